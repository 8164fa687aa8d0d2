"""What a call of a model may change beside its result: saved before the call, and put back for another try.

Costs a copy of the inputs and buffers on their devices, because a device's copies wait for nothing. Attributes and
containers are saved by what they hold, not by the contents of that. `Snapshot` in `verification/` saves more and takes
far longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .runtime.tensors.parameter_slots import ParameterSlot
from .verification.snapshot import RandomState, is_same
from .weights.quantized_leaves import leaves_of

__all__ = ["CallState"]

CONTAINERS = (dict, list, set, deque)
CALLABLES = (FunctionType, BuiltinFunctionType, type)
ATOMS = (str, bytes, int, float, complex, bool, type(None), ModuleType, torch.device, torch.dtype, nn.Module)
# A larger container is restored as a whole, and its items are not searched.
MAX_ITEMS = 4096


class CallState:
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
        self.random = RandomState(devices)
        self.seen: dict[int, Any] = {}
        """What was searched, by id. Keeping it alive keeps the ids from being reused."""
        self.attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.containers: list[tuple[Any, Any]] = []
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            self.buffers = [(slot, slot.held.detach().clone()) for slot in buffers]
            self.take_attributes(vars(module))
            for value in vars(module).values():
                if isinstance(value, CONTAINERS):
                    self.containers.append((value, value.copy()))
            waiting = [given]
            while waiting:
                waiting += self.take(waiting.pop())

    def take(self, value: Any) -> list[Any]:
        """Save a value; returns the values inside it that are to be saved as well."""
        if isinstance(value, ATOMS) or id(value) in self.seen:
            return []
        self.seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if not value.is_meta and len(leaves_of(value)) == 1 and not isinstance(value, nn.Parameter):
                self.tensors.append((value, value.detach().clone()))
            return []
        if isinstance(value, tuple):
            return list(value)
        if isinstance(value, CONTAINERS):
            self.containers.append((value, value.copy()))
            if len(value) > MAX_ITEMS:
                return []
            return list(value.values() if isinstance(value, dict) else value)
        if isinstance(value, MethodType):
            return [value.__self__]
        if not isinstance(value, CALLABLES) and isinstance(getattr(value, "__dict__", None), dict):
            self.take_attributes(vars(value))
        return []

    def take_attributes(self, attributes: dict[str, Any]) -> None:
        self.attributes.append((attributes, dict(attributes)))

    def can_put_back(self) -> bool:
        """Whether all tensors still have their shapes: what the call resized cannot be written to."""
        pairs = [(slot.held, saved) for slot, saved in self.buffers] + self.tensors
        return all(now.shape == saved.shape and now.dtype == saved.dtype for now, saved in pairs)

    def put_back(self) -> None:
        """Restore everything that was saved."""
        self.random.put_back()
        for attributes, saved in self.attributes:
            for name in attributes.keys() - saved.keys():
                del attributes[name]
            attributes.update(saved)
        for container, items in self.containers:
            if not is_same(container, items):
                container.clear()
                container.extend(items) if isinstance(container, list | deque) else container.update(items)
        for tensor, content in self.tensors:
            write(tensor, content)
        for slot, content in self.buffers:
            write(slot.held, content)


def write(tensor: torch.Tensor, content: torch.Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.detach().copy_(content)
