"""Recipes of diffusers' pipelines, tiny and without a download."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import diffusers
import torch

from highwater.tests.compat.modes import Recipe
from highwater.tests.compat.parts import clip_text, clip_tokens, kl_vae, t5_text, t5_tokens, umt5_text

__all__ = ["RECIPES"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the libraries ask the network even for what is there

RECIPES: dict[str, Recipe] = {}
TO_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
PROMPT = "a red fox"


def recipe(
    pipeline: str, *, lora: tuple[str, ...] = (), guides: tuple[str, ...] = (), **call: Any
) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    """Register a pipeline: the function below returns its parts; ``call`` is what it is called with."""

    def register(parts: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        def build() -> Any:
            return getattr(diffusers, pipeline)(**parts())

        def run(pipe: Any) -> Any:
            arguments = {name: value() if callable(value) else value for name, value in call.items()}
            return pipe(**arguments, generator=torch.Generator().manual_seed(3))

        RECIPES[pipeline] = Recipe(name=pipeline, build=build, call=run, lora_targets=lora, guides=guides)
        return parts

    return register


IMAGE = {"prompt": PROMPT, "num_inference_steps": 2, "output_type": "pt"}


def unet(**options: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        **{
            "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1,
            "block_out_channels": (16, 32), "norm_num_groups": 4, "cross_attention_dim": 32, "attention_head_dim": 4,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            **options,
        }
    )  # fmt: skip


def ddim(**options: Any) -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, **options
    )


def flow(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, **options)


@recipe("StableDiffusionPipeline", lora=TO_LAYERS, height=32, width=32, **IMAGE)
def stable_diffusion() -> dict[str, Any]:
    return {
        "unet": unet(), "vae": kl_vae(), "scheduler": ddim(), "text_encoder": clip_text(), "tokenizer": clip_tokens(),
        "safety_checker": None, "feature_extractor": None, "requires_safety_checker": False,
    }  # fmt: skip


@recipe("StableDiffusionXLPipeline", lora=TO_LAYERS, height=32, width=32, **IMAGE)
def stable_diffusion_xl() -> dict[str, Any]:
    return {
        "unet": unet(
            cross_attention_dim=64, addition_embed_type="text_time", addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 32, transformer_layers_per_block=(1, 2),
            use_linear_projection=True, attention_head_dim=(2, 4),
        ),
        "vae": kl_vae(), "scheduler": ddim(), "text_encoder": clip_text(), "tokenizer": clip_tokens(),
        "text_encoder_2": clip_text(projected=True), "tokenizer_2": clip_tokens(),
    }  # fmt: skip


def flux_transformer(**options: Any) -> Any:
    return diffusers.FluxTransformer2DModel(
        **{
            "in_channels": 16, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8), **options,
        }
    )  # fmt: skip


@recipe("FluxPipeline", lora=TO_LAYERS, height=16, width=16, max_sequence_length=16, **IMAGE)
def flux() -> dict[str, Any]:
    return {
        "transformer": flux_transformer(), "vae": kl_vae(latent_channels=4), "scheduler": flow(),
        "text_encoder": clip_text(), "tokenizer": clip_tokens(),
        "text_encoder_2": t5_text(), "tokenizer_2": t5_tokens(),
    }  # fmt: skip


@recipe("StableDiffusion3Pipeline", lora=TO_LAYERS, height=32, width=32, max_sequence_length=16, **IMAGE)
def stable_diffusion_3() -> dict[str, Any]:
    return {
        "transformer": diffusers.SD3Transformer2DModel(
            sample_size=32, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=4,
            caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
        ),
        "vae": kl_vae(use_quant_conv=False, use_post_quant_conv=False), "scheduler": flow(),
        "text_encoder": clip_text(projected=True), "tokenizer": clip_tokens(),
        "text_encoder_2": clip_text(projected=True), "tokenizer_2": clip_tokens(),
        "text_encoder_3": t5_text(), "tokenizer_3": t5_tokens(),
    }  # fmt: skip


def wan_vae() -> Any:
    return diffusers.AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                                      temperal_downsample=[False, True, True])  # fmt: skip


def wan_transformer(**options: Any) -> Any:
    return diffusers.WanTransformer3DModel(
        **{
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16,
            "out_channels": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 32, "num_layers": 3,
            "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32, **options,
        }
    )  # fmt: skip


@recipe("WanPipeline", lora=TO_LAYERS, height=16, width=16, num_frames=5, max_sequence_length=16, **IMAGE)
def wan() -> dict[str, Any]:
    return {
        "transformer": wan_transformer(), "vae": wan_vae(), "scheduler": flow(), "text_encoder": umt5_text(),
        "tokenizer": t5_tokens(),
    }  # fmt: skip
