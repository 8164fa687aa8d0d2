"""Weights that other code converted or resized: the module keeps them, and their group is managed no more.

[Note: given up] ``Module.to(dtype)``, ``half()`` and ``float()``, which diffusers calls inside its pipelines, give a
weight another dtype; transformers gives embeddings another shape. The group of such a weight was laid out, planned and
entered in the books for the former one. So it gives up: it leaves its device, the module has ordinary tensors again,
with what the other code made of them. The component is then described, planned and packed anew as its module is now,
before its next pass or where it gets another profile; a release leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..blocks.block_state import BlockState
from ..blocks.unpacking import unpack
from ..blocks.weight_group import WeightGroup
from ..tensors.encoded_weight import EncodedWeight
from ..tensors.parameter_slots import repoint
from ..tensors.reported_device import plainly
from ..tensors.watched_data import unwatch

__all__ = ["ConvertedWeight", "find_all_converted", "give_up", "put_converted_aside"]

DATA: Any = torch.Tensor.data  # the descriptor


@dataclass(frozen=True, slots=True)
class ConvertedWeight:
    """What other code made of a weight, at one place of the module."""

    group: WeightGroup
    index: int
    place: tuple[nn.Module, str]
    held: torch.Tensor
    """What the module holds there."""

    @property
    def change(self) -> str:
        """What was done, for a message."""
        slot = self.group.slots[self.index]
        if list(self.held.shape) != list(slot.spec.shape):
            return f"{slot.spec.name!r} was replaced by a {self.held.dtype} {list(self.held.shape)}"
        return f"its weights were changed to {self.held.dtype}"


def find_all_converted(groups: Iterable[WeightGroup]) -> list[ConvertedWeight]:
    """Return the weights of another dtype or shape than their groups gave the module. For groups at rest.

    Buffers count where a weight does: forwards replace them.
    """
    groups = [group for group in groups if group.state is not BlockState.COMPUTING]
    found = [each for group in groups for each in find_converted(group, buffers=is_without_weights(group))]
    if found:
        found += [each for group in groups if not is_without_weights(group) for each in find_converted_buffers(group)]
    return found


def is_without_weights(group: WeightGroup) -> bool:
    return all(slot.is_buffer for slot in group.slots)


def find_converted(group: WeightGroup, *, buffers: bool) -> list[ConvertedWeight]:
    if buffers:
        return find_converted_buffers(group)
    found = []
    for index, slot in enumerate(group.slots):
        if slot.is_buffer or slot.is_quantized:
            continue
        form = None
        for module, name in slot.owners:
            held = module._parameters.get(name)
            if held is None or held.is_meta:
                continue
            form = form or group.at_rest.held_form(index)
            is_plain = isinstance(held, EncodedWeight) and held.encoded.has_ended  # converted, and back
            if held.dtype is not form.dtype or held.shape != form.shape or is_plain:
                found.append(ConvertedWeight(group, index, (module, name), held))
    return found


def find_converted_buffers(group: WeightGroup) -> list[ConvertedWeight]:
    """Return the plain buffers of a group that have another dtype than it gave them, and the same shape."""
    return [
        ConvertedWeight(group, index, (module, name), held)
        for index, (slot, placed) in enumerate(zip(group.slots, group.placed.tensors, strict=False))
        if slot.is_plain_buffer
        for module, name in slot.owners
        if (held := module._buffers.get(name)) is not None
        and held.dtype is not placed.dtype
        and held.shape == placed.shape
    ]


def put_converted_aside(converted: Sequence[ConvertedWeight]) -> list[ConvertedWeight]:
    """Put the groups' own tensors in the places of converted weights; returns these weights with memory of their own.

    Afterwards no converted weight is on a device.
    """
    homes: dict[int, torch.Tensor] = {}
    for each in converted:
        if id(each.held) not in homes:
            homes[id(each.held)] = in_memory(each)
    aside = [ConvertedWeight(each.group, each.index, each.place, homes[id(each.held)]) for each in converted]
    for each in converted:
        (module, name), tensors = each.place, each.group.placed.tensors
        if tensors:
            each.group.slots[each.index].tensors_of(module)[name] = tensors[each.index]
    return aside


def in_memory(converted: ConvertedWeight) -> torch.Tensor:
    """Return what a weight was converted to, in host memory: the object of other code, or what our object holds."""
    held, placed = converted.held, converted.group.placed.tensors
    is_ours = bool(placed) and held is placed[converted.index]
    if isinstance(held, EncodedWeight):
        return nn.Parameter(held.encoded.current().to("cpu", copy=True), requires_grad=False)
    with plainly(), torch.no_grad(), torch.inference_mode(held.is_inference()):
        if is_ours or type(held) is not nn.Parameter:
            data: torch.Tensor = DATA.__get__(held)
            return data.detach().to("cpu")
        if held.device.type != "cpu":
            held.data = held.detach().to("cpu")
    return held


def give_up(group: WeightGroup, converted: Iterable[ConvertedWeight]) -> None:
    """End the management of a group that has left its device: its module gets ordinary tensors, the converted ones.

    Raises:
        InvalidInput: weights rest in a file that has changed.
    """
    if group.at_rest.store is not None:
        unpack(group)
    for each in converted:
        slot, (module, name) = group.slots[each.index], each.place
        table = slot.tensors_of(module)
        if isinstance(each.held, nn.Parameter) or slot.is_buffer:
            table[name] = unwatch(each.held)
            continue
        own = table[name]
        if not isinstance(own, nn.Parameter):  # swapped with a plain tensor (`torch.utils.swap_tensors`)
            table[name] = nn.Parameter(each.held, own.requires_grad)
        elif own.dtype is not each.held.dtype or own.shape != each.held.shape:  # else a tied place has it already
            repoint(slot, [each.held], lasting=True)
