"""Reading a weight that rests in its file when other code uses more of it than its form."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from ...errors import UnsafeState
from ..tensors.parameter_slots import ParameterSlot

__all__ = ["ReadOnUse", "Readable"]


class Readable(Protocol):
    """What a weight without memory asks of its group.

    A protocol because `WeightGroup`, which answers, is made of the weights at rest, and these need this file.
    """

    def read_weight(self, slot: ParameterSlot) -> torch.Tensor:
        """Read the group into host memory, and return what the module then holds for the weight."""
        ...

    def read_copy(self, slot: ParameterSlot, device: torch.device) -> torch.Tensor | None:
        """Return a copy on a device of a weight that rests in its file; None if it does not."""
        ...


class ReadOnUse:
    """What one weight without memory calls to be read; refers to its group weakly."""

    def __init__(self, group: Readable, slot: ParameterSlot, form: torch.Tensor) -> None:
        self.group = weakref.ref(group)
        self.slot = slot
        self.form = torch.empty(form.shape, dtype=form.dtype, device="meta")
        self.home: torch.Tensor | None = None
        """The weight in plain memory, when its group has ended."""

    def __call__(self) -> torch.Tensor:
        """Return the weight, in the memory that the module uses. Raises as `read_on`, and `UnsafeState`."""
        if self.home is not None:
            return self.home
        group = self.group()
        if group is None:
            raise UnsafeState(f"{self.slot.spec.name!r} rests in its file and has no memory")
        return group.read_weight(self.slot)

    def read_on(self, device: torch.device) -> torch.Tensor:
        """Return a copy on a device; raises `InvalidInput` if the file has changed."""
        group = self.group()
        read = group.read_copy(self.slot, device) if group is not None else None
        return self().detach().to(device, copy=True) if read is None else read

    def settle_in(self, home: torch.Tensor) -> None:
        """Return this plain tensor from now on: the group has ended."""
        self.home = home

    def __deepcopy__(self, memo: object) -> ReadOnUse:
        return self
