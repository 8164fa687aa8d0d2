"""Small models that guide as patches of another model's blocks. Runs in the host's own Python.

They stay core's own: what is under management is the model that they guide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.latent_formats
import comfy.ldm.lumina.controlnet
import comfy.ldm.wan.uni3c
import comfy.model_management
import comfy.ops
import torch
from comfy.model_patcher import CoreModelPatcher, ModelPatcher
from comfy_extras.nodes_model_patch import (
    DiffSynthCnetPatch,
    QwenImageBlockWiseControlNet,
    WanUni3CCnetPatch,
    ZImageControlPatch,
)

from highwater.tests.comfyui.sweep.architectures import Architecture
from highwater.tests.comfyui.sweep.weights import fill, hint, operations

__all__ = ["PATCHES", "for_diffsynth"]


class Encoder:
    """What a VAE is to a patch: latents for the image, the same each time."""

    def __init__(self, *size: int) -> None:
        self.size = size

    def encode(self, image: torch.Tensor) -> torch.Tensor:
        return hint(*self.size)

    def spacial_compression_encode(self) -> int:
        return 8

    def temporal_compression_decode(self) -> int:
        return 4


def loaded(model: torch.nn.Module) -> ModelPatcher:
    """Return a patch's model as its loader gives it."""
    fill(model, 6)
    device = comfy.model_management.get_torch_device()
    return CoreModelPatcher(model.eval(), device, comfy.model_management.unet_offload_device())


def options_for(patcher: ModelPatcher) -> dict[str, Any]:
    return {**operations(patcher.model_dtype()), "operations": comfy.ops.manual_cast}


def for_diffsynth(architecture: Architecture, patcher: ModelPatcher) -> ModelPatcher:
    model = QwenImageBlockWiseControlNet(num_layers=architecture.config["num_layers"], dim=64, **options_for(patcher))
    patched = patcher.clone()
    patched.set_model_double_block_patch(
        DiffSynthCnetPatch(loaded(model), Encoder(1, 16, 1, 8, 8), hint(1, 64, 64, 3), 0.8)
    )
    return patched


def for_z_image(architecture: Architecture, patcher: ModelPatcher, **more: Any) -> ModelPatcher:
    model = comfy.ldm.lumina.controlnet.ZImage_Control(
        dim=256, n_heads=4, n_kv_heads=4, multiple_of=32, ffn_dim_multiplier=1.0, **more, **options_for(patcher)
    )
    patch = ZImageControlPatch(loaded(model), Encoder(1, 16, 8, 8), hint(1, 64, 64, 3), 0.8)
    patched = patcher.clone()
    patched.set_model_noise_refiner_patch(patch)
    patched.set_model_double_block_patch(patch)
    return patched


def for_uni3c(architecture: Architecture, patcher: ModelPatcher) -> ModelPatcher:
    model = comfy.ldm.wan.uni3c.WanUni3CControlnet(
        conv_out_dim=96, dim=48, ffn_dim=64, num_heads=4, num_layers=3, time_embed_dim=64, out_proj_dim=64,
        mid_channels=32, **options_for(patcher),
    )  # fmt: skip
    encoder, latent_format = Encoder(1, 16, 2, 8, 8), comfy.latent_formats.Wan21()
    patched = patcher.clone()
    patched.set_model_double_block_patch(
        WanUni3CCnetPatch(loaded(model), hint(5, 64, 64, 3), encoder, latent_format, 0.8, 1e9, 0.0)
    )
    return patched


PATCHES: dict[str, Callable[[Architecture, ModelPatcher], ModelPatcher]] = {
    "z-image": partial(for_z_image, n_control_layers=15),
    "z-image refiner": partial(for_z_image, n_control_layers=15, additional_in_dim=17, refiner_control=True),
    "uni3c": for_uni3c,
}
