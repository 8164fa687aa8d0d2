"""Pipelines that make videos with a UNet."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from highwater.tests.compat.images import fill_zeros
from highwater.tests.compat.parts import clip_pixels, clip_text, clip_tokens, clip_vision, film, image, kl_vae
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, ddim, recipe
from highwater.tests.compat.unets import SIZE, stable_diffusion_xl, unet, unet_sizes
from highwater.tests.compat.unets_control import guide_sizes

FRAMES = {"num_frames": 2, **SIZE, **IMAGE}
GUIDED = {"lora": TO_LAYERS, "guides": ("controlnet",)}


def film_of_32() -> list[Any]:
    return film(2, 32)


def motion(**options: Any) -> Any:
    adapter = diffusers.MotionAdapter(
        block_out_channels=(16, 32), motion_layers_per_block=1, motion_norm_num_groups=4, motion_num_attention_heads=4,
        **options,
    )  # fmt: skip
    return fill_zeros(adapter)


@recipe("AnimateDiffPipeline", lora=TO_LAYERS, **FRAMES)
@recipe("AnimateDiffPAGPipeline", lora=TO_LAYERS, pag_scale=2.0, **FRAMES)
@recipe("AnimateDiffVideoToVideoPipeline", lora=TO_LAYERS, video=film_of_32, strength=0.9, **SIZE, **IMAGE)
def animate_diff() -> dict[str, Any]:
    return {
        "unet": unet(), "vae": kl_vae(), "scheduler": ddim(), "text_encoder": clip_text(), "tokenizer": clip_tokens(),
        "motion_adapter": motion(),
    }  # fmt: skip


@recipe("AnimateDiffControlNetPipeline", **GUIDED, conditioning_frames=film_of_32, **FRAMES)
@recipe(
    "AnimateDiffVideoToVideoControlNetPipeline", **GUIDED, conditioning_frames=film_of_32, video=film_of_32,
    strength=0.9, **SIZE, **IMAGE,
)  # fmt: skip
def animate_diff_control() -> dict[str, Any]:
    return animate_diff() | {"controlnet": fill_zeros(diffusers.ControlNetModel(**guide_sizes(unet_sizes())))}


@recipe(
    "AnimateDiffSparseControlNetPipeline", **GUIDED, conditioning_frames=film_of_32, controlnet_frame_indices=[0, 1],
    **FRAMES,
)  # fmt: skip
def animate_diff_sparse() -> dict[str, Any]:
    guide = diffusers.SparseControlNetModel(
        in_channels=4, conditioning_channels=3, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlockMotion", "CrossAttnDownBlockMotion"), cross_attention_dim=32, attention_head_dim=4,
        conditioning_embedding_out_channels=(8, 8), use_simplified_condition_embedding=False,
    )  # fmt: skip
    return animate_diff() | {"controlnet": fill_zeros(guide)}


@recipe("AnimateDiffSDXLPipeline", lora=TO_LAYERS, **FRAMES)
def animate_diff_xl() -> dict[str, Any]:
    return stable_diffusion_xl() | {"motion_adapter": motion(use_motion_mid_block=False)}


@recipe("PIAPipeline", lora=TO_LAYERS, image=image, **FRAMES)
def pia() -> dict[str, Any]:
    return animate_diff() | {"motion_adapter": motion(conv_in_channels=9)}


@recipe("StableVideoDiffusionPipeline", image=image, num_frames=2, **SIZE, num_inference_steps=2, output_type="pt")
def stable_video_diffusion() -> dict[str, Any]:
    return {
        "unet": diffusers.UNetSpatioTemporalConditionModel(
            block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=8, out_channels=4,
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), cross_attention_dim=32,
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), num_attention_heads=4,
            projection_class_embeddings_input_dim=96, addition_time_embed_dim=32,
        ),
        "vae": diffusers.AutoencoderKLTemporalDecoder(
            block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4
        ),
        "scheduler": diffusers.EulerDiscreteScheduler(
            beta_schedule="scaled_linear", prediction_type="v_prediction", sigma_max=700.0, sigma_min=0.002,
            timestep_type="continuous", use_karras_sigmas=True, timestep_spacing="leading",
        ),
        "image_encoder": clip_vision(size=224), "feature_extractor": clip_pixels(size=224),
    }  # fmt: skip


@recipe("TextToVideoSDPipeline", lora=TO_LAYERS, **FRAMES)
@recipe("VideoToVideoSDPipeline", lora=TO_LAYERS, video=lambda: torch.rand(1, 2, 3, 32, 32), strength=0.9, **IMAGE)
def text_to_video() -> dict[str, Any]:
    return {
        "unet": diffusers.UNet3DConditionModel(
            block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, sample_size=16, cross_attention_dim=32,
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), attention_head_dim=4,
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        ),
        "vae": kl_vae(), "scheduler": ddim(), "text_encoder": clip_text(), "tokenizer": clip_tokens(),
    }  # fmt: skip
