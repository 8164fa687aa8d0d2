"""Saves what a forward wrote to its block's weights, after the block has computed.

Forwards rarely write to weights, so the usual cost is one check. If a forward did, the host waits for the device. A
change that cannot be saved is undone and refused with a one-line reason.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...errors import InvalidInput
from ..blocks.weight_group import WeightGroup
from ..blocks.weight_swaps import Swaps, foreign_tensors
from ..tensors.computing_parameter import DATA, ComputingWeight
from ..tensors.parameter_slots import ParameterSlot
from ..tensors.watched_data import is_same_view

__all__ = ["keep_writes"]


def keep_writes(group: WeightGroup, wait: Callable[[], None], *, host_replaces: bool) -> str | None:
    """Save what was written to a group while it computed; returns the reason if a change cannot be saved.

    Args:
        wait: waits for the copies that are under way.
        host_replaces: as in `DeviceShare`.
    """
    is_written, refused = take_looked(group)
    if not host_replaces:
        refused = take_replaced(group) or refused
    if group.origin is not None:
        slab, before, scratch, scratch_before = group.origin
        wide = is_written or (scratch is not None and scratch._version != scratch_before)
        own = group.copy.slab if group.copy is not None else group.host_slab
        if slab is not own and (is_written or slab._version != before):
            wait()
            group.save_slab(slab)
        if scratch is not None and wide:
            wait()
            if group.resting_slab is None:
                group.save_slab(slab)
            refused = save_wide(group) or refused
    return refused


def take_looked(group: WeightGroup) -> tuple[bool, str | None]:
    """Check the weights whose ``.data`` was accessed; returns whether any was written to, and why it cannot be saved.

    Keeps no reference to the weights, because the caller counts references to them next.
    """
    is_written, refused = False, None
    for weight in group.views.looked:
        is_written |= weight.take_written()
        if is_pointed_elsewhere(group, weight):
            refused = take_data(group, weight) or refused
            is_written = True
    group.views.looked.clear()
    return is_written, refused


def take_replaced(group: WeightGroup) -> str | None:
    """Copy tensors that a forward assigned in place of weights into the weights; returns why one cannot be saved."""
    refused = None
    for index, (module, name), held in list(foreign_tensors(group)):
        slot = group.slots[index]
        if slot.is_buffer:  # `WeightGroup.put` saves buffers
            continue
        if Swaps(()).is_kept_by_others(group, index, group.placed.tensors[index]):
            refused = f"{slot.spec.name!r} was replaced temporarily"
        else:
            refused = write_over(slot, group.placed.tensors[index], held) or refused
        slot.tensors_of(module)[name] = group.placed.tensors[index]
    return refused


def write_over(slot: ParameterSlot, ours: torch.Tensor, given: torch.Tensor | None) -> str | None:
    name = slot.spec.name
    if given is None:
        return f"{name!r} was removed"
    if slot.is_quantized or (given.shape, given.dtype) != (ours.shape, ours.dtype) or given.is_meta:
        return f"{name!r} was replaced by a {given.dtype} {list(given.shape)}"
    with torch.no_grad():
        ours.copy_(given.detach())
    return None


def place_of(group: WeightGroup, weight: ComputingWeight) -> int | None:
    return next((index for index, placed in enumerate(group.placed.tensors) if placed is weight), None)


def own_memory(group: WeightGroup, index: int) -> torch.Tensor:
    """Return the memory from which a plain weight computes, as a tensor."""
    assert group.origin is not None
    slab, _, scratch, _ = group.origin
    slot = group.slots[index]
    if slot.encoding is None or scratch is None:
        return group.layout.leaf_views(slab)[index][0]
    return group.layout.wide.views(scratch)[list(group.encoded).index(index)]


def is_pointed_elsewhere(group: WeightGroup, weight: ComputingWeight) -> bool:
    """Whether a weight got other memory, or the same memory in another order."""
    index = place_of(group, weight)
    return index is not None and not is_same_view(weight, own_memory(group, index))


def take_data(group: WeightGroup, weight: ComputingWeight) -> str | None:
    """Copy the tensor that was assigned to a weight's ``.data`` into the weight's own memory; undo the assignment.

    The weight keeps its strides.
    """
    index = place_of(group, weight)
    assert index is not None
    ours, given = own_memory(group, index), DATA.__get__(weight)
    if given.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr():
        given = given.clone()  # a view of our memory, which is written now
    refused = write_over(group.slots[index], ours, given)
    DATA.__set__(weight, ours)
    group.forget_views()  # this view has its own version counter now
    return refused


def save_wide(group: WeightGroup) -> str | None:
    """Encode the wide weights that a forward changed; returns why one cannot be saved."""
    refused = None
    slab = group.resting_slab
    assert slab is not None
    for index in group.encoded:
        slot = group.slots[index]
        assert slot.encoding is not None
        wide, leaves = own_memory(group, index), group.layout.leaf_views(slab)[index]
        with torch.no_grad(), torch.inference_mode(False):
            before = torch.empty_like(wide)
            slot.encoding.decode_into(before, [leaf.to(wide.device) for leaf in leaves])
            if torch.equal(wide, before):
                continue
        try:
            group.overwrite(slot.spec.name, wide)
        except InvalidInput as error:
            refused = str(error)
    return refused
