"""Detects weights that other code moved, converted (``Module.to``, ``Module.half``) or replaced, and restores them.

[Note: moved] torch converts a module's weight in one of three ways: it assigns ``.data`` of the parameter object, puts
another object in its place, or swaps the contents of two objects. Afterwards neither the objects that a group put into
the module nor the group's tensors at rest can be trusted. The group's slabs can, and so can its buffer objects, because
for buffers torch always puts other objects into the module.

A tensor that other code assigned in place of ours is detected by its identity. `weight_swaps.py` tells whether the
assignment is for good.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ..errors import UnsafeState
from ..weights.quantized_leaves import Wrapper, leaves_of
from ..weights.storage_form import AS_STORED
from .encoded_weight import EncodedWeight
from .parameter_slots import ParameterSlot, as_held, repoint
from .read_on_use import ReadOnUse
from .watched_data import AbsentWeight, WatchedTensor, plainly, watch
from .weight_group import BlockState, WeightGroup
from .weight_store import FileStore
from .weight_swaps import Swaps, foreign_tensors

__all__ = ["MoveGuard"]

ADDRESS = torch.Tensor.data_ptr
STRIDE = torch.Tensor.stride
DATA: Any = torch.Tensor.data  # the descriptor
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
        self.witnesses = [Witness(group) for group in self.groups]
        self.swaps = swaps
        swaps.watch(groups)
        self.opened = [group.opened for group in self.groups]
        self.undone: str | None = None
        """The change of weights that was undone and has not been reported yet."""
        self.gone: str | None = None
        """The name of a weight whose place was removed from the module."""
        if after is not None:
            self.undone, self.gone = after.undone, after.gone

    def note_gone(self, name: str) -> None:
        """Refuse forwards from now on, because this weight is not where it came under management."""
        self.gone = name

    def is_moved(self) -> bool:
        """Whether the module holds other weights than the groups gave it. For groups at rest."""
        return not all(group.is_as_placed() for group in self.groups) or any(w.is_moved() for w in self.witnesses)

    @property
    def is_settled(self) -> bool:
        """Whether no place is lent, every undone change is reported, and no window waits for `settle`."""
        has_news = self.undone is not None or self.gone is not None or bool(self.swaps.loans)
        return not has_news and not any(self.opened)

    def plain_weights(self) -> set[int]:
        """Return the ids of the plain parameters that the module holds."""
        return {id(witness.group.slots[number].held) for witness in self.witnesses for number, _ in witness.plain}

    def samples(self) -> set[int]:
        """Return the ids of one plain parameter of each group."""
        return {id(witness.group.slots[witness.plain[0][0]].held) for witness in self.witnesses if witness.plain}

    def put_back(self) -> bool:
        """Undo moves and conversions of weights, and take over assigned values; returns whether anything had changed.

        Checks every weight's address. The caller holds the manager's lock.
        """
        is_laid_out_anew = was_settled = False
        for group, index, held in self.swaps.take_back():
            self.wait()
            layout = group.layout.at_rest
            self.undone = why_not_adopted(group, index, held) or self.undone
            is_laid_out_anew = is_laid_out_anew or group.layout.at_rest is not layout
        for group in self.groups:
            if group.opened:
                was_settled = True
                self.wait()
                dtype = group.settle()
                if dtype is not None:
                    self.undone = f"its weights were changed to {dtype}"
        changed = [group for group in self.groups if not group.is_as_placed()]
        has_changed = bool(changed) or was_settled or bool(self.swaps.loans)
        if changed:
            self.swaps.lend(changed)
            slabs = self.find_slabs()
            # All of them before any weight is written: they may lie in each other's memory.
            foreign = [
                (group, index, place, held if held is None else apart(group, index, held, slabs))
                for group in changed
                for index, place, held in foreign_tensors(group)
            ]
            changed = [
                group for group in changed if self.take_over(group, [each for each in foreign if each[0] is group])
            ]
        if changed or is_laid_out_anew or any(witness.is_moved() for witness in self.witnesses):
            has_changed = True
            self.wait()
            slabs = self.find_slabs()
            swapped = [(witness, witness.find_swapped(slabs)) for witness in self.witnesses]
            for witness, given in swapped:
                self.undone = witness.adopt_swapped(given) or self.undone
            for witness in self.witnesses:  # all of them: a block's buffers are in another group than its weights
                undone = witness.put_back()
                if undone is not None:
                    self.undone = undone
        return has_changed

    def find_slabs(self) -> frozenset[int]:
        """Return the addresses of all memory that weights lie in."""
        slabs = [slab for group in self.groups for slab in (group.host_slab, group.resting_slab) if slab is not None]
        stores = [group.store for group in self.groups if isinstance(group.store, FileStore)]
        kept = [leaf for store in stores for leaf in store.kept.values()]
        return frozenset(memory.untyped_storage().data_ptr() for memory in (*slabs, *kept))

    def take_over(self, group: WeightGroup, foreign: Iterable[Foreign]) -> bool:
        """Save tensors assigned for good to their weights, or undo the assignment; returns whether there were any."""
        found = False
        for _, index, (module, name), held in foreign:
            slot = group.slots[index]
            places = slot.tensors_of(module)
            if slot.is_buffer:  # the next `WeightGroup.put` saves buffers that a forward made
                if held is not None and not held.is_meta and held.device.type == "cpu":
                    self.take_buffer(group, index, (module, name), held)
                continue
            found = True
            if name not in places:
                group.disown(index, (module, name))
                self.gone = slot.spec.name
                continue
            self.wait()
            self.undone = self.undone or why_not_adopted(group, index, held)
            places[name] = group.placed[index]
        return found

    def take_buffer(self, group: WeightGroup, index: int, place: tuple[nn.Module, str], held: torch.Tensor) -> None:
        """Copy a buffer that was assigned in host memory into the group's buffer; move one of another form there."""
        placed, places = group.placed[index], group.slots[index].tensors_of(place[0])
        if placed.device.type in ("cpu", "meta"):
            return
        self.wait()
        if (held.shape, held.dtype) == (placed.shape, placed.dtype):
            with torch.inference_mode(placed.is_inference()), torch.no_grad():
                placed.copy_(held)
            places[place[1]] = placed
        else:
            places[place[1]] = held.to(placed.device)

    def tell_undone(self) -> None:
        """Report a change that was undone, once; a removed weight, each time. Raises `UnsafeState` for both."""
        if self.gone is not None:
            raise UnsafeState(f"{self.owner}: {self.gone!r} is gone from its module: release it before such changes")
        undone = self.take_undone()
        if undone is not None:
            raise UnsafeState(f"{self.owner}: {undone}; the change was undone: release it before such changes")

    def take_undone(self) -> str | None:
        """Return the change that was undone, once; None if there is none."""
        undone, self.undone = self.undone, None
        return undone


