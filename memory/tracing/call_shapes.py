"""What of a call's inputs tells how much it computes: equal for the call of a model and for its trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["Shapes", "shapes_of"]

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors in a call's inputs, and of lists of tokens, in order."""

MOST_SHAPES = 16
MAX_DEPTH = 4
# Vectors are steps of a sampler, which tell nothing of the size; so may be rows of numbers, such as pooled texts.
LEAST_DIMS = {True: 3, False: 2}
"""By whether its numbers are floating: of so many dimensions at least a tensor counts."""


def shapes_of(inputs: Any) -> Shapes:
    """Return the shapes of a call's inputs. Reads shapes only."""
    found: list[tuple[int, ...]] = []
    collect(inputs, found, MAX_DEPTH)
    return tuple(found[:MOST_SHAPES])


def collect(value: Any, found: list[tuple[int, ...]], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        if value.dim() >= LEAST_DIMS[value.is_floating_point()]:
            found.append(tuple(value.shape))
    elif isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        found.append((len(value), max(map(len, value))))
    elif depth and isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        for item in value.values() if isinstance(value, Mapping) else value:
            collect(item, found, depth - 1)
