"""Weights that were moved, converted (``Module.to``, ``Module.half``) or replaced from outside: seen and put back.

[Note: moved] torch gives a converted weight to its module in one of three ways: it points the parameter object that is
there to other memory, puts another object in its place, or swaps the insides of two. So neither the objects that a
unit put into the module nor those that are its masters can be relied on afterwards; its slabs can, and its buffers'
objects, of which the module always gets others.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence

import torch

from .device_copy import Known
from .entries import as_held, repoint
from .errors import UnsafeState
from .leaves import leaves_of
from .masters import FileMaster
from .residency import BlockState, Unit
from .watched import watch

__all__ = ["MoveGuard"]

ADDRESS = torch.Tensor.data_ptr


class MoveGuard:
    """Puts the weights of a component back, and tells who changed their dtype. For units whose masters are in place.

    Args:
        wait: waits for the copies that are under way.
    """

    def __init__(self, owner: str, units: Sequence[Unit], *, wait: Callable[[], None]) -> None:
        self.owner = owner
        self.wait = wait
        self.witnesses = [Witness(unit) for unit in units]
        self.changed_dtype: torch.dtype | None = None
        """What somebody changed the weights to, and was not told yet that it was taken back."""

    def put_back(self) -> None:
        """Undo what was done to the weights, and keep what was given instead. Looks at every weight's address.

        The caller holds the manager's lock.
        """
        if any(witness.is_moved() for witness in self.witnesses):
            self.wait()
            for witness in self.witnesses:  # a block's buffers are in another unit than its weights
                self.changed_dtype = witness.put_back() or self.changed_dtype

    def refuse_changed_dtype(self) -> None:
        """Tell, once, whoever changed the dtype of the weights. Raises `UnsafeState`."""
        if self.changed_dtype is not None:
            dtype, self.changed_dtype = self.changed_dtype, None
            raise UnsafeState(
                f"{self.owner}: its weights were changed to {dtype}, which has been undone: "
                "release it before changing its dtype"
            )


class Witness:
    """Tells whether the weights of a unit were moved or replaced, and puts them all back.

    Every plain parameter tells by its object and its address. For their dtype stands one: rather a plain one than a
    quantized one, a parameter than a buffer, which a forward may replace, and one that ``Module.half`` changes. For a
    unit whose masters are in place.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        order = sorted(
            (entry.wrapper is not None, entry.is_buffer, not entry.held.is_floating_point(), index)
            for index, entry in enumerate(unit.entries)
            if entry.held.numel()
        )
        self.entry = unit.entries[order[0][-1]] if order else None
        self.leaf = sum(unit.num_leaves[: order[0][-1]]) if order else 0
        self.plain = [
            (number, sum(unit.num_leaves[:number]), *entry.owners[0])
            for number, entry in enumerate(unit.entries)
            if not entry.is_buffer and entry.wrapper is None and entry.owners and entry.held.numel()
        ]
        """The plain parameters: their place among the entries and the leaves, and who holds them."""
        self.known: tuple[object, Known] = None, ([], [])
        """Those of the masters."""

    def is_moved(self) -> bool:
        """Whether the module has other memory or another dtype than the unit, while that rests, gave it."""
        unit, entry = self.unit, self.entry
        if entry is None or not entry.owners or unit.state is BlockState.COMPUTING:
            return False
        held = entry.held
        if unit.master is None:  # computes in place
            return held.device.type != "cpu"
        slab = unit.resting_slab
        if slab is not None:
            address = slab.data_ptr() + unit.layout.offsets[self.leaf]
        else:
            assert isinstance(unit.master, FileMaster)
            address = unit.master.address_of(self.leaf)
        leaf = held if entry.wrapper is None else leaves_of(held)[0]
        is_moved = leaf.data_ptr() != address or leaf.dtype is not unit.layout.forms[self.leaf].dtype
        return is_moved or self.is_replaced()

    def is_replaced(self) -> bool:
        """Whether any plain parameter is another object than the unit, while that rests, gave, or lies elsewhere."""
        unit = self.unit
        placed, (own, addresses) = unit.copy.known if unit.copy is not None else self.known
        if placed is not unit.placed:
            own, addresses = [unit.placed[number] for number, *_ in self.plain], self.addresses()
            if unit.copy is not None:
                unit.copy.known = unit.placed, (own, addresses)  # gone with the copy, whose memory they keep
            else:
                self.known = unit.placed, (own, addresses)
        held = [module._parameters[name] for _, _, module, name in self.plain]
        return any(map(operator.is_not, held, own)) or list(map(ADDRESS, own)) != addresses

    def addresses(self) -> list[int]:
        """Return where the plain parameters lie while the unit rests."""
        unit, slab = self.unit, self.unit.resting_slab
        if slab is not None:
            return [slab.data_ptr() + unit.layout.offsets[leaf] for _, leaf, *_ in self.plain]
        assert isinstance(unit.master, FileMaster)
        return [unit.master.address_of(leaf) for _, leaf, *_ in self.plain]

    def put_back(self) -> torch.dtype | None:
        """Let the module hold the unit's own tensors again; returns the dtype that its weights had been changed to.

        The memory that it held instead is free then. What a forward wrote into buffers stays.
        """
        unit = self.unit
        if self.entry is None or unit.state is BlockState.COMPUTING:
            return None
        if unit.master is None:
            for entry in unit.entries:
                if entry.held.device.type != "cpu":
                    repoint(entry, [leaf.detach().to("cpu") for leaf in leaves_of(entry.held)], lasting=True)
            return None
        dtype = self.changed_dtype()
        for entry, placed in zip(unit.entries, unit.placed, strict=True):
            if entry.is_buffer and entry.held.shape == placed.shape and entry.held.dtype != placed.dtype:
                entry.hold(placed)
        self.adopt()
        unit.renew(renewed_masters(unit))
        if unit.copy is not None:
            views = zip(unit.entries, unit.copy.views, unit.held_views(unit.copy.slab), strict=True)
            unit.copy.views = [old if entry.is_plain_buffer else new for entry, old, new in views]
        unit.forget_views()
        unit.rest()
        self.known = None, ([], [])  # perhaps objects that lie elsewhere now
        return dtype

    def changed_dtype(self) -> torch.dtype | None:
        """Return what the dtype of a weight was changed to."""
        unit = self.unit
        leaf = leaves_of(self.entry.held)[0] if self.entry is not None else None
        if leaf is not None and leaf.dtype is not unit.layout.forms[self.leaf].dtype:
            return leaf.dtype
        for _, place, module, name in self.plain:
            held = module._parameters[name]
            if held is not None and held.dtype is not unit.layout.forms[place].dtype:
                return held.dtype
        return None

    def adopt(self) -> None:
        """Take over weights that somebody gave the module instead of ours, where they have their dtype and shape."""
        unit = self.unit
        slab = unit.resting_slab
        if slab is None:
            return
        for entry, leaves in zip(unit.entries, unit.leaf_views(slab), strict=True):
            held = entry.held
            is_plain = entry.wrapper is None and entry.scale is None and not entry.is_buffer
            if is_plain and (held.dtype, held.shape) == (leaves[0].dtype, leaves[0].shape) and not held.is_meta:
                with torch.no_grad():
                    given = held.detach().to(slab.device)
                    if given.data_ptr() != leaves[0].data_ptr() and not torch.equal(given, leaves[0]):
                        leaves[0].copy_(given)


def renewed_masters(unit: Unit) -> list[torch.Tensor]:
    """Return masters that show what they are made of, as the objects that they are where torch allows that."""
    if unit.host_slab is not None:
        leaves = iter(unit.layout.views(unit.host_slab))
    else:
        assert isinstance(unit.master, FileMaster)
        leaves = iter(unit.master.resting_leaves())
    masters = []
    for entry, master, count in zip(unit.entries, unit.masters, unit.num_leaves, strict=True):
        own = list(itertools.islice(leaves, count))
        if entry.is_plain_buffer:
            masters.append(master)
        elif entry.wrapper is None and torch._has_compatible_shallow_copy_type(master, own[0]):
            master.data = own[0]
            masters.append(watch(master))
        else:
            masters.append(watch(as_held(iter(own), entry)))
    return masters
