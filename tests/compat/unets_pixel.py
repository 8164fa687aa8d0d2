"""Pipelines without text, DeepFloyd IF, Marigold, and others of the first years."""

from __future__ import annotations

from typing import Any

import diffusers

from highwater.tests.compat.parts import (
    clip_pixels,
    clip_text,
    clip_tokens,
    clip_vision,
    hint,
    image,
    kl_vae,
    mask,
    t5_text,
    t5_tokens,
)
from highwater.tests.compat.recipes import IMAGE, PROMPT, TO_LAYERS, ddim, recipe
from highwater.tests.compat.unets import SIZE, unet

STEPS = {"num_inference_steps": 2, "output_type": "np"}


def plain_unet(**options: Any) -> Any:
    return diffusers.UNet2DModel(
        **{
            "sample_size": 16, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "norm_num_groups": 4,
            "block_out_channels": (16, 32), "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4, **options,
        }
    )  # fmt: skip


@recipe("DDIMPipeline", **STEPS)
@recipe("DDPMPipeline", **STEPS)
def without_text() -> dict[str, Any]:
    return {"unet": plain_unet(), "scheduler": diffusers.DDPMScheduler()}


@recipe("PNDMPipeline", **STEPS | {"num_inference_steps": 5})
def pndm() -> dict[str, Any]:
    return {"unet": plain_unet(), "scheduler": diffusers.PNDMScheduler()}


@recipe("ScoreSdeVePipeline", **STEPS)
def score_sde() -> dict[str, Any]:
    return {"unet": plain_unet(), "scheduler": diffusers.ScoreSdeVeScheduler()}


@recipe("KarrasVePipeline", **STEPS)
def karras() -> dict[str, Any]:
    return {"unet": plain_unet(), "scheduler": diffusers.KarrasVeScheduler()}


@recipe("RePaintPipeline", image=image, mask_image=mask, jump_length=2, jump_n_sample=2,
        **STEPS | {"num_inference_steps": 4})  # fmt: skip
def repaint() -> dict[str, Any]:
    return {"unet": plain_unet(), "scheduler": diffusers.RePaintScheduler()}


@recipe("ConsistencyModelPipeline", **STEPS)
def consistency() -> dict[str, Any]:
    scheduler = diffusers.CMStochasticIterativeScheduler(num_train_timesteps=40, sigma_min=0.002, sigma_max=80.0)
    return {"unet": plain_unet(resnet_time_scale_shift="scale_shift"), "scheduler": scheduler}


@recipe("DanceDiffusionPipeline", audio_length_in_s=0.004, num_inference_steps=2)
def dance_diffusion() -> dict[str, Any]:
    return {
        "unet": diffusers.UNet1DModel(
            block_out_channels=(32, 64), extra_in_channels=64, sample_size=64, sample_rate=16000, in_channels=2,
            out_channels=2, flip_sin_to_cos=True, use_timestep_embedding=False, time_embedding_type="fourier",
            mid_block_type="UNetMidBlock1D", down_block_types=("DownBlock1DNoSkip", "AttnDownBlock1D"),
            up_block_types=("AttnUpBlock1D", "UpBlock1DNoSkip"),
        ),
        "scheduler": diffusers.IPNDMScheduler(),
    }  # fmt: skip


def vq(**options: Any) -> Any:
    return diffusers.VQModel(
        block_out_channels=(16, 32), layers_per_block=1, latent_channels=3, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **options,
    )  # fmt: skip


@recipe("LDMPipeline", **STEPS)
def ldm() -> dict[str, Any]:
    return {"vqvae": vq(), "unet": plain_unet(), "scheduler": diffusers.DDIMScheduler()}


@recipe("LDMSuperResolutionPipeline", image=hint, **STEPS)
def ldm_upscale() -> dict[str, Any]:
    return {"vqvae": vq(), "unet": plain_unet(in_channels=6), "scheduler": diffusers.DDIMScheduler()}


@recipe("LDMTextToImagePipeline", prompt=PROMPT, **SIZE, **STEPS)
def ldm_from_text() -> dict[str, Any]:
    return {
        "vqvae": kl_vae(), "bert": clip_text(), "tokenizer": clip_tokens(), "unet": unet(), "scheduler": ddim(),
    }  # fmt: skip


@recipe("DiTPipeline", class_labels=[1], **STEPS)
def dit() -> dict[str, Any]:
    transformer = diffusers.DiTTransformer2DModel(
        sample_size=16, num_layers=3, patch_size=4, attention_head_dim=8, num_attention_heads=2, in_channels=4,
        out_channels=8, num_embeds_ada_norm=1000,
    )  # fmt: skip
    return {"transformer": transformer, "vae": kl_vae(), "scheduler": diffusers.DDIMScheduler()}


def if_scheduler() -> Any:
    return diffusers.DDPMScheduler(
        beta_schedule="squaredcos_cap_v2", thresholding=True, dynamic_thresholding_ratio=0.95, sample_max_value=1.0,
        variance_type="learned_range",
    )  # fmt: skip


def if_unet(**options: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        **{
            "sample_size": 32, "in_channels": 3, "out_channels": 6, "layers_per_block": 1, "norm_num_groups": 4,
            "block_out_channels": (16, 32), "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
            "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"), "act_fn": "gelu",
            "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), "cross_attention_dim": 32,
            "encoder_hid_dim": 32, "attention_head_dim": 8, "addition_embed_type": "text",
            "addition_embed_type_num_heads": 2, "cross_attention_norm": "group_norm",
            "resnet_time_scale_shift": "scale_shift", **options,
        }
    )  # fmt: skip


