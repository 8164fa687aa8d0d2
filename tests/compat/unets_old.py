"""Pipelines of Stable Diffusion 1 that diffusers keeps for old checkpoints: other encoders, other ways to guide it."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.pipelines.deprecated.alt_diffusion import RobertaSeriesModelWithTransformation
from diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series import RobertaSeriesConfig
from diffusers.pipelines.deprecated.paint_by_example import PaintByExampleImageEncoder

from highwater.tests.compat.parts import (
    clip_pixels,
    clip_text,
    clip_tokens,
    clip_vision,
    clip_vision_config,
    fill_zeros,
    image,
    kl_vae,
    mask,
    roberta_tokens,
)
from highwater.tests.compat.recipes import IMAGE, PROMPT, TO_LAYERS, ddim, recipe
from highwater.tests.compat.unets import SIZE, stable_diffusion, unet
from highwater.tests.compat.unets_sd import PICTURE

READS_WEIGHT = "it reads a weight of a component without `forward`, outside of any call, when the weight is on the CPU"


@recipe("AltDiffusionPipeline", lora=TO_LAYERS, **SIZE, **IMAGE)
@recipe("AltDiffusionImg2ImgPipeline", lora=TO_LAYERS, strength=0.9, **PICTURE)
def alt_diffusion() -> dict[str, Any]:
    text_encoder = RobertaSeriesModelWithTransformation(
        RobertaSeriesConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=80, project_dim=32,
        )
    )  # fmt: skip
    return stable_diffusion() | {"text_encoder": text_encoder, "tokenizer": roberta_tokens()}


@recipe("PaintByExamplePipeline", example_image=image, image=image, mask_image=mask, num_inference_steps=2,
        output_type="pt")  # fmt: skip
def paint_by_example() -> dict[str, Any]:
    return {
        "unet": unet(in_channels=9), "vae": kl_vae(), "scheduler": ddim(), "safety_checker": None,
        "image_encoder": PaintByExampleImageEncoder(clip_vision_config(num_hidden_layers=10), proj_size=32),
        "feature_extractor": clip_pixels(),
    }  # fmt: skip


@recipe("StableDiffusionGLIGENTextImagePipeline", gligen_phrases=["a hat"], gligen_images=lambda: [image()],
        gligen_boxes=[[0.1, 0.2, 0.6, 0.7]], **SIZE, **IMAGE)  # fmt: skip
def gligen_text_image() -> dict[str, Any]:
    from diffusers.pipelines.stable_diffusion import CLIPImageProjection

    return stable_diffusion() | {
        "unet": fill_zeros(unet(attention_type="gated-text-image", cross_attention_dim=32)),
        "image_encoder": clip_vision(),
        "processor": clip_pixels(), "image_project": CLIPImageProjection(hidden_size=32),
    }  # fmt: skip


@recipe("StableDiffusionPix2PixZeroPipeline", source_embeds=lambda: torch.rand(1, 77, 32),
        target_embeds=lambda: torch.rand(1, 77, 32), **SIZE, **IMAGE)  # fmt: skip
def pix2pix_zero() -> dict[str, Any]:
    return stable_diffusion() | {
        "scheduler": diffusers.DDIMScheduler(), "inverse_scheduler": diffusers.DDIMInverseScheduler(),
        "caption_generator": None, "caption_processor": None,
    }  # fmt: skip


VQ = {"prompt": PROMPT, "num_inference_steps": 2, "output_type": "np", "generator": None}


@recipe("VQDiffusionPipeline", **VQ)
def vq_diffusion() -> dict[str, Any]:
    return vq_parts(learned=False)


@recipe("VQDiffusionPipeline", "learned embedding of no prompt", limit=READS_WEIGHT, **VQ)
def vq_diffusion_learned() -> dict[str, Any]:
    return vq_parts(learned=True)


def vq_parts(*, learned: bool) -> dict[str, Any]:
    from diffusers.pipelines.deprecated.vq_diffusion.pipeline_vq_diffusion import (
        LearnedClassifierFreeSamplingEmbeddings,
    )

    return {
        "transformer": diffusers.Transformer2DModel(
            attention_bias=True, cross_attention_dim=32, num_layers=3, num_attention_heads=2, attention_head_dim=8,
            num_vector_embeds=12, num_embeds_ada_norm=12, sample_size=8, activation_fn="geglu-approximate",
        ),
        "vqvae": diffusers.VQModel(
            block_out_channels=(16, 32), norm_num_groups=4, latent_channels=3, num_vq_embeddings=12, vq_embed_dim=3,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        "scheduler": diffusers.VQDiffusionScheduler(12), "text_encoder": clip_text(), "tokenizer": clip_tokens(),
        "learned_classifier_free_sampling_embeddings": LearnedClassifierFreeSamplingEmbeddings(learned, 32, 77),
    }  # fmt: skip
