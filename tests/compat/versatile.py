"""Versatile Diffusion, with a UNet for pictures and one for texts, and UniDiffuser, with one model for both."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers.pipelines.deprecated.unidiffuser import UniDiffuserModel, UniDiffuserTextDecoder
from diffusers.pipelines.deprecated.versatile_diffusion.modeling_text_unet import UNetFlatConditionModel

from highwater.tests.compat.parts import clip_pixels, clip_text, clip_tokens, clip_vision, image, kl_vae
from highwater.tests.compat.recipes import IMAGE, ddim, recipe
from highwater.tests.compat.unets import SIZE, unet, unet_sizes

NO_TEXT = {"image": image, **SIZE, "num_inference_steps": 2, "output_type": "pt"}
SWAPS = "it exchanges layers between its two UNets during a call, which is refused with a message"


def flat_unet() -> Any:
    return UNetFlatConditionModel(
        **unet_sizes(
            down_block_types=("DownBlockFlat", "CrossAttnDownBlockFlat"), mid_block_type="UNetMidBlockFlatCrossAttn",
            up_block_types=("CrossAttnUpBlockFlat", "UpBlockFlat"),
        )
    )  # fmt: skip


@recipe("VersatileDiffusionPipeline", "image variation", method="image_variation", **NO_TEXT)
@recipe("VersatileDiffusionPipeline", "text to image", limit=SWAPS, method="text_to_image", **SIZE, **IMAGE)
def versatile() -> dict[str, Any]:
    return text_only() | {"image_encoder": clip_vision(), "image_feature_extractor": clip_pixels()}


@recipe("VersatileDiffusionTextToImagePipeline", **SIZE, **IMAGE)
def text_only() -> dict[str, Any]:
    return {
        "image_unet": unet(), "text_unet": flat_unet(), "vae": kl_vae(), "scheduler": ddim(),
        "text_encoder": clip_text(projected=True), "tokenizer": clip_tokens(),
    }  # fmt: skip


@recipe("VersatileDiffusionImageVariationPipeline", **NO_TEXT)
def image_only() -> dict[str, Any]:
    return {
        "image_unet": unet(), "vae": kl_vae(), "scheduler": ddim(), "image_encoder": clip_vision(),
        "image_feature_extractor": clip_pixels(),
    }  # fmt: skip


@recipe("UniDiffuserPipeline", "text to image", **SIZE, **IMAGE)
@recipe("UniDiffuserPipeline", "image to text", image=image, num_inference_steps=2)
def unidiffuser() -> dict[str, Any]:
    return {
        "unet": UniDiffuserModel(
            text_dim=16, clip_img_dim=32, num_text_tokens=77, num_attention_heads=2, attention_head_dim=8,
            in_channels=4, out_channels=4, num_layers=3, sample_size=16, patch_size=2, activation_fn="gelu",
            num_embeds_ada_norm=1000, use_data_type_embedding=True,
        ),
        "text_decoder": UniDiffuserTextDecoder(
            prefix_length=77, prefix_inner_dim=32, prefix_hidden_dim=16, vocab_size=514, n_positions=256, n_embd=32,
            n_layer=2, n_head=4, initializer_range=0.5,
        ),
        "vae": kl_vae(), "scheduler": diffusers.DPMSolverMultistepScheduler(solver_order=3),
        "text_encoder": clip_text(), "clip_tokenizer": clip_tokens(), "text_tokenizer": clip_tokens(),
        "image_encoder": clip_vision(), "clip_image_processor": clip_pixels(),
    }  # fmt: skip
