"""Kolors: the UNet of Stable Diffusion XL with ChatGLM as its text encoder."""

from __future__ import annotations

from typing import Any

import torch

from highwater.tests.compat.parts import chat_glm_tokens, image, kl_vae
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, ddim, recipe
from highwater.tests.compat.unets import SIZE, unet_xl


@recipe("KolorsPipeline", lora=TO_LAYERS, max_sequence_length=64, **SIZE, **IMAGE)
@recipe("KolorsPAGPipeline", lora=TO_LAYERS, pag_scale=2.0, max_sequence_length=64, **SIZE, **IMAGE)
@recipe("KolorsImg2ImgPipeline", lora=TO_LAYERS, strength=0.9, image=image, max_sequence_length=64, **IMAGE)
def kolors() -> dict[str, Any]:
    from diffusers.pipelines.kolors import ChatGLMModel
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig

    text_encoder = ChatGLMModel(
        ChatGLMConfig(
            num_layers=3, padded_vocab_size=128, hidden_size=32, ffn_hidden_size=64, kv_channels=8,
            num_attention_heads=4, seq_length=64, add_qkv_bias=True, multi_query_attention=True,
            multi_query_group_num=2, original_rope=True, use_cache=True,
        )
    )  # fmt: skip
    with torch.no_grad():  # the class leaves its weights as the memory was
        for weight in text_encoder.parameters():
            weight.normal_(std=0.2)
    return {
        "unet": unet_xl(cross_attention_dim=32), "vae": kl_vae(), "scheduler": ddim(), "text_encoder": text_encoder,
        "tokenizer": chat_glm_tokens(),
    }  # fmt: skip
