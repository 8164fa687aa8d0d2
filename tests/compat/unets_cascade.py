"""Stable Cascade, Wuerstchen, unCLIP, and others that make a picture in several stages."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import clip_pixels, clip_text, clip_tokens, clip_vision, fill_zeros, image, kl_vae
from highwater.tests.compat.recipes import IMAGE, PROMPT, TO_LAYERS, ddim, recipe
from highwater.tests.compat.unets import SIZE, unet
from highwater.tests.compat.unets_kandinsky import prefixed, prior_parts

STEPS = {"num_inference_steps": 2, "output_type": "pt"}


def codes_of_16() -> torch.Tensor:
    return torch.rand(1, 16, 4, 4)


def codes_of_2() -> torch.Tensor:
    return torch.rand(1, 2, 4, 4)


def paella() -> Any:
    from diffusers.pipelines.deprecated.wuerstchen import PaellaVQModel

    return PaellaVQModel(bottleneck_blocks=1, num_vq_embeddings=2, levels=2, embed_dim=16)


def text_parts() -> dict[str, Any]:
    return {"text_encoder": clip_text(projected=True), "tokenizer": clip_tokens()}


def cascade_prior_parts() -> dict[str, Any]:
    prior = diffusers.StableCascadeUNet(
        conditioning_dim=32, block_out_channels=(32, 32), num_attention_heads=(2, 2), in_channels=16, out_channels=16,
        down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1), down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1), switch_level=(False,), clip_image_in_channels=32, clip_text_in_channels=32,
        clip_text_pooled_in_channels=32, block_types_per_layer=(CASCADE_BLOCKS,) * 2,
    )  # fmt: skip
    pictures = {"image_encoder": clip_vision(), "feature_extractor": clip_pixels()}
    return {"prior": prior, "scheduler": diffusers.DDPMWuerstchenScheduler(), **text_parts(), **pictures}


CASCADE_BLOCKS = ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")


@recipe("StableCascadePriorPipeline", prompt=PROMPT, height=128, width=128, images=lambda: [image()], **STEPS)
def cascade_prior() -> dict[str, Any]:
    return cascade_prior_parts()


@recipe(
    "StableCascadeDecoderPipeline",
    placed=("image_embeddings",),
    prompt=PROMPT,
    image_embeddings=lambda: torch.rand(1, 16, 4, 4),
    **STEPS,
)
def cascade_decoder() -> dict[str, Any]:
    decoder = diffusers.StableCascadeUNet(
        in_channels=4, out_channels=4, conditioning_dim=32, block_out_channels=(16, 32), num_attention_heads=(-1, 2),
        down_num_layers_per_block=(1, 1), up_num_layers_per_block=(1, 1), down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(2, 2), block_types_per_layer=(CASCADE_BLOCKS[:2], CASCADE_BLOCKS), patch_size=2,
        clip_text_pooled_in_channels=32, effnet_in_channels=16,
    )  # fmt: skip
    scheduler = diffusers.DDPMWuerstchenScheduler()
    return {"decoder": decoder, "vqgan": paella(), "scheduler": scheduler, "latent_dim_scale": 4.0, **text_parts()}


@recipe("StableCascadeCombinedPipeline", images=lambda: [image()], **SIZE, prior_num_inference_steps=2, **IMAGE)
def cascade_combined() -> dict[str, Any]:
    parts = cascade_decoder()
    del parts["latent_dim_scale"]
    return parts | prefixed(cascade_prior_parts())


def wuerstchen_prior_parts() -> dict[str, Any]:
    from diffusers.pipelines.deprecated.wuerstchen import WuerstchenPrior

    prior = WuerstchenPrior(c_in=2, c=16, depth=3, c_cond=32, c_r=16, nhead=2)
    scheduler = diffusers.DDPMWuerstchenScheduler()
    return {"prior": fill_zeros(prior), "scheduler": scheduler, "text_encoder": clip_text(), "tokenizer": clip_tokens()}


@recipe("WuerstchenPriorPipeline", lora=("to_q", "to_k", "to_v"), height=128, width=128, prompt=PROMPT, **STEPS)
def wuerstchen_prior() -> dict[str, Any]:
    return wuerstchen_prior_parts()


@recipe(
    "WuerstchenDecoderPipeline",
    placed=("image_embeddings",),
    prompt=PROMPT,
    image_embeddings=lambda: torch.rand(1, 2, 4, 4),
    **STEPS,
)
def wuerstchen_decoder() -> dict[str, Any]:
    from diffusers.pipelines.deprecated.wuerstchen import WuerstchenDiffNeXt

    decoder = WuerstchenDiffNeXt(
        c_cond=32, c_hidden=[16, 32], nhead=[-1, 2], blocks=[2, 2], level_config=["CT", "CTA"], c_in=4, c_out=4,
        clip_embd=32, effnet_embd=2, inject_effnet=[True, True],
    )  # fmt: skip
    return {
        "decoder": fill_zeros(decoder), "vqgan": paella(), "scheduler": diffusers.DDPMWuerstchenScheduler(),
        "text_encoder": clip_text(), "tokenizer": clip_tokens(), "latent_dim_scale": 4.0,
    }  # fmt: skip


@recipe("WuerstchenCombinedPipeline", height=128, width=128, prior_num_inference_steps=2, **IMAGE)
def wuerstchen_combined() -> dict[str, Any]:
    parts = wuerstchen_decoder()
    del parts["latent_dim_scale"]
    return parts | prefixed(wuerstchen_prior_parts())


def noised() -> dict[str, Any]:
    from diffusers.pipelines.stable_diffusion import StableUnCLIPImageNormalizer

    return {
        "unet": unet(class_embed_type="projection", projection_class_embeddings_input_dim=64), "vae": kl_vae(),
        "scheduler": ddim(), "text_encoder": clip_text(), "tokenizer": clip_tokens(),
        "image_normalizer": StableUnCLIPImageNormalizer(embedding_dim=32),
        "image_noising_scheduler": diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
    }  # fmt: skip


@recipe("StableUnCLIPPipeline", lora=TO_LAYERS, **SIZE, prior_num_inference_steps=2, **IMAGE)
def stable_unclip() -> dict[str, Any]:
    prior = prior_parts()
    scheduler = diffusers.DDPMScheduler(variance_type="fixed_small_log", prediction_type="sample")
    kept = {name: prior[name] for name in ("text_encoder", "tokenizer")}
    return noised() | {"prior": prior["prior"]} | prefixed(kept | {"scheduler": scheduler})


@recipe("StableUnCLIPImg2ImgPipeline", lora=TO_LAYERS, image=image, **SIZE, **IMAGE)
def stable_unclip_from_image() -> dict[str, Any]:
    return noised() | {"image_encoder": clip_vision(), "feature_extractor": clip_pixels()}


def unclip_parts() -> dict[str, Any]:
    from diffusers.pipelines.deprecated.unclip.text_proj import UnCLIPTextProjModel

    sizes = {
        "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 4,
        "resnet_time_scale_shift": "scale_shift",
    }  # fmt: skip
    upscaler = {"down_block_types": ("ResnetDownsampleBlock2D",) * 2, "up_block_types": ("ResnetUpsampleBlock2D",) * 2}
    decoder = unet(
        sample_size=8, in_channels=3, out_channels=6, mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"), class_embed_type="identity",
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), encoder_hid_dim=32, **sizes,
    )  # fmt: skip
    upscalers = [
        diffusers.UNet2DModel(sample_size=16, in_channels=6, out_channels=3, **upscaler, **sizes) for _ in range(2)
    ]
    return {
        "decoder": decoder, "super_res_first": upscalers[0], "super_res_last": upscalers[1], **text_parts(),
        "text_proj": UnCLIPTextProjModel(
            clip_embeddings_dim=32, time_embed_dim=64, cross_attention_dim=32, clip_extra_context_tokens=2
        ),
        "decoder_scheduler": diffusers.UnCLIPScheduler(variance_type="learned_range", num_train_timesteps=1000),
        "super_res_scheduler": diffusers.UnCLIPScheduler(variance_type="fixed_small_log", num_train_timesteps=1000),
    }  # fmt: skip


STAGES = {"decoder_num_inference_steps": 2, "super_res_num_inference_steps": 2, "output_type": "pt"}


@recipe("UnCLIPPipeline", prompt=PROMPT, prior_num_inference_steps=2, **STAGES)
def unclip() -> dict[str, Any]:
    prior = prior_parts()
    return unclip_parts() | {"prior": prior["prior"], "prior_scheduler": prior["scheduler"]}


@recipe("UnCLIPImageVariationPipeline", image=image, **STAGES)
def unclip_variation() -> dict[str, Any]:
    return unclip_parts() | {"image_encoder": clip_vision(), "feature_extractor": clip_pixels()}
