"""Pipelines that make images from the text and pictures that a language model reads, or with parts in common."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers

from highwater.tests.compat.images import z_image
from highwater.tests.compat.parts import (
    clip_tokens,
    fill_zeros,
    hint,
    kl_vae,
    llama_like_tokens,
    qwen3_text,
    t5_text,
    t5_tokens,
)
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, flow, recipe
from highwater.tests.compat.wan import wan_vae

SQUARE = {"height": 32, "width": 32, "max_sequence_length": 16, **IMAGE}


@recipe("ZImageControlNetPipeline", guides=("controlnet",), guidance_scale=3.0,
        control_image=hint, **SQUARE)  # fmt: skip
def z_image_controlnet(channels: int = 16) -> dict[str, Any]:
    guide = diffusers.ZImageControlNetModel(
        control_layers_places=[0, 2], control_refiner_layers_places=[0], control_in_dim=channels,
        add_control_noise_refiner="control_noise_refiner", dim=32, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
    )  # fmt: skip
    return z_image() | {"controlnet": fill_zeros(guide)}


def bert() -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=514, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=128,
        )
    )  # fmt: skip


def hunyuan_dit_sizes(**options: Any) -> dict[str, Any]:
    return {
        "sample_size": 16, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 3,
        "in_channels": 4, "cross_attention_dim": 32, "cross_attention_dim_t5": 32, "pooled_projection_dim": 16,
        "hidden_size": 24, "activation_fn": "gelu-approximate", **options,
    }  # fmt: skip


def hunyuan_dit_parts(**options: Any) -> dict[str, Any]:
    return {
        "transformer": diffusers.HunyuanDiT2DModel(**hunyuan_dit_sizes(num_layers=4)), "vae": kl_vae(levels=4),
        "scheduler": diffusers.DDPMScheduler(), "text_encoder": bert(), "tokenizer": clip_tokens(),
        "text_encoder_2": t5_text(), "tokenizer_2": t5_tokens(), "safety_checker": None, "feature_extractor": None,
        "requires_safety_checker": False, **options,
    }  # fmt: skip


DIT = {"use_resolution_binning": False, "height": 64, "width": 64, **IMAGE}


@recipe("HunyuanDiTPipeline", **DIT)
def hunyuan_dit() -> dict[str, Any]:
    return hunyuan_dit_parts()


@recipe("HunyuanDiTPAGPipeline", pag_scale=1.0, **DIT)
def hunyuan_dit_pag() -> dict[str, Any]:
    return hunyuan_dit_parts(pag_applied_layers="blocks.1")


@recipe("HunyuanDiTControlNetPipeline", guides=("controlnet",), control_image=partial(hint, 64),
        controlnet_conditioning_scale=0.7, **DIT)  # fmt: skip
def hunyuan_dit_controlnet() -> dict[str, Any]:
    guide = diffusers.HunyuanDiT2DControlNetModel(**hunyuan_dit_sizes(transformer_num_layers=4))
    return hunyuan_dit_parts(controlnet=fill_zeros(guide))


@recipe("PRXPixelPipeline", use_resolution_binning=False, height=32, width=32, **IMAGE)
def prx_of_pixels() -> dict[str, Any]:
    transformer = diffusers.PRXTransformer2DModel(
        patch_size=1, in_channels=3, context_in_dim=32, hidden_size=16, mlp_ratio=2.0, num_heads=2, depth=3,
        axes_dim=[4, 4], bottleneck_size=8, resolution_embeds=True,
    )  # fmt: skip
    return {
        "transformer": fill_zeros(transformer), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "text_encoder": qwen3_text(), "tokenizer": llama_like_tokens(), "prompt_max_tokens": 16,
    }  # fmt: skip


@recipe("BriaFiboPipeline", lora=TO_LAYERS, prompt='{"text": "a red fox"}', negative_prompt="dull", height=32, width=32,
        num_inference_steps=2, output_type="pt")  # fmt: skip
def bria_fibo() -> dict[str, Any]:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    text = SmolLM3ForCausalLM(
        SmolLM3Config(
            vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=256, bos_token_id=257, eos_token_id=258,
        )
    )  # fmt: skip
    transformer = diffusers.BriaFiboTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=64, text_encoder_dim=32, pooled_projection_dim=None, axes_dims_rope=[0, 4, 4],
    )  # fmt: skip
    return {
        "transformer": transformer, "vae": wan_vae(), "scheduler": flow(), "text_encoder": text,
        "tokenizer": llama_like_tokens(),
    }  # fmt: skip


@recipe("StableAudioPipeline", prompt="a red fox", num_inference_steps=2, audio_end_in_s=1.0, output_type="pt")
def stable_audio() -> dict[str, Any]:
    from diffusers.pipelines.stable_audio import StableAudioProjectionModel

    return {
        "transformer": diffusers.StableAudioDiTModel(
            sample_size=4, in_channels=3, num_layers=3, attention_head_dim=4, num_key_value_attention_heads=2,
            num_attention_heads=4, out_channels=3, cross_attention_dim=4, time_proj_dim=8, global_states_input_dim=8,
            cross_attention_input_dim=4,
        ),
        "vae": diffusers.AutoencoderOobleck(
            encoder_hidden_size=6, downsampling_ratios=[1, 2], decoder_channels=3, decoder_input_channels=3,
            audio_channels=2, channel_multiples=[2, 4], sampling_rate=4,
        ),
        "scheduler": diffusers.EDMDPMSolverMultistepScheduler(prediction_type="v_prediction"),
        "text_encoder": t5_text(), "tokenizer": t5_tokens(),
        "projection_model": StableAudioProjectionModel(
            text_encoder_dim=32, conditioning_dim=4, min_value=0, max_value=32
        ),
    }  # fmt: skip
