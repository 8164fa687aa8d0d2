"""Restores weights that other code moved, converted (``Module.to``, ``Module.half``) or replaced, and reports it.

[Note: moved] torch converts a module's weight in one of three ways: it assigns ``.data`` of the parameter object, puts
another object in its place, or swaps the contents of two objects. Afterwards neither the objects that a group put into
the module nor the group's tensors at rest can be trusted. The group's slabs can, and so can its buffer objects, because
for buffers torch always puts other objects into the module.

A tensor that other code assigned in place of ours is detected by its identity. `weight_swaps.py` tells whether the
assignment is for good.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ...errors import UnsafeState
from ...weights.quantized_leaves import leaves_of
from ..blocks.weight_group import WeightGroup
from ..blocks.weight_store import FileStore
from ..blocks.weight_swaps import Swaps, foreign_tensors
from ..tensors.encoded_weight import EncodedWeight
from ..tensors.parameter_slots import as_held, repoint
from ..tensors.reported_device import plainly
from ..tensors.watched_data import watch
from .adopted_values import (
    adopt_at_rest,
    adopt_data,
    adopt_swapped,
    apart,
    bits_of,
    find_swapped,
    leave_reformed,
    separate_shared,
    show_at_rest,
    why_not_adopted,
)
from .converted_weights import ConvertedWeight, find_all_converted, put_converted_aside
from .move_detector import MoveDetector

__all__ = ["GONE", "MoveGuard"]

DATA: Any = torch.Tensor.data  # the descriptor
GONE = "release it before such changes, or call reprofile() after them"
"""The remedies where a weight is gone from its place."""
Foreign: TypeAlias = tuple[WeightGroup, int, tuple[nn.Module, str], torch.Tensor | None]
"""A place that does not hold its group's tensor: the index of the weight, the place, and what is there."""


