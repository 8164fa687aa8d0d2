"""What a call of a model may change beside its result: saved before the call, and put back for another try.

Costs a copy of the inputs and buffers on their devices, because a device's copies wait for nothing. Attributes and
containers are saved by what they hold, not by the contents of that. `Snapshot` in `verification/` saves more and takes
far longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .runtime.tensors.parameter_slots import ParameterSlot
from .verification.saved_values import CONTAINERS, SavedValues, write
from .verification.snapshot import RandomState

__all__ = ["CallState"]

# Nothing of these is saved.
LEFT_OUT = (nn.Module, FunctionType, BuiltinFunctionType)


class CallState(SavedValues):
    """The state of a call before it begins: random generators, buffers, inputs, attributes of the module.

    Args:
        module: the called module; its attributes and the containers there are saved, not those of its submodules.
        buffers: the managed buffers; they are put back where they rest by then.
        given: arguments, in nested containers; of plain objects there the attributes are saved.
        devices: those whose random generators the call may use.
    """

    def __init__(
        self, module: nn.Module, buffers: Iterable[ParameterSlot], given: Any, devices: Iterable[torch.device]
    ) -> None:
        super().__init__()
        self.random = RandomState(devices)
        with torch.no_grad():
            self.buffers = [(slot, slot.held.detach().clone()) for slot in buffers]
            for value in self.take_attributes(vars(module)):
                if isinstance(value, CONTAINERS):
                    self.take_container(value)
            self.search([given])

    def take_object(self, value: Any) -> Iterable[Any]:
        if isinstance(value, MethodType):
            return [value.__self__]
        if not isinstance(value, LEFT_OUT) and isinstance(getattr(value, "__dict__", None), dict):
            self.take_attributes(vars(value))
        return ()

    def can_put_back(self) -> bool:
        """Whether all tensors still have their shapes: what the call resized cannot be written to."""
        pairs = [(slot.held, saved) for slot, saved in self.buffers] + self.tensors
        return all(now.shape == saved.shape and now.dtype == saved.dtype for now, saved in pairs)

    def put_back(self, *, compares: bool = False) -> None:
        """Restore everything that was saved; memory is short."""
        self.random.put_back()
        super().put_back(compares=compares)
        for slot, content in self.buffers:
            write(slot.held, content, compares=compares)
