"""Small ControlNets for the architectures. Runs in the host's own Python.

Each is the host's class with the options that its loader of such files gives it. Those that are patches of a model, or
have no patcher of their own, are in `patches` and `adapters`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.cldm.cldm
import comfy.cldm.dit_embedder
import comfy.cldm.mmdit
import comfy.controlnet
import comfy.ldm.flux.controlnet
import comfy.ldm.hydit.controlnet
import comfy.ldm.qwen_image.controlnet
import comfy.model_management
import comfy.ops
import torch
from comfy.model_patcher import ModelPatcher

from highwater.nodes.host.adopting import adopt_control
from highwater.nodes.host.hosted import Request
from highwater.tests.comfyui.sweep.adapters import ADAPTERS
from highwater.tests.comfyui.sweep.architectures import Architecture
from highwater.tests.comfyui.sweep.patches import PATCHES, for_diffsynth
from highwater.tests.comfyui.sweep.weights import fill, hint, operations

__all__ = ["Ask", "guide"]

Guided = tuple[ModelPatcher, Any]
Ask = Callable[[torch.nn.Module], Request]
"""What a model is to be managed by."""


def guide(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None) -> Guided:
    """Return the patcher and the ControlNet that guides it: under management as asked for, or core's own."""
    kind = architecture.control
    assert kind is not None
    if kind in PATCHES:
        return PATCHES[kind](architecture, patcher), None
    if kind in ADAPTERS:
        control = ADAPTERS[kind](patcher)
        return patcher, adopt_control(control, "control", Request()) if ask is not None else control
    if kind == "qwen":
        patcher = for_diffsynth(architecture, patcher)
    return patcher, CONTROLS[kind](architecture, patcher, ask)


def wrap(
    model: torch.nn.Module,
    ask: Ask | None,
    *size: int,
    kind: type = comfy.controlnet.ControlNet,
    **options: Any,
) -> Any:
    """Return a ControlNet of the host's as its apply node makes it of a loaded one."""
    fill(model, 5)
    device = comfy.model_management.get_torch_device()
    control = kind(model.eval(), load_device=device, **options)
    if ask is not None:
        adopt_control(control, "control", ask(model))
    return control.copy().set_cond_hint(hint(*size), 0.9)


def for_unet(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None, **more: Any) -> Any:
    config = {key: value for key, value in patcher.model.model_config.unet_config.items() if key != "out_channels"}
    config |= operations(patcher.model_dtype())
    return wrap(comfy.cldm.cldm.ControlNet(hint_channels=3, **config, **more), ask, 1, 3, 64, 64)


def for_unet_union(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None) -> Any:
    control = for_unet(architecture, patcher, ask, union_controlnet_num_control_type=6)
    control.set_extra_arg("control_type", [3])
    return control


def two_for_unet(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None) -> Any:
    """Two in a row, one of which averages over the picture."""
    first, second = for_unet(architecture, patcher, ask), for_unet(architecture, patcher, ask)
    second.global_average_pooling = True
    return second.set_previous_controlnet(first)


def for_flux(
    architecture: Architecture, patcher: ModelPatcher, ask: Ask | None, *, has_mask: bool = False, **more: Any
) -> Any:
    config = {**architecture.config, "depth": 2, "depth_single_blocks": 0, **more, **operations(patcher.model_dtype())}
    model = comfy.ldm.flux.controlnet.ControlNetFlux(latent_input=True, control_latent_channels=16 + has_mask, **config)
    options: dict[str, Any] = {"compression_ratio": 1, "concat_mask": has_mask, "extra_conds": ["y", "guidance"]}
    return wrap(model, ask, 1, 16, 8, 8, **options)


def for_flux_union(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None) -> Any:
    control = for_flux(architecture, patcher, ask, num_union_modes=7, depth_single_blocks=2)
    control.set_extra_arg("control_type", [2])
    return control


def for_flux_pictures(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None, *, mistoline: bool) -> Any:
    config = {**architecture.config, "depth": 2, "depth_single_blocks": 2 * mistoline}
    config |= operations(patcher.model_dtype())
    model = comfy.ldm.flux.controlnet.ControlNetFlux(mistoline=mistoline, **config)
    return wrap(model, ask, 1, 3, 64, 64, extra_conds=["y", "guidance"])


def for_sd3(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None, *, has_mask: bool = False) -> Any:
    config = {**architecture.config, "num_blocks": 3, **operations(patcher.model_dtype())}
    model = comfy.cldm.mmdit.ControlNet(control_latent_channels=16 + has_mask, **config)
    return wrap(model, ask, 1, 16, 8, 8, compression_ratio=1, concat_mask=has_mask)


def for_sd35(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None, *, doubled: bool) -> Any:
    """It takes an embedder's weights from the model that it guides, before each run."""
    model = comfy.cldm.dit_embedder.ControlNetEmbedder(
        img_size=None, patch_size=2, in_chans=16, num_layers=3, main_model_double=3, double_y_emb=doubled,
        attention_head_dim=64, num_attention_heads=3, adm_in_channels=48, **operations(patcher.model_dtype()),
    )  # fmt: skip
    return wrap(model, ask, 1, 16, 8, 8, kind=comfy.controlnet.ControlNetSD35, compression_ratio=1)


def for_qwen(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None, *, has_mask: bool = False) -> Any:
    config = {**architecture.config, "num_layers": 2, **operations(patcher.model_dtype())}
    model = comfy.ldm.qwen_image.controlnet.QwenImageControlNetModel(extra_condition_channels=4 * has_mask, **config)
    return wrap(model, ask, 1, 16, 1, 8, 8, compression_ratio=1, concat_mask=has_mask, extra_conds=[])


def for_qwen_fun(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None) -> Any:
    """It computes with embedders of the model that it guides."""
    model = comfy.ldm.qwen_image.controlnet.QwenImageFunControlNetModel(
        inner_dim=64, num_attention_heads=4, attention_head_dim=16, num_control_blocks=3, main_model_double=5,
        injection_layers=(0, 2, 4), **operations(patcher.model_dtype()),
    )  # fmt: skip
    kind = comfy.controlnet.QwenFunControlNet
    return wrap(model, ask, 1, 16, 1, 8, 8, kind=kind, compression_ratio=1, extra_conds=[])


def for_dit(architecture: Architecture, patcher: ModelPatcher, ask: Ask | None) -> Any:
    config = {**architecture.config, **operations(patcher.model_dtype())}
    texts = ["text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5", "image_meta_size"]
    model = comfy.ldm.hydit.controlnet.HunYuanControlNet(**config)
    return wrap(model, ask, 1, 4, 8, 8, compression_ratio=1, extra_conds=[*texts, "style", "cos_cis_img"])


CONTROLS: dict[str, Callable[[Architecture, ModelPatcher, Ask | None], Any]] = {
    "unet": for_unet,
    "unet union": for_unet_union,
    "unet twice": two_for_unet,
    "flux": for_flux,
    "flux union": for_flux_union,
    "flux inpainting": partial(for_flux, has_mask=True),
    "flux xlabs": partial(for_flux_pictures, mistoline=False),
    "flux mistoline": partial(for_flux_pictures, mistoline=True),
    "sd3": for_sd3,
    "sd3 inpainting": partial(for_sd3, has_mask=True),
    "sd35": partial(for_sd35, doubled=False),
    "sd35 doubled": partial(for_sd35, doubled=True),
    "dit": for_dit,
    "qwen": for_qwen,
    "qwen inpainting": partial(for_qwen, has_mask=True),
    "qwen fun": for_qwen_fun,
}