class MoveGuard:
    """Restores the weights of a component, and reports changes that it undid.

    Args:
        groups: each group, with its weight store in place, and the device on which it computes.
        swaps: the places that hold tensors of others.
        wait: waits for the copies that are under way.
        after: the guard of the groups before some of them were replaced.
    """

    def __init__(
        self,
        owner: str,
        groups: Sequence[tuple[WeightGroup, torch.device]],
        swaps: Swaps,
        *,
        wait: Callable[[], None],
        after: MoveGuard | None = None,
    ) -> None:
        self.owner = owner
        self.wait = wait
        self.groups = [group for group, _ in groups]
        self.detectors = [MoveDetector(group) for group in self.groups]
        self.swaps = swaps
        swaps.watch(groups)
        self.opened = [group.at_rest.opened for group in self.groups]
        self.written = [group.at_rest.aliases.written for group in self.groups]
        self.undone: str | None = None
        """The change of weights that was undone and has not been reported yet."""
        self.gone: str | None = None
        """The name of a weight whose place was removed from the module."""
        self.converted: list[ConvertedWeight] = []
        """The converted weights that `put_back` put aside; `take_converted` returns them."""
        if after is not None:
            self.undone, self.gone = after.undone, after.gone

    def note_gone(self, name: str) -> None:
        """Refuse forwards from now on, because this weight is not where it came under management."""
        self.gone = name

    def is_moved(self) -> bool:
        """Whether the module holds other weights than the groups gave it. For groups at rest."""
        return not all(group.placed.is_as_placed() for group in self.groups) or any(
            detector.is_moved() for detector in self.detectors
        )

    @property
    def is_settled(self) -> bool:
        """Whether no place is lent, every undone change is reported, and no write to a weight at rest waits."""
        has_news = self.undone is not None or self.gone is not None or bool(self.swaps.loans)
        return not has_news and not any(self.opened) and not any(self.written)

    def plain_weights(self) -> set[int]:
        """Return the ids of the plain parameters that the module holds."""
        return {id(detector.group.slots[number].held) for detector in self.detectors for number, _ in detector.plain}

    def samples(self) -> set[int]:
        """Return the ids of one plain parameter of each group."""
        return {id(detector.group.slots[detector.plain[0][0]].held) for detector in self.detectors if detector.plain}

    def has_converted(self) -> bool:
        """Whether the module holds weights of another dtype or shape than the groups gave it. For groups at rest."""
        return bool(find_all_converted(self.groups))

    def take_converted(self) -> list[ConvertedWeight]:
        """Return the converted weights that `put_back` put aside, once."""
        converted, self.converted = self.converted, []
        return converted

    def put_back(self, *, keeps_converted: bool = False) -> bool:
        """Undo moves and conversions of weights, and take over assigned values; returns whether anything had changed.

        Checks every weight's address. The caller holds the manager's lock.

        Args:
            keeps_converted: put converted and resized weights aside for `take_converted`, instead of reporting them.
        """
        is_laid_out_anew = was_settled = False
        for group in self.groups:
            may_be_older = group.copy is not None and bool(group.at_rest.opened or group.at_rest.aliases.written)
            group.at_rest.aliases.written.clear()
            if group.at_rest.opened:
                was_settled = True
                self.wait()
                group.at_rest.settle()
            if may_be_older:
                self.undone = self.refresh(group) or self.undone
        for group, index, held in self.swaps.take_back():
            self.wait()
            layout = group.layout.at_rest
            self.undone = why_not_adopted(group, index, held) or self.undone
            is_laid_out_anew = is_laid_out_anew or group.layout.at_rest is not layout
        changed = [group for group in self.groups if not group.placed.is_as_placed()]
        has_changed = bool(changed) or was_settled or bool(self.swaps.loans)
        if changed:
            self.swaps.lend(changed)
        converted = find_all_converted(self.groups) if keeps_converted else []
        if converted:
            self.wait()
            self.converted += put_converted_aside(converted)
            changed = [group for group in self.groups if not group.placed.is_as_placed()]
        given_up = {id(each.group) for each in converted}
        if changed:
            slabs = self.find_slabs()
            given = [(group, *each) for group in changed for each in foreign_tensors(group)]
            given = self.undo_untying(given)
            # All of them before any weight is written: they may lie in each other's memory.
            foreign = [
                (group, index, place, held if held is None else apart(group, index, held, slabs))
                for group, index, place, held in given
            ]
            changed = [
                group for group in changed if self.take_over(group, [each for each in foreign if each[0] is group])
            ]
        if changed or given_up or is_laid_out_anew or any(detector.is_moved() for detector in self.detectors):
            has_changed = True
            self.wait()
            slabs = self.find_slabs()
            for detector in self.detectors:
                leave_reformed(detector)
                separate_shared(detector, slabs)
            for detector, swapped in [(detector, find_swapped(detector)) for detector in self.detectors]:
                self.undone = adopt_swapped(detector.group, swapped) or self.undone
            for detector in self.detectors:  # all of them: a block's buffers are in another group than its weights
                undone = put_back(detector)
                self.undone = self.undone if id(detector.group) in given_up else undone or self.undone
        return has_changed

    def refresh(self, group: WeightGroup) -> str | None:
        """Copy a resident group's weights to the device again if other code wrote to those in host memory.

        Such code has a parameter from the time when the group was not on the device. Returns what was undone.
        """
        copy, host_slab, kept = group.copy, group.host_slab, kept_leaves(group)
        if copy is None or (host_slab is None and not kept) or copy.store_version == group.at_rest.version:
            return None
        if copy.is_written:
            copy.take_store_version(group.at_rest.version)
            return "its weights were changed both on the device and in RAM; the two cannot be merged"
        self.wait()
        if host_slab is None:
            copy.refresh_leaves(kept)
            copy.take_store_version(group.at_rest.version)
            return None
        undone = adopt_at_rest(group)
        group.at_rest.renew(renewed_resting(group))
        copy.refresh(host_slab)
        copy.take_store_version(group.at_rest.version)
        group.forget_views()
        return undone

    def find_slabs(self) -> frozenset[int]:
        """Return the addresses of all memory that weights lie in."""
        slabs = [slab for group in self.groups for slab in (group.host_slab, group.resting_slab) if slab is not None]
        stores = [group.at_rest.store for group in self.groups if isinstance(group.at_rest.store, FileStore)]
        kept = [leaf for store in stores for leaf in store.kept.values()]
        return frozenset(memory.untyped_storage().data_ptr() for memory in (*slabs, *kept))

    def undo_untying(self, given: Sequence[Foreign]) -> list[Foreign]:
        """Undo assignments to some of the places of a tied weight, and return the others: it stays one weight."""
        left: list[Foreign] = []
        for each in given:
            group, index, (module, name), _ = each
            slot = group.slots[index]
            if len(slot.owners) < 2 or slot.is_buffer or not is_untied(group, index):
                left.append(each)
                continue
            undone = f"{slot.spec.name!r} is tied, and was replaced in some of its places only"
            self.undone = self.undone or undone
            slot.tensors_of(module)[name] = group.placed.tensors[index]
        return left

    def take_over(self, group: WeightGroup, foreign: Iterable[Foreign]) -> bool:
        """Save tensors assigned for good to their weights, or undo the assignment; returns whether there were any."""
        found = False
        for _, index, (module, name), held in foreign:
            slot = group.slots[index]
            places = slot.tensors_of(module)
            if slot.is_buffer:
                self.take_buffer(group, index, (module, name), held)
                continue
            found = True
            if name not in places:
                group.placed.disown(index, (module, name))
                self.gone = slot.spec.name
                continue
            self.wait()
            undone, placed = why_not_adopted(group, index, held), group.placed.tensors[index]
            self.undone = self.undone or undone
            if undone is None and not any(slot.tensors_of(part).get(its) is placed for part, its in slot.owners):
                show_at_rest(group, index)  # what was done to our object before it was replaced is over
            places[name] = placed
        return found

    def take_buffer(
        self, group: WeightGroup, index: int, place: tuple[nn.Module, str], held: torch.Tensor | None
    ) -> None:
        """Copy a buffer that was assigned into the group's buffer; one of another form is the module's own."""
        placed, places = group.placed.tensors[index], group.slots[index].tensors_of(place[0])
        if held is None or held.is_meta or placed.is_meta:
            return
        if (held.shape, held.dtype) == (placed.shape, placed.dtype):
            self.wait()
            with torch.inference_mode(placed.is_inference()), torch.no_grad():
                placed.copy_(held)
            places[place[1]] = placed
        elif held.device.type == "cpu" and placed.device.type != "cpu":
            places[place[1]] = held.to(placed.device)
        elif held.shape != placed.shape:
            group.placed.disown(index, place)

    def tell_undone(self) -> None:
        """Report a change that was undone, once; a removed weight, each time. Raises `UnsafeState` for both."""
        if self.gone is not None:
            raise UnsafeState(f"{self.owner}: {self.gone!r} is gone from its module: {GONE}")
        undone = self.take_undone()
        if undone is not None:
            raise UnsafeState(f"{self.owner}: {undone}; the change was undone: release it before such changes")

    def take_undone(self) -> str | None:
        """Return the change that was undone, once; None if there is none."""
        undone, self.undone = self.undone, None
        return undone


