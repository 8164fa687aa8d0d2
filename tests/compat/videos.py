"""Pipelines that make videos with transformers and VAEs of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import (
    QWEN_MARKS,
    clip_text,
    clip_tokens,
    fill_zeros,
    film,
    image,
    kl_vae,
    llama_like_tokens,
    llama_model,
    qwen_vl_text,
    siglip_pixels,
    siglip_vision,
    t5_text,
    t5_tokens,
)
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, flow, recipe

VIDEO = {"height": 16, "width": 16, "num_frames": 9, "max_sequence_length": 16, **IMAGE}


def with_t5(**parts: Any) -> dict[str, Any]:
    return {"text_encoder": t5_text(), "tokenizer": t5_tokens(), **parts}


def hunyuan_vae(levels: int = 4, channels: int = 4) -> Any:
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=channels, down_block_types=("HunyuanVideoDownBlock3D",) * levels,
        up_block_types=("HunyuanVideoUpBlock3D",) * levels, block_out_channels=(8,) * levels, layers_per_block=1,
        norm_num_groups=4, spatial_compression_ratio=8, temporal_compression_ratio=4, mid_block_add_attention=True,
    )  # fmt: skip


def hunyuan_sizes(**options: Any) -> dict[str, Any]:
    return {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 2,
        "num_single_layers": 3, "num_refiner_layers": 2, "patch_size": 1, "patch_size_t": 1, "guidance_embeds": True,
        "text_embed_dim": 32, "pooled_projection_dim": 32, "rope_axes_dim": (2, 4, 4), **options,
    }  # fmt: skip


def hunyuan_parts(transformer: Any) -> dict[str, Any]:
    return {
        "transformer": transformer, "vae": hunyuan_vae(), "scheduler": flow(), "text_encoder": llama_model(),
        "tokenizer": llama_like_tokens(), "text_encoder_2": clip_text(), "tokenizer_2": clip_tokens(),
    }  # fmt: skip


TEMPLATE = {"template": "{}", "crop_start": 0}


@recipe("HunyuanVideoPipeline", lora=TO_LAYERS, prompt_template=TEMPLATE, **VIDEO)
def hunyuan_video() -> dict[str, Any]:
    return hunyuan_parts(diffusers.HunyuanVideoTransformer3DModel(**hunyuan_sizes()))


@recipe("HunyuanSkyreelsImageToVideoPipeline", lora=TO_LAYERS, image=partial(image, 16), prompt_template=TEMPLATE,
        **VIDEO)  # fmt: skip
def hunyuan_skyreels() -> dict[str, Any]:
    return hunyuan_parts(diffusers.HunyuanVideoTransformer3DModel(**hunyuan_sizes(in_channels=8)))


@recipe(
    "HunyuanVideoFramepackPipeline", lora=TO_LAYERS, image=image, prompt_template=TEMPLATE, latent_window_size=3,
    **VIDEO | {"height": 32, "width": 32},
)  # fmt: skip
def hunyuan_framepack() -> dict[str, Any]:
    sizes = hunyuan_sizes(patch_size=2, has_image_proj=True, image_proj_dim=32, has_clean_x_embedder=True)
    return hunyuan_parts(diffusers.HunyuanVideoFramepackTransformer3DModel(**sizes)) | {
        "image_encoder": siglip_vision(), "feature_extractor": siglip_pixels(),
    }  # fmt: skip


def hunyuan15_parts(task: str) -> dict[str, Any]:
    from transformers import ByT5Tokenizer

    return {
        "transformer": diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=8, num_layers=3,
            num_refiner_layers=2, mlp_ratio=2.0, patch_size=1, patch_size_t=1, text_embed_dim=32,
            text_embed_2_dim=32, image_embed_dim=32, rope_axes_dim=(2, 2, 4), target_size=16, task_type=task,
        ),
        "vae": diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(16, 16), layers_per_block=1, spatial_compression_ratio=4,
            temporal_compression_ratio=2, downsample_match_channel=False, upsample_match_channel=False,
        ),
        "scheduler": flow(), "text_encoder": qwen_vl_text().model.language_model,
        "tokenizer": llama_like_tokens(*QWEN_MARKS), "text_encoder_2": t5_text(wide=True),
        "tokenizer_2": ByT5Tokenizer(), "guider": diffusers.ClassifierFreeGuidance(guidance_scale=2.0),
    }  # fmt: skip


SHORT = {k: v for k, v in VIDEO.items() if k != "max_sequence_length"}


@recipe("HunyuanVideo15Pipeline", lora=TO_LAYERS, **SHORT | {"prompt": 'a red fox says "hello"'})
def hunyuan_video15() -> dict[str, Any]:
    return hunyuan15_parts("t2v")


@recipe("HunyuanVideo15ImageToVideoPipeline", lora=TO_LAYERS, image=partial(image, 16),
        prompt='a red fox says "hello"', num_frames=9, num_inference_steps=2, output_type="pt")  # fmt: skip
def hunyuan_video15_of_image() -> dict[str, Any]:
    return hunyuan15_parts("i2v") | {"image_encoder": siglip_vision(), "feature_extractor": siglip_pixels()}


def ltx_vae() -> Any:
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False), decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(1, 1, 1, 1),
        patch_size=1, patch_size_t=1, encoder_causal=True, decoder_causal=False,
    )  # fmt: skip
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    return vae


LTX = {**VIDEO, "height": 32, "width": 32}


def ltx_parts() -> dict[str, Any]:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, num_attention_heads=4, attention_head_dim=8,
        cross_attention_dim=32, num_layers=3, caption_channels=32,
    )  # fmt: skip
    return with_t5(transformer=transformer, vae=ltx_vae(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler())


@recipe("LTXPipeline", lora=TO_LAYERS, **LTX)
@recipe("LTXImageToVideoPipeline", lora=TO_LAYERS, image=image, **LTX)
@recipe("LTXConditionPipeline", lora=TO_LAYERS, image=image, **LTX)
def ltx() -> dict[str, Any]:
    return ltx_parts()


@recipe("LTXLatentUpsamplePipeline", video=partial(film, 5, 32), height=32, width=32, output_type="pt")
def ltx_upsample() -> dict[str, Any]:
    from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel

    upsampler = LTXLatentUpsamplerModel(
        in_channels=8, mid_channels=32, num_blocks_per_stage=2, dims=3, spatial_upsample=True, temporal_upsample=False
    )
    return {"vae": ltx_vae(), "latent_upsampler": upsampler}


@recipe("MochiPipeline", lora=TO_LAYERS, **VIDEO | {"num_frames": 7})
def mochi() -> dict[str, Any]:
    transformer = diffusers.MochiTransformer3DModel(
        patch_size=2, num_attention_heads=2, attention_head_dim=8, num_layers=3, pooled_projection_dim=16,
        in_channels=12, qk_norm="rms_norm", text_embed_dim=32, time_embed_dim=4, max_sequence_length=16,
    )  # fmt: skip
    with torch.no_grad():  # the class leaves them as the memory was
        transformer.pos_frequencies.fill_(0.25)
    vae = diffusers.AutoencoderKLMochi(
        latent_channels=12, out_channels=3, encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32), layers_per_block=(1, 1, 1, 1, 1),
    )  # fmt: skip
    return with_t5(transformer=transformer, vae=vae, scheduler=diffusers.FlowMatchEulerDiscreteScheduler())


def video_vae(family: str) -> Any:
    return getattr(diffusers, f"AutoencoderKL{family}")(
        down_block_types=(f"{family}DownBlock3D",) * 4, up_block_types=(f"{family}UpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2,
        temporal_compression_ratio=4,
    )  # fmt: skip


def cog_parts(channels: int, *, rotary: bool = False, learned: bool = False) -> dict[str, Any]:
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=channels, out_channels=4, time_embed_dim=2,
        text_embed_dim=32, num_layers=3, sample_width=2, sample_height=2, sample_frames=9, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=16, use_rotary_positional_embeddings=rotary,
        use_learned_positional_embeddings=learned,
    )  # fmt: skip
    vae = video_vae("CogVideoX")
    return with_t5(transformer=transformer, vae=vae, scheduler=diffusers.DDIMScheduler())


@recipe("CogVideoXPipeline", lora=TO_LAYERS, **VIDEO)
def cog() -> dict[str, Any]:
    return cog_parts(4)


@recipe("CogVideoXVideoToVideoPipeline", lora=TO_LAYERS, video=partial(film, 8, 16), strength=0.9, prompt="a red fox",
        height=16, width=16, num_inference_steps=3, max_sequence_length=16, output_type="pt")  # fmt: skip
def cog_of_video() -> dict[str, Any]:
    return cog_parts(4) | {"scheduler": diffusers.CogVideoXDDIMScheduler()}


@recipe("CogVideoXImageToVideoPipeline", lora=TO_LAYERS, image=partial(image, 16), **VIDEO)
def cog_of_image() -> dict[str, Any]:
    return cog_parts(8, rotary=True, learned=True)


@recipe("CogVideoXFunControlPipeline", lora=TO_LAYERS, control_video=partial(film, 9, 16),
        **{k: v for k, v in VIDEO.items() if k != "num_frames"})  # fmt: skip
def cog_of_control() -> dict[str, Any]:
    return cog_parts(8)


@recipe("AllegroPipeline", **VIDEO | {"num_frames": 8}, clean_caption=False)
def allegro() -> dict[str, Any]:
    transformer = diffusers.AllegroTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, num_layers=3,
        cross_attention_dim=24, sample_width=8, sample_height=8, sample_frames=8, caption_channels=32,
    )  # fmt: skip
    vae = video_vae("Allegro")
    vae.enable_tiling()
    vae.kernel = vae.stride = 8, 16, 16  # it decodes whole tiles only, and all of a smaller picture as zeros
    return with_t5(transformer=transformer, vae=vae, scheduler=diffusers.DDIMScheduler())


@recipe("LattePipeline", prompt="a red fox", num_inference_steps=2, height=16, width=16,
        video_length=2, output_type="pt", clean_caption=False)  # fmt: skip
def latte() -> dict[str, Any]:
    transformer = diffusers.LatteTransformer3DModel(
        sample_size=8, num_layers=3, patch_size=2, attention_head_dim=8, num_attention_heads=3, caption_channels=32,
        in_channels=4, cross_attention_dim=24, out_channels=8, attention_bias=True, norm_type="ada_norm_single",
        activation_fn="gelu-approximate", num_embeds_ada_norm=1000, norm_elementwise_affine=False, norm_eps=1e-6,
        video_length=2,
    )  # fmt: skip
    return with_t5(transformer=transformer, vae=kl_vae(), scheduler=diffusers.DDIMScheduler())


def kandinsky5_parts(*, visual: bool, vae: Any) -> dict[str, Any]:
    transformer = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=16, in_text_dim=32, in_text_dim2=32, time_dim=16, out_visual_dim=16, patch_size=(1, 2, 2),
        model_dim=16, ff_dim=32, num_text_blocks=2, num_visual_blocks=3, axes_dims=(1, 1, 2), visual_cond=visual,
        attention_type="regular",
    )  # fmt: skip
    return {
        "transformer": fill_zeros(transformer), "vae": vae, "scheduler": flow(), "text_encoder": qwen_vl_text(),
        "tokenizer": llama_like_tokens(*QWEN_MARKS), "text_encoder_2": clip_text(), "tokenizer_2": clip_tokens(),
    }  # fmt: skip


KANDINSKY = ("to_query", "to_key", "to_value")


@recipe("Kandinsky5T2VPipeline", lora=KANDINSKY, **LTX | {"num_frames": 5})
def kandinsky5() -> dict[str, Any]:
    return kandinsky5_parts(visual=False, vae=hunyuan_vae(2, 16))


STILL = {k: v for k, v in LTX.items() if k != "num_frames"} | {"height": 64, "width": 64}


@recipe("Kandinsky5T2IPipeline", lora=KANDINSKY, **STILL)
def kandinsky5_t2i() -> dict[str, Any]:
    return kandinsky5_parts(visual=False, vae=kl_vae(16))


def easy_animate_parts(in_channels: int = 4, **options: Any) -> dict[str, Any]:
    transformer = diffusers.EasyAnimateTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=in_channels, out_channels=4, time_embed_dim=2,
        text_embed_dim=32, num_layers=3, sample_width=16, sample_height=16, patch_size=2, **options,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLMagvit(
        down_block_types=("SpatialDownBlock3D", *("SpatialTemporalDownBlock3D",) * 3),
        up_block_types=("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3), block_out_channels=(8, 8, 8, 8),
        latent_channels=4, layers_per_block=1, norm_num_groups=2, spatial_group_norm=False,
    )  # fmt: skip
    return {
        "transformer": transformer, "vae": vae, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "text_encoder": qwen_vl_text(), "tokenizer": llama_like_tokens(*QWEN_MARKS),
    }  # fmt: skip


@recipe("EasyAnimatePipeline", negative_prompt="", height=16, width=16, num_frames=5, **IMAGE)
def easy_animate() -> dict[str, Any]:
    return easy_animate_parts()
