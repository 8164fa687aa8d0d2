"""Pipelines that guide a UNet with a ControlNet."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import fill_zeros, hint
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, recipe
from highwater.tests.compat.unets import stable_diffusion, stable_diffusion_xl, unet, unet_sizes, unet_xl, unet_xl_sizes
from highwater.tests.compat.unets_sd import MASKED, PICTURE

GUIDED = {"lora": TO_LAYERS, "guides": ("controlnet",)}


def hints() -> list[torch.Tensor]:
    return [hint()]


def guide_sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    left_out = ("sample_size", "out_channels", "up_block_types")
    sizes = {name: value for name, value in sizes.items() if name not in left_out}
    return sizes | {"conditioning_embedding_out_channels": (8, 16)}


@recipe("StableDiffusionControlNetPipeline", **GUIDED, image=hint, **IMAGE)
@recipe("StableDiffusionControlNetPAGPipeline", **GUIDED, pag_scale=2.0, image=hint, **IMAGE)
@recipe("StableDiffusionControlNetImg2ImgPipeline", **GUIDED, control_image=hint, **PICTURE)
@recipe("StableDiffusionControlNetInpaintPipeline", **GUIDED, control_image=hint, **MASKED)
@recipe("StableDiffusionControlNetPAGInpaintPipeline", **GUIDED, pag_scale=2.0, control_image=hint, **MASKED)
def control() -> dict[str, Any]:
    guide = diffusers.ControlNetModel(**guide_sizes(unet_sizes()))
    return stable_diffusion() | {"controlnet": fill_zeros(guide)}


@recipe("StableDiffusionControlNetPipeline", "two guides", **GUIDED, image=lambda: [hint(), hint()], **IMAGE)
def control_twice() -> dict[str, Any]:
    return stable_diffusion() | {"controlnet": [control()["controlnet"], control()["controlnet"]]}


@recipe("StableDiffusionXLControlNetPipeline", **GUIDED, image=hint, **IMAGE)
@recipe("StableDiffusionXLControlNetPAGPipeline", **GUIDED, pag_scale=2.0, image=hint, **IMAGE)
@recipe("StableDiffusionXLControlNetImg2ImgPipeline", **GUIDED, control_image=hint, **PICTURE)
@recipe("StableDiffusionXLControlNetPAGImg2ImgPipeline", **GUIDED, pag_scale=2.0, control_image=hint, **PICTURE)
@recipe("StableDiffusionXLControlNetInpaintPipeline", **GUIDED, control_image=hint, **MASKED)
def control_xl() -> dict[str, Any]:
    guide = diffusers.ControlNetModel(**guide_sizes(unet_xl_sizes()))
    return stable_diffusion_xl() | {"controlnet": fill_zeros(guide)}


@recipe("StableDiffusionXLControlNetUnionPipeline", **GUIDED, control_image=hints, control_mode=[0], **IMAGE)
@recipe("StableDiffusionXLControlNetUnionImg2ImgPipeline", **GUIDED, control_image=hints, control_mode=[0], **PICTURE)
@recipe("StableDiffusionXLControlNetUnionInpaintPipeline", **GUIDED, control_image=hints, control_mode=[0], **MASKED)
def control_union() -> dict[str, Any]:
    guide = diffusers.ControlNetUnionModel(
        **guide_sizes(unet_xl_sizes()), num_control_type=2, num_trans_channel=16, num_trans_head=2, num_proj_channel=16
    )
    return stable_diffusion_xl() | {"controlnet": fill_zeros(guide)}


def xs_adapter(guided: Any) -> Any:
    guide = diffusers.ControlNetXSAdapter.from_unet(
        guided, size_ratio=1, conditioning_embedding_out_channels=(8, 16), num_attention_heads=4
    )
    return fill_zeros(guide)


@recipe("StableDiffusionControlNetXSPipeline", lora=TO_LAYERS, guides=("controlnet",), image=hint, **IMAGE)
def control_xs() -> dict[str, Any]:
    parts = stable_diffusion() | {"unet": unet(layers_per_block=2)}
    return parts | {"controlnet": xs_adapter(parts["unet"])}


@recipe("StableDiffusionXLControlNetXSPipeline", lora=TO_LAYERS, guides=("controlnet",), image=hint, **IMAGE)
def control_xs_xl() -> dict[str, Any]:
    parts = stable_diffusion_xl() | {"unet": unet_xl(layers_per_block=2)}
    return parts | {"controlnet": xs_adapter(parts["unet"])}