def is_untied(group: WeightGroup, index: int) -> bool:
    """Whether the module holds different values in the places of a tied weight."""
    slot = group.slots[index]
    found = {id(held): held for module, name in slot.owners if (held := slot.tensors_of(module).get(name)) is not None}
    first, *others = found.values()
    return any(not has_same_bits(first, other) for other in others)


def has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two weights have the same bits, wherever they are; False where one has no memory."""
    pairs = list(itertools.zip_longest(leaves_of(one), leaves_of(other)))
    if any(a is None or b is None or a.is_meta or b.is_meta or a.dtype is not b.dtype for a, b in pairs):
        return False
    with torch.no_grad():
        return all(
            a.shape == b.shape and torch.equal(bits_of(a.detach().cpu()), bits_of(b.detach().cpu())) for a, b in pairs
        )


def kept_leaves(group: WeightGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the single weights in host memory of a resident group that rests in its file, each with its copy."""
    store, copy = group.at_rest.store, group.copy
    if copy is None or not isinstance(store, FileStore) or not store.kept:
        return []
    slots = [slot for slot, number in zip(group.slots, group.layout.num_leaves, strict=True) for _ in range(number)]
    leaves = group.layout.at_rest.views(copy.slab)
    return [(leaf, leaves[place]) for place, leaf in store.kept.items() if not slots[place].is_plain_buffer]


