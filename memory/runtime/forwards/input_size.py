"""The size of a forward's inputs, rounded up to eight steps per doubling (about 9 %)."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["Size", "input_size"]

Size = tuple[int, ...]
"""The number of the entry module, the bytes per element, and the rounded number of elements of each input."""

# Inputs that differ in size by less than about 9 % count as equal.
STEPS_PER_DOUBLING = 8

MAX_INPUTS = 64
MAX_DEPTH = 4


def input_size(inputs: Any) -> Size:
    """Return the size of a forward's inputs. Reads shapes only."""
    found: list[torch.Tensor] = []
    collect_tensors(inputs, found, MAX_DEPTH)
    if not found:
        return ()
    item_bytes = next((tensor.element_size() for tensor in found if tensor.is_floating_point()), 0)
    numels = (tensor.numel() for tensor in found)
    return (item_bytes, *(math.ceil(STEPS_PER_DOUBLING * math.log2(numel)) for numel in numels if numel > 1))


def collect_tensors(value: Any, found: list[torch.Tensor], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        if len(found) < MAX_INPUTS:
            found.append(value)
    elif depth and isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            collect_tensors(item, found, depth - 1)
