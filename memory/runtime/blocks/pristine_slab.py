"""A slab of host memory that has weights as their files have them, and could stand for these files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ...transfer.pinned_memory import HostSlab
from ...transfer.slabs import SlabLayout
from ...weights.file_origin import Origin
from ...weights.quantized_leaves import leaves_of
from ...weights.tensor_holders import CAN_COUNT, count_tensors
from .weight_group import WeightGroup
from .weight_store import HostStore, SharedStore

__all__ = ["KnownOrigins", "PristineSlab", "find_origins", "lying_in", "slab_of"]

KnownOrigins: TypeAlias = Mapping[str, tuple[tuple[int, Origin] | None, ...]]
"""For the leaves of a weight, by its name, where each lay in host memory when it was read, and what it was read from;
None for one that no file has as it is."""


@dataclass(frozen=True, eq=False, slots=True)
class PristineSlab:
    """The packed weights of a group, with what each leaf was read from; None for one that no file has as it is."""

    slab: HostSlab
    layout: SlabLayout
    origins: tuple[Origin | None, ...]

    @property
    def num_bytes(self) -> int:
        return self.slab.data.numel()

    @property
    def file_bytes(self) -> int:
        """The bytes of it that stand for bytes of files."""
        return sum(
            form.num_bytes for form, origin in zip(self.layout.forms, self.origins, strict=True) if origin is not None
        )

    def weights(self) -> Iterator[tuple[Origin, torch.Tensor]]:
        """Yield the leaves that files have, as views: what is written to them is written to the slab."""
        for origin, view in zip(self.origins, self.layout.views(self.slab.data), strict=True):
            if origin is not None:
                yield origin, view

    def is_unused(self) -> bool:
        """Whether no tensor but the slab itself has any of this memory."""
        return count_tensors(self.slab.data) == 1 and not self.slab.has_pieces()

    def is_viewed(self) -> bool:
        """Whether tensors are known to have some of this memory, which stays as long as they do."""
        return CAN_COUNT and count_tensors(self.slab.data) > 1

    def holds(self, group: WeightGroup) -> bool:
        """Whether a group's weights lie in the slab as they would be packed, and no other tensors do.

        Some may lie elsewhere, such as buffers, which are made anew with each model: there is room for them.
        """
        leaves = [leaf for slot in group.slots for leaf in leaves_of(slot.held)]
        if group.encoded or group.layout.at_rest != self.layout or len(leaves) != len(self.layout.offsets):
            return False
        if not all(leaf.device.type == "cpu" for leaf in leaves):
            return False
        begin = self.slab.data.data_ptr()
        there = [leaf.data_ptr() == begin + offset for leaf, offset in zip(leaves, self.layout.offsets, strict=True)]
        num_leaves = len({id(leaf) for leaf, is_there in zip(leaves, there, strict=True) if is_there})
        return num_leaves > 0 and count_tensors(self.slab.data) == 1 + num_leaves and not self.slab.has_pieces()


def lying_in(
    groups: Iterable[WeightGroup], filled: Sequence[PristineSlab], pinned: Collection[str]
) -> dict[WeightGroup, HostSlab]:
    """Return which groups lie in one of these slabs as they would be packed, page-locked or not as they are to be.

    An arena counts with all its slabs, or not at all: it stays locked as long as one of them is used.

    Args:
        pinned: the names of the groups that are to be page-locked.
    """
    by_address = {each.slab.data.data_ptr() + offset: each for each in filled for offset in each.layout.offsets}
    found: dict[WeightGroup, HostSlab] = {}
    for group in groups if by_address else ():
        leaves = (leaf for slot in group.slots for leaf in leaves_of(slot.held) if not leaf.is_meta)
        slab = next((by_address[at] for leaf in leaves if (at := leaf.data_ptr()) in by_address), None)
        if slab is not None and (slab.slab.lock is not None) == (group.name in pinned) and slab.holds(group):
            found[group] = slab.slab
    taken = Counter[int]()
    for host in found.values():
        taken[id(host.lock)] += host.data.numel()
    return {
        group: host for group, host in found.items() if not host.lock or taken[id(host.lock)] == host.lock.slab_bytes
    }


def find_origins(group: WeightGroup, known: KnownOrigins) -> tuple[Origin | None, ...]:
    """Return what the leaves of a group that is about to be packed were read from, if they lie where they were read to.

    Not for buffers, which forwards change, nor for encoded weights, whose leaves are not in the file.
    """
    found: list[Origin | None] = []
    for index, slot in enumerate(group.slots):
        leaves = leaves_of(slot.held)
        origins: Sequence[tuple[int, Origin] | None] = known.get(slot.spec.name, ())
        if slot.is_buffer or index in group.encoded or len(origins) != len(leaves):
            found += [None] * group.layout.num_leaves[index]
            continue
        for leaf, one in zip(leaves, origins, strict=True):
            is_same = one is not None and leaf.data_ptr() == one[0] and one[1].is_form_of(leaf)
            found.append(one[1] if one is not None and is_same else None)
    return tuple(found)


def slab_of(group: WeightGroup) -> PristineSlab | None:
    """Return a group's slab if files have weights of it; the caller knows that nothing was written to it."""
    store, origins = group.at_rest.store, group.at_rest.origins
    if not isinstance(store, HostStore) or isinstance(store, SharedStore) or group.encoded or not any(origins):
        return None
    return PristineSlab(store.memory, group.layout.at_rest, origins)
