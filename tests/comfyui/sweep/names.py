"""The rows of the table by name, for those who do not have the host's code."""

from __future__ import annotations

from highwater.tests.comfyui.sweep.architectures import ARCHITECTURES

__all__ = ["AUTOENCODERS", "ROWS"]

AUTOENCODERS = [
    f"VAE {name}"
    for name in (
        "AutoencoderKL", "AutoencodingEngine", "SVD", "TAESD", "TAEHV", "Stable Cascade A", "Stable Cascade C",
        "HunyuanImage", "HunyuanVideo 1.5", "HunyuanVideo", "LTX-Video", "CogVideoX", "Cosmos", "Wan 2.1", "Wan 2.2",
        "Stable Audio",
    )
]  # fmt: skip
ROWS = [*ARCHITECTURES, *AUTOENCODERS]
