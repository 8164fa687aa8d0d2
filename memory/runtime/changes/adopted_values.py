"""Values that other code gave in place of weights: written to the weights at rest, or the reason why they cannot be."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from ...weights.quantized_leaves import Wrapper, leaves_of
from ...weights.storage_form import AS_STORED
from ..blocks.weight_group import WeightGroup
from ..blocks.weight_store import FileStore
from ..tensors.encoded_weight import EncodedWeight
from ..tensors.reported_device import plainly
from ..tensors.watched_data import WatchedTensor, retire_data
from .move_detector import MoveDetector, is_of_another

__all__ = [
    "adopt_at_rest",
    "adopt_data",
    "adopt_swapped",
    "apart",
    "bits_of",
    "find_swapped",
    "leave_reformed",
    "separate_shared",
    "show_at_rest",
    "why_not_adopted",
]

DATA: Any = torch.Tensor.data  # the descriptor


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
    assert isinstance(group.at_rest.store, FileStore)
    leaves = iter(group.at_rest.store.resting_leaves())
    return [list(itertools.islice(leaves, count)) for count in group.layout.num_leaves]


def why_not_adopted(group: WeightGroup, index: int, given: torch.Tensor | None) -> str | None:
    """Write a tensor that was assigned to the module to the weight at rest, or return why that is impossible."""
    if group.copy is None:
        group.at_rest.leave_shared()
    slot, slab, placed = group.slots[index], group.resting_slab, group.placed.tensors[index]
    name = slot.spec.name
    if given is None:
        return f"{name!r} was removed"
    if isinstance(given, EncodedWeight):
        given = given.plain()
    is_wide = given.dtype is group.wide_dtypes[name] and given.shape == placed.shape and not given.is_meta
    if slab is not None and group.at_rest.shows(slot) and is_wide and Wrapper.of(given) is None:
        ours = group.at_rest.show(index, group.layout.leaf_views(slab)[index])
        ours.data = given
        ours.encoded.settle()
        return None
    leaves = resting_leaves(group)[index]
    theirs = leaves_of(given)
    is_alike = [(leaf.dtype, leaf.shape) for leaf in theirs] == [(leaf.dtype, leaf.shape) for leaf in leaves]
    if not is_alike or (Wrapper.of(given) is not None) != slot.is_quantized:
        if given.shape == placed.shape and given.dtype not in (
            leaves[0].dtype,
            group.wide_dtypes[name],
        ):
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
                DATA.__set__(placed, leaves[0])
        if all(torch.equal(bits_of(leaf), bits_of(own)) for leaf, own in zip(moved, leaves, strict=True)):
            return None
        if slot.encoding is not None:
            return f"{name!r}{resting_form(group, index)} was replaced"
        if group.copy is None and group.host_slab is not None:
            retire_data(group.at_rest.tensors[index])
        for leaf, own in zip(moved, leaves, strict=True):
            own.copy_(leaf)
    return None


def show_at_rest(group: WeightGroup, index: int) -> None:
    """Point the tensor that a group gave the module for a plain weight to the weight at rest, whatever it shows."""
    placed, leaves = group.placed.tensors[index], resting_leaves(group)[index]
    if group.slots[index].form is not AS_STORED or placed.is_meta or leaves[0].is_meta:
        return
    if torch._has_compatible_shallow_copy_type(placed, leaves[0]):
        with plainly(), torch.inference_mode(placed.is_inference()):
            DATA.__set__(placed, leaves[0])


def bits_of(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.reshape(-1).view(torch.uint8)


def resting_form(group: WeightGroup, index: int) -> str:
    """Return, for a message, how a weight rests that other code cannot replace; empty for other weights."""
    if index in group.encoded:
        return f", which rests {group.encoded[index].numbers.rests},"
    return ", which rests in its file," if group.placed.tensors[index].is_meta else ""


def leave_reformed(detector: MoveDetector) -> None:
    """Leave buffers to the module whose ``.data`` has another dtype or shape now, as if another had been assigned."""
    group = detector.group
    if not detector.is_at_rest or group.at_rest.store is None:
        return
    for number, _ in detector.buffers:
        slot, placed, form = group.slots[number], group.placed.tensors[number], group.at_rest.held_form(number)
        if (placed.dtype, placed.shape) == (form.dtype, form.shape):
            continue
        device = group.copy.slab.device if group.copy is not None else torch.device("cpu")
        with plainly(), torch.no_grad():
            own = torch.Tensor.detach(placed).to(device, copy=True)
        for place in slot.owners:
            if slot.tensors_of(place[0]).get(place[1]) is placed:
                slot.tensors_of(place[0])[place[1]] = own
                group.placed.disown(number, place)


def separate_shared(detector: MoveDetector, slabs: Collection[int]) -> None:
    """Give plain weights that lie in another weight's memory memory of their own, before any weight is written."""
    group = detector.group
    if not detector.is_at_rest or group.at_rest.store is None:
        return
    for number, _ in (*detector.plain, *detector.buffers):
        held = group.placed.tensors[number]
        own = apart(group, number, held, slabs)
        if own is not held:
            with plainly(), torch.inference_mode(held.is_inference()):
                DATA.__set__(held, own)


