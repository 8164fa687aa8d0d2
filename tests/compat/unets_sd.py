"""Pipelines of Stable Diffusion 1 and 2 that take a picture or guide the sampling."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import (
    clip_pixels,
    clip_text,
    clip_tokens,
    clip_vision,
    fill_zeros,
    image,
    kl_vae,
    mask,
)
from highwater.tests.compat.recipes import IMAGE, PROMPT, TO_LAYERS, ddim, recipe
from highwater.tests.compat.unets import SIZE, stable_diffusion, unet

PICTURE = {"image": image, **IMAGE}
MASKED = {"mask_image": mask, **SIZE, **PICTURE}


@recipe("StableDiffusionImg2ImgPipeline", lora=TO_LAYERS, strength=0.9, **PICTURE)
@recipe("StableDiffusionInpaintPipeline", lora=TO_LAYERS, **MASKED)
@recipe("StableDiffusionPAGPipeline", lora=TO_LAYERS, pag_scale=2.0, **SIZE, **IMAGE)
@recipe("StableDiffusionPAGImg2ImgPipeline", lora=TO_LAYERS, pag_scale=2.0, strength=0.9, **PICTURE)
@recipe("StableDiffusionPAGInpaintPipeline", lora=TO_LAYERS, pag_scale=2.0, **MASKED)
@recipe("StableDiffusionPanoramaPipeline", lora=TO_LAYERS, height=32, width=48, **IMAGE)
@recipe("StableDiffusionSAGPipeline", lora=TO_LAYERS, sag_scale=0.75, **SIZE, **IMAGE)
@recipe("StableDiffusionPipelineSafe", **SIZE, **IMAGE)
@recipe(
    "SemanticStableDiffusionPipeline", editing_prompt=["a hat"], edit_warmup_steps=0, edit_guidance_scale=5.0,
    edit_threshold=0.5, **SIZE, **IMAGE,
)  # fmt: skip
@recipe(
    "StableDiffusionAttendAndExcitePipeline", token_indices=[1, 2], max_iter_to_alter=2,
    attn_res=(8, 8), thresholds={0: 0.9}, **SIZE, **IMAGE,
)  # fmt: skip
@recipe("StableDiffusionModelEditingPipeline", lora=TO_LAYERS, **SIZE, **IMAGE)
@recipe("StableDiffusionInpaintPipelineLegacy", lora=TO_LAYERS, strength=0.9, mask_image=mask, **PICTURE)
def stable_diffusion_1() -> dict[str, Any]:
    return stable_diffusion()


@recipe("CycleDiffusionPipeline", lora=TO_LAYERS, source_prompt="a blue fox", strength=0.9, eta=0.1, **PICTURE)
def cycle() -> dict[str, Any]:
    return stable_diffusion() | {"scheduler": ddim(set_alpha_to_one=False)}


@recipe("StableDiffusionParadigmsPipeline", lora=TO_LAYERS, parallel=3, **SIZE, **IMAGE | {"num_inference_steps": 3})
def paradigms() -> dict[str, Any]:
    return stable_diffusion() | {"scheduler": diffusers.DDIMParallelScheduler()}


@recipe("StableDiffusionInstructPix2PixPipeline", lora=TO_LAYERS, **PICTURE)
def instruct_pix2pix() -> dict[str, Any]:
    return stable_diffusion() | {"unet": unet(in_channels=8)}


@recipe("StableDiffusionInpaintPipeline", "own UNet", lora=TO_LAYERS, **MASKED)
def inpaint_with_own_unet() -> dict[str, Any]:
    return stable_diffusion() | {"unet": unet(in_channels=9)}


@recipe("LatentConsistencyModelPipeline", lora=TO_LAYERS, **SIZE, **IMAGE)
@recipe("LatentConsistencyModelImg2ImgPipeline", lora=TO_LAYERS, strength=0.9, **PICTURE)
def latent_consistency() -> dict[str, Any]:
    return stable_diffusion() | {"unet": unet(time_cond_proj_dim=16), "scheduler": diffusers.LCMScheduler()}


@recipe("StableDiffusionLDM3DPipeline", lora=TO_LAYERS, **SIZE, **IMAGE | {"output_type": "np"})
def ldm3d() -> dict[str, Any]:
    return stable_diffusion() | {"vae": kl_vae(in_channels=6, out_channels=6), "image_encoder": None}


def depth_estimator() -> Any:
    from transformers import DPTConfig, DPTForDepthEstimation

    return DPTForDepthEstimation(
        DPTConfig(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=32,
            patch_size=16, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16, 16, 32, 32],
            fusion_hidden_size=16, is_hybrid=False,
        )
    )  # fmt: skip


def depth_pixels() -> Any:
    from transformers import DPTImageProcessorPil

    return DPTImageProcessorPil(size={"height": 32, "width": 32})


@recipe("StableDiffusionDepth2ImgPipeline", lora=TO_LAYERS, strength=0.9, **PICTURE)
def depth_to_image() -> dict[str, Any]:
    return {
        "unet": unet(in_channels=5), "vae": kl_vae(), "scheduler": ddim(), "text_encoder": clip_text(),
        "tokenizer": clip_tokens(), "depth_estimator": depth_estimator(), "feature_extractor": depth_pixels(),
    }  # fmt: skip


@recipe("StableDiffusionImageVariationPipeline", image=image, **SIZE, num_inference_steps=2, output_type="pt")
def image_variation() -> dict[str, Any]:
    return {
        "unet": unet(), "vae": kl_vae(), "scheduler": ddim(), "image_encoder": clip_vision(),
        "feature_extractor": clip_pixels(), "safety_checker": None, "requires_safety_checker": False,
    }  # fmt: skip


@recipe("StableDiffusionUpscalePipeline", lora=TO_LAYERS, noise_level=20, **PICTURE | {"image": lambda: image(16)})
def upscale() -> dict[str, Any]:
    return {
        "unet": unet(in_channels=7, num_class_embeds=1000), "vae": kl_vae(levels=3), "scheduler": ddim(),
        "low_res_scheduler": diffusers.DDPMScheduler(), "text_encoder": clip_text(), "tokenizer": clip_tokens(),
        "max_noise_level": 350,
    }  # fmt: skip


@recipe("StableDiffusionLatentUpscalePipeline", **PICTURE | {"image": lambda: image(64)})
def latent_upscale() -> dict[str, Any]:
    return {
        "unet": unet(
            in_channels=8, out_channels=5, block_out_channels=(32, 32, 64, 64), norm_num_groups=None, act_fn="gelu",
            down_block_types=("KDownBlock2D", *("KCrossAttnDownBlock2D",) * 3), mid_block_type=None,
            up_block_types=(*("KCrossAttnUpBlock2D",) * 3, "KUpBlock2D"), layers_per_block=2, attention_head_dim=8,
            time_embedding_type="fourier", timestep_post_act="gelu", time_cond_proj_dim=160,
            resnet_time_scale_shift="scale_shift", conv_in_kernel=1, conv_out_kernel=1,
        ),
        "vae": kl_vae(levels=4), "scheduler": diffusers.EulerDiscreteScheduler(prediction_type="sample"),
        "text_encoder": clip_text(), "tokenizer": clip_tokens(),
    }  # fmt: skip


def invert(pipe: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    pipe.invert(image=image(), num_inversion_steps=5, skip=0.3, source_prompt=PROMPT, generator=generator)


@recipe(
    "LEditsPPPipelineStableDiffusion",
    lora=TO_LAYERS,
    before=invert,
    editing_prompt=["a hat"],
    edit_threshold=0.7,
    output_type="pt",
)
def ledits() -> dict[str, Any]:
    three_levels = unet(
        block_out_channels=(16, 32, 32), down_block_types=("DownBlock2D", *("CrossAttnDownBlock2D",) * 2),
        up_block_types=(*("CrossAttnUpBlock2D",) * 2, "UpBlock2D"),
    )  # fmt: skip
    return stable_diffusion() | {"unet": three_levels, "scheduler": dpm_sde()}


def dpm_sde() -> Any:
    return diffusers.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", solver_order=2)


@recipe("StableDiffusionDiffEditPipeline", lora=TO_LAYERS, mask_image=lambda: torch.ones(1, 16, 16),
        image_latents=lambda: torch.rand(1, 2, 4, 16, 16), inpaint_strength=1.0, **IMAGE)  # fmt: skip
def diffedit() -> dict[str, Any]:
    return stable_diffusion() | {"inverse_scheduler": diffusers.DDIMInverseScheduler()}


@recipe("TextToVideoZeroPipeline", lora=TO_LAYERS, video_length=2, t0=0, t1=1, prompt=PROMPT, **SIZE,
        num_inference_steps=3, output_type="np")  # fmt: skip
def text_to_video_zero() -> dict[str, Any]:
    return stable_diffusion()


@recipe("StableDiffusionAdapterPipeline", guides=("adapter",), lora=TO_LAYERS, **PICTURE)
def adapter() -> dict[str, Any]:
    return stable_diffusion() | {
        "unet": unet(down_block_types=("CrossAttnDownBlock2D", "DownBlock2D")),
        "adapter": diffusers.T2IAdapter(
            in_channels=3, channels=[16, 32], num_res_blocks=1, downscale_factor=2, adapter_type="full_adapter"
        ),
    }


@recipe("StableDiffusionGLIGENPipeline", gligen_phrases=["a hat"], gligen_boxes=[[0.1, 0.2, 0.6, 0.7]], **SIZE, **IMAGE)
def gligen() -> dict[str, Any]:
    return stable_diffusion() | {"unet": fill_zeros(unet(attention_type="gated", cross_attention_dim=32))}
