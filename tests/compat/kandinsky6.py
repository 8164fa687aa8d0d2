"""Kandinsky 6, which makes a film and its sound at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers

from highwater.tests.compat.parts import image
from highwater.tests.compat.recipes import IMAGE, recipe
from highwater.tests.compat.videos import hunyuan_vae, kandinsky5_parts

FILM = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 16, **IMAGE}


@recipe("Kandinsky6TI2VAPipeline", **FILM)
@recipe("Kandinsky6TI2VAPipeline", "with an image", image=partial(image, 32), **FILM)
def kandinsky6() -> dict[str, Any]:
    transformer = diffusers.Kandinsky6Transformer3DModel(
        in_text_dim=32, in_text_dim2=32, time_dim=16, model_dim=16, ff_dim=32, num_text_blocks=2, num_visual_blocks=3,
        axes_dims=(4, 2, 2), in_audio_dim=8, out_audio_dim=8, visual_token_type_num_embeddings=2, ca_rope=True,
        cross_gates=True,
    )  # fmt: skip
    audio = diffusers.MMAudioVAE(
        mel_bins=8, latent_channels=8, hidden_channels=16, layers_per_block=1, sample_rate=1600, n_fft=64, hop_length=16
    )
    vocoder = diffusers.MMAudioVocoder(
        num_mels=8, upsample_initial_channel=16, upsample_rates=(4, 4), upsample_kernel_sizes=(8, 8),
        resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1, 3, 5),),
    )  # fmt: skip
    return kandinsky5_parts(visual=True, vae=hunyuan_vae(4, 16)) | {
        "transformer": transformer, "audio_vae": audio, "vocoder": vocoder,
    }  # fmt: skip
