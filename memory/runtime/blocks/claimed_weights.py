"""Weights that a module may have from files, as names and forms say: read from there, and compared with what it has."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...errors import InvalidInput
from ...transfer.pinned_memory import HostSlab
from ...weights.source import WeightsSource
from ..tensors.parameter_slots import repoint
from .weight_group import WeightGroup

__all__ = ["read_claimed"]


def read_claimed(group: WeightGroup, slab: HostSlab, source: WeightsSource, proven: Collection[int]) -> None:
    """Read weights of a group that is about to be packed from their files into its slab, where they come from there.

    The module's own are compared with them. Equal ones are pointed to the slab, and packing need not copy them; the
    origins of others are forgotten, of all where a file cannot be read.

    Args:
        proven: where weights lie in host memory that are known to come from files.
    """
    origins, views = list(group.at_rest.origins), group.layout.leaf_views(slab.data)
    claimed = []
    for index, slot in enumerate(group.slots):
        first = group.layout.first_leaf(index)
        if origins[first] is not None and slot.held.data_ptr() not in proven:
            claimed.append((slot, views[index][0], first))
    if not claimed:
        return
    try:
        source.read_into([(slot.spec.name, view) for slot, view, _ in claimed])
        can_read = True
    except InvalidInput:  # replaced since: the library has the former file open
        can_read = False
    for slot, view, first in claimed:
        if can_read and is_same(slot.held, view):
            repoint(slot, [view])
        else:
            origins[first] = None
    group.at_rest.note_origins(tuple(origins))


def is_same(held: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether two contiguous weights of one form are equal, bit by bit."""
    return torch.equal(*(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (held, view)))
