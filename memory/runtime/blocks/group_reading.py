"""Reads the weights of a block that rest in their file into host memory, because other code uses them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...transfer.pinned_memory import HostSlab, allocate_slab
from ..tensors.reported_device import plainly
from .weight_group import WeightGroup
from .weight_store import FileStore

__all__ = ["read_into_memory"]


def read_into_memory(group: WeightGroup, slab: HostSlab | None = None) -> None:
    """Read weights that rest in their file into host memory, where they stay. No pass or copy may be under way.

    Args:
        slab: what they are read into; by default a new pageable one.

    Raises:
        InvalidInput: the file has changed. The group is as before.
    """
    store = group.at_rest.store
    assert isinstance(store, FileStore)
    given = find_given(group, store)
    with torch.inference_mode(False), torch.no_grad():
        slab = slab or allocate_slab(group.slab_bytes)
        store.read_whole(slab.data)
    group.at_rest.rest_in(slab)
    with without_gone_places(group):  # a weight may be asked for while other code moves it to another name
        group.rest()
    for table, name, tensor in given:
        table[name] = tensor


def find_given(group: WeightGroup, store: FileStore) -> list[tuple[dict[str, torch.Tensor], str, torch.Tensor]]:
    """Return what other code has put in places of a group that rests in its file; the next look takes it over.

    A module that is converted has its weights changed one by one, and one of them may be read meanwhile.
    """
    if group.copy is not None or not group.placed.tensors:
        return []
    leaves = store.resting_leaves()
    firsts = map(group.layout.first_leaf, range(len(group.slots)))
    return [
        (table, name, held)
        for slot, first in zip(group.slots, firsts, strict=True)
        if not slot.is_buffer and not slot.is_quantized
        for table, name in ((slot.tensors_of(module), name) for module, name in slot.owners)
        if (held := table.get(name)) is not None and not held.is_meta and is_other(held, leaves[first])
    ]


@contextmanager
def without_gone_places(group: WeightGroup) -> Iterator[None]:
    """Leave places of the module alone meanwhile that hold nothing."""
    before = [(slot, slot.owners) for slot in group.slots]
    for slot, owners in before:
        slot.set_owners((part, name) for part, name in owners if slot.tensors_of(part).get(name) is not None)
    try:
        yield
    finally:
        for slot, owners in before:
            slot.set_owners(owners)


def is_other(held: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether a tensor in memory is not where a leaf rests, or no longer has its form."""
    with plainly():
        is_there = not leaf.is_meta and held.data_ptr() == leaf.data_ptr()
        return not is_there or (held.dtype, held.shape) != (leaf.dtype, leaf.shape)
