"""Reads weights that rest in their file into host memory, because other code uses them, or their module gets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...errors import InvalidInput
from ...transfer.pinned_memory import HostSlab, allocate_slab
from ...weights.source import WeightsSource
from ..tensors.parameter_slots import ParameterSlot, read_weights
from ..tensors.reported_device import plainly
from .weight_group import WeightGroup
from .weight_store import FileStore

__all__ = ["read_into_memory", "read_resting"]


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


def read_resting(
    resting: Sequence[tuple[WeightGroup, ParameterSlot]], source: WeightsSource | None
) -> list[torch.Tensor]:
    """Return weights that rest in files in memory of their own, in the dtypes in which they compute.

    Where another file is in the place of theirs, they come from the mapping that the weight store has of theirs.

    Raises:
        InvalidInput: a file has changed.
    """
    try:
        return read_weights([slot for _, slot in resting], source, drop_pages=True)
    except InvalidInput:
        mapped = [find_mapped(group, slot) for group, slot in resting]
        found = [weight.detach().clone() for weight in mapped if weight is not None]
        if source is None or len(found) < len(resting):
            raise
        source.refuse_overwritten()
        return found


def find_mapped(group: WeightGroup, slot: ParameterSlot) -> torch.Tensor | None:
    """Return a weight in the mapping that its group's weight store has of its file."""
    store = group.at_rest.store
    return store.mapped.get(slot.spec.name) if isinstance(store, FileStore) and not store.converted else None


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
