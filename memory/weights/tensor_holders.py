"""How many objects hold a tensor, or its memory: counted by their references, however many components there are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

import torch

__all__ = ["CAN_COUNT", "count_tensors", "find_held_elsewhere"]

CAN_COUNT = hasattr(torch._C, "_storage_Use_Count")
"""Whether torch tells how many tensors share a storage."""


def count_tensors(tensor: torch.Tensor) -> int:
    """Return how many tensors share a tensor's storage, with itself; many where torch does not tell."""
    if not CAN_COUNT:
        return 1 << 30
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1  # the one that we ask by


def find_held_elsewhere(places: Iterable[torch.Tensor | None]) -> set[int]:
    """Return the ids of tensors to which anything refers beside these places, which are one reference each.

    One that the caller keeps counts, too, such as a list of weights.
    """
    held = [tensor for tensor in places if tensor is not None]
    num_places = Counter(map(id, held))
    tensors: list[object] = list(dict(zip(map(id, held), held, strict=True)).values())
    held.clear()
    tensors.append(object())  # to which nothing refers but the list
    *counts, least = map(sys.getrefcount, tensors)
    return {
        id(tensor) for tensor, count in zip(tensors, counts, strict=False) if count - least != num_places[id(tensor)]
    }
