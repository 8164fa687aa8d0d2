"""Pipelines with Wan's transformer and VAE, or descendants of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers

from highwater.tests.compat.parts import (
    clip_pixels,
    clip_vision,
    film,
    image,
    mask,
    t5_tokens,
    umt5_text,
)
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, flow, recipe

VIDEO = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16, **IMAGE}


def wan_vae(**options: Any) -> Any:
    return diffusers.AutoencoderKLWan(
        **{
            "base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
            "temperal_downsample": [False, True, True], **options,
        }
    )  # fmt: skip


def wan_sizes(**options: Any) -> dict[str, Any]:
    return {
        "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16,
        "out_channels": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 32, "num_layers": 3,
        "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32, **options,
    }  # fmt: skip


def wan_transformer(**options: Any) -> Any:
    return diffusers.WanTransformer3DModel(**wan_sizes(**options))


def unipc() -> Any:
    return diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


@recipe("WanPipeline", lora=TO_LAYERS, **VIDEO)
@recipe("WanVideoToVideoPipeline", lora=TO_LAYERS, video=film, strength=0.9, prompt="a red fox",
        num_inference_steps=2, output_type="pt", height=16, width=16, max_sequence_length=16)  # fmt: skip
def wan() -> dict[str, Any]:
    return {
        "transformer": wan_transformer(), "vae": wan_vae(), "scheduler": flow(), "text_encoder": umt5_text(),
        "tokenizer": t5_tokens(),
    }  # fmt: skip


@recipe("WanPipeline", "2.2 with two transformers", lora=TO_LAYERS, **VIDEO)
def wan_of_two() -> dict[str, Any]:
    return wan() | {"transformer_2": wan_transformer(), "boundary_ratio": 0.875, "scheduler": unipc()}


def wan_with_timesteps() -> dict[str, Any]:
    vae = wan_vae(
        z_dim=48, in_channels=12, out_channels=12, is_residual=True, patch_size=2, scale_factor_spatial=16,
        scale_factor_temporal=4, latents_mean=[0.0] * 48, latents_std=[1.0] * 48,
    )  # fmt: skip
    return wan() | {"transformer": wan_transformer(in_channels=48, out_channels=48), "vae": vae, "scheduler": unipc()}


@recipe("WanPipeline", "2.2 TI2V", lora=TO_LAYERS, **VIDEO | {"height": 32, "width": 32})
def wan_ti2v() -> dict[str, Any]:
    return wan_with_timesteps() | {"expand_timesteps": True}


@recipe("LucyEditPipeline", lora=TO_LAYERS, video=partial(film, 5, 32), **VIDEO | {"height": 32, "width": 32})
def lucy_edit() -> dict[str, Any]:
    return wan_with_timesteps() | {
        "transformer": wan_transformer(in_channels=96, out_channels=48),
        "expand_timesteps": True,
    }


@recipe("WanImageToVideoPipeline", lora=TO_LAYERS, image=partial(image, 16), **VIDEO)
def wan_i2v() -> dict[str, Any]:
    return wan() | {
        "transformer": wan_transformer(in_channels=36, image_dim=32), "image_encoder": clip_vision(),
        "image_processor": clip_pixels(),
    }  # fmt: skip


@recipe("WanImageToVideoPipeline", "2.2 with two transformers", lora=TO_LAYERS, image=partial(image, 16), **VIDEO)
def wan_i2v_of_two() -> dict[str, Any]:
    return wan_of_two() | {
        "transformer": wan_transformer(in_channels=36), "transformer_2": wan_transformer(in_channels=36),
        "image_encoder": None, "image_processor": None,
    }  # fmt: skip


@recipe("ChronoEditPipeline", lora=TO_LAYERS, image=partial(image, 16), **VIDEO)
def chrono_edit() -> dict[str, Any]:
    sizes = wan_sizes(in_channels=36, image_dim=32)
    return wan_i2v() | {"transformer": diffusers.ChronoEditTransformer3DModel(**sizes)}


@recipe("WanVACEPipeline", lora=TO_LAYERS, **VIDEO)
@recipe("WanVACEPipeline", "with a film and a mask", lora=TO_LAYERS, video=film, mask=lambda: [mask(16)] * 5, **VIDEO)
def wan_vace() -> dict[str, Any]:
    sizes = wan_sizes(vace_layers=[0, 2], vace_in_channels=96)
    return wan() | {"transformer": diffusers.WanVACETransformer3DModel(**sizes)}


@recipe(
    "WanAnimatePipeline", lora=TO_LAYERS, image=partial(image, 16), pose_video=partial(film, 5),
    face_video=partial(film, 5), height=16, width=16, segment_frame_length=5, prev_segment_conditioning_frames=1,
    max_sequence_length=16, **IMAGE,
)  # fmt: skip
def wan_animate() -> dict[str, Any]:
    sizes = wan_sizes(
        in_channels=36, latent_channels=16, image_dim=32, motion_encoder_channel_sizes={"4": 16, "8": 16, "16": 16},
        motion_encoder_size=16, motion_style_dim=8, motion_dim=4, motion_encoder_dim=16, face_encoder_hidden_dim=16,
        face_encoder_num_heads=2, inject_face_latents_blocks=3,
    )  # fmt: skip
    return wan_i2v() | {"transformer": diffusers.WanAnimateTransformer3DModel(**sizes)}


FORCING = {**VIDEO, "num_frames": 9, "base_num_frames": 5, "overlap_history": 1, "ar_step": 0}


@recipe("SkyReelsV2Pipeline", lora=TO_LAYERS, **VIDEO)
@recipe("SkyReelsV2DiffusionForcingPipeline", lora=TO_LAYERS, **VIDEO)
@recipe("SkyReelsV2DiffusionForcingImageToVideoPipeline", lora=TO_LAYERS, image=partial(image, 16), **VIDEO)
@recipe("SkyReelsV2DiffusionForcingVideoToVideoPipeline", lora=TO_LAYERS, video=film, **FORCING)
def skyreels() -> dict[str, Any]:
    scheduler = diffusers.UniPCMultistepScheduler(flow_shift=8.0, use_flow_sigmas=True)
    return wan() | {"transformer": diffusers.SkyReelsV2Transformer3DModel(**wan_sizes()), "scheduler": scheduler}


@recipe("SkyReelsV2ImageToVideoPipeline", lora=TO_LAYERS, image=partial(image, 16), **VIDEO)
def skyreels_i2v() -> dict[str, Any]:
    sizes = wan_sizes(in_channels=36, image_dim=32)
    return skyreels() | {
        "transformer": diffusers.SkyReelsV2Transformer3DModel(**sizes), "image_encoder": clip_vision(),
        "image_processor": clip_pixels(),
    }  # fmt: skip
