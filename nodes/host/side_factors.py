"""Which of core's patches of a weight are a low-rank sum, and that sum: it is added when an encoded weight is decoded.

Merged into a weight that rests in eight or four bits and rounded to these again, a LoRA loses what is smaller than
half a step: of most LoRAs much, of some all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from comfy.weight_adapter import LoRAAdapter

from ...memory.hosted_component import HostedWeight, SideFactors

__all__ = ["factors_of", "is_same", "rank_of"]


def factors_of(patches: Sequence[tuple[Any, ...]], weight: HostedWeight) -> SideFactors | None:
    """Return what core's patches add to an encoded weight; None where they do another thing, or are too large."""
    if not weight.is_encoded:
        return None
    parts = [low_rank_of(patch, weight.shape) for patch in patches]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    joined = SideFactors.joined(found)
    return joined if weight.takes_factors(joined) else None


def low_rank_of(patch: tuple[Any, ...], shape: Sequence[int]) -> SideFactors | None:
    """Return what one patch adds to a weight of a shape; None where it is not a plain LoRA of a part of its rows."""
    strength, adapter, strength_model, offset, function = patch
    rank = rank_of(adapter, shape, offset=offset, function=function)
    if rank is None or strength_model != 1.0:
        return None
    up, down, alpha, *_ = adapter.weights
    rows = shape[0]
    _, begin, length = (0, 0, rows) if offset is None else offset
    scale = strength * (1.0 if alpha is None else alpha / rank)
    with torch.no_grad(), torch.inference_mode(False):
        scaled = up.flatten(1).to("cpu", torch.float32) * scale
        whole = scaled if length == rows else torch.zeros(rows, rank)
        if whole is not scaled:
            whole[begin : begin + length] = scaled
        return balanced(whole, down.flatten(1).to("cpu", torch.float32))


def rank_of(adapter: Any, shape: Sequence[int], *, offset: Sequence[int] | None, function: Any) -> int | None:
    """Return the rank of what an adapter adds to a weight of a shape; None where it is not as `low_rank_of` says.

    Reads no values: its tensors may be without memory.

    Args:
        offset: the part of the weight that it changes: dimension, begin and length.
    """
    if type(adapter) is not LoRAAdapter or function is not None or not shape:
        return None
    up, down, _, *others = adapter.weights
    if any(other is not None for other in others):  # a middle matrix, DoRA's scales, another shape
        return None
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    dim, _, length = (0, 0, rows) if offset is None else offset
    rank: int = down.shape[0]
    if dim != 0 or (up.flatten(1).shape, down.flatten(1).shape) != ((length, rank), (rank, columns)):
        return None
    return rank


def balanced(up: torch.Tensor, down: torch.Tensor) -> SideFactors:
    """Return factors of like magnitudes with the same product: in float16 one of them might be too small to be held."""
    largest = [float(each.abs().max()) if each.numel() else 0.0 for each in (up, down)]
    if min(largest) > 0 and all(map(math.isfinite, largest)):
        power = round(math.log2(largest[1] / largest[0]) / 2)
        up, down = torch.ldexp(up, torch.tensor(power)), torch.ldexp(down, torch.tensor(-power))
    return SideFactors(up=up, down=down)


def is_same(patches: Sequence[tuple[Any, ...]], others: Sequence[tuple[Any, ...]]) -> bool:
    """Whether two lists of core's patches do the same: the same objects in the same strengths."""
    return len(patches) == len(others) and all(
        (one[0], one[2], one[3]) == (other[0], other[2], other[3]) and one[1] is other[1] and one[4] is other[4]
        for one, other in zip(patches, others, strict=True)
    )
