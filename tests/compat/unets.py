"""Pipelines around a UNet."""

from __future__ import annotations

from typing import Any

import diffusers

from highwater.tests.compat.parts import (
    clip_text,
    clip_tokens,
    kl_vae,
)
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, ddim, recipe

SIZE = {"height": 32, "width": 32}


def unet_sizes(**options: Any) -> dict[str, Any]:
    return {
        "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (16, 32),
        "norm_num_groups": 4, "cross_attention_dim": 32, "attention_head_dim": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        **options,
    }  # fmt: skip


def unet(**options: Any) -> Any:
    return diffusers.UNet2DConditionModel(**unet_sizes(**options))


def unet_xl_sizes(**options: Any) -> dict[str, Any]:
    return unet_sizes(
        **{
            "cross_attention_dim": 64, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + 32, "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True, "attention_head_dim": (2, 4), **options,
        }
    )  # fmt: skip


def unet_xl(**options: Any) -> Any:
    return diffusers.UNet2DConditionModel(**unet_xl_sizes(**options))


@recipe("StableDiffusionPipeline", lora=TO_LAYERS, **SIZE, **IMAGE)
def stable_diffusion() -> dict[str, Any]:
    return {
        "unet": unet(), "vae": kl_vae(), "scheduler": ddim(), "text_encoder": clip_text(), "tokenizer": clip_tokens(),
        "safety_checker": None, "feature_extractor": None, "requires_safety_checker": False,
    }  # fmt: skip


@recipe("StableDiffusionXLPipeline", lora=TO_LAYERS, **SIZE, **IMAGE)
def stable_diffusion_xl() -> dict[str, Any]:
    return {
        "unet": unet_xl(),
        "vae": kl_vae(), "scheduler": ddim(), "text_encoder": clip_text(), "tokenizer": clip_tokens(),
        "text_encoder_2": clip_text(projected=True), "tokenizer_2": clip_tokens(),
    }  # fmt: skip
