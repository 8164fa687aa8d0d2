"""Random weights for small models, the same every time. Runs in the host's own Python."""

from __future__ import annotations

import math

import torch

__all__ = ["fill"]


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
        if name.endswith("pos_embed"):  # SD3's comes from its file
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
