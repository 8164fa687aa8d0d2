"""Weights that were moved, converted (``Module.to``, ``Module.half``) or replaced from outside: seen and put back.

[Note: moved] torch gives a converted weight to its module in one of three ways: it points the parameter object that is
there to other memory, puts another object in its place, or swaps the insides of two. So neither the objects that a
unit put into the module nor those that are its masters can be relied on afterwards; its slabs can, and its buffers'
objects, of which the module always gets others.

A tensor that was assigned to the module in place of ours is seen by its identity, each of them; whether that is for
good, `weight_swaps.py` tells.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UnsafeState
from ..weights.fp8 import FP8
from ..weights.quantized import Wrapper, leaves_of
from .eight_bit_weight import EightBitWeight
from .parameter_slots import as_held, repoint
from .watched_data import plainly, watch
from .weight_group import BlockState, WeightGroup
from .weight_store import FileStore
from .weight_swaps import Swaps, foreign_tensors

__all__ = ["MoveGuard"]

ADDRESS = torch.Tensor.data_ptr
STRIDE = torch.Tensor.stride
DATA: Any = torch.Tensor.data  # the descriptor


class MoveGuard:
    """Puts the weights of a component back, and tells who changed their dtype. For units whose masters are in place.

    Args:
        units: with the device on which each computes.
        wait: waits for the copies that are under way.
        after: that of the units before some of them were replaced.
    """

    def __init__(
        self,
        owner: str,
        units: Sequence[tuple[WeightGroup, torch.device]],
        *,
        wait: Callable[[], None],
        after: MoveGuard | None = None,
    ) -> None:
        self.owner = owner
        self.wait = wait
        self.units = [unit for unit, _ in units]
        self.witnesses = [Witness(unit) for unit in self.units]
        self.swaps = Swaps(units)
        self.undone: str | None = None
        """What was done to the weights and taken back, until it is told."""
        self.gone: str | None = None
        """A weight that its module has no place for any more."""
        if after is not None:
            self.undone, self.gone = after.undone, after.gone
            self.swaps.loans = [loan for loan in after.swaps.loans if loan.unit in self.swaps.devices]

    def is_moved(self) -> bool:
        """Whether the module has other weights than the units, while those rest, gave it."""
        return not all(unit.is_as_placed() for unit in self.units) or any(w.is_moved() for w in self.witnesses)

    def put_back(self) -> None:
        """Undo what was done to the weights, and keep what was given instead. Looks at every weight's address.

        The caller holds the manager's lock.
        """
        is_laid_out_anew = False
        for unit, index, held in self.swaps.take_back():
            self.wait()
            layout = unit.layout
            self.undone = why_not_adopted(unit, index, held) or self.undone
            is_laid_out_anew = is_laid_out_anew or unit.layout is not layout
        for unit in self.units:
            if unit.opened:
                self.wait()
                dtype = unit.settle()
                if dtype is not None:
                    self.undone = f"its weights were changed to {dtype}"
        changed = [unit for unit in self.units if not unit.is_as_placed()]
        if changed:
            self.swaps.lend(changed)
            changed = [unit for unit in changed if self.take_over(unit)]
        if changed or is_laid_out_anew or any(witness.is_moved() for witness in self.witnesses):
            self.wait()
            for witness in self.witnesses:  # a block's buffers are in another unit than its weights
                undone = witness.put_back()
                if undone is not None:
                    self.undone = undone

    def take_over(self, unit: WeightGroup) -> bool:
        """Make what was assigned for good the new version of its weight, or undo it; returns whether there was any."""
        found = False
        for index, (module, name), held in list(foreign_tensors(unit)):
            entry = unit.entries[index]
            slots = entry.slots_of(module)
            if entry.is_buffer:  # the next `WeightGroup.put` takes over what a forward made
                if held is not None and not held.is_meta and held.device.type == "cpu":
                    self.take_buffer(unit, index, (module, name), held)
                continue
            found = True
            if name not in slots:
                unit.disown(index, (module, name))
                self.gone = entry.spec.name
                continue
            self.wait()
            self.undone = self.undone or why_not_adopted(unit, index, held)
            slots[name] = unit.placed[index]
        return found

    def take_buffer(self, unit: WeightGroup, index: int, place: tuple[nn.Module, str], held: torch.Tensor) -> None:
        """Copy a buffer that was assigned in host memory into its unit's; of another form, move it to the device."""
        placed, slots = unit.placed[index], unit.entries[index].slots_of(place[0])
        if placed.device.type in ("cpu", "meta"):
            return
        self.wait()
        if (held.shape, held.dtype) == (placed.shape, placed.dtype):
            with torch.inference_mode(placed.is_inference()), torch.no_grad():
                placed.copy_(held)
            slots[place[1]] = placed
        else:
            slots[place[1]] = held.to(placed.device)

    def tell_undone(self) -> None:
        """Tell, once, what was done to the weights and undone; every time, what cannot be. Raises `UnsafeState`."""
        if self.gone is not None:
            raise UnsafeState(f"{self.owner}: {self.gone!r} is gone from its module: release it before you change that")
        if self.undone is not None:
            undone, self.undone = self.undone, None
            raise UnsafeState(f"{self.owner}: {undone}, which has been undone: release it before that")