def put_back(detector: MoveDetector) -> str | None:
    """Put the group's own tensors back into the module; returns the change that was undone, for a message.

    Frees the memory that the module held instead. What a forward wrote into buffers stays.
    """
    group = detector.group
    if detector.slot is None or not detector.is_at_rest:
        return None
    if group.at_rest.store is None:
        for slot in group.slots:
            if slot.held.device.type != "cpu":
                repoint(slot, [leaf.detach().to("cpu") for leaf in leaves_of(slot.held)], lasting=True)
        return None
    dtype, undone = detector.changed_dtype(), detector.changed_shape()
    if dtype is not None:
        undone = f"its weights were changed to {dtype}"
    for slot, placed in zip(group.slots, group.placed.tensors, strict=True):
        if slot.is_buffer and slot.held.shape == placed.shape and slot.held.dtype != placed.dtype:
            slot.hold(placed)
    is_newest = group.copy is not None and group.copy.store_version == group.at_rest.version
    adopt_data(group)
    group.at_rest.renew(renewed_resting(group))
    if group.copy is not None:
        if is_newest:  # the same weights at rest, only other objects
            group.copy.take_store_version(group.at_rest.version)
        before, leaves = group.copy.views, group.layout.leaf_views(group.copy.slab)
        group.copy.take_views([point_to(view, index, leaves[index], group) for index, view in enumerate(before)])
        group.kept.note_replaced(group.slots, before, group.copy.views)
    group.forget_views()
    group.rest()
    return undone


def point_to(view: torch.Tensor, index: int, leaves: Sequence[torch.Tensor], group: WeightGroup) -> torch.Tensor:
    """Point what the module holds of a resident copy to its leaves there; the same object where torch allows it."""
    slot = group.slots[index]
    if group.at_rest.shows(slot):
        shown = group.at_rest.show(index, leaves)
        if isinstance(view, EncodedWeight):
            view.show_as(shown)
            return view
        return shown
    if not slot.is_quantized and torch._has_compatible_shallow_copy_type(view, leaves[0]):
        with torch.inference_mode(view.is_inference()):
            DATA.__set__(view, leaves[0])
        return view
    return as_held(iter(leaves), slot)


def renewed_resting(group: WeightGroup) -> list[torch.Tensor]:
    """Return the tensors at rest, showing the weight store again; the same objects where torch allows it."""
    if group.host_slab is not None:
        leaves = iter(group.layout.at_rest.views(group.host_slab))
    else:
        assert isinstance(group.at_rest.store, FileStore)
        leaves = iter(group.at_rest.store.resting_leaves())
    resting = []
    counts = zip(group.slots, group.at_rest.tensors, group.layout.num_leaves, strict=True)
    for index, (slot, store, count) in enumerate(counts):
        own = list(itertools.islice(leaves, count))
        if slot.is_plain_buffer and store.data_ptr() == own[0].data_ptr():
            resting.append(store)
        elif group.at_rest.shows(slot):
            resting.append(group.at_rest.show(index, own))
        elif not (slot.is_quantized or own[0].is_meta or store.is_meta) and torch._has_compatible_shallow_copy_type(
            store, own[0]
        ):
            with plainly():
                DATA.__set__(store, own[0])  # assignments of the same memory in another order were copied
            resting.append(watch(store, group.at_rest.asked, aliases=group.at_rest.aliases))
        else:
            resting.append(group.at_rest.watch(slot, as_held(iter(own), slot), group))
    return resting