class Witness:
    """Detects whether the weights of a group were moved or replaced, and restores them.

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

    def is_moved(self) -> bool:
        """Whether the weights have other memory or another dtype than the group gave them. For a group at rest."""
        group, slot = self.group, self.slot
        if slot is None or not slot.owners or group.state is BlockState.COMPUTING or group.is_whole:
            return False
        held = slot.held
        if group.store is None:  # computes in place
            return held.device.type != "cpu"
        slab = group.resting_slab
        if slab is not None:
            address = slab.data_ptr() + group.layout.at_rest.offsets[self.leaf]
        else:
            assert isinstance(group.store, FileStore)
            address = group.store.address_of(self.leaf)
        leaf = leaves_of(held)[0]
        is_moved = leaf.data_ptr() != address or leaf.dtype is not group.layout.at_rest.forms[self.leaf].dtype
        return is_moved or self.is_replaced() or any(self.find_exchanged())

    def is_replaced(self) -> bool:
        """Whether any plain parameter of the group lies at another address. For a group at rest."""
        group = self.group
        own = [group.placed[number] for number, _ in self.plain]
        with plainly():
            return [*map(ADDRESS, own), *map(STRIDE, own)] != self.addresses()

    def find_exchanged(self) -> Iterator[int]:
        """Yield the indices of weights shown without memory whose objects are plain or stand for another weight.

        `torch.utils.swap_tensors` makes them so. For a group at rest.
        """
        group = self.group
        in_file = group.store.names if isinstance(group.store, FileStore) and group.copy is None else ()
        for number, leaf in self.plain if group.encoded or in_file else ():
            slot = group.slots[number]
            held = slot.held if slot.owners else None
            if held is None:
                continue
            if group.shows(slot):
                is_other = not (isinstance(held, EncodedWeight) and held.encoded.slot is slot)
            else:
                rests_in_file = bool(in_file) and in_file[leaf] is not None
                is_other = bool(in_file) and (held.is_meta != rests_in_file or is_of_another(held, slot))
            if is_other:
                yield number

    def find_swapped(self, slabs: Collection[int]) -> list[tuple[int, torch.Tensor]]:
        """Return by index what the objects of weights without memory were swapped with.

        Plain weights that lie in another weight's memory get memory of their own, before any is written.
        """
        group = self.group
        if group.state is BlockState.COMPUTING or group.is_whole or group.store is None:
            return []
        for number, _ in self.plain:
            held = group.placed[number]
            own = apart(group, number, held, slabs)
            if own is not held:
                with plainly(), torch.inference_mode(held.is_inference()):
                    DATA.__set__(held, own)
        held_at = [(number, group.slots[number].held) for number in self.find_exchanged()]
        return [(number, held.plain() if isinstance(held, EncodedWeight) else held) for number, held in held_at]

    def adopt_swapped(self, swapped: Iterable[tuple[int, torch.Tensor]]) -> str | None:
        """Write what objects of encoded weights were swapped with; returns what was undone, as for those in a file."""
        group, undone = self.group, None
        for number, given in swapped:
            name, slab, form = group.slots[number].spec.name, group.resting_slab, group.held_form(number)
            if slab is None:
                undone = f"{name!r}, which rests in its file, was replaced"
            elif (given.dtype, given.shape) == (form.dtype, form.shape) and not given.is_meta:  # else told below
                undone = why_not_adopted(group, number, given) or undone
        return undone

    def addresses(self) -> list[Any]:
        """Return the addresses of the plain parameters (0 for encoded ones, shown wide), then their strides."""
        return [*self.places(), *(self.group.held_form(number).strides for number, _ in self.plain)]

    def places(self) -> list[int]:
        group, slab = self.group, self.group.resting_slab
        if slab is not None:
            begin, offsets = slab.data_ptr(), group.layout.at_rest.offsets
            return [0 if group.shows(group.slots[number]) else begin + offsets[leaf] for number, leaf in self.plain]
        assert isinstance(group.store, FileStore)
        return [group.store.address_of(leaf) for _, leaf in self.plain]

    def put_back(self) -> str | None:
        """Put the group's own tensors back into the module; returns the change that was undone, for a message.

        Frees the memory that the module held instead. What a forward wrote into buffers stays.
        """
        group = self.group
        if self.slot is None or group.state is BlockState.COMPUTING or group.is_whole:
            return None
        if group.store is None:
            for slot in group.slots:
                if slot.held.device.type != "cpu":
                    repoint(slot, [leaf.detach().to("cpu") for leaf in leaves_of(slot.held)], lasting=True)
            return None
        dtype, undone = self.changed_dtype(), self.changed_shape()
        if dtype is not None:
            undone = f"its weights were changed to {dtype}"
        for slot, placed in zip(group.slots, group.placed, strict=True):
            if slot.is_buffer and slot.held.shape == placed.shape and slot.held.dtype != placed.dtype:
                slot.hold(placed)
        self.adopt()
        group.renew(renewed_resting(group))
        if group.copy is not None:
            views = zip(group.slots, group.copy.views, group.resting_views(group.copy.slab), strict=True)
            before = group.copy.views
            group.copy.take_views([old if slot.is_plain_buffer else new for slot, old, new in views])
            group.note_given(before, group.copy.views)
        group.forget_views()
        group.rest()
        return undone

    def changed_dtype(self) -> torch.dtype | None:
        """Return the dtype to which a weight was converted; None if none was."""
        group = self.group
        if not self.plain:
            leaf = leaves_of(self.slot.held)[0] if self.slot is not None and self.slot.owners else None
            return None if leaf is None or leaf.dtype is group.layout.at_rest.forms[self.leaf].dtype else leaf.dtype
        for number, _ in self.plain:
            slot, placed = group.slots[number], group.placed[number]
            if slot.owners and placed.dtype is not group.held_form(number).dtype:
                return placed.dtype
        return None

    def changed_shape(self) -> str | None:
        """Describe a plain parameter that got data of another shape, as transformers does to resize embeddings."""
        for number, _ in self.plain:
            slot, form = self.group.slots[number], self.group.held_form(number)
            if slot.owners and slot.held.shape != form.shape:
                return f"{slot.spec.name!r} was replaced by a {slot.held.dtype} {list(slot.held.shape)}"
        return None

    def adopt(self) -> None:
        """Write values that were assigned in place of our weights to these, if dtype and shape are the same."""
        group = self.group
        slab = group.resting_slab
        for index, (slot, leaves) in enumerate(zip(group.slots, resting_leaves(group), strict=True)):
            held = slot.held
            is_plain = slot.form is AS_STORED and not slot.is_buffer and not leaves[0].is_meta
            if is_plain and (held.dtype, held.shape) == (leaves[0].dtype, leaves[0].shape) and not held.is_meta:
                with torch.no_grad():
                    given = held.detach().to(leaves[0].device)
                    if given.data_ptr() == leaves[0].data_ptr():
                        if given.stride() == leaves[0].stride():
                            continue
                        given = given.clone()
                    relaid = slab is not None and group.take_strides(index, given)
                    own = resting_leaves(group)[index][0] if relaid else leaves[0]
                    if not torch.equal(given, own):
                        own.copy_(given)


def apart(group: WeightGroup, index: int, held: torch.Tensor, slabs: Collection[int]) -> torch.Tensor:
    """Return what other code gave for a weight, as a copy where it is plain and lies in another weight's memory."""
    if (
        type(held) not in (nn.Parameter, torch.Tensor, WatchedTensor)
        or held.is_meta
        or held.layout is not torch.strided
    ):
        return held
    with plainly(), torch.no_grad():
        if held.untyped_storage().data_ptr() not in slabs:
            return held
        if held.data_ptr() == resting_leaves(group)[index][0].data_ptr():
            return held
        return held.detach().clone()


