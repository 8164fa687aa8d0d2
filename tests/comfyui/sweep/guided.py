"""The kinds of ControlNets that ComfyUI loads, each with a small model that it guides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from highwater.tests.comfyui.sweep.architectures import ARCHITECTURES, TEXT, Architecture, unet

__all__ = ["GUIDED"]

LEVELS = {"channel_mult": [1, 2, 4, 4], "num_res_blocks": [2] * 4, "transformer_depth": [0] * 8}
# The one where an adapter's features have their places: four levels of two blocks.
LEVELLED = Architecture(
    name="SD 1.5", model="SD15", latent=(1, 4, 16, 16), text=TEXT,
    config=unet(use_linear_in_transformer=False, transformer_depth_output=[0] * 12, transformer_depth_middle=1,
                **LEVELS),
)  # fmt: skip
# The width that a union's class has in its code.
WIDE = Architecture(
    name="SDXL", model="SDXL", latent=(1, 4, 8, 8), text=TEXT, pooled=48,
    config=unet(model_channels=320, adm_in_channels=48 + 1536, num_classes="sequential", channel_mult=[1],
                num_res_blocks=[1], transformer_depth=[1], transformer_depth_output=[1, 1], num_head_channels=64),
)  # fmt: skip


def dit_extras(generator: torch.Generator) -> dict[str, Any]:
    return {
        "attention_mask": torch.ones(1, 6), "conditioning_mt5xl": torch.randn(1, 4, 48, generator=generator),
        "attention_mask_mt5xl": torch.tensor([[1.0, 1.0, 1.0, 0.0]]),
    }  # fmt: skip


# Its forward writes into the text that it is given.
DIT = Architecture(
    name="HunyuanDiT", model="HunyuanDiT", latent=(1, 4, 8, 8), text=TEXT, extras=dit_extras, config={
        "image_model": "hydit", "depth": 40, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2.0, "input_size": 8,
        "text_states_dim": 32, "text_states_dim_t5": 48, "text_len": 6, "text_len_t5": 4},
)  # fmt: skip
KINDS: dict[str, tuple[Architecture, str]] = {
    "Flux, XLabs": (ARCHITECTURES["Flux"], "flux xlabs"),
    "Flux, Mistoline": (ARCHITECTURES["Flux"], "flux mistoline"),
    "Flux, InstantX union": (ARCHITECTURES["Flux"], "flux union"),
    "Flux, InstantX inpainting": (ARCHITECTURES["Flux"], "flux inpainting"),
    "SD3, inpainting": (ARCHITECTURES["SD3"], "sd3 inpainting"),
    "SD3.5 large": (ARCHITECTURES["SD3"], "sd35"),
    "SD3.5, two embedders": (ARCHITECTURES["SD3"], "sd35 doubled"),
    "Qwen-Image Fun": (ARCHITECTURES["Qwen-Image"], "qwen fun"),
    "Qwen-Image, inpainting": (ARCHITECTURES["Qwen-Image"], "qwen inpainting"),
    "Z-Image Fun": (ARCHITECTURES["Z-Image"], "z-image"),
    "Z-Image Fun, refiner": (ARCHITECTURES["Z-Image"], "z-image refiner"),
    "SDXL union": (WIDE, "unet union"),
    "SD 1.5, two": (ARCHITECTURES["SD 1.5"], "unet twice"),
    "SD 1.5, Control-LoRA": (ARCHITECTURES["SD 1.5"], "lora"),
    "SD 1.5, T2I-Adapter": (LEVELLED, "adapter"),
    "SD 1.5, light T2I-Adapter": (LEVELLED, "light adapter"),
    "Stable Cascade C": (ARCHITECTURES["Stable Cascade C"], "cascade"),
    "HunyuanDiT": (DIT, "dit"),
    "Wan Uni3C": (ARCHITECTURES["Wan 2.1 t2v"], "uni3c"),
}
GUIDED = {
    f"ControlNet {kind}": replace(architecture, name=f"ControlNet {kind}", control=control)
    for kind, (architecture, control) in KINDS.items()
}
