"""The tensors inside arguments and outputs, at any depth, and the containers around them, which stay their owner's.

Looked into are dicts, lists, tuples and deques with their subclasses, dataclasses, and plain objects that are arguments
themselves and hold tensors as attributes. Other objects are their owner's business: a cache of keys and values is
passed to every block and stays as it is.
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

__all__ = ["Lent", "find_tensors", "replace_tensors"]

# What most leaves are; looked at first.
ATOMS = frozenset((NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice))
# Whose attributes are never looked at.
OPAQUE = (nn.Module, type, ModuleType, FunctionType, MethodType, torch.Generator)
# How deep an argument stands in a call: (args, kwargs), one of the two, the argument, what a tuple or list of it holds.
DEPTH_OF_ARGUMENTS = 3


def entries_of(value: Any, depth: int) -> dict[Any, Any] | None:
    """Return what a container holds, by key, place or attribute; None for what is no container."""
    if isinstance(value, dict):
        return dict(value)
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
    """Return the attributes of one object, those in slots too."""
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def walk(value: Any, seen: set[int], depth: int = 0) -> Iterator[tuple[Any, dict[Any, Any] | None]]:
    """Yield every tensor, and every container with what it holds, those inside others first; each once."""
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
    """Return a value with other tensors in place of some, by their ids; what holds none of them stays the same object.

    Args:
        others: the replacements; those of containers are added.
        containers: is called with each container, what it held, and the copy that stands for it, perhaps itself.
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
    """Return a copy of a container in which some entries are others."""
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
        object.__setattr__(container, key, value)  # of a frozen dataclass, too


class Lent:
    """A value as a callee gets it: with other tensors in it, and in copies of the containers that hold these.

    What the callee does to its containers is done to the owner's when it comes back.

    Args:
        others: the callee's tensors, by the ids of the owner's.
    """

    def __init__(self, value: Any, others: Mapping[int, torch.Tensor]) -> None:
        self.containers: list[tuple[Any, Any, dict[Any, Any]]] = []
        self.value = replace_tensors(value, others, lambda *found: self.containers.append(found))

    @property
    def owned(self) -> dict[int, Any]:
        """The owner's containers, by the ids of the callee's."""
        return {id(lent): own for own, lent, _ in self.containers if lent is not own}

    def come_back(self, bring: Callable[[Any], Any]) -> None:
        """Do to the owner's containers what the callee did to its own.

        Args:
            bring: returns a value as the owner is to have it.
        """
        for own, lent, before in self.containers:
            after = entries_of(lent, 0)
            if after is None:  # a plain object that holds no tensor any more
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
    """Remove an entry that may be gone already."""
    if not isinstance(container, dict):
        if key in attributes_of(container):
            object.__delattr__(container, key)
    elif key in container:
        del container[key]
