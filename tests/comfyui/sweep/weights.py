"""Random weights and inputs for small models, the same every time. Runs in the host's own Python."""

from __future__ import annotations

import math
from typing import Any

import comfy.ops
import torch

__all__ = ["fill", "hint", "operations"]

# Buffers that no code of the host computes: they come with the weights.
FROM_FILES = (
    "pos_embed", "per_channel_statistics", "latents_mean", "latents_std", "zero_k_bias", "mask_token", "mel_basis",
    "rope.inv_freq",
    "running_mean", "running_var",
)  # fmt: skip


def fill(module: torch.nn.Module, seed: int) -> None:
    """Random weights of a size that keeps activations near one: every block matters to the result."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if not values.numel():
            continue
        if parameter.ndim < 2:
            values = values * 0.02 + (0.0 if name.endswith("bias") else 1.0)
        else:
            values = values / math.sqrt(parameter[0].numel())
        parameter.data.copy_(values)
    for name, buffer in module.named_buffers():
        if any(part in name for part in FROM_FILES):
            buffer.copy_(1.0 + 0.1 * torch.randn(buffer.shape, generator=generator))


def hint(*shape: int) -> torch.Tensor:
    """Return a picture to guide by."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(9))


def operations(dtype: torch.dtype) -> dict[str, Any]:
    """Return how the host's classes make their layers."""
    return {"dtype": dtype, "device": torch.device("cpu"), "operations": comfy.ops.disable_weight_init}
