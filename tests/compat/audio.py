"""Pipelines that make sound through a picture of it: AudioLDM, AudioLDM 2, MusicLDM."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.audioldm2 import AudioLDM2ProjectionModel, AudioLDM2UNet2DConditionModel

from highwater.tests.compat.parts import byte_level_roberta_tokens, kl_vae, t5_text, t5_tokens
from highwater.tests.compat.recipes import PROMPT, ddim, recipe
from highwater.tests.compat.unets import unet, unet_sizes

SOUND = {"audio_length_in_s": 0.02, "num_inference_steps": 2}
CLAP_TEXT = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "projection_dim": 32, "max_position_embeddings": 80,
}  # fmt: skip


def clap() -> Any:
    from transformers import ClapConfig, ClapModel

    hears = {
        "spec_size": 8, "window_size": 4, "num_mel_bins": 8, "intermediate_size": 32, "depths": [1, 1],
        "num_attention_heads": [1, 1], "num_hidden_layers": 2, "hidden_size": 192, "projection_dim": 32,
        "patch_size": 2, "patch_stride": 2, "patch_embed_input_channels": 4,
    }  # fmt: skip
    return ClapModel(ClapConfig(text_config=CLAP_TEXT, audio_config=hears, projection_dim=32))


def clap_text() -> Any:
    from transformers import ClapTextConfig, ClapTextModelWithProjection

    return ClapTextModelWithProjection(ClapTextConfig(**CLAP_TEXT))


def vocoder() -> Any:
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    return SpeechT5HifiGan(
        SpeechT5HifiGanConfig(
            model_in_dim=8, sampling_rate=16000, upsample_initial_channel=16, upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4], resblock_kernel_sizes=[3, 7], normalize_before=False, initializer_range=0.3,
            resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        )
    )  # fmt: skip


def sound_unet() -> Any:
    return unet(
        cross_attention_dim=(16, 32), class_embed_type="simple_projection", projection_class_embeddings_input_dim=32,
        class_embeddings_concat=True,
    )  # fmt: skip


def sound_vae() -> Any:
    return kl_vae(in_channels=1, out_channels=1)


@recipe("AudioLDMPipeline", prompt=PROMPT, **SOUND)
def audio_ldm() -> dict[str, Any]:
    return {
        "unet": sound_unet(), "vae": sound_vae(), "scheduler": ddim(), "text_encoder": clap_text(),
        "tokenizer": byte_level_roberta_tokens(), "vocoder": vocoder(),
    }  # fmt: skip


# Its `_encode_prompt` calls `.to` on what `ClapModel.get_text_features` returns, which in transformers 5 is no tensor.
@recipe("MusicLDMPipeline", "from embeddings", prompt_embeds=lambda: torch.rand(1, 32),
        negative_prompt_embeds=lambda: torch.rand(1, 32), **SOUND)  # fmt: skip
def music_ldm() -> dict[str, Any]:
    return audio_ldm() | {"text_encoder": clap(), "feature_extractor": None}


@recipe("AudioLDM2Pipeline", prompt=PROMPT, max_new_tokens=4, **SOUND)
def audio_ldm_2() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return {
        "unet": AudioLDM2UNet2DConditionModel(**unet_sizes(cross_attention_dim=((None, 16, 32),) * 2)),
        "vae": sound_vae(), "scheduler": ddim(), "vocoder": vocoder(), "feature_extractor": None,
        "text_encoder": clap(), "tokenizer": byte_level_roberta_tokens(),
        "text_encoder_2": t5_text(), "tokenizer_2": t5_tokens(),
        "projection_model": AudioLDM2ProjectionModel(32, 32, 16),
        "language_model": GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=3, vocab_size=320, n_positions=160)),
    }  # fmt: skip
