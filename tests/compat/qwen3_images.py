"""Pipelines that make and edit images, with Qwen 3 VL for their text encoder."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from highwater.tests.compat.flux import flux2_vae
from highwater.tests.compat.images import qwen_vae
from highwater.tests.compat.parts import image
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, flow, recipe
from highwater.tests.compat.vision_language import qwen3_vl_model, qwen3_vl_text, qwen_processor, qwen_tokens
from highwater.tests.compat.wan import wan_vae

SQUARE = {"height": 32, "width": 32, **IMAGE}


@recipe("Krea2Pipeline", lora=TO_LAYERS, max_sequence_length=16, negative_prompt="dull", **SQUARE)
def krea2() -> dict[str, Any]:
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16, num_layers=3, attention_head_dim=8, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, timestep_embed_dim=8, text_hidden_dim=32, num_text_layers=3, text_num_attention_heads=2,
        text_num_key_value_heads=1, text_intermediate_size=16, num_layerwise_text_blocks=1, num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    )  # fmt: skip
    return {
        "transformer": transformer, "vae": qwen_vae(), "scheduler": flow(use_dynamic_shifting=True),
        "text_encoder": qwen3_vl_model(), "tokenizer": qwen_tokens(), "text_encoder_select_layers": (0, 1, 2),
    }  # fmt: skip


def ideogram_transformer() -> Any:
    return diffusers.Ideogram4Transformer2DModel(
        in_channels=16, num_layers=3, attention_head_dim=8, num_attention_heads=4, intermediate_size=32, adaln_dim=16,
        llm_features_dim=13 * 16, rope_theta=10_000, mrope_section=(2, 1, 1),
    )  # fmt: skip


@recipe("Ideogram4Pipeline", lora=TO_LAYERS, max_sequence_length=64, guidance_schedule=(5.0, 3.0), **SQUARE)
def ideogram() -> dict[str, Any]:
    return {
        "transformer": ideogram_transformer(), "unconditional_transformer": ideogram_transformer(),
        "vae": flux2_vae(), "scheduler": flow(), "tokenizer": qwen_tokens(),
        "text_encoder": qwen3_vl_model(layers=36, width=16),  # the pipeline reads 13 of 36 layers
    }  # fmt: skip


FIBO2 = {"prompt": '{"short_description": "a fox", "text_render": [{"text": "hi"}]}', "negative_prompt": "dull"}


@recipe("BriaFibo2Pipeline", lora=TO_LAYERS, **SQUARE | FIBO2)
@recipe("BriaFibo2Pipeline", "with an image", lora=TO_LAYERS, image=image, **SQUARE)
def bria_fibo2() -> dict[str, Any]:
    transformer = diffusers.BriaFibo2Transformer2DModel(
        in_channels=4, dim=32, n_layers=6, n_refiner_layers=1, n_heads=2, cap_feat_dim=48,
        injection_layer_ids=(0, 1, 2, 3, 4), perceiver_num_layers=1, min_num_gist_tokens=8, max_num_gist_tokens=16,
        gist_step=8, gist_min_text_len=8, gist_max_text_len=64, axes_dims=(8, 4, 4), axes_lens=(512, 32, 32),
    )  # fmt: skip
    return {
        "transformer": transformer, "vae": flux2_vae(), "scheduler": flow(use_dynamic_shifting=True),
        "text_encoder": qwen3_vl_text(layers=36, width=16), "processor": qwen_processor("Qwen3VLProcessor"),
    }  # fmt: skip


DREAM = {"height": 32, "width": 32, "negative_prompt": "dull", **IMAGE}


@recipe("DreamLitePipeline", lora=TO_LAYERS[:3], **DREAM)
@recipe("DreamLitePipeline", "with an image", lora=TO_LAYERS[:3], image=image, **DREAM)
@recipe("DreamLiteMobilePipeline", lora=TO_LAYERS[:3], **SQUARE)
@recipe("DreamLiteMobilePipeline", "with an image", lora=TO_LAYERS[:3], image=image, **SQUARE)
def dream_lite() -> dict[str, Any]:
    unet = diffusers.DreamLiteUNetModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), cross_attention_dim=32,
        down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D", "DreamLiteCrossAttnDownBlock2D"),
        up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"), attention_head_dim=8, layers_per_block=1,
        norm_num_groups=8, transformer_layers_per_block=1,
    )  # fmt: skip
    vae = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1), latent_channels=4,
    )  # fmt: skip
    return {
        "unet": unet, "vae": vae, "scheduler": flow(), "text_encoder": qwen3_vl_text(), "tokenizer": qwen_tokens(),
        "processor": qwen_processor("Qwen3VLProcessor"),
    }  # fmt: skip


@recipe("NucleusMoEImagePipeline", return_index=-1, negative_prompt="dull", max_sequence_length=64, **SQUARE)
def nucleus() -> dict[str, Any]:
    from diffusers.models.transformers.transformer_nucleusmoe_image import SwiGLUExperts

    transformer = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=5, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(8, 4, 4), num_experts=4, moe_intermediate_dim=32,
        capacity_factors=[2.0] * 5,
    )  # fmt: skip
    with torch.no_grad():  # the class leaves its experts as the memory was
        for layer in transformer.modules():
            if isinstance(layer, SwiGLUExperts):
                layer.gate_up_proj.normal_(std=0.1)
                layer.down_proj.normal_(std=0.1)
    return {
        "transformer": transformer, "vae": qwen_vae(), "scheduler": flow(), "text_encoder": qwen3_vl_text(),
        "processor": qwen_processor("Qwen3VLProcessor"),
    }  # fmt: skip


def small_pictures(pipe: Any) -> None:
    """Keep pictures at 32 pixels: the pipeline's own processor enlarges each to a megapixel."""
    from diffusers.pipelines.joyimage.image_processor import JoyImageEditImageProcessor

    class SmallPictures(JoyImageEditImageProcessor):
        def get_default_height_width(self, *_: Any, **__: Any) -> tuple[int, int]:
            return 32, 32

    for name in ("image_processor", "vae_image_processor"):
        if isinstance(getattr(pipe, name, None), JoyImageEditImageProcessor):
            setattr(pipe, name, SmallPictures(vae_scale_factor=pipe.vae_scale_factor_spatial))


def joy_parts(transformer_class: Any) -> dict[str, Any]:
    transformer = transformer_class(
        patch_size=[1, 2, 2], in_channels=16, hidden_size=32, num_attention_heads=2, text_dim=32, num_layers=3,
        rope_dim_list=[4, 6, 6], theta=256,
    )  # fmt: skip
    return {
        "transformer": transformer, "vae": wan_vae(), "scheduler": flow(), "text_encoder": qwen3_vl_text(),
        "tokenizer": qwen_tokens(), "processor": qwen_processor("Qwen3VLProcessor"),
    }  # fmt: skip


@recipe("JoyImageEditPipeline", image=image, before=small_pictures, **SQUARE)
def joy() -> dict[str, Any]:
    return joy_parts(diffusers.JoyImageEditTransformer3DModel)


@recipe("JoyImageEditPlusPipeline", images=lambda: [image(), image(48)], before=small_pictures, **SQUARE)
def joy_plus() -> dict[str, Any]:
    return joy_parts(diffusers.JoyImageEditPlusTransformer3DModel)
