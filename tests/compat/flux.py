"""Pipelines around Flux and Flux 2 beside the two plain ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers

from highwater.tests.compat.images import flux, flux_controlnet, flux_transformer
from highwater.tests.compat.parts import (
    clip_text,
    clip_tokens,
    hint,
    image,
    llama_like_tokens,
    mask,
    qwen3_text,
    siglip_pixels,
    siglip_vision,
    t5_text,
    t5_tokens,
)
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, recipe

SQUARE = {"height": 16, "width": 16, "max_sequence_length": 16, **IMAGE}
OF_IMAGE = {"image": partial(image, 16), **SQUARE}
INPAINT = {"mask_image": partial(mask, 16), **OF_IMAGE}

recipe("FluxImg2ImgPipeline", lora=TO_LAYERS, strength=1.0, **OF_IMAGE)(flux)
recipe("FluxInpaintPipeline", lora=TO_LAYERS, strength=1.0, **INPAINT)(flux)
recipe("FluxKontextPipeline", lora=TO_LAYERS, _auto_resize=False, max_area=256, **OF_IMAGE)(flux)
recipe("FluxKontextInpaintPipeline", lora=TO_LAYERS, _auto_resize=False, max_area=256, strength=1.0, **INPAINT)(flux)


CONTROL = {"guides": ("controlnet",), "control_image": partial(hint, 16), "controlnet_conditioning_scale": 0.7}
recipe("FluxControlNetImg2ImgPipeline", lora=TO_LAYERS, strength=1.0, **CONTROL, **OF_IMAGE)(flux_controlnet)
recipe("FluxControlNetInpaintPipeline", lora=TO_LAYERS, strength=1.0, **CONTROL, **INPAINT)(flux_controlnet)


@recipe("FluxControlPipeline", lora=TO_LAYERS, control_image=partial(hint, 16), **SQUARE)
@recipe("FluxControlImg2ImgPipeline", lora=TO_LAYERS, control_image=partial(hint, 16), strength=1.0, **OF_IMAGE)
@recipe("FluxControlInpaintPipeline", lora=TO_LAYERS, control_image=partial(hint, 16), strength=1.0, **INPAINT)
def flux_control() -> dict[str, Any]:
    return flux() | {"transformer": flux_transformer(in_channels=32, out_channels=16)}


@recipe("FluxFillPipeline", lora=TO_LAYERS, **INPAINT)
def flux_fill() -> dict[str, Any]:
    # latents, masked latents, and the mask of each of the 2x2 pixels of 2x2 latents
    return flux() | {"transformer": flux_transformer(in_channels=16 + 16 + 4 * 4, out_channels=16)}


@recipe("FluxPriorReduxPipeline", image=image, prompt="a red fox")
def flux_redux() -> dict[str, Any]:
    from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder

    return {
        "image_encoder": siglip_vision(), "feature_extractor": siglip_pixels(),
        "image_embedder": ReduxImageEncoder(redux_dim=32, txt_in_features=32),
        "text_encoder": clip_text(), "tokenizer": clip_tokens(), "text_encoder_2": t5_text(),
        "tokenizer_2": t5_tokens(),
    }  # fmt: skip


def rows_of_images() -> list[list[Any]]:
    return [[image(), image().rotate(90)], [image().rotate(180), None]]


CLOZE = {
    "task_prompt": "each row", "content_prompt": "a red fox", "image": rows_of_images, "num_inference_steps": 2,
    "max_sequence_length": 16, "output_type": "pt",
}  # fmt: skip


@recipe("VisualClozeGenerationPipeline", lora=TO_LAYERS, **CLOZE)
@recipe("VisualClozePipeline", lora=TO_LAYERS, upsampling_height=32, upsampling_width=32, upsampling_strength=1.0,
        **CLOZE)  # fmt: skip
def visual_cloze() -> dict[str, Any]:
    return flux_fill() | {"resolution": 32}


def flux2_vae() -> Any:
    return diffusers.AutoencoderKLFlux2(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 2, layers_per_block=1, sample_size=32, latent_channels=4,
    )  # fmt: skip


def flux2_transformer(width: int, *, guidance: bool) -> Any:
    return diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=width, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=guidance,
    )  # fmt: skip


FLUX2 = {"text_encoder_out_layers": (1, 2, 3), **SQUARE}


def klein_parts(**options: Any) -> dict[str, Any]:
    return {
        "transformer": flux2_transformer(96, guidance=False), "vae": flux2_vae(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), "text_encoder": qwen3_text(),
        "tokenizer": llama_like_tokens(), **options,
    }  # fmt: skip


@recipe("Flux2KleinPipeline", lora=TO_LAYERS, **FLUX2)
@recipe("Flux2KleinInpaintPipeline", lora=TO_LAYERS, image=image, mask_image=mask, strength=1.0, **FLUX2)
@recipe("Flux2KleinKVPipeline", lora=TO_LAYERS, image=partial(image, 64), **FLUX2)
def klein() -> dict[str, Any]:
    return klein_parts()


recipe("Flux2KleinPipeline", "with an image", lora=TO_LAYERS, image=partial(image, 64), **FLUX2)(klein)


@recipe("Flux2Pipeline", lora=TO_LAYERS, **FLUX2)
def flux2() -> dict[str, Any]:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {
        "model_type": "mistral", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8,
        "max_position_embeddings": 512, "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "sliding_window": None,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "image_size": 30, "patch_size": 6, "num_channels": 3,
    }  # fmt: skip
    config = Mistral3Config(text_config=text, vision_config=vision, vision_feature_layer=-1, image_token_index=259)
    return klein_parts() | {
        "transformer": flux2_transformer(96, guidance=True), "tokenizer": llama_like_tokens("[IMG]"),
        "text_encoder": Mistral3ForConditionalGeneration(config),
    }  # fmt: skip
