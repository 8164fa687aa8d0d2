"""Pipelines that make sound with a transformer: Stable Audio 3, ACE-Step, LongCat Audio."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.pipelines.ace_step.modeling_ace_step import (
    AceStepAudioTokenDetokenizer,
    AceStepAudioTokenizer,
    AceStepConditionEncoder,
)
from diffusers.pipelines.stable_audio_3.modeling_stable_audio_3 import StableAudio3DurationEmbedder

from highwater.tests.compat.parts import fill_zeros, llama_like_tokens, qwen3_text, t5_tokens, umt5_text
from highwater.tests.compat.recipes import PROMPT, TO_LAYERS, recipe

SECOND = {"prompt": PROMPT, "duration": 1.0, "num_inference_steps": 2, "output_type": "pt"}


def t5_gemma_text() -> Any:
    from transformers import T5GemmaConfig, T5GemmaEncoderModel

    sizes = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 64,
        "layer_types": ["full_attention"] * 3,
    }  # fmt: skip
    return T5GemmaEncoderModel(T5GemmaConfig(encoder=sizes, decoder=sizes, is_encoder_decoder=False))


def sound(seconds: int = 1) -> torch.Tensor:
    """Two channels at 16 samples a second."""
    return torch.linspace(-1, 1, 2 * 16 * seconds).reshape(1, 2, -1)


@recipe("StableAudio3Pipeline", guidance_scale=2.0, **SECOND)
@recipe("StableAudio3AudioToAudioPipeline", audio=sound, init_noise_level=0.8, **SECOND)
@recipe("StableAudio3InpaintPipeline", audio=sound, mask_start_seconds=0.2, mask_end_seconds=0.8, **SECOND)
def stable_audio_3() -> dict[str, Any]:
    return {
        "transformer": fill_zeros(
            diffusers.StableAudio3DiTModel(
                io_channels=8, embed_dim=32, depth=3, num_heads=4, cond_token_dim=32, global_cond_dim=32,
                local_add_cond_dim=9, timestep_features_dim=16, ff_mult=2, num_memory_tokens=3,
                use_differential_attention=False,
            )
        ),
        "vae": fill_zeros(
            diffusers.AutoencoderSAME(
                patch_size=2, encoder_channels=8, encoder_c_mults=(2,), encoder_strides=(2,), dim_heads=4, ff_mult=2,
                encoder_transformer_depths=(1,), latent_dim=8, use_differential_attention=False, sampling_rate=16,
            )
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1),
        "text_encoder": t5_gemma_text(), "tokenizer": t5_tokens(),
        "duration_embedder": StableAudio3DurationEmbedder(output_dim=32, fourier_dim=16),
    }  # fmt: skip


ATTENTION = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rope_theta": 1e4, "sliding_window": 16,
}  # fmt: skip
POOLED = {
    **ATTENTION, "audio_acoustic_hidden_dim": 8, "pool_window_size": 2, "num_attention_pooler_hidden_layers": 2,
}  # fmt: skip


@recipe("AceStepPipeline", lora=TO_LAYERS, prompt=PROMPT, lyrics="la", audio_duration=0.4, num_inference_steps=2,
        max_text_length=32)  # fmt: skip
@recipe("AceStepPipeline", "cover", lora=TO_LAYERS, prompt=PROMPT, task_type="cover", num_inference_steps=2,
        src_audio=lambda: sound()[0], reference_audio=lambda: sound()[0], max_text_length=32)  # fmt: skip
def ace_step() -> dict[str, Any]:
    return {
        "transformer": diffusers.AceStepTransformer1DModel(
            num_hidden_layers=3, in_channels=24, audio_acoustic_hidden_dim=8, patch_size=2, **ATTENTION
        ),
        "condition_encoder": AceStepConditionEncoder(
            text_hidden_dim=32, timbre_hidden_dim=8, num_lyric_encoder_hidden_layers=2,
            num_timbre_encoder_hidden_layers=2, **ATTENTION,
        ),
        "audio_tokenizer": AceStepAudioTokenizer(
            fsq_dim=32, fsq_input_levels=[4, 4, 4], fsq_input_num_quantizers=1, **POOLED
        ),
        "audio_token_detokenizer": AceStepAudioTokenDetokenizer(**POOLED),
        "vae": diffusers.AutoencoderOobleck(
            encoder_hidden_size=16, downsampling_ratios=[1, 2], decoder_channels=3, decoder_input_channels=8,
            audio_channels=2, channel_multiples=[2, 4], sampling_rate=50,
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1),
        "text_encoder": qwen3_text(), "tokenizer": llama_like_tokens(),
    }  # fmt: skip


@recipe("LongCatAudioDiTPipeline", prompt=PROMPT, audio_duration_s=0.01, num_inference_steps=2, output_type="pt")
def longcat_audio() -> dict[str, Any]:
    return {
        "transformer": fill_zeros(
            diffusers.LongCatAudioDiTTransformer(
                dit_dim=64, dit_depth=3, dit_heads=4, dit_text_dim=32, latent_dim=8, text_conv=False
            )
        ),
        "vae": diffusers.LongCatAudioDiTVae(
            channels=16, c_mults=[1, 2], strides=[2], latent_dim=8, encoder_latent_dim=16, downsampling_ratio=2
        ),
        "text_encoder": umt5_text(), "tokenizer": t5_tokens(),
    }  # fmt: skip
