"""Keeps what a forward wrote to the weights of its block, once the block has computed.

Forwards rarely write to weights, so the usual cost is one check. If something was written the host waits for the
device. What cannot be kept is undone and refused in one line.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import InvalidInput
from ..weights.fp8 import upcast_into
from .computing_parameter import DATA, ComputingWeight
from .eight_bit_weight import stored_leaf
from .parameter_slots import ParameterSlot
from .weight_group import WeightGroup
from .weight_swaps import Swaps, foreign_tensors

__all__ = ["keep_writes"]


def keep_writes(unit: WeightGroup, wait: Callable[[], None], *, host_replaces: bool) -> str | None:
    """Save what was written to a unit while it computed to where it rests; returns what cannot be kept.

    Args:
        wait: waits for the copies that are under way.
        host_replaces: as in `DeviceShare`.
    """
    is_written, refused = take_looked(unit)
    if not host_replaces:
        refused = take_replaced(unit) or refused
    if unit.origin is not None:
        slab, before, scratch, scratch_before = unit.origin
        wide = is_written or (scratch is not None and scratch._version != scratch_before)
        own = unit.copy.slab if unit.copy is not None else unit.host_slab
        if slab is not own and (is_written or slab._version != before):
            wait()
            unit.save_slab(slab)
        if scratch is not None and wide:
            wait()
            refused = save_wide(unit) or refused
    return refused


def take_looked(unit: WeightGroup) -> tuple[bool, str | None]:
    """Check the weights whose ``.data`` was accessed; returns whether any was written to, and what cannot be kept.

    Holds no reference to them when it returns: what else holds them is checked next.
    """
    is_written, refused = False, None
    for weight in unit.looked:
        is_written |= weight.alias is not None and weight.alias._version > 0
        weight.alias = None
        if is_pointed_elsewhere(unit, weight):
            refused = take_data(unit, weight) or refused
            is_written = True
    unit.looked.clear()
    return is_written, refused


def take_replaced(unit: WeightGroup) -> str | None:
    """Copy what a forward assigned in place of weights into the weights; returns what cannot be kept."""
    refused = None
    for index, (module, name), held in list(foreign_tensors(unit)):
        entry = unit.entries[index]
        if entry.is_buffer:  # `WeightGroup.put` takes it over
            continue
        if Swaps(()).is_kept_by_others(unit, index, unit.placed[index]):
            refused = f"{entry.spec.name!r} was replaced for a while"
        else:
            refused = write_over(entry, unit.placed[index], held) or refused
        entry.slots_of(module)[name] = unit.placed[index]
    return refused


def write_over(entry: ParameterSlot, ours: torch.Tensor, given: torch.Tensor | None) -> str | None:
    name = entry.spec.name
    if given is None:
        return f"{name!r} was removed"
    if entry.wrapper is not None or (given.shape, given.dtype) != (ours.shape, ours.dtype) or given.is_meta:
        return f"{name!r} was replaced by a {given.dtype} {list(given.shape)}"
    with torch.no_grad():
        ours.copy_(given.detach())
    return None


def place_of(unit: WeightGroup, weight: ComputingWeight) -> int | None:
    return next((index for index, placed in enumerate(unit.placed) if placed is weight), None)


def own_memory(unit: WeightGroup, index: int) -> torch.Tensor:
    """Return the memory from which a plain weight computes."""
    assert unit.origin is not None
    slab, _, scratch, _ = unit.origin
    entry = unit.entries[index]
    if entry.scale is None or scratch is None:
        return unit.leaf_views(slab)[index][0]
    number = sum(other.scale is not None for other in unit.entries[:index])
    return unit.wide_layout.views(scratch)[number]


def is_pointed_elsewhere(unit: WeightGroup, weight: ComputingWeight) -> bool:
    index = place_of(unit, weight)
    return index is not None and weight.data_ptr() != own_memory(unit, index).data_ptr()


def take_data(unit: WeightGroup, weight: ComputingWeight) -> str | None:
    """Copy what a weight's ``.data`` was pointed to into its own memory, and point it there again."""
    index = place_of(unit, weight)
    assert index is not None
    ours, given = own_memory(unit, index), DATA.__get__(weight)
    refused = write_over(unit.entries[index], ours, given)
    DATA.__set__(weight, ours)
    unit.forget_views()  # this view has a counter of its own now
    return refused


def save_wide(unit: WeightGroup) -> str | None:
    """Quantize wide weights that a forward changed to eight bits again; returns what cannot be kept."""
    refused = None
    slab = unit.resting_slab
    assert slab is not None
    for index, entry in enumerate(unit.entries):
        if entry.scale is None:
            continue
        wide, leaf = own_memory(unit, index), unit.leaf_views(slab)[index][0]
        with torch.no_grad(), torch.inference_mode(False):
            before = torch.empty_like(wide)
            upcast_into(before, stored_leaf(leaf).to(wide.device), entry.scale)
            if torch.equal(wide, before):
                continue
        try:
            unit.overwrite(entry.spec.name, wide)
        except InvalidInput as error:
            refused = str(error)
    return refused
