"""Kandinsky 2.1, 2.2 and 3, with their priors."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import (
    clip_pixels,
    clip_text,
    clip_tokens,
    clip_vision,
    hint,
    image,
    t5_text,
    t5_tokens,
)
from highwater.tests.compat.recipes import IMAGE, PROMPT, TO_LAYERS, ddim, recipe
from highwater.tests.compat.unets import SIZE

STEPS = {"num_inference_steps": 2, "output_type": "pt"}
PRIOR_STEPS = {"prior_num_inference_steps": 2}
EMBEDDED = {
    "image_embeds": lambda: torch.rand(1, 32), "negative_image_embeds": lambda: torch.rand(1, 32), **SIZE, **STEPS,
}  # fmt: skip
PICTURE_OF_64 = {"image": lambda: image(64), "height": 64, "width": 64}
MASK_OF_64 = {"mask_image": lambda: torch.ones(1, 64, 64).numpy()[0]}


def kandinsky_unet(added: str, **options: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        **{
            "sample_size": 8, "in_channels": 4, "out_channels": 8, "layers_per_block": 1,
            "block_out_channels": (16, 32), "norm_num_groups": 4,
            "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"), "addition_embed_type": added,
            "mid_block_type": "UNetMidBlock2DSimpleCrossAttn", "cross_attention_dim": 32, "attention_head_dim": 4,
            "encoder_hid_dim": 32, "encoder_hid_dim_type": "image_proj", "resnet_time_scale_shift": "scale_shift",
            **options,
        }
    )  # fmt: skip


def movq(levels: int = 2) -> Any:
    plain = levels - 1
    return diffusers.VQModel(
        block_out_channels=(32,) * levels, layers_per_block=1, latent_channels=4, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * plain + ("AttnDownEncoderBlock2D",), norm_type="spatial",
        up_block_types=("AttnUpDecoderBlock2D",) + ("UpDecoderBlock2D",) * plain, num_vq_embeddings=12, vq_embed_dim=4,
    )  # fmt: skip


def prior_parts() -> dict[str, Any]:
    prior = diffusers.PriorTransformer(num_attention_heads=2, attention_head_dim=12, embedding_dim=32, num_layers=3)
    with torch.no_grad():
        prior.clip_std.fill_(1.0)
    return {
        "prior": prior, "image_encoder": clip_vision(), "text_encoder": clip_text(projected=True),
        "tokenizer": clip_tokens(), "image_processor": clip_pixels(),
        "scheduler": diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", clip_sample=True, clip_sample_range=10.0
        ),
    }  # fmt: skip


@recipe("KandinskyPriorPipeline", prompt=PROMPT, **STEPS)
@recipe("KandinskyV22PriorPipeline", prompt=PROMPT, **STEPS)
@recipe("KandinskyV22PriorEmb2EmbPipeline", prompt=PROMPT, image=image, strength=0.9, **STEPS)
def kandinsky_prior() -> dict[str, Any]:
    return prior_parts()


def prefixed(parts: dict[str, Any]) -> dict[str, Any]:
    return {f"prior_{name}": part for name, part in parts.items()}


def text_encoder() -> Any:
    from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

    return MultilingualCLIP(
        MCLIPConfig(
            numDims=32, transformerDimensions=32, hidden_size=32, intermediate_size=64, num_attention_heads=4,
            num_hidden_layers=3, vocab_size=514, max_position_embeddings=128,
        )
    )  # fmt: skip


@recipe("KandinskyPipeline", prompt=PROMPT, **EMBEDDED)
@recipe("KandinskyImg2ImgPipeline", prompt=PROMPT, strength=0.9, **EMBEDDED | PICTURE_OF_64)
def kandinsky() -> dict[str, Any]:
    return {
        "unet": kandinsky_unet("text_image", encoder_hid_dim_type="text_image_proj"), "movq": movq(),
        "scheduler": ddim(), "text_encoder": text_encoder(), "tokenizer": clip_tokens(),
    }  # fmt: skip


@recipe("KandinskyInpaintPipeline", prompt=PROMPT, **EMBEDDED | PICTURE_OF_64 | MASK_OF_64)
def kandinsky_inpaint() -> dict[str, Any]:
    return kandinsky() | {"unet": kandinsky_unet("text_image", in_channels=9, encoder_hid_dim_type="text_image_proj")}


@recipe("KandinskyCombinedPipeline", **PRIOR_STEPS, **SIZE, **IMAGE)
@recipe("KandinskyImg2ImgCombinedPipeline", strength=0.9, **PRIOR_STEPS, **IMAGE | PICTURE_OF_64)
def kandinsky_combined() -> dict[str, Any]:
    return kandinsky() | prefixed(prior_parts())


@recipe("KandinskyInpaintCombinedPipeline", **PRIOR_STEPS, **IMAGE | PICTURE_OF_64 | MASK_OF_64)
def kandinsky_inpaint_combined() -> dict[str, Any]:
    return kandinsky_inpaint() | prefixed(prior_parts())


@recipe("KandinskyV22Pipeline", **EMBEDDED)
@recipe("KandinskyV22Img2ImgPipeline", strength=0.9, **EMBEDDED | PICTURE_OF_64)
def kandinsky_22() -> dict[str, Any]:
    return {"unet": kandinsky_unet("image"), "movq": movq(), "scheduler": ddim()}


@recipe("KandinskyV22InpaintPipeline", **EMBEDDED | PICTURE_OF_64 | MASK_OF_64)
def kandinsky_22_inpaint() -> dict[str, Any]:
    return kandinsky_22() | {"unet": kandinsky_unet("image", in_channels=9)}


@recipe("KandinskyV22CombinedPipeline", **PRIOR_STEPS, **SIZE, **IMAGE)
@recipe("KandinskyV22Img2ImgCombinedPipeline", strength=0.9, **PRIOR_STEPS, **IMAGE | PICTURE_OF_64)
def kandinsky_22_combined() -> dict[str, Any]:
    return kandinsky_22() | prefixed(prior_parts())


@recipe("KandinskyV22InpaintCombinedPipeline", **PRIOR_STEPS, **IMAGE | PICTURE_OF_64 | MASK_OF_64)
def kandinsky_22_inpaint_combined() -> dict[str, Any]:
    return kandinsky_22_inpaint() | prefixed(prior_parts())


@recipe("KandinskyV22ControlnetPipeline", hint=partial(hint, 64), **EMBEDDED | {"height": 64, "width": 64})
@recipe(
    "KandinskyV22ControlnetImg2ImgPipeline", hint=partial(hint, 64), strength=0.9,
    **EMBEDDED | PICTURE_OF_64,
)  # fmt: skip
def kandinsky_22_control() -> dict[str, Any]:
    return kandinsky_22() | {"unet": kandinsky_unet("image_hint", in_channels=8), "movq": movq(4)}


@recipe("Kandinsky3Pipeline", lora=TO_LAYERS, **IMAGE | {"height": 16, "width": 16})
@recipe("Kandinsky3Img2ImgPipeline", lora=TO_LAYERS, strength=0.9, image=image, **IMAGE)
def kandinsky_3() -> dict[str, Any]:
    return {
        "unet": diffusers.Kandinsky3UNet(
            in_channels=4, time_embedding_dim=4, groups=2, attention_head_dim=4, layers_per_block=3,
            block_out_channels=(16, 32), cross_attention_dim=4, encoder_hid_dim=32,
        ),
        "scheduler": diffusers.DDPMScheduler(
            beta_start=0.00085, beta_end=0.012, steps_offset=1, beta_schedule="squaredcos_cap_v2"
        ),
        "movq": movq(), "text_encoder": t5_text(), "tokenizer": t5_tokens(),
    }  # fmt: skip