def resting_leaves(group: WeightGroup) -> list[list[torch.Tensor]]:
    """Return the leaves of each weight where they lie at rest; without memory for those in their file."""
    slab = group.resting_slab
    if slab is not None:
        return group.layout.leaf_views(slab)
    assert isinstance(group.store, FileStore)
    leaves = iter(group.store.resting_leaves())
    return [list(itertools.islice(leaves, count)) for count in group.layout.num_leaves]


def why_not_adopted(group: WeightGroup, index: int, given: torch.Tensor | None) -> str | None:
    """Write a tensor that was assigned to the module to the weight at rest, or return why that is impossible."""
    slot, slab = group.slots[index], group.resting_slab
    name = slot.spec.name
    if given is None:
        return f"{name!r} was removed"
    if isinstance(given, EncodedWeight):
        given = given.plain()
    is_wide = given.dtype is group.wide_dtypes[name] and given.shape == group.placed[index].shape and not given.is_meta
    if slab is not None and group.shows(slot) and is_wide and Wrapper.of(given) is None:
        ours = group.show(slot, group.layout.leaf_views(slab)[index])
        ours.data = given
        ours.encoded.settle()
        return None
    leaves = group.layout.leaf_views(slab)[index] if slab is not None else leaves_of(group.placed[index])
    theirs = leaves_of(given)
    is_alike = [(leaf.dtype, leaf.shape) for leaf in theirs] == [(leaf.dtype, leaf.shape) for leaf in leaves]
    if not is_alike or (Wrapper.of(given) is not None) != slot.is_quantized:
        if given.shape == group.placed[index].shape and given.dtype not in (leaves[0].dtype, group.wide_dtypes[name]):
            return f"its weights were changed to {given.dtype}"
        return f"{name!r}{resting_form(group, index)} was replaced by a {given.dtype} {list(given.shape)}"
    if all(leaf.is_meta for leaf in (*leaves, *theirs)) and not is_of_another(given, slot):
        return None
    if any(leaf.is_meta for leaf in (*leaves, *theirs)):
        return f"{name!r}{resting_form(group, index)} was replaced"
    with torch.no_grad():
        moved = [leaf.detach().to(own.device) for leaf, own in zip(theirs, leaves, strict=True)]
        if slab is not None and group.take_strides(index, moved[0]):
            leaves = group.layout.leaf_views(slab)[index]
            with plainly():
                DATA.__set__(group.placed[index], leaves[0])
        if all(torch.equal(bits_of(leaf), bits_of(own)) for leaf, own in zip(moved, leaves, strict=True)):
            return None
        if slot.encoding is not None:
            return f"{name!r}{resting_form(group, index)} was replaced"
        for leaf, own in zip(moved, leaves, strict=True):
            own.copy_(leaf)
    return None


