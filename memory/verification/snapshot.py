"""Saves and restores what a forward may change beside its result: random states, buffers, caches, attributes.

Finds caches in attributes of modules, and in containers and plain objects there. Does not find state in ``__slots__``,
closures or C extensions.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ..runtime.tensors.parameter_slots import ParameterSlot
from ..weights.quantized_leaves import leaves_of
from .comparison import same_bits

__all__ = ["RandomState", "Snapshot", "go_through", "hook_tables", "is_our_hook", "is_same"]

# The attributes that torch sets on every module; `training` is treated like other attributes.
TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
CONTAINERS = (dict, list, set, deque)
ATOMS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType, torch.device, torch.dtype)
# A larger container is a vocabulary, not a cache: it is restored as a whole, and its items are not searched.
MAX_ITEMS = 4096
MAX_OBJECTS = 50_000
PACK = f"{__name__.rsplit('.', 3)[0]}."


def go_through(step: Callable[[], None]) -> None:
    """Run a step that may run twice; run it again if an exception or interrupt ends it."""
    try:
        step()
    except BaseException:
        step()
        raise


class RandomState:
    """The states of torch's random generators (CPU and accelerators), Python's and numpy's.

    Args:
        devices: the accelerators; None: all.
    """

    def __init__(self, devices: Iterable[torch.device] | None = None) -> None:
        self.cpu = torch.get_rng_state()
        self.python = random.getstate()
        numpy = sys.modules.get("numpy")
        self.numpy = numpy.random.get_state() if numpy is not None else None
        self.devices: dict[int, torch.Tensor] = {}
        if torch.accelerator.is_available():
            module = torch.get_device_module()
            indices = range(torch.accelerator.device_count()) if devices is None else [d.index for d in devices]
            self.devices = {index: module.get_rng_state(index) for index in indices}

    def put_back(self) -> None:
        torch.set_rng_state(self.cpu)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for index, state in self.devices.items():
            torch.get_device_module().set_rng_state(state, index)


class Snapshot:
    """The state of modules and other objects at one time. Costs a copy of their buffers and caches.

    Args:
        slots: the managed weights; their buffers are restored where they rest by then.
        objects: other objects whose state a call changes, such as a pipeline with its scheduler.
        left_out: attributes of modules that belong to a host and are not restored.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        slots: Iterable[ParameterSlot],
        objects: Iterable[Any] = (),
        *,
        left_out: frozenset[str] = frozenset(),
    ) -> None:
        self.left_out = TORCHS_OWN | left_out
        self.random = RandomState()
        self.seen: dict[int, Any] = {}
        """The searched objects by id. Keeping them alive keeps their ids from being reused."""
        self.containers: list[tuple[Any, Any]] = []
        self.attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.buffers: list[tuple[nn.Module, dict[str, list[torch.Tensor] | None]]] = []
        self.owners = [(slot, slot.owners, slot.held) for slot in slots if slot.is_buffer]
        self.hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        """The hook tables of each module, because some libraries add hooks in the first forward."""
        waiting: list[Any] = []
        for module in modules:
            for part in module.modules():
                if id(part) not in self.seen:
                    self.seen[id(part)] = part
                    self.buffers.append((part, {name: copy_of(held) for name, held in part._buffers.items()}))
                    self.hooks += [(table, dict(table)) for table in hook_tables(part)]
                    waiting += self.take_attributes(vars(part), self.left_out)
        for thing in objects:
            waiting.append(thing)
        while waiting and len(self.seen) < MAX_OBJECTS:
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
        # An alias of a type, such as list[int], has the read-only attributes of the type.
        if isinstance(value, nn.Module) or not isinstance(getattr(value, "__dict__", None), dict) or is_foreign(value):
            return []
        return self.take_attributes(vars(value), frozenset())

    def take_attributes(self, attributes: dict[str, Any], left_out: frozenset[str]) -> list[Any]:
        saved = {name: value for name, value in attributes.items() if name not in left_out}
        self.attributes.append((attributes, saved))
        return list(saved.values())

    def put_back(self) -> None:
        """Restore everything that was saved. Can be called again, also after an interrupt."""
        self.random.put_back()
        for attributes, saved in self.attributes:
            for name in [name for name in attributes if name not in saved and name not in self.left_out]:
                del attributes[name]
            attributes.update(saved)
        for table, hooks in self.hooks:
            put_back_hooks(table, hooks)
        for container, items in self.containers:
            if not is_same(container, items):
                container.clear()
                container.extend(items) if isinstance(container, list | deque) else container.update(items)
        for tensor, content in self.tensors:
            if tensor.shape != content.shape:
                tensor.data = content.clone()
            else:
                write(tensor, content)
        for slot, owners, held in self.owners:
            if slot.owners != owners:  # the group gave up the buffer, because the forward changed its shape
                slot.set_owners(owners)
                slot.hold(held)
        for module, saved_buffers in self.buffers:
            for name in [name for name in module._buffers if name not in saved_buffers]:
                del module._buffers[name]
            for name, leaves in saved_buffers.items():
                put_back_buffer(module, name, leaves)


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return a module's tables of forward hooks. Torch's other tables have no effect without entries in these."""
    return module._forward_pre_hooks, module._forward_hooks


def put_back_hooks(table: dict[int, Any], before: dict[int, Any]) -> None:
    """Remove hooks that other code added, and add hooks that it removed. Leaves the engine's own hooks alone."""
    for number, hook in list(table.items()):
        if number not in before and not is_our_hook(hook):
            del table[number]
    for number, hook in before.items():
        if number not in table and not is_our_hook(hook):
            table[number] = hook


def is_our_hook(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(PACK)


def put_back_buffer(module: nn.Module, name: str, saved: list[torch.Tensor] | None) -> None:
    held = module._buffers.get(name)
    if saved is None or held is None:
        module._buffers[name] = None if saved is None else saved[0].clone()
        return
    for leaf, content in zip(leaves_of(held), saved, strict=True):
        if leaf.shape != content.shape or leaf.dtype != content.dtype:
            module._buffers[name] = content.to(leaf.device, copy=True)
            return
        write(leaf, content)


def copy_of(held: torch.Tensor | None) -> list[torch.Tensor] | None:
    if held is None:
        return None
    return [leaf.detach() if leaf.is_meta else leaf.detach().clone() for leaf in leaves_of(held)]


def write(tensor: torch.Tensor, content: torch.Tensor) -> None:
    """Write a tensor's former content if it has changed; an unchanged tensor keeps its version counter."""
    if tensor.is_meta:
        return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        content = content.to(tensor.device)
        if not same_bits(tensor.detach(), content):
            tensor.detach().copy_(content)


def is_same(container: Any, items: Any) -> bool:
    if len(container) != len(items):
        return False
    if isinstance(container, dict):
        return all(a is b and container[a] is items[b] for a, b in zip(container, items, strict=True))
    if isinstance(container, set):
        return bool(container == items)
    return all(a is b for a, b in zip(container, items, strict=True))


def is_foreign(value: Any) -> bool:
    """Whether an object is the engine's, or of a library whose objects hold no model caches."""
    module = type(value).__module__
    top = module.partition(".")[0]
    return module.startswith(PACK) or top in ("torch", "numpy", "threading", "tokenizers")
