"""Pipelines of Stable Diffusion XL that take a picture or guide the sampling."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import clip_pixels, clip_vision, image
from highwater.tests.compat.recipes import IMAGE, PROMPT, TO_LAYERS, recipe
from highwater.tests.compat.unets import SIZE, stable_diffusion_xl, unet_xl
from highwater.tests.compat.unets_sd import MASKED, PICTURE, dpm_sde


@recipe("StableDiffusionXLImg2ImgPipeline", lora=TO_LAYERS, strength=0.9, **PICTURE)
@recipe("StableDiffusionXLInpaintPipeline", lora=TO_LAYERS, strength=0.9, **MASKED)
@recipe("StableDiffusionXLPAGPipeline", lora=TO_LAYERS, pag_scale=2.0, **SIZE, **IMAGE)
@recipe("StableDiffusionXLPAGImg2ImgPipeline", lora=TO_LAYERS, pag_scale=2.0, strength=0.9, **PICTURE)
@recipe("StableDiffusionXLPAGInpaintPipeline", lora=TO_LAYERS, pag_scale=2.0, strength=0.9, **MASKED)
@recipe(
    "TextToVideoZeroSDXLPipeline", lora=TO_LAYERS, video_length=2, t0=0, t1=1, prompt=PROMPT, **SIZE,
    num_inference_steps=3, output_type="np",
)  # fmt: skip
def xl() -> dict[str, Any]:
    return stable_diffusion_xl()


@recipe("StableDiffusionXLInstructPix2PixPipeline", lora=TO_LAYERS, **SIZE, **PICTURE)
def xl_instruct_pix2pix() -> dict[str, Any]:
    return stable_diffusion_xl() | {"unet": unet_xl(in_channels=8)}


@recipe("StableDiffusionXLAdapterPipeline", guides=("adapter",), lora=TO_LAYERS, **SIZE, **PICTURE)
def xl_adapter() -> dict[str, Any]:
    return stable_diffusion_xl() | {
        "adapter": diffusers.T2IAdapter(
            in_channels=3, channels=[16, 32], num_res_blocks=1, downscale_factor=4, adapter_type="full_adapter_xl"
        )
    }


def load_lora(pipe: Any) -> None:
    """Give the UNet and both text encoders a LoRA through the pipeline's own loader, managed or not."""
    state = {}
    for part, targets in (("unet", TO_LAYERS), ("text_encoder", TEXT_LAYERS), ("text_encoder_2", TEXT_LAYERS)):
        for name, layer in getattr(pipe, part).named_modules():
            if name.endswith(targets) and isinstance(layer, torch.nn.Linear):
                state[f"{part}.{name}.lora_A.weight"] = torch.rand(4, layer.in_features) - 0.5
                state[f"{part}.{name}.lora_B.weight"] = torch.rand(layer.out_features, 4) - 0.5
    pipe.load_lora_weights(state, adapter_name="three")
    pipe.set_adapters("three", 0.7)


TEXT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj")


@recipe(
    "StableDiffusionXLPipeline", "`load_lora_weights` when managed", lora=TO_LAYERS, before=load_lora, **SIZE, **IMAGE
)
def xl_with_lora() -> dict[str, Any]:
    return stable_diffusion_xl()


def invert_xl(pipe: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    size = {"height": 32, "width": 32, "generator": generator}
    pipe.invert(image=image(), num_inversion_steps=5, skip=0.3, source_prompt=PROMPT, **size)


@recipe(
    "LEditsPPPipelineStableDiffusionXL", lora=TO_LAYERS, before=invert_xl, editing_prompt=["a hat"], edit_threshold=0.7,
    output_type="pt",
)  # fmt: skip
def ledits_xl() -> dict[str, Any]:
    pictures = {"image_encoder": clip_vision(), "feature_extractor": clip_pixels()}
    return stable_diffusion_xl() | {"scheduler": dpm_sde()} | pictures