class Witness:
    """Tells whether the weights of a unit were moved or replaced, and puts them all back.

    Every plain parameter tells by its object and its address. For their dtype stands one: rather a plain one than a
    quantized one, a parameter than a buffer, which a forward may replace, and one that ``Module.half`` changes. For a
    unit whose masters are in place.
    """

    def __init__(self, unit: WeightGroup) -> None:
        self.unit = unit
        order = sorted(
            (entry.wrapper is not None, entry.is_buffer, not entry.held.is_floating_point(), index)
            for index, entry in enumerate(unit.entries)
            if entry.held.numel()
        )
        self.entry = unit.entries[order[0][-1]] if order else None
        self.leaf = sum(unit.num_leaves[: order[0][-1]]) if order else 0
        self.plain = [
            (number, sum(unit.num_leaves[:number]))
            for number, entry in enumerate(unit.entries)
            if not entry.is_buffer and entry.wrapper is None and entry.owners and entry.held.numel()
        ]
        """The plain parameters: their place among the entries and among the leaves."""

    def is_moved(self) -> bool:
        """Whether the module has other memory or another dtype than the unit, while that rests, gave it."""
        unit, entry = self.unit, self.entry
        if entry is None or not entry.owners or unit.state is BlockState.COMPUTING or unit.is_whole:
            return False
        held = entry.held
        if unit.master is None:  # computes in place
            return held.device.type != "cpu"
        slab = unit.resting_slab
        if slab is not None:
            address = slab.data_ptr() + unit.layout.offsets[self.leaf]
        else:
            assert isinstance(unit.master, FileStore)
            address = unit.master.address_of(self.leaf)
        leaf = leaves_of(held)[0]
        is_moved = leaf.data_ptr() != address or leaf.dtype is not unit.layout.forms[self.leaf].dtype
        return is_moved or self.is_replaced()

    def is_replaced(self) -> bool:
        """Whether any plain parameter that the unit, while it rests, gave lies elsewhere."""
        unit = self.unit
        placed, (own, addresses) = unit.copy.known if unit.copy is not None else unit.known
        if placed is not unit.placed:
            own, addresses = [unit.placed[number] for number, _ in self.plain], self.addresses()
            if unit.copy is not None:
                unit.copy.known = unit.placed, (own, addresses)  # gone with the copy, whose memory they keep
            else:
                unit.known = unit.placed, (own, addresses)
        with plainly():
            return [*map(ADDRESS, own), *map(STRIDE, own)] != addresses

    def addresses(self) -> list[Any]:
        """Return where the plain parameters rest, 0 for eight bits that are shown wide; then their strides."""
        return [*self.places(), *(self.unit.layout.forms[leaf].strides for _, leaf in self.plain)]

    def places(self) -> list[int]:
        unit, slab = self.unit, self.unit.resting_slab
        if slab is not None:
            begin, offsets = slab.data_ptr(), unit.layout.offsets
            return [0 if unit.shows(unit.entries[number]) else begin + offsets[leaf] for number, leaf in self.plain]
        assert isinstance(unit.master, FileStore)
        return [unit.master.address_of(leaf) for _, leaf in self.plain]

    def put_back(self) -> str | None:
        """Put the unit's own tensors back into the module; returns which change to them was undone.

        The memory that it held instead is free then. What a forward wrote into buffers stays.
        """
        unit = self.unit
        if self.entry is None or unit.state is BlockState.COMPUTING or unit.is_whole:
            return None
        if unit.master is None:
            for entry in unit.entries:
                if entry.held.device.type != "cpu":
                    repoint(entry, [leaf.detach().to("cpu") for leaf in leaves_of(entry.held)], lasting=True)
            return None
        dtype, undone = self.changed_dtype(), self.changed_shape()
        if dtype is not None:
            undone = f"its weights were changed to {dtype}"
        for entry, placed in zip(unit.entries, unit.placed, strict=True):
            if entry.is_buffer and entry.held.shape == placed.shape and entry.held.dtype != placed.dtype:
                entry.hold(placed)
        self.adopt()
        unit.renew(renewed_masters(unit))
        if unit.copy is not None:
            views = zip(unit.entries, unit.copy.views, unit.resting_views(unit.copy.slab), strict=True)
            before = unit.copy.views
            unit.copy.views = [old if entry.is_plain_buffer else new for entry, old, new in views]
            unit.note_given(before, unit.copy.views)
        unit.forget_views()
        unit.rest()
        unit.known = None, ([], [])  # perhaps objects that lie elsewhere now
        return undone

    def changed_dtype(self) -> torch.dtype | None:
        """Return what the dtype of a weight was changed to."""
        unit = self.unit
        if not self.plain:
            leaf = leaves_of(self.entry.held)[0] if self.entry is not None and self.entry.owners else None
            return None if leaf is None or leaf.dtype is unit.layout.forms[self.leaf].dtype else leaf.dtype
        for number, place in self.plain:
            entry, placed = unit.entries[number], unit.placed[number]
            own = unit.wide_dtypes[entry.spec.name] if unit.shows(entry) else unit.layout.forms[place].dtype
            if entry.owners and placed.dtype is not own:
                return placed.dtype
        return None

    def changed_shape(self) -> str | None:
        """Describe a plain parameter that got data of another shape, as when transformers resizes embeddings."""
        for number, place in self.plain:
            entry, form = self.unit.entries[number], self.unit.layout.forms[place]
            if entry.owners and entry.held.shape != form.shape:
                return f"{entry.spec.name!r} was replaced by a {entry.held.dtype} {list(entry.held.shape)}"
        return None

    def adopt(self) -> None:
        """Take over weights that were assigned to the module in place of ours, if dtype and shape are the same."""
        unit = self.unit
        slab = unit.resting_slab
        if slab is None:
            return
        for index, (entry, leaves) in enumerate(zip(unit.entries, unit.leaf_views(slab), strict=True)):
            held = entry.held
            is_plain = entry.wrapper is None and entry.scale is None and not entry.is_buffer
            if is_plain and (held.dtype, held.shape) == (leaves[0].dtype, leaves[0].shape) and not held.is_meta:
                with torch.no_grad():
                    given = held.detach().to(slab.device)
                    if given.data_ptr() == leaves[0].data_ptr():
                        if given.stride() == leaves[0].stride():
                            continue
                        given = given.clone()
                    own = unit.leaf_views(slab)[index][0] if unit.take_strides(index, given) else leaves[0]
                    if not torch.equal(given, own):
                        own.copy_(given)


