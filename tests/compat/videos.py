"""Pipelines that make videos or sound."""

from __future__ import annotations

from typing import Any

import diffusers

from highwater.tests.compat.parts import (
    t5_tokens,
    umt5_text,
)
from highwater.tests.compat.recipes import IMAGE, TO_LAYERS, flow, recipe


def wan_vae() -> Any:
    return diffusers.AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                                      temperal_downsample=[False, True, True])  # fmt: skip


def wan_transformer(**options: Any) -> Any:
    return diffusers.WanTransformer3DModel(
        **{
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16,
            "out_channels": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 32, "num_layers": 3,
            "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32, **options,
        }
    )  # fmt: skip


@recipe("WanPipeline", lora=TO_LAYERS, height=16, width=16, num_frames=5, max_sequence_length=16, **IMAGE)
def wan() -> dict[str, Any]:
    return {
        "transformer": wan_transformer(), "vae": wan_vae(), "scheduler": flow(), "text_encoder": umt5_text(),
        "tokenizer": t5_tokens(),
    }  # fmt: skip
