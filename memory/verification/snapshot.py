"""Saves and restores what a forward may change beside its result: random states, buffers, caches, attributes.

Finds caches in attributes of modules, and in containers and plain objects there.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..runtime.tensors.parameter_slots import ParameterSlot
from ..weights.quantized_leaves import leaves_of
from .saved_values import SavedValues, write

__all__ = ["RandomState", "Snapshot", "go_through", "hook_tables", "is_our_hook"]

# The attributes that torch sets on every module; `training` is treated like other attributes.
TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
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


class Snapshot(SavedValues):
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
        super().__init__()
        self.left_out = TORCHS_OWN | left_out
        self.random = RandomState()
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
        self.search([*waiting, *objects])

    def take_object(self, value: Any) -> Iterable[Any]:
        # An alias of a type, such as list[int], has the read-only attributes of the type.
        if isinstance(value, nn.Module) or not isinstance(getattr(value, "__dict__", None), dict) or is_foreign(value):
            return ()
        return self.take_attributes(vars(value))

    def put_back(self, *, compares: bool = True) -> None:
        """Restore everything that was saved. Can be called again, also after an interrupt."""
        self.random.put_back()
        for table, hooks in self.hooks:
            put_back_hooks(table, hooks)
        super().put_back(compares=compares)
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


def is_foreign(value: Any) -> bool:
    """Whether an object is the engine's, or of a library whose objects hold no model caches."""
    module = type(value).__module__
    top = module.partition(".")[0]
    return module.startswith(PACK) or top in ("torch", "numpy", "threading", "tokenizers")
