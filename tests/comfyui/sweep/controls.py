"""Small ControlNets, and patches that guide, for the architectures. Runs in the host's own Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.cldm.cldm
import comfy.cldm.mmdit
import comfy.controlnet
import comfy.ldm.flux.controlnet
import comfy.ldm.qwen_image.controlnet
import comfy.model_management
import comfy.ops
import torch
from comfy.model_patcher import CoreModelPatcher, ModelPatcher

from highwater.nodes.host.hosted import Request
from highwater.nodes.host.loading import adopt_control
from highwater.tests.comfyui.sweep.architectures import Architecture
from highwater.tests.comfyui.sweep.weights import fill

__all__ = ["guide"]

Guided = tuple[ModelPatcher, Any]


def guide(architecture: Architecture, patcher: ModelPatcher, request: Request | None) -> Guided:
    """Return the patcher and the ControlNet that guides it: under management by a request, or core's own."""
    assert architecture.control is not None
    return GUIDES[architecture.control](architecture, patcher, request)


def wrap(model: torch.nn.Module, hint: torch.Tensor, request: Request | None, **options: Any) -> Any:
    fill(model, 5)
    device = comfy.model_management.get_torch_device()
    control = comfy.controlnet.ControlNet(model.eval(), load_device=device, **options)
    if request is not None:
        adopt_control(control, "control", request)
    return control.copy().set_cond_hint(hint, 0.9)


def operations(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "device": torch.device("cpu"), "operations": comfy.ops.disable_weight_init}


def hint(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9))


def for_unet(architecture: Architecture, patcher: ModelPatcher, request: Request | None) -> Guided:
    config = {key: value for key, value in patcher.model.model_config.unet_config.items() if key != "out_channels"}
    config |= operations(patcher.model_dtype())
    model = comfy.cldm.cldm.ControlNet(hint_channels=3, **config)
    return patcher, wrap(model, hint(1, 3, 64, 64), request)


def for_flux(architecture: Architecture, patcher: ModelPatcher, request: Request | None) -> Guided:
    config = {**architecture.config, "depth": 2, "depth_single_blocks": 0}
    model = comfy.ldm.flux.controlnet.ControlNetFlux(
        latent_input=True, control_latent_channels=16, **config, **operations(patcher.model_dtype())
    )
    return patcher, wrap(model, hint(1, 16, 8, 8), request, compression_ratio=1, extra_conds=["y", "guidance"])


def for_sd3(architecture: Architecture, patcher: ModelPatcher, request: Request | None) -> Guided:
    config = {**architecture.config, "num_blocks": 3, **operations(patcher.model_dtype())}
    model = comfy.cldm.mmdit.ControlNet(control_latent_channels=16, **config)
    return patcher, wrap(model, hint(1, 16, 8, 8), request, compression_ratio=1)


def for_qwen(architecture: Architecture, patcher: ModelPatcher, request: Request | None) -> Guided:
    """A ControlNet, and DiffSynth's, which is a patch of the model's blocks."""
    from comfy_extras.nodes_model_patch import DiffSynthCnetPatch, QwenImageBlockWiseControlNet

    config = {**architecture.config, "num_layers": 2, **operations(patcher.model_dtype())}
    model = comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel(**config)
    control = wrap(model, hint(1, 16, 1, 8, 8), request, compression_ratio=1, extra_conds=[])

    options = {**operations(patcher.model_dtype()), "operations": comfy.ops.manual_cast}
    patch = QwenImageBlockWiseControlNet(num_layers=architecture.config["num_layers"], dim=64, **options)
    fill(patch, 6)
    device = comfy.model_management.get_torch_device()
    offload = comfy.model_management.unet_offload_device()
    patched = patcher.clone()
    patched.set_model_double_block_patch(
        DiffSynthCnetPatch(CoreModelPatcher(patch, device, offload), Encoder(), hint(1, 64, 64, 3), 0.8)
    )
    return patched, control


class Encoder:
    """What a VAE is to DiffSynth's patch: latents for the image, the same each time."""

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        return hint(1, 16, 1, 8, 8)

    def spacial_compression_encode(self) -> int:
        return 8


GUIDES: dict[str, Callable[[Architecture, ModelPatcher, Request | None], Guided]] = {
    "unet": for_unet,
    "flux": for_flux,
    "sd3": for_sd3,
    "qwen": for_qwen,
}
