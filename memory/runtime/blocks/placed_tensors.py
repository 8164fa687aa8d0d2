"""The tensors that a module was given for a group of weights, and every place in the module tree where they stand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..tensors.parameter_slots import ParameterSlot, put_in_list
from .block_state import BlockState

__all__ = ["PlacedTensors"]


class PlacedTensors:
    """What the module of a group was given last, and in which `BlockState` the group is by that."""

    def __init__(self, slots: Sequence[ParameterSlot]) -> None:
        self.slots = slots
        self.state = BlockState.IN_PLACE
        self.tensors: Sequence[torch.Tensor] = []
        """One for each slot: the weights at rest, the views of the copy, or those that compute; empty in place."""
        self.places: list[tuple[dict[str, torch.Tensor], str, int]] = []
        """The places of the slots: a module's dict, the name in it, and the slot's index; empty until first used."""
        for slot in slots:
            slot.clear_with(self.places)
        self.has_buffers = any(slot.is_buffer for slot in slots)
        self.has_lists = any(slot.lists for slot in slots)

    def put(self, tensors: Sequence[torch.Tensor], state: BlockState) -> None:
        """Give the module a tensor for each slot; native dict entries, no attribute hooks."""
        if self.has_buffers and self.tensors:
            for slot, placed, tensor in zip(self.slots, self.tensors, tensors, strict=True):
                if slot.is_buffer and slot.owners and slot.held is not placed:
                    self.take_replaced(slot, tensor)
        for table, name, index in self.places or self.find_places():
            table[name] = tensors[index]
        for slot, tensor in zip(self.slots, tensors, strict=True) if self.has_lists else ():
            for place in slot.lists:
                put_in_list(place, tensor)
        self.tensors, self.state = tensors, state

    def note(self, tensors: Sequence[torch.Tensor], state: BlockState) -> None:
        """Note what the module holds already, as if it had been put there."""
        self.tensors, self.state = tensors, state

    def forget(self) -> None:
        """Forget what the module was given: it keeps that, or has its own tensors again."""
        self.tensors = []

    def is_as_placed(self) -> bool:
        """Whether the module holds what it was given, everywhere: others may have put their own there."""
        placed = self.tensors
        if placed:
            for table, name, index in self.places or self.find_places():
                if table.get(name) is not placed[index]:
                    return False
        return True

    def find_places(self) -> list[tuple[dict[str, torch.Tensor], str, int]]:
        """Return the places of the slots in the dicts of their modules, with the number of the slot."""
        self.places[:] = [
            (slot.tensors_of(module), name, index)
            for index, slot in enumerate(self.slots)
            for module, name in slot.owners
        ]
        return self.places

    def take_replaced(self, slot: ParameterSlot, tensor: torch.Tensor) -> None:
        """Take over a buffer that a forward replaced by another tensor; one of another shape is the module's own."""
        replaced = slot.held
        if replaced.is_meta and not tensor.is_meta:
            return  # the module was moved to the meta device: no values to take over
        if replaced.shape == tensor.shape and replaced.dtype == tensor.dtype:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(replaced)
        else:
            slot.set_owners(())

    # -- places that come and go

    def own(self, index: int, owner: tuple[nn.Module, str]) -> None:
        """Give the weight to one more place of the module from now on."""
        slot = self.slots[index]
        slot.set_owners((*slot.owners, owner))

    def disown_gone(self) -> None:
        """Leave the places alone from which other code deleted weights."""
        for slot in self.slots:
            here = [place for place in slot.owners if slot.tensors_of(place[0]).get(place[1]) is not None]
            if len(here) < len(slot.owners):
                slot.set_owners(here)

    def disown(self, index: int, owner: tuple[nn.Module, str]) -> None:
        """Leave a place of the module alone from now on."""
        slot = self.slots[index]
        slot.set_owners(place for place in slot.owners if place != owner)