def is_of_another(given: torch.Tensor, slot: ParameterSlot) -> bool:
    """Whether a tensor without memory stands for another weight that rests in its file."""
    return isinstance(given, AbsentWeight) and isinstance(given.bring, ReadOnUse) and given.bring.slot is not slot


def bits_of(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.reshape(-1).view(torch.uint8)


def resting_form(group: WeightGroup, index: int) -> str:
    """Return, for a message, how a weight rests that other code cannot replace; empty for other weights."""
    if index in group.encoded:
        return f", which rests {group.encoded[index].numbers.rests},"
    return ", which rests in its file," if group.placed[index].is_meta else ""


def renewed_resting(group: WeightGroup) -> list[torch.Tensor]:
    """Return the tensors at rest, showing the weight store again; the same objects where torch allows it."""
    if group.host_slab is not None:
        leaves = iter(group.layout.at_rest.views(group.host_slab))
    else:
        assert isinstance(group.store, FileStore)
        leaves = iter(group.store.resting_leaves())
    resting = []
    for slot, store, count in zip(group.slots, group.resting, group.layout.num_leaves, strict=True):
        own = list(itertools.islice(leaves, count))
        if slot.is_plain_buffer:
            resting.append(store)
        elif group.shows(slot):
            resting.append(group.show(slot, own))
        elif not (slot.is_quantized or own[0].is_meta or store.is_meta) and torch._has_compatible_shallow_copy_type(
            store, own[0]
        ):
            with plainly():
                DATA.__set__(store, own[0])  # assignments of the same memory in another order were copied
            resting.append(watch(store, group.asked, aliases=group.aliases))
        else:
            resting.append(group.watch(slot, as_held(iter(own), slot)))
    return resting
