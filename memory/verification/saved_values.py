"""Saves and restores what objects hold: tensors, containers and attributes, found by walking from some values.

Does not find state in ``__slots__``, closures or C extensions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ..weights.quantized_leaves import leaves_of
from .comparison import same_bits

__all__ = ["CONTAINERS", "SavedValues", "write"]

CONTAINERS = (dict, list, set, deque)
ATOMS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType, torch.device, torch.dtype)
# A larger container is a vocabulary, not a cache: it is restored as a whole, and its items are not searched.
MAX_ITEMS = 4096
MAX_OBJECTS = 50_000


class SavedValues:
    """What values hold at one time: of containers and attributes the items by identity, of tensors a copy.

    Subclasses say what of other objects is saved.
    """

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}
        """The searched objects by id. Keeping them alive keeps their ids from being reused."""
        self.containers: list[tuple[Any, Any]] = []
        self.attributes: list[tuple[dict[str, Any], dict[str, Any], frozenset[str]]] = []
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

    def search(self, values: Iterable[Any]) -> None:
        """Save values and what is in them."""
        waiting = list(values)
        while waiting and len(self.seen) < MAX_OBJECTS:
            waiting += self.take(waiting.pop())

    def take(self, value: Any) -> Iterable[Any]:
        """Save a value; returns the values inside it that are to be saved as well."""
        if isinstance(value, ATOMS) or id(value) in self.seen:
            return ()
        self.seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if not value.is_meta and len(leaves_of(value)) == 1 and not isinstance(value, nn.Parameter):
                self.tensors.append((value, value.detach().clone()))
            return ()
        if isinstance(value, tuple):
            return value
        if isinstance(value, CONTAINERS):
            self.take_container(value)
            if len(value) > MAX_ITEMS:
                return ()
            return list(value.values() if isinstance(value, dict) else value)
        return self.take_object(value)

    def take_object(self, value: Any) -> Iterable[Any]:
        """Save an object that is none of these; returns the values of it that are to be saved."""
        return ()

    def take_container(self, container: Any) -> None:
        """Save which items a container has."""
        self.containers.append((container, container.copy()))

    def take_attributes(self, attributes: dict[str, Any], left_out: frozenset[str] = frozenset()) -> list[Any]:
        """Save attributes of an object, but those of some names; returns their values."""
        saved = {name: value for name, value in attributes.items() if name not in left_out}
        self.attributes.append((attributes, saved, left_out))
        return list(saved.values())

    def put_back(self, *, compares: bool = True) -> None:
        """Restore everything that was saved. Can be called again, also after an interrupt.

        Args:
            compares: leave unchanged tensors alone, for which memory of their size is allocated on their device.
        """
        for attributes, saved, left_out in self.attributes:
            for name in [name for name in attributes if name not in saved and name not in left_out]:
                del attributes[name]
            attributes.update(saved)
        for container, items in self.containers:
            if not is_same(container, items):
                container.clear()
                container.extend(items) if isinstance(container, list | deque) else container.update(items)
        for tensor, content in self.tensors:
            if tensor.shape != content.shape:
                tensor.data = content.clone()
            else:
                write(tensor, content, compares=compares)


def write(tensor: torch.Tensor, content: torch.Tensor, *, compares: bool = True) -> None:
    """Write a tensor's former content; if that is compared, an unchanged tensor keeps its version counter."""
    if tensor.is_meta:
        return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        content = content.to(tensor.device)
        if not compares or not same_bits(tensor.detach(), content):
            tensor.detach().copy_(content)


def is_same(container: Any, items: Any) -> bool:
    if len(container) != len(items):
        return False
    if isinstance(container, dict):
        return all(a is b and container[a] is items[b] for a, b in zip(container, items, strict=True))
    if isinstance(container, set):
        return bool(container == items)
    return all(a is b for a, b in zip(container, items, strict=True))
