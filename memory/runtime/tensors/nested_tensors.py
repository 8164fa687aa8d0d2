"""Finds and replaces tensors inside arguments and outputs, at any depth; the caller keeps its own containers.

Searches dicts, lists, tuples and deques with their subclasses, dataclasses, and plain objects that are arguments
themselves and have tensors as attributes. All other objects stay unchanged; for example a cache of keys and values,
which is passed to every block.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from types import FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["Lent", "find_tensors", "replace_tensors"]

# The types of most leaves; checked first.
ATOMS = frozenset((NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice))
# Objects whose attributes are never searched.
OPAQUE = (nn.Module, type, ModuleType, FunctionType, MethodType, torch.Generator)
# The depth of an argument in a call: (args, kwargs), one of these two, the argument, an item of it.
DEPTH_OF_ARGUMENTS = 3


def entries_of(value: Any, depth: int) -> dict[Any, Any] | None:
    """Return a container's entries by key, index or attribute name; None for a value that is no container."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, PackedSequence):  # torch wants the sizes of its batches on the CPU, wherever the data is
        return {place: held for place, held in enumerate(value) if held is not value.batch_sizes}
    if isinstance(value, list | tuple | deque):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return attributes_of(value)
    if isinstance(value, SimpleNamespace):
        return dict(vars(value))
    if depth <= DEPTH_OF_ARGUMENTS and not isinstance(value, OPAQUE) and not callable(value):
        attributes = attributes_of(value)
        return attributes if any(isinstance(held, torch.Tensor) for held in attributes.values()) else None
    return None


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including those in ``__slots__``."""
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def walk(value: Any, seen: set[int], depth: int = 0) -> Iterator[tuple[Any, dict[Any, Any] | None]]:
    """Yield every tensor, and every container with its entries, each once; inner containers before outer ones."""
    if type(value) in ATOMS or id(value) in seen:
        return
    if isinstance(value, torch.Tensor):
        seen.add(id(value))
        yield value, None
        return
    entries = entries_of(value, depth)
    if entries is not None:
        seen.add(id(value))
        for held in entries.values():
            yield from walk(held, seen, depth + 1)
        yield value, entries


def find_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors inside a value, each once."""
    return [found for found, entries in walk(value, set()) if entries is None]


def replace_tensors(value: Any, others: Mapping[int, Any], containers: Any = None) -> Any:
    """Return a value in which some tensors are replaced. Containers without such tensors stay the same objects.

    Args:
        others: the replacements by the id of the replaced tensor; containers are added to a copy of it.
        containers: called with each container, its copy (itself if nothing is replaced) and the entries of the copy.
    """
    others = dict(others)
    for found, entries in walk(value, set()):
        if entries is None or id(found) in others:
            continue
        changed = {key: others[id(held)] for key, held in entries.items() if id(held) in others}
        other = copied(found, changed) if changed else found
        if other is not found:
            others[id(found)] = other
        if containers is not None and not isinstance(found, tuple):
            containers(found, other, entries | changed)
    return others.get(id(value), value)


def copied(container: Any, changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a container with changed entries."""
    if isinstance(container, tuple):
        items = [changed.get(place, held) for place, held in enumerate(container)]
        make = getattr(type(container), "_make", type(container))  # a namedtuple takes its items one by one
        return make(items)
    other = copy.copy(container)
    for key, held in changed.items():
        put(other, key, held)
    return other


def put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, dict | list | deque):
        container[key] = value
    else:
        object.__setattr__(container, key, value)  # works for frozen dataclasses, too


class Lent:
    """A value for a callee: with other tensors, and with copies of the containers that hold replaced tensors.

    `come_back` repeats the callee's changes of its containers on the owner's.

    Args:
        others: the callee's tensors by the ids of the owner's tensors.
    """

    def __init__(self, value: Any, others: Mapping[int, torch.Tensor]) -> None:
        self.containers: list[tuple[Any, Any, dict[Any, Any]]] = []
        self.value = replace_tensors(value, others, lambda *found: self.containers.append(found))

    @property
    def owned(self) -> dict[int, Any]:
        """The owner's containers by the ids of the callee's copies."""
        return {id(lent): own for own, lent, _ in self.containers if lent is not own}

    def come_back(self, bring: Callable[[Any], Any]) -> None:
        """Repeat the callee's changes of its containers on the owner's.

        Args:
            bring: converts a value of the callee to the owner's.
        """
        for own, lent, before in self.containers:
            after = entries_of(lent, 0)
            if after is None:  # a plain object that no longer holds a tensor
                after = attributes_of(lent)
            if after.keys() == before.keys() and all(after[key] is before[key] for key in after):
                continue
            if isinstance(own, list | deque):
                items = [bring(held) for held in lent]
                own.clear()
                own.extend(items)
                continue
            for key, held in after.items():
                if key not in before or before[key] is not held:
                    put(own, key, bring(held))
            for key in before.keys() - after.keys():
                remove(own, key)


def remove(container: Any, key: Any) -> None:
    """Remove an entry, if it still exists."""
    if not isinstance(container, dict):
        if key in attributes_of(container):
            object.__delattr__(container, key)
    elif key in container:
        del container[key]
