"""Pipelines that make or refine something from a picture or a film that their text encoder or VAE reads, too."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import (
    QWEN_MARKS,
    clip_pixels,
    image,
    kl_vae,
    language_sizes,
    llama_like_tokens,
    qwen_vl_text,
)
from highwater.tests.compat.recipes import IMAGE, PROMPT, TO_LAYERS, flow, recipe
from highwater.tests.compat.videos import (
    KANDINSKY,
    LTX,
    VIDEO,
    easy_animate_parts,
    hunyuan_parts,
    hunyuan_sizes,
    hunyuan_vae,
    kandinsky5_parts,
    ltx_parts,
)
from highwater.tests.compat.vision_language import qwen_processor


def llava_text() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    text = LlamaConfig(**language_sizes(3))
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_id=259, pad_token_id=256)
    )


# Sixteen patches take the place of the mark of the image; the pipeline looks for three ends of headers.
END = "<|end_header_id|>"
LLAVA = {
    "template": f"{END}see <image>{END}{{}}. So:{END}", "crop_start": 7, "image_emb_len": 16, "image_emb_start": 5,
    "image_emb_end": 21,
}  # fmt: skip


@recipe("HunyuanVideoImageToVideoPipeline", lora=TO_LAYERS, image=partial(image, 16), prompt_template=LLAVA,
        **VIDEO | {"max_sequence_length": 32})  # fmt: skip
def hunyuan_of_image() -> dict[str, Any]:
    sizes = hunyuan_sizes(in_channels=9, guidance_embeds=False, image_condition_type="latent_concat")
    return hunyuan_parts(diffusers.HunyuanVideoTransformer3DModel(**sizes)) | {
        "text_encoder": llava_text(), "tokenizer": llama_like_tokens("<image>", END), "image_processor": clip_pixels(),
    }  # fmt: skip


@recipe("HunyuanVideoImageToVideoPipeline", "with the first frame replaced", lora=TO_LAYERS, image=partial(image, 16),
        prompt_template=LLAVA, **VIDEO | {"max_sequence_length": 32})  # fmt: skip
def hunyuan_of_first_frame() -> dict[str, Any]:
    sizes = hunyuan_sizes(image_condition_type="token_replace")
    return hunyuan_of_image() | {"transformer": diffusers.HunyuanVideoTransformer3DModel(**sizes)}


@recipe("HunyuanImageRefinerPipeline", image=image, height=32, width=32, **IMAGE)
def hunyuan_refiner() -> dict[str, Any]:
    return {
        "transformer": diffusers.HunyuanImageTransformer2DModel(
            in_channels=16, out_channels=8, num_attention_heads=2, attention_head_dim=12, num_layers=2,
            num_single_layers=3, num_refiner_layers=2, patch_size=(1, 1, 1), guidance_embeds=True, text_embed_dim=32,
            text_embed_2_dim=None, rope_axes_dim=(4, 4, 4),
        ),
        "vae": diffusers.AutoencoderKLHunyuanImageRefiner(
            latent_channels=4, block_out_channels=(8, 8, 8), layers_per_block=1, spatial_compression_ratio=4,
            temporal_compression_ratio=2, downsample_match_channel=False, upsample_match_channel=False,
        ),
        "scheduler": flow(), "text_encoder": qwen_vl_text(), "tokenizer": llama_like_tokens(*QWEN_MARKS),
    }  # fmt: skip


@recipe("Kandinsky5I2VPipeline", lora=KANDINSKY, image=image, **LTX | {"num_frames": 17})
def kandinsky5_of_image() -> dict[str, Any]:
    return kandinsky5_parts(visual=True, vae=hunyuan_vae(4, 16))


def small_pictures(pipe: Any) -> None:
    pipe.resolutions = [(64, 64)]  # the smallest of the class has 900,000 points


@recipe("Kandinsky5I2IPipeline", lora=KANDINSKY, image=partial(image, 64), before=small_pictures, height=64, width=64,
        **IMAGE)  # fmt: skip
def kandinsky5_to_image() -> dict[str, Any]:
    parts = kandinsky5_parts(visual=True, vae=kl_vae(16, levels=4))
    return parts | {"tokenizer": qwen_processor(patch_size=14)}


ANIMATE = {"negative_prompt": "", "height": 16, "width": 16, "num_frames": 5, **IMAGE}


def frames() -> torch.Tensor:
    return torch.linspace(0, 1, 3 * 5 * 16 * 16).reshape(1, 3, 5, 16, 16)


def half_masked() -> torch.Tensor:
    return (torch.arange(16) < 8).float().expand(1, 1, 5, 16, 16) * 255


# Without a generator: the pipeline adds noise to the film with one of the film's device.
@recipe("EasyAnimateInpaintPipeline", video=frames, mask_video=half_masked, strength=1.0, generator=None, **ANIMATE)
def easy_animate_of_film() -> dict[str, Any]:
    return easy_animate_parts(in_channels=12, resize_inpaint_mask_directly=False)


@recipe("LTXI2VLongMultiPromptPipeline", lora=TO_LAYERS, cond_image=image, prompt=f"{PROMPT} | it sleeps",
        **{name: value for name, value in LTX.items() if name != "prompt"})  # fmt: skip
def ltx_long() -> dict[str, Any]:
    return ltx_parts()
