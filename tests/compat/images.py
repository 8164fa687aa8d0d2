"""Pipelines that make images with a transformer."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import (
    QWEN_MARKS,
    clip_text,
    clip_tokens,
    fill_zeros,
    gemma2_text,
    hint,
    kl_vae,
    llama_like_tokens,
    llama_text,
    qwen3_text,
    qwen_vl_text,
    t5_text,
    t5_tokens,
    umt5_text,
)
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, TO_QKV, flow, recipe


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


def sd3_transformer(**options: Any) -> Any:
    return diffusers.SD3Transformer2DModel(
        **{
            "sample_size": 32, "patch_size": 1, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8,
            "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32,
            "pooled_projection_dim": 64, "out_channels": 4, **options,
        }
    )  # fmt: skip


@recipe("StableDiffusion3Pipeline", lora=TO_LAYERS, height=32, width=32, max_sequence_length=16, **IMAGE)
def stable_diffusion_3() -> dict[str, Any]:
    return {
        "transformer": sd3_transformer(),
        "vae": kl_vae(use_quant_conv=False, use_post_quant_conv=False), "scheduler": flow(),
        "text_encoder": clip_text(projected=True), "tokenizer": clip_tokens(),
        "text_encoder_2": clip_text(projected=True), "tokenizer_2": clip_tokens(),
        "text_encoder_3": t5_text(), "tokenizer_3": t5_tokens(),
    }  # fmt: skip


@recipe("ChromaPipeline", lora=TO_LAYERS, height=16, width=16, max_sequence_length=16, **IMAGE)
def chroma() -> dict[str, Any]:
    return {
        "transformer": diffusers.ChromaTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=[4, 4, 8], approximator_hidden_dim=32,
            approximator_layers=1, approximator_num_channels=16,
        ),
        "vae": kl_vae(latent_channels=4), "scheduler": flow(), "text_encoder": t5_text(), "tokenizer": t5_tokens(),
    }  # fmt: skip


@recipe("AuraFlowPipeline", lora=TO_LAYERS, height=32, width=32, max_sequence_length=16, **IMAGE)
def aura_flow() -> dict[str, Any]:
    return {
        "transformer": diffusers.AuraFlowTransformer2DModel(
            sample_size=32, patch_size=2, in_channels=4, num_mmdit_layers=2, num_single_dit_layers=3,
            attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32,
            out_channels=4, pos_embed_max_size=256,
        ),
        "vae": kl_vae(), "scheduler": flow(), "text_encoder": umt5_text(), "tokenizer": t5_tokens(),
    }  # fmt: skip


@recipe("Lumina2Pipeline", lora=TO_QKV, height=32, width=32, max_sequence_length=16, **IMAGE)
def lumina2() -> dict[str, Any]:
    return {
        "transformer": diffusers.Lumina2Transformer2DModel(
            sample_size=4, patch_size=2, in_channels=4, hidden_size=24, num_layers=3, num_attention_heads=3,
            num_kv_heads=1, multiple_of=16, axes_dim_rope=[4, 2, 2], cap_feat_dim=32,
        ),
        "vae": kl_vae(), "scheduler": flow(), "text_encoder": gemma2_text(), "tokenizer": llama_like_tokens(),
    }  # fmt: skip


@recipe(
    "ZImagePipeline",
    lora=TO_QKV,
    height=32,
    width=32,
    max_sequence_length=16,
    guidance_scale=3.0,
    **IMAGE,
)
def z_image() -> dict[str, Any]:
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,), all_f_patch_size=(1,), in_channels=16, dim=32, n_layers=3, n_refiner_layers=1, n_heads=2,
        n_kv_heads=2, qk_norm=True, cap_feat_dim=32, axes_dims=[8, 4, 4], axes_lens=[512, 32, 32],
    )  # fmt: skip
    with torch.no_grad():  # the class leaves them as the memory was
        transformer.x_pad_token.fill_(0.5)
        transformer.cap_pad_token.fill_(0.25)
    return {
        "transformer": transformer, "vae": kl_vae(latent_channels=16), "scheduler": flow(),
        "text_encoder": qwen3_text(), "tokenizer": llama_like_tokens(),
    }  # fmt: skip


def qwen_vae() -> Any:
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip


def qwen_transformer(**options: Any) -> Any:
    return diffusers.QwenImageTransformer2DModel(
        **{
            "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 3, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 32, "guidance_embeds": False, "axes_dims_rope": (8, 4, 4),
            **options,
        }
    )  # fmt: skip


@recipe("QwenImagePipeline", lora=TO_LAYERS, height=32, width=32, max_sequence_length=16, true_cfg_scale=1.0, **IMAGE)
def qwen_image() -> dict[str, Any]:
    return {
        "transformer": qwen_transformer(), "vae": qwen_vae(), "scheduler": flow(), "text_encoder": qwen_vl_text(),
        "tokenizer": llama_like_tokens(*QWEN_MARKS),
    }  # fmt: skip


@recipe("HiDreamImagePipeline", lora=TO_LAYERS, height=32, width=32, max_sequence_length=16, **IMAGE)
def hidream() -> dict[str, Any]:
    return {
        "transformer": diffusers.HiDreamImageTransformer2DModel(
            patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=8,
            num_attention_heads=4, caption_channels=[32, 32], text_emb_dim=64, num_routed_experts=4,
            num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(32, 32), llama_layers=(0, 1, 1, 2, 2),
        ),
        "vae": kl_vae(), "scheduler": flow(),
        "text_encoder": clip_text(projected=True), "tokenizer": clip_tokens(),
        "text_encoder_2": clip_text(projected=True), "tokenizer_2": clip_tokens(),
        "text_encoder_3": t5_text(), "tokenizer_3": t5_tokens(),
        "text_encoder_4": llama_text(), "tokenizer_4": llama_like_tokens(),
    }  # fmt: skip


@recipe(
    "FluxControlNetPipeline", lora=TO_LAYERS, guides=("controlnet",), height=16, width=16, max_sequence_length=16,
    control_image=lambda: torch.rand(1, 3, 16, 16), controlnet_conditioning_scale=0.7, **IMAGE,
)  # fmt: skip
def flux_controlnet() -> dict[str, Any]:
    guide = diffusers.FluxControlNetModel(
        in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return flux() | {"controlnet": fill_zeros(guide)}


@recipe(
    "StableDiffusion3ControlNetPipeline", lora=TO_LAYERS, guides=("controlnet",), height=32, width=32,
    max_sequence_length=16, control_image=hint, controlnet_conditioning_scale=0.7, **IMAGE,
)  # fmt: skip
def stable_diffusion_3_controlnet() -> dict[str, Any]:
    guide = diffusers.SD3ControlNetModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    return stable_diffusion_3() | {"controlnet": fill_zeros(guide)}