def why_not_adopted(unit: WeightGroup, index: int, given: torch.Tensor | None) -> str | None:
    """Write a tensor that was assigned to the module over the weight where it rests, or return why that cannot be."""
    entry, slab = unit.entries[index], unit.resting_slab
    name = entry.spec.name
    if given is None:
        return f"{name!r} was removed"
    if isinstance(given, EightBitWeight):
        given = given.plain()
    is_wide = given.dtype is unit.wide_dtypes[name] and given.shape == unit.placed[index].shape and not given.is_meta
    if slab is not None and unit.shows(entry) and is_wide and Wrapper.of(given) is None:
        ours = unit.show(entry, unit.leaf_views(slab)[index][0])
        ours.data = given
        ours.bits.settle()
        return None
    leaves = unit.leaf_views(slab)[index] if slab is not None else leaves_of(unit.placed[index])
    theirs = leaves_of(given)
    is_alike = [(leaf.dtype, leaf.shape) for leaf in theirs] == [(leaf.dtype, leaf.shape) for leaf in leaves]
    if not is_alike or (Wrapper.of(given) is None) != (entry.wrapper is None):
        if given.shape == unit.placed[index].shape and given.dtype not in (FP8, unit.wide_dtypes[name]):
            return f"its weights were changed to {given.dtype}"
        return f"{name!r}{resting_form(unit, index)} was replaced by a {given.dtype} {list(given.shape)}"
    if all(leaf.is_meta for leaf in (*leaves, *theirs)):
        return None
    if any(leaf.is_meta for leaf in (*leaves, *theirs)):
        return f"{name!r}{resting_form(unit, index)} was replaced"
    with torch.no_grad():
        moved = [leaf.detach().to(own.device) for leaf, own in zip(theirs, leaves, strict=True)]
        if slab is not None and unit.take_strides(index, moved[0]):
            leaves = unit.leaf_views(slab)[index]
            with plainly():
                DATA.__set__(unit.placed[index], leaves[0])
        if all(torch.equal(bits_of(leaf), bits_of(own)) for leaf, own in zip(moved, leaves, strict=True)):
            return None
        if entry.scale is not None:
            return f"{name!r}{resting_form(unit, index)} was replaced"
        for leaf, own in zip(moved, leaves, strict=True):
            own.copy_(leaf)
    return None


