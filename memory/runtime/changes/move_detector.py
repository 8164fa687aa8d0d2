"""Detects whether other code moved, converted or replaced the weights of a group ([Note: moved] in `move_guard.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...weights.quantized_leaves import leaves_of
from ..blocks.block_state import BlockState
from ..blocks.read_on_use import ReadOnUse
from ..blocks.weight_group import WeightGroup
from ..blocks.weight_store import FileStore
from ..tensors.absent_weight import AbsentWeight
from ..tensors.encoded_weight import EncodedWeight
from ..tensors.parameter_slots import ParameterSlot
from ..tensors.reported_device import plainly

__all__ = ["MoveDetector", "is_of_another"]

ADDRESS = torch.Tensor.data_ptr
STRIDE = torch.Tensor.stride


class MoveDetector:
    """Detects whether the weights of a group have other memory, strides or dtypes than the group gave them.

    Checks the object and address of every plain parameter, but the dtype of one weight only. That one is preferably
    plain, not quantized; a parameter, not a buffer, which a forward may replace; and of a dtype that ``Module.half``
    changes. For a group whose weight store is in place.
    """

    def __init__(self, group: WeightGroup) -> None:
        self.group = group
        order = sorted(
            (slot.is_quantized, slot.is_buffer, not slot.held.is_floating_point(), index)
            for index, slot in enumerate(group.slots)
            if slot.held.numel()
        )
        self.slot = group.slots[order[0][-1]] if order else None
        self.leaf = group.layout.first_leaf(order[0][-1]) if order else 0
        self.plain = [
            (number, group.layout.first_leaf(number))
            for number, slot in enumerate(group.slots)
            if not slot.is_buffer and not slot.is_quantized and slot.owners and slot.held.numel()
        ]
        """The plain parameters: their index among the slots, and the index of their first leaf."""
        self.buffers = [
            (number, group.layout.first_leaf(number))
            for number, slot in enumerate(group.slots)
            if slot.is_plain_buffer and slot.owners and slot.held.numel()
        ]
        """The same for plain buffers."""

    @property
    def is_at_rest(self) -> bool:
        """Whether the module should hold what the group gave it at rest."""
        return self.group.state is not BlockState.COMPUTING and not self.group.at_rest.has_given_back

    def is_moved(self) -> bool:
        """Whether the weights have other memory or another dtype than the group gave them. For a group at rest."""
        group, slot = self.group, self.slot
        if slot is None or not slot.owners or not self.is_at_rest:
            return False
        held = slot.held
        if group.at_rest.store is None:  # computes in place
            return held.device.type != "cpu"
        slab = group.resting_slab
        if slab is not None:
            address = slab.data_ptr() + group.layout.at_rest.offsets[self.leaf]
        else:
            assert isinstance(group.at_rest.store, FileStore)
            address = group.at_rest.store.address_of(self.leaf)
        leaf = leaves_of(held)[0]
        is_moved = leaf.data_ptr() != address or leaf.dtype is not self.leaf_dtype()
        return is_moved or self.is_replaced() or next(self.find_exchanged(), None) is not None

    def leaf_dtype(self) -> torch.dtype:
        """Return the dtype of what the module holds at rest for the first leaf of the one weight."""
        group, store = self.group, self.group.at_rest.store
        if group.copy is None and isinstance(store, FileStore):
            return store.computing_dtype(self.leaf)
        return group.layout.at_rest.forms[self.leaf].dtype

    def is_replaced(self) -> bool:
        """Whether what the group gave for a plain parameter or buffer lies at another address. For a group at rest."""
        group = self.group
        own = [group.placed.tensors[number] for number, _ in (*self.plain, *self.buffers)]
        with plainly():
            return [*map(ADDRESS, own), *map(STRIDE, own)] != self.expected()

    def find_exchanged(self) -> Iterator[int]:
        """Yield the indices of encoded weights, and of those in a file, whose objects now stand for something else.

        `torch.utils.swap_tensors` makes them so. For a group at rest.
        """
        group = self.group
        in_file = group.at_rest.store.names if isinstance(group.at_rest.store, FileStore) and group.copy is None else ()
        for number, leaf in self.plain if group.encoded or in_file else ():
            slot = group.slots[number]
            held = slot.held if slot.owners else None
            if held is None:
                continue
            if group.at_rest.shows(slot) and not in_file:
                is_other = not (isinstance(held, EncodedWeight) and held.encoded.slot is slot)
            else:
                rests_in_file = bool(in_file) and in_file[leaf] is not None
                is_other = bool(in_file) and (held.is_meta != rests_in_file or is_of_another(held, slot))
            if is_other:
                yield number

    def expected(self) -> list[Any]:
        """Return the addresses that plain parameters and buffers should have (0 for encoded), then their strides."""
        group, slab, every = self.group, self.group.resting_slab, (*self.plain, *self.buffers)
        if slab is not None:
            begin, offsets = slab.data_ptr(), group.layout.at_rest.offsets
            places = [
                0 if group.at_rest.shows(group.slots[number]) else begin + offsets[leaf] for number, leaf in every
            ]
        else:
            assert isinstance(group.at_rest.store, FileStore)
            places = [group.at_rest.store.address_of(leaf) for _, leaf in every]
        return [*places, *(group.at_rest.held_form(number).strides for number, _ in every)]

    def changed_dtype(self) -> torch.dtype | None:
        """Return the dtype to which a weight was converted; else None."""
        group = self.group
        if not self.plain:
            leaf = leaves_of(self.slot.held)[0] if self.slot is not None and self.slot.owners else None
            return None if leaf is None or leaf.dtype is group.layout.at_rest.forms[self.leaf].dtype else leaf.dtype
        for number, _ in self.plain:
            slot, placed = group.slots[number], group.placed.tensors[number]
            if slot.owners and placed.dtype is not group.at_rest.held_form(number).dtype:
                return placed.dtype
        return None

    def changed_shape(self) -> str | None:
        """Describe a plain parameter that got data of another shape, as transformers does to resize embeddings."""
        for number, _ in self.plain:
            slot, form = self.group.slots[number], self.group.at_rest.held_form(number)
            if slot.owners and slot.held.shape != form.shape:
                return f"{slot.spec.name!r} was replaced by a {slot.held.dtype} {list(slot.held.shape)}"
        return None


def is_of_another(given: torch.Tensor, slot: ParameterSlot) -> bool:
    """Whether a tensor without memory stands for another weight that rests in its file."""
    return isinstance(given, AbsentWeight) and isinstance(given.reader, ReadOnUse) and given.reader.slot is not slot
