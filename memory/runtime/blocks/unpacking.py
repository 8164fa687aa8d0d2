"""The end of a group: its module gets ordinary tensors again."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from functools import partial

import torch

from ...weights.quantized_leaves import leaves_of
from ...weights.storage_form import AS_STORED
from ..tensors.parameter_slots import ParameterSlot, repoint
from ..tensors.reported_device import device_of
from ..tensors.watched_data import unwatch
from .group_reading import read_resting
from .weight_group import WeightGroup
from .weight_store import FileStore

__all__ = ["discard", "unpack"]


def unpack(group: WeightGroup, on_meta: Collection[str] = ()) -> None:
    """Give the module ordinary tensors again and drop the slab; encoded weights come back decoded.

    Weights that rest in their file are read from it, in one go; what came in a mapping of it comes back as it was.

    Args:
        on_meta: the weights that the module gets without memory.

    Raises:
        InvalidInput: a file is not what it was.
    """
    at_rest = group.at_rest
    mapped = dict(at_rest.mapped)  # also of weights that came without memory before
    names = at_rest.names_in_file.difference(on_meta, mapped)
    to_read = [slot for slot in group.slots if slot.spec.name in names and slot.owners]
    source = at_rest.store.source if isinstance(at_rest.store, FileStore) else None
    read = zip(to_read, read_resting([(group, slot) for slot in to_read], source), strict=True)
    stored = {slot.spec.name: weight for slot, weight in read}
    group.kept.note(group.slots, at_rest.tensors)
    resting = itertools.chain(at_rest.tensors, itertools.repeat(None))  # fewer where packing failed half way
    for index, (slot, held) in enumerate(zip(group.slots, resting, strict=False)):
        name = slot.spec.name
        if name in mapped and slot.owners:
            slot.hold(mapped[name])
        elif name in on_meta:
            slot.hold(unwatch(at_rest.on_meta.get(name, slot.held)))
            if not slot.held.is_meta:
                take_memory(slot)
        elif not slot.owners:  # what the module has there is its own
            continue
        elif name in stored:
            repoint(slot, [stored[name]], lasting=True)
        elif held is not None and at_rest.is_shared:
            slot.hold(held)  # watched: a write gives it memory of its own
        elif held is not None:
            own = own_leaves(group, index) if group.host_slab is not None else []
            slot.hold(at_rest.originals.get(name, unwatch(held)))
            if own:
                repoint(slot, own, lasting=True)
    held = None
    at_rest.give_back()
    group.placed.forget()
    group.forget_views()
    group.kept.end(partial(find_home, group))
    group.forget_resting()
    for index in group.encoded:  # only now: interrupted before, all of it is done again
        group.slots[index].rest_as(AS_STORED)


def own_leaves(group: WeightGroup, index: int) -> list[torch.Tensor]:
    """Return what makes a weight in memory of its own: where it lies, if that can be, else a copy."""
    own = group.at_rest.own_leaves(index)
    return leaves_of(group.wide(group.slots[index].spec.name, torch.device("cpu"))) if own is None else own


def find_home(group: WeightGroup, slot: ParameterSlot, form: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory that takes the place of a weight's tensors which other code keeps.

    It is what the module holds for the weight now; where that is nothing, or has no memory, the weight is read
    into memory of its own.
    """
    held, store = slot.held if slot.owners else None, group.at_rest.store
    if held is not None and not held.is_meta and device_of(held).type == "cpu":
        return held
    if group.host_slab is not None:
        return group.wide(slot.spec.name, torch.device("cpu"))
    if isinstance(store, FileStore) and slot.spec.name in group.at_rest.names_in_file:
        with torch.inference_mode(False):
            weight = torch.empty(form.shape, dtype=group.wide_dtypes[slot.spec.name])
        store.source.read_into([(slot.spec.name, weight)], drop_pages=True)
        return group.as_it_computes(slot, weight, store.source)
    return form.detach().to("cpu", copy=True)


def discard(group: WeightGroup) -> None:
    """Drop the weights, and give the module shapes without memory: it is no longer used. Reads nothing."""
    for slot in group.slots:
        slot.rest_as(AS_STORED)
        take_memory(slot)
    group.forget_resting()


def take_memory(slot: ParameterSlot) -> None:
    """Leave the module a weight's shape without memory, in the tensor that it holds."""
    unwatch(slot.held)
    repoint(slot, [torch.empty(slot.held.shape, dtype=slot.held.dtype, device="meta")])
