"""Pipelines around transformers that make images from the text of T5, Gemma, GLM or no text."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch

from highwater.tests.compat.images import (
    chroma,
    qwen_image,
    qwen_transformer,
    sd3_transformer,
    stable_diffusion_3,
    z_image,
)
from highwater.tests.compat.parts import (
    QWEN_MARKS,
    fill_zeros,
    gemma2_text,
    hint,
    image,
    kl_vae,
    llama_like_tokens,
    mask,
    qwen3_text,
    qwen_vl_text,
    t5_text,
    t5_tokens,
)
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, flow, recipe

SQUARE = {"height": 32, "width": 32, "max_sequence_length": 16, **IMAGE}
OF_IMAGE = {"image": image, **SQUARE}
INPAINT = {"mask_image": mask, **OF_IMAGE}


CONTROL = {"guides": ("controlnet",), "control_image": hint, "controlnet_conditioning_scale": 0.7}

recipe("StableDiffusion3Img2ImgPipeline", lora=TO_LAYERS, strength=1.0, **OF_IMAGE)(stable_diffusion_3)
recipe("ChromaImg2ImgPipeline", lora=TO_LAYERS, strength=1.0, **OF_IMAGE)(chroma)
recipe("ZImageImg2ImgPipeline", lora=TO_LAYERS[:3], strength=1.0, **OF_IMAGE)(z_image)
recipe("ZImageInpaintPipeline", lora=TO_LAYERS[:3], strength=1.0, **INPAINT)(z_image)
recipe("QwenImageImg2ImgPipeline", lora=TO_LAYERS, strength=1.0, true_cfg_scale=1.0, **OF_IMAGE)(qwen_image)
recipe("QwenImageInpaintPipeline", lora=TO_LAYERS, strength=1.0, true_cfg_scale=1.0, **INPAINT)(qwen_image)


def qwen_guide(**options: Any) -> Any:
    return fill_zeros(
        diffusers.QwenImageControlNetModel(
            patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=32, axes_dims_rope=(8, 4, 4), **options,
        )
    )  # fmt: skip


@recipe("QwenImageControlNetPipeline", lora=TO_LAYERS, true_cfg_scale=1.0, **CONTROL, **SQUARE)
def qwen_controlnet() -> dict[str, Any]:
    return qwen_image() | {"controlnet": qwen_guide(), "transformer": qwen_transformer()}


@recipe(
    "QwenImageControlNetInpaintPipeline", lora=TO_LAYERS, true_cfg_scale=1.0, control_mask=mask, **CONTROL, **SQUARE
)
def qwen_controlnet_inpaint() -> dict[str, Any]:
    return qwen_image() | {"controlnet": qwen_guide(extra_condition_channels=4)}


recipe("StableDiffusion3PAGPipeline", lora=TO_LAYERS, pag_scale=1.0, **SQUARE)(
    lambda: stable_diffusion_3() | {"pag_applied_layers": "blocks.1"}
)
recipe("StableDiffusion3PAGImg2ImgPipeline", lora=TO_LAYERS, pag_scale=1.0, strength=1.0, **OF_IMAGE)(
    lambda: stable_diffusion_3() | {"pag_applied_layers": "blocks.1"}
)


@recipe("StableDiffusion3InpaintPipeline", lora=TO_LAYERS, strength=1.0, **INPAINT)
def sd3_inpaint() -> dict[str, Any]:
    # The class takes 16 or 33 channels and no others.
    return stable_diffusion_3() | {
        "transformer": sd3_transformer(in_channels=16, out_channels=16),
        "vae": kl_vae(16, use_quant_conv=False, use_post_quant_conv=False),
    }


@recipe("StableDiffusion3ControlNetInpaintingPipeline", lora=TO_LAYERS, guides=("controlnet",), control_image=hint,
        control_mask=lambda: torch.ones(1, 1, 32, 32), controlnet_conditioning_scale=0.7, **SQUARE)  # fmt: skip
def sd3_controlnet_inpaint() -> dict[str, Any]:
    guide = diffusers.SD3ControlNetModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
        extra_conditioning_channels=1,
    )  # fmt: skip
    return stable_diffusion_3() | {"controlnet": fill_zeros(guide)}


def pixart() -> dict[str, Any]:
    transformer = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=3, patch_size=2, attention_head_dim=8, num_attention_heads=3, caption_channels=32,
        in_channels=4, cross_attention_dim=24, out_channels=8, attention_bias=True,
        activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_type="ada_norm_single",
        norm_elementwise_affine=False, norm_eps=1e-6, use_additional_conditions=False,
    )  # fmt: skip
    return {
        "transformer": transformer, "vae": kl_vae(), "scheduler": diffusers.DDIMScheduler(),
        "text_encoder": t5_text(), "tokenizer": t5_tokens(),
    }  # fmt: skip


PIXART = {"use_resolution_binning": False, "clean_caption": False, **SQUARE}
recipe("PixArtAlphaPipeline", **PIXART)(pixart)
recipe("PixArtSigmaPipeline", **PIXART)(pixart)
recipe("PixArtSigmaPAGPipeline", pag_scale=1.0, **PIXART)(lambda: pixart() | {"pag_applied_layers": "blocks.1"})


def sana_sizes(**options: Any) -> dict[str, Any]:
    return {
        "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 3, "num_attention_heads": 2,
        "attention_head_dim": 4, "num_cross_attention_heads": 2, "cross_attention_head_dim": 4,
        "cross_attention_dim": 8, "caption_channels": 32, "sample_size": 32, **options,
    }  # fmt: skip


def sana_parts(**options: Any) -> dict[str, Any]:
    vae = diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=[1, 1], downsample_block_type="conv",
        upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu",
    )  # fmt: skip
    return {
        "transformer": diffusers.SanaTransformer2DModel(**sana_sizes(**options)), "vae": vae, "scheduler": flow(),
        "text_encoder": gemma2_text(), "tokenizer": llama_like_tokens(),
    }  # fmt: skip


SANA = {"complex_human_instruction": None, "use_resolution_binning": False, "clean_caption": False, **SQUARE}


@recipe("SanaPipeline", lora=TO_LAYERS, **SANA)
def sana() -> dict[str, Any]:
    return sana_parts()


@recipe("SanaPAGPipeline", lora=TO_LAYERS, pag_scale=1.0, **SANA)
def sana_pag() -> dict[str, Any]:
    return sana_parts() | {"pag_applied_layers": "blocks.1"}


@recipe("SanaControlNetPipeline", lora=TO_LAYERS, **CONTROL, **SANA)
def sana_controlnet() -> dict[str, Any]:
    return sana_parts() | {"controlnet": fill_zeros(diffusers.SanaControlNetModel(**sana_sizes(num_layers=2)))}


@recipe("SanaSprintPipeline", lora=TO_LAYERS, **SANA)
@recipe("SanaSprintImg2ImgPipeline", lora=TO_LAYERS, image=image, strength=1.0, **SANA)
def sana_sprint() -> dict[str, Any]:
    parts = sana_parts(qk_norm="rms_norm_across_heads", guidance_embeds=True)
    return parts | {"scheduler": diffusers.SCMScheduler()}


@recipe("CogView3PlusPipeline", **SQUARE)
def cogview3() -> dict[str, Any]:
    transformer = diffusers.CogView3PlusTransformer2DModel(
        patch_size=2, in_channels=4, num_layers=3, attention_head_dim=4, num_attention_heads=2, out_channels=4,
        text_embed_dim=32, time_embed_dim=8, condition_dim=2, pos_embed_max_size=8, sample_size=8,
    )  # fmt: skip
    return {
        "transformer": transformer, "vae": kl_vae(), "scheduler": diffusers.CogVideoXDDIMScheduler(),
        "text_encoder": t5_text(), "tokenizer": t5_tokens(),
    }  # fmt: skip


def cogview4_parts(channels: int) -> dict[str, Any]:
    from transformers import GlmConfig, GlmForCausalLM

    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=channels, num_layers=3, attention_head_dim=4, num_attention_heads=4, out_channels=4,
        text_embed_dim=32, time_embed_dim=8, condition_dim=4,
    )  # fmt: skip
    config = GlmConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, pad_token_id=256,
    )  # fmt: skip
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        base_shift=0.25, max_shift=0.75, base_image_seq_len=256, use_dynamic_shifting=True, time_shift_type="linear"
    )
    return {
        "transformer": transformer, "vae": kl_vae(), "scheduler": scheduler,
        "text_encoder": GlmForCausalLM(config), "tokenizer": llama_like_tokens(),
    }  # fmt: skip


@recipe("CogView4Pipeline", lora=TO_LAYERS, negative_prompt="dull", **SQUARE)
def cogview4() -> dict[str, Any]:
    return cogview4_parts(4)


@recipe("CogView4ControlPipeline", lora=TO_LAYERS, negative_prompt="dull", control_image=image, **SQUARE)
def cogview4_control() -> dict[str, Any]:
    return cogview4_parts(8)


@recipe("HunyuanImagePipeline", lora=TO_LAYERS, height=64, width=64, **IMAGE | {"prompt": 'a fox says "hello"'})
def hunyuan_image() -> dict[str, Any]:
    from transformers import ByT5Tokenizer

    guider = partial(diffusers.AdaptiveProjectedMixGuidance, adaptive_projected_guidance_start_step=1)
    return {
        "transformer": diffusers.HunyuanImageTransformer2DModel(
            in_channels=4, out_channels=4, num_attention_heads=4, attention_head_dim=8, num_layers=2,
            num_single_layers=3, num_refiner_layers=2, patch_size=(1, 1), text_embed_dim=32, text_embed_2_dim=32,
            rope_axes_dim=(4, 4),
        ),
        "vae": diffusers.AutoencoderKLHunyuanImage(
            in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(32, 64, 64, 64), layers_per_block=1,
            spatial_compression_ratio=8, sample_size=128, scaling_factor=0.5,
        ),
        "scheduler": flow(), "guider": guider(), "ocr_guider": guider(), "text_encoder": qwen_vl_text(),
        "tokenizer": llama_like_tokens(*QWEN_MARKS), "text_encoder_2": t5_text(wide=True),
        "tokenizer_2": ByT5Tokenizer(),
    }  # fmt: skip


@recipe("OvisImagePipeline", lora=TO_LAYERS, **SQUARE | {"max_sequence_length": 64})
def ovis() -> dict[str, Any]:
    transformer = diffusers.OvisImageTransformer2DModel(
        patch_size=1, in_channels=16, out_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return {
        "transformer": transformer, "vae": kl_vae(), "scheduler": flow(), "text_encoder": qwen3_text(),
        "tokenizer": llama_like_tokens(),
    }  # fmt: skip


@recipe("BriaPipeline", lora=TO_LAYERS, **SQUARE)
def bria() -> dict[str, Any]:
    transformer = diffusers.BriaTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=None, axes_dims_rope=[0, 4, 4],
    )  # fmt: skip
    return {
        "transformer": fill_zeros(transformer), "vae": kl_vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "text_encoder": t5_text(), "tokenizer": t5_tokens(),
    }  # fmt: skip


@recipe(
    "PRXPipeline",
    lora=("img_qkv_proj", "txt_kv_proj", "to_out.0"),
    use_resolution_binning=False,
    height=32,
    width=32,
    **IMAGE,
)
def prx() -> dict[str, Any]:
    from transformers import T5GemmaConfig, T5GemmaModuleConfig
    from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

    sizes = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
        "layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 4,
    }  # fmt: skip
    config = T5GemmaConfig(encoder=T5GemmaModuleConfig(**sizes), is_encoder_decoder=False, **sizes)
    transformer = diffusers.PRXTransformer2DModel(
        patch_size=1, in_channels=4, context_in_dim=32, hidden_size=16, mlp_ratio=2.0, num_heads=2, depth=3,
        axes_dim=[4, 4],
    )  # fmt: skip
    return {
        "transformer": fill_zeros(transformer), "vae": kl_vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "text_encoder": T5GemmaEncoder(config.encoder), "tokenizer": llama_like_tokens(),
    }  # fmt: skip
