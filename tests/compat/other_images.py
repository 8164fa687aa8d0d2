"""Pipelines that make and edit images, with GLM, Mistral, Qwen 2.5 VL, Qwen 3 or SmolLM for their text encoder."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from highwater.tests.compat.flux import flux2_vae
from highwater.tests.compat.images import z_image
from highwater.tests.compat.more_images import bria_fibo, z_image_controlnet
from highwater.tests.compat.parts import (
    WIDTH,
    fill_zeros,
    image,
    kl_vae,
    language_sizes,
    llama_like_tokens,
    mask,
    qwen_vl_text,
    sharpen,
    t5_text,
)
from highwater.tests.compat.recipes import IMAGE, PROMPT, TO_LAYERS, TO_QKV, flow, recipe
from highwater.tests.compat.vision_language import qwen_processor, qwen_tokens

SQUARE = {"height": 32, "width": 32, **IMAGE}
SHORT = {"max_sequence_length": 16, **SQUARE}


@recipe("ZImageControlNetInpaintPipeline", lora=TO_QKV, guides=("controlnet",), image=image,
        mask_image=mask, control_image=image, guidance_scale=3.0, **SHORT)  # fmt: skip
def z_image_controlnet_inpaint() -> dict[str, Any]:
    return z_image_controlnet(channels=33)


@recipe("ZImageOmniPipeline", lora=TO_QKV, guidance_scale=3.0, **SHORT)
@recipe("ZImageOmniPipeline", "with an image", lora=TO_QKV, image=lambda: [image(64)], guidance_scale=3.0, **SHORT)
def z_image_omni() -> dict[str, Any]:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    parts = z_image()
    transformer = diffusers.ZImageTransformer2DModel(**parts["transformer"].config | {"siglip_feat_dim": WIDTH})
    with torch.no_grad():
        for pad in (transformer.x_pad_token, transformer.cap_pad_token, transformer.siglip_pad_token):
            pad.normal_()
    siglip = Siglip2VisionModel(
        Siglip2VisionConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3, num_attention_heads=4, patch_size=8,
            num_patches=16,
        )
    )  # fmt: skip
    return parts | {
        "transformer": transformer, "siglip": siglip,
        "siglip_processor": Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16),
        "vae": parts["vae"].to(torch.bfloat16),  # the pipeline hands it pictures in that type
    }  # fmt: skip


def longcat(**parts: Any) -> dict[str, Any]:
    transformer = diffusers.LongCatImageTransformer2DModel(
        in_channels=64, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return {
        "transformer": transformer, "vae": kl_vae(16), "scheduler": flow(use_dynamic_shifting=True),
        "text_encoder": qwen_vl_text(), "tokenizer": qwen_tokens(), "text_processor": qwen_processor(patch_size=14),
        **parts,
    }  # fmt: skip


@recipe("LongCatImagePipeline", lora=TO_LAYERS, negative_prompt="dull", enable_prompt_rewrite=False, **SQUARE)
def longcat_image() -> dict[str, Any]:
    return longcat()


@recipe("LongCatImageEditPipeline", lora=TO_LAYERS, negative_prompt="dull", image=image, **IMAGE)
def longcat_edit() -> dict[str, Any]:
    # Six narrow levels: the pipeline enlarges its picture to a megapixel.
    vae = diffusers.AutoencoderKL(
        block_out_channels=(4,) * 6, down_block_types=("DownEncoderBlock2D",) * 6, latent_channels=16,
        up_block_types=("UpDecoderBlock2D",) * 6, norm_num_groups=2, layers_per_block=0, shift_factor=0.0,
    )  # fmt: skip
    return longcat(vae=vae)


@recipe("ErnieImagePipeline", lora=TO_LAYERS, negative_prompt="dull", **SQUARE)
def ernie() -> dict[str, Any]:
    from transformers import Ministral3Config, Ministral3ForCausalLM

    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32, num_attention_heads=2, num_layers=3, ffn_hidden_size=32, in_channels=16, out_channels=16,
        text_in_dim=32, rope_axes_dim=(8, 4, 4),
    )  # fmt: skip
    enhancer = Ministral3ForCausalLM(Ministral3Config(**language_sizes(3), head_dim=8))
    tokens = llama_like_tokens("<|enhancer|>")
    tokens.model_max_length = 4  # so many tokens the enhancer writes
    return {
        "transformer": fill_zeros(transformer), "vae": flux2_vae(), "scheduler": flow(), "text_encoder": mistral(),
        "tokenizer": llama_like_tokens(), "pe": sharpen(enhancer), "pe_tokenizer": tokens,
    }  # fmt: skip


def mistral() -> Any:
    from transformers import Mistral3Config, Mistral3Model

    vision = {
        "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    text = {"model_type": "ministral3", "head_dim": 8, **language_sizes(3)}
    return Mistral3Model(Mistral3Config(text_config=text, vision_config=vision))


@recipe("BriaFiboEditPipeline", lora=TO_LAYERS, image=image, mask=mask, negative_prompt="dull", **SQUARE | {
        "prompt": '{"text": "a red fox", "edit_instruction": "make it blue"}', "_auto_resize": False})  # fmt: skip
def bria_fibo_edit() -> dict[str, Any]:
    return bria_fibo()


GLM_TOKENS = {
    "image_token": "<|image|>", "grid_bos_token": "<|grid|>", "grid_eos_token": "<|/grid|>", "bos_token": "<|bos|>",
}  # fmt: skip
GLM_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


# With a picture it fails by itself: it joins the features of pictures to one tensor, whose channels transformers 5 then
# takes for pictures (get_image_tokens).
@recipe("GlmImagePipeline", height=32, width=32, max_sequence_length=16,
        guidance_scale=1.5, num_inference_steps=2, output_type="pt", prompt=f'{PROMPT} that says "hello"')  # fmt: skip
def glm_image() -> dict[str, Any]:
    from transformers import ByT5Tokenizer, GlmImageConfig, GlmImageForConditionalGeneration, GlmImageProcessor
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    tokens = llama_like_tokens(*GLM_TOKENS.values())
    for name, token in GLM_TOKENS.items():
        setattr(tokens, name, token)
    text = language_sizes(2) | {  # the pipeline asks it for 257 tokens
        "vision_vocab_size": 128, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        "pad_token_id": 256, "eos_token_id": None,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "image_size": 32, "patch_size": 8, "intermediate_size": 32,
    }  # fmt: skip
    language = GlmImageForConditionalGeneration(
        GlmImageConfig(
            text_config=text, vision_config=vision,
            vq_config={"embed_dim": 32, "num_embeddings": 128, "latent_channels": 32},
            image_token_id=tokens.convert_tokens_to_ids("<|image|>"), image_start_token_id=126, image_end_token_id=127,
        )
    )  # fmt: skip
    transformer = diffusers.GlmImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2,
        text_embed_dim=32, time_embed_dim=16, condition_dim=8, prior_vq_quantizer_codebook_size=128,
    )  # fmt: skip
    pictures = GlmImageImageProcessorPil(
        patch_size=8, temporal_patch_size=1, merge_size=1, size={"shortest_edge": 256, "longest_edge": 1024}
    )
    return {
        "tokenizer": ByT5Tokenizer(), "processor": GlmImageProcessor(pictures, tokens, chat_template=GLM_TEMPLATE),
        "text_encoder": t5_text(wide=True), "vision_language_encoder": language,
        "vae": kl_vae(4, levels=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4), "transformer": transformer,
        "scheduler": flow(),
    }  # fmt: skip
