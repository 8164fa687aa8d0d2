"""Cosmos 2.5, whose text encoder is a language model, and Cosmos 3, whose transformer is one."""

from __future__ import annotations

from typing import Any

import diffusers

from highwater.tests.compat.parts import QWEN_MARKS, film, image, llama_like_tokens, qwen_vl_text
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, recipe
from highwater.tests.compat.wan import wan_vae
from highwater.tests.compat.wan_kin import COSMOS, HarmlessChecker, cosmos_transformer


@recipe("Cosmos2_5_PredictBasePipeline", lora=TO_LAYERS, negative_prompt="dull", **COSMOS)
@recipe("Cosmos2_5_PredictBasePipeline", "with a film", lora=TO_LAYERS, video=film, **COSMOS)
def cosmos25() -> dict[str, Any]:
    # The features of the prompt are those of all three layers of the text encoder, one beside another.
    sizes = {"use_crossattn_projection": True, "crossattn_proj_in_channels": 96, "encoder_hidden_states_channels": 32}
    return {
        "transformer": cosmos_transformer(in_channels=17, **sizes), "vae": wan_vae(),
        "scheduler": diffusers.UniPCMultistepScheduler(), "text_encoder": qwen_vl_text(),
        "tokenizer": llama_like_tokens(*QWEN_MARKS), "safety_checker": HarmlessChecker(),
    }  # fmt: skip


OMNI = {"height": 16, "width": 16, "num_frames": 5, "use_system_prompt": False, **IMAGE}


@recipe("Cosmos3OmniPipeline", **OMNI)
@recipe("Cosmos3OmniPipeline", "with an image and sound", image=image, enable_sound=True, **OMNI)
def cosmos3() -> dict[str, Any]:
    transformer = diffusers.Cosmos3OmniTransformer(
        head_dim=8, hidden_size=32, intermediate_size=64, latent_channel=16, latent_patch_size=1,
        num_attention_heads=4, num_hidden_layers=3, num_key_value_heads=2, patch_latent_dim=16, vocab_size=320,
        rope_axes_dim=(2, 1, 1), sound_gen=True, sound_dim=8,
    )  # fmt: skip
    sound = diffusers.Cosmos3AVAEAudioTokenizer(
        sampling_rate=160, hop_size=4, input_channels=1, enc_dim=4, enc_num_blocks=1, enc_n_fft=8, enc_hop_length=2,
        enc_latent_dim=8, enc_c_mults=(1,), enc_strides=(2,), vocoder_input_dim=8, dec_dim=4, dec_c_mults=(1, 2),
        dec_strides=(2, 2), dec_out_channels=2,
    )  # fmt: skip
    return {
        "transformer": transformer, "text_tokenizer": llama_like_tokens(*QWEN_MARKS), "vae": wan_vae(),
        "scheduler": diffusers.UniPCMultistepScheduler(), "sound_tokenizer": sound, "enable_safety_checker": False,
    }  # fmt: skip
