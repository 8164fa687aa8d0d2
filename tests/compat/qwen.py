"""Qwen-Image's pipelines that read a picture beside the text, and Qwen-Image 2.1."""

from __future__ import annotations

from typing import Any

import diffusers

from highwater.tests.compat.images import qwen_image, qwen_transformer
from highwater.tests.compat.parts import image, mask
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, flow, recipe
from highwater.tests.compat.vision_language import qwen3_vl_text, qwen_processor

SQUARE = {"height": 64, "width": 64, **IMAGE}
EDIT = {"image": image, "true_cfg_scale": 2.0, "negative_prompt": "dull"}


def deep_vae(channels: int = 4, **options: Any) -> Any:
    """A VAE of six narrow levels: the pipelines enlarge a picture to a megapixel before they encode it."""
    return diffusers.AutoencoderKLQwenImage(
        base_dim=2, z_dim=channels, dim_mult=[1, 1, 1, 1, 1, 1], num_res_blocks=0, temperal_downsample=[False] * 5,
        latents_mean=[0.0] * channels, latents_std=[1.0] * channels, **options,
    )  # fmt: skip


@recipe("QwenImageEditPipeline", lora=TO_LAYERS, **EDIT, **SQUARE)
@recipe("QwenImageEditPlusPipeline", lora=TO_LAYERS, **EDIT, **SQUARE)
@recipe(
    "QwenImageEditInpaintPipeline",
    lora=TO_LAYERS,
    strength=1.0,
    mask_image=mask,
    **EDIT,
    **IMAGE | {"output_type": "latent"},
)
def edit() -> dict[str, Any]:
    return qwen_image() | {"processor": qwen_processor(patch_size=14), "vae": deep_vae()}


@recipe(
    "QwenImageLayeredPipeline", lora=TO_LAYERS, layers=1, **EDIT | {"image": lambda: image().convert("RGBA")}, **IMAGE
)
def layered() -> dict[str, Any]:
    # With four channels its latents would look like a picture with transparency.
    transformer = qwen_transformer(in_channels=32, out_channels=8, use_additional_t_cond=True, use_layer3d_rope=True)
    return qwen_image() | {
        "processor": qwen_processor(patch_size=14), "vae": deep_vae(8, input_channels=4), "transformer": transformer,
    }  # fmt: skip


@recipe("QwenImage21Pipeline", lora=TO_LAYERS, true_cfg_scale=2.0, negative_prompt="dull", **SQUARE)
@recipe("QwenImage21Pipeline", "with an image", lora=TO_LAYERS, image=image, output_resolution=64, **SQUARE)
def qwen21() -> dict[str, Any]:
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=4, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2, context_in_dim=32,
        axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )  # fmt: skip
    return {
        "transformer": transformer, "vae": vae, "scheduler": flow(use_dynamic_shifting=True),
        "text_encoder": qwen3_vl_text(), "processor": qwen_processor("Qwen3VLProcessor"),
    }  # fmt: skip