def find_swapped(detector: MoveDetector) -> list[tuple[int, torch.Tensor]]:
    """Return by index what the objects of weights without plain memory were swapped with."""
    group = detector.group
    if not detector.is_at_rest or group.at_rest.store is None:
        return []
    held_at = [(number, group.slots[number].held) for number in detector.find_exchanged()]
    return [(number, held.plain() if isinstance(held, EncodedWeight) else held) for number, held in held_at]


def adopt_swapped(group: WeightGroup, swapped: Iterable[tuple[int, torch.Tensor]]) -> str | None:
    """Write what `find_swapped` found to the weights at rest; returns why that is impossible for one."""
    undone = None
    for number, given in swapped:
        name, slab, form = group.slots[number].spec.name, group.resting_slab, group.at_rest.held_form(number)
        if slab is None:
            undone = f"{name!r}, which rests in its file, was replaced"
        elif (given.dtype, given.shape) == (form.dtype, form.shape) and not given.is_meta:
            # Another dtype or shape is found as one that was assigned through ``.data``.
            undone = why_not_adopted(group, number, given) or undone
    return undone


def adopt_data(group: WeightGroup) -> None:
    """Write what was assigned to the ``.data`` of weights to the weights at rest, if dtype and shape are the same."""
    given: dict[int, torch.Tensor] = {}
    for index, (slot, leaves) in enumerate(zip(group.slots, resting_leaves(group), strict=True)):
        # A forward may put another object in a buffer's place, which says nothing of ours.
        held = group.placed.tensors[index] if slot.is_plain_buffer else slot.held
        is_plain = slot.form is AS_STORED and not leaves[0].is_meta
        if is_plain and (held.dtype, held.shape) == (leaves[0].dtype, leaves[0].shape) and not held.is_meta:
            with torch.no_grad():
                here = held.detach().to(leaves[0].device)
                is_same = here.data_ptr() == leaves[0].data_ptr()
                if here.stride() != leaves[0].stride():
                    given[index] = here.clone() if is_same else here
                elif not is_same and not torch.equal(here, leaves[0]):
                    given[index] = here
    if given:
        leave_memory(group, given)
    for index, tensor in given.items():
        with torch.no_grad():
            if group.resting_slab is not None:
                group.take_strides(index, tensor)
            resting_leaves(group)[index][0].copy_(tensor)


def adopt_at_rest(group: WeightGroup) -> str | None:
    """Write what was assigned to the ``.data`` of a resident group's weights in host memory to its weight store.

    Returns why that is impossible for one.
    """
    assert group.host_slab is not None
    undone = None
    for index, (weight, leaves) in enumerate(
        zip(group.at_rest.tensors, group.layout.leaf_views(group.host_slab), strict=True)
    ):
        if type(weight) is not WatchedTensor:
            continue
        with plainly(), torch.no_grad():
            if weight.data_ptr() == leaves[0].data_ptr() and weight.stride() == leaves[0].stride():
                continue
            if (weight.dtype, weight.shape) != (leaves[0].dtype, leaves[0].shape) or weight.is_meta:
                undone = f"{group.slots[index].spec.name!r} was replaced by a {weight.dtype} {list(weight.shape)}"
            elif not torch.equal(weight.detach(), leaves[0]):
                retire_data(weight)
                leaves[0].copy_(weight.detach())
    return undone


def leave_memory(group: WeightGroup, indices: Iterable[int]) -> None:
    """Leave the former data of weights to other code that keeps them, before other values are written.

    On a device the group gets other memory: costs its bytes there until other code drops the former data. In host
    memory it stays where it is: former data that are given back are refused (`refuse_overwritten`).
    """
    if group.copy is not None:
        with torch.inference_mode(False), torch.no_grad():
            group.copy.move_to(group.copy.slab.clone())
    for index in indices if group.host_slab is not None else ():
        retire_data(group.at_rest.tensors[index])