def bits_of(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.reshape(-1).view(torch.uint8)


def resting_form(unit: WeightGroup, index: int) -> str:
    """Return, for people, where a weight rests that others cannot replace where it is."""
    if unit.entries[index].scale is not None:
        return ", which rests in eight bits,"
    return ", which rests in its file," if unit.placed[index].is_meta else ""


def renewed_masters(unit: WeightGroup) -> list[torch.Tensor]:
    """Return masters that show what they are made of, as the objects that they are where torch allows that."""
    if unit.host_slab is not None:
        leaves = iter(unit.layout.views(unit.host_slab))
    else:
        assert isinstance(unit.master, FileStore)
        leaves = iter(unit.master.resting_leaves())
    masters = []
    for entry, master, count in zip(unit.entries, unit.masters, unit.num_leaves, strict=True):
        own = list(itertools.islice(leaves, count))
        if entry.is_plain_buffer:
            masters.append(master)
        elif unit.shows(entry):
            masters.append(unit.show(entry, own[0]))
        elif entry.wrapper is None and not own[0].is_meta and torch._has_compatible_shallow_copy_type(master, own[0]):
            with plainly():
                DATA.__set__(master, own[0])  # others' assignments of the same memory in another order are copied
            masters.append(watch(master, unit.asked, aliases=unit.aliases))
        else:
            masters.append(unit.watch(entry, as_held(iter(own), entry)))
    return masters
