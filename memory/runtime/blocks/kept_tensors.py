"""Tensors that a module held for a group of weights, and that other code keeps beyond that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from ..tensors.encoded_weight import EncodedLeaves
from ..tensors.parameter_slots import ParameterSlot, become
from .read_on_use import ReadOnUse

__all__ = ["KeptTensors"]


class KeptTensors:
    """Weak references to all tensors that the module held for a group, with what these decode or read from.

    What is in other code's hands when the group ends gets plain memory then (`end`).
    """

    def __init__(self) -> None:
        self.given: list[tuple[ParameterSlot, weakref.ref[torch.Tensor]]] = []
        """Tensors that the module held in an earlier state."""
        self.shown: weakref.WeakSet[EncodedLeaves] = weakref.WeakSet()
        """The leaves behind the wide tensors that the module holds, or held, for encoded weights."""
        self.readers: weakref.WeakSet[ReadOnUse] = weakref.WeakSet()
        """What weights without memory, and their ``.data``, call to be read."""

    def note(self, slots: Sequence[ParameterSlot], tensors: Sequence[torch.Tensor]) -> None:
        """Note tensors that the module holds or held for weights, and will not hold any more."""
        self.given += [(slot, weakref.ref(tensor)) for slot, tensor in zip(slots, tensors, strict=False)]

    def note_replaced(
        self, slots: Sequence[ParameterSlot], before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]
    ) -> None:
        """Note tensors that the module held, where others have taken their places."""
        self.given += [
            (slot, weakref.ref(old)) for slot, old, new in zip(slots, before, now, strict=False) if old is not new
        ]
        self.forget_gone()

    def forget_gone(self) -> None:
        """Forget tensors that no code keeps."""
        self.given = [(slot, known) for slot, known in self.given if known() is not None]

    def note_reader(self, reader: ReadOnUse) -> None:
        """Note what a weight without memory calls to be read."""
        self.readers.add(reader)

    def on_device(self, device: torch.device) -> Iterator[tuple[ParameterSlot, torch.Tensor]]:
        """Yield the tensors on a device that the module held earlier and other code keeps."""
        for slot, known in self.given:
            tensor = known()
            if tensor is not None and tensor.device == device:
                yield slot, tensor

    def end(self, find_home: Callable[[ParameterSlot, torch.Tensor], torch.Tensor]) -> None:
        """Make all of them plain tensors in host memory: the group ends.

        Args:
            find_home: returns the tensor whose memory takes the place of a weight's, once per weight.
        """
        homes: dict[int, torch.Tensor] = {}

        def home_of(slot: ParameterSlot, form: torch.Tensor) -> torch.Tensor:
            if id(slot) not in homes:
                homes[id(slot)] = find_home(slot, form)
            return homes[id(slot)]

        for encoded in list(self.shown):
            encoded.end(home_of(encoded.slot, encoded.leaves[0]))
        kept = [(slot, tensor) for slot, known in self.given if (tensor := known()) is not None]
        for reader in list(self.readers):
            if reader.home is None:
                reader.settle_in(home_of(reader.slot, reader.form))
        self.given = []  # what has a weak reference cannot be swapped
        for slot, tensor in kept:
            if not slot.owners or tensor is not slot.held:
                become(tensor, home_of(slot, tensor))