@recipe("IFPipeline", lora=TO_LAYERS[:1], **SIZE, **IMAGE)
@recipe("IFImg2ImgPipeline", lora=TO_LAYERS[:1], image=image, strength=0.9, **IMAGE)
@recipe("IFInpaintingPipeline", lora=TO_LAYERS[:1], image=image, mask_image=mask, **IMAGE)
def deepfloyd_if() -> dict[str, Any]:
    return {
        "unet": if_unet(), "text_encoder": t5_text(), "tokenizer": t5_tokens(), "scheduler": if_scheduler(),
        "safety_checker": None, "feature_extractor": None, "watermarker": None, "requires_safety_checker": False,
    }  # fmt: skip


SMALL = {"image": lambda: image(16)}


@recipe("IFSuperResolutionPipeline", lora=TO_LAYERS[:1], **SMALL, **SIZE, **IMAGE)
@recipe("IFImg2ImgSuperResolutionPipeline", lora=TO_LAYERS[:1], original_image=image, **SMALL, **IMAGE)
@recipe(
    "IFInpaintingSuperResolutionPipeline", lora=TO_LAYERS[:1], original_image=image, mask_image=mask, **SMALL, **IMAGE
)
def deepfloyd_if_upscale() -> dict[str, Any]:
    return deepfloyd_if() | {
        "unet": if_unet(in_channels=6, class_embed_type="timestep", time_embedding_act_fn="gelu"),
        "image_noising_scheduler": diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
    }


@recipe("MarigoldDepthPipeline", image=image, processing_resolution=0, **STEPS)
@recipe("MarigoldNormalsPipeline", image=image, processing_resolution=0, **STEPS)
def marigold() -> dict[str, Any]:
    return {
        "unet": unet(in_channels=8), "vae": kl_vae(), "scheduler": diffusers.LCMScheduler(clip_sample=False),
        "text_encoder": clip_text(), "tokenizer": clip_tokens(),
    }  # fmt: skip


@recipe("MarigoldIntrinsicsPipeline", image=image, processing_resolution=0, **STEPS)
def marigold_intrinsics() -> dict[str, Any]:
    names = {"target_names": ["albedo", "material"], "albedo": {"prediction_space": "srgb", "up_to_scale": False}}
    names["material"] = {"prediction_space": "stack", "up_to_scale": False}
    return marigold() | {"unet": unet(in_channels=12, out_channels=8), "target_properties": names}


@recipe("AmusedPipeline", **SIZE, **IMAGE)
@recipe("AmusedImg2ImgPipeline", image=image, strength=0.9, **IMAGE)
@recipe("AmusedInpaintPipeline", image=image, mask_image=mask, strength=0.9, **IMAGE)
def amused() -> dict[str, Any]:
    return {
        "transformer": diffusers.UVit2DModel(
            hidden_size=32, use_bias=False, hidden_dropout=0.0, cond_embed_dim=32, micro_cond_encode_dim=2,
            micro_cond_embed_dim=10, encoder_hidden_size=32, vocab_size=32, codebook_size=32, in_channels=32,
            block_out_channels=32, num_res_blocks=1, downsample=True, upsample=True, block_num_heads=1,
            num_hidden_layers=2, num_attention_heads=1, attention_dropout=0.0, intermediate_size=32,
            layer_norm_eps=1e-06, ln_elementwise_affine=True,
        ),
        "vqvae": diffusers.VQModel(
            block_out_channels=(16, 32), layers_per_block=1, latent_channels=32, num_vq_embeddings=32,
            norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, lookup_from_codebook=True, sample_size=16,
        ),
        "scheduler": diffusers.AmusedScheduler(mask_token_id=31),
        "text_encoder": clip_text(projected=True), "tokenizer": clip_tokens(),
    }  # fmt: skip


def renderer() -> Any:
    from diffusers.pipelines.shap_e.renderer import ShapERenderer

    return ShapERenderer(
        param_shapes=((8, 93), (8, 8), (8, 8), (8, 8)), d_latent=16, d_hidden=8, n_output=12, background=(0.1, 0.1, 0.1)
    )


def shap_e_prior(**options: Any) -> Any:
    return diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=16, embedding_dim=16, num_embeddings=32, embedding_proj_dim=32,
        time_embed_dim=64, num_layers=3, clip_embed_dim=32, additional_embeddings=0, time_embed_act_fn="gelu",
        norm_in_type="layer", encoder_hid_proj_type=None, added_emb_type=None, **options,
    )  # fmt: skip


@recipe("ShapEPipeline", prompt=PROMPT, **STEPS | {"output_type": "latent"})
def shap_e() -> dict[str, Any]:
    return {
        "prior": shap_e_prior(), "text_encoder": clip_text(projected=True), "tokenizer": clip_tokens(),
        "shap_e_renderer": renderer(), "scheduler": shap_e_scheduler(),
    }  # fmt: skip


def shap_e_scheduler() -> Any:
    return diffusers.HeunDiscreteScheduler(
        beta_schedule="exp", num_train_timesteps=1024, prediction_type="sample", use_karras_sigmas=True,
        clip_sample=True, clip_sample_range=1.0,
    )  # fmt: skip


@recipe("ShapEImg2ImgPipeline", image=image, **STEPS | {"output_type": "latent"})
def shap_e_from_image() -> dict[str, Any]:
    from transformers import CLIPVisionModel

    return {
        "prior": shap_e_prior(embedding_proj_norm_type="layer"), "image_encoder": CLIPVisionModel(clip_vision().config),
        "image_processor": clip_pixels(), "shap_e_renderer": renderer(), "scheduler": shap_e_scheduler(),
    }  # fmt: skip
