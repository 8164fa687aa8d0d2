"""Records the inputs and outputs of modules in one run with native hooks, in the order in which they returned."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from torch import nn

from ..weights.component import Component
from ..weights.module_component import is_callable
from .comparison import Shown, leaves_in, show
from .snapshot import go_through

__all__ = ["Call", "Recording", "places_of", "remove_hooks_of"]


@dataclass(slots=True)
class Call:
    """One call of a recorded module: digests of its inputs, and its outputs."""

    place: str
    number: int
    """The number of this call of the module, from 1."""
    inputs: list[Shown]
    outputs: list[Shown] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return self.place, self.number


class Recording:
    """Records calls of modules in the body of a ``with``, in the thread that runs it. Each call waits for its device.

    Args:
        places: the modules with their names.
        room_bytes: how many bytes of outputs are kept in host memory; of further outputs only digests are kept.
    """

    def __init__(self, places: Mapping[nn.Module, str], *, room_bytes: int) -> None:
        self.places = places
        self.room_bytes = room_bytes
        self.calls: list[Call] = []
        """The calls that returned, in this order: inner calls come before outer ones."""
        self.begun: list[Call] = []
        """The open calls, the innermost last; after an exception, the calls in which it was raised."""
        self.num_dropped = 0
        """The number of outputs that were not kept."""
        self.counts = Counter[str]()
        self.thread_id = 0

    def __enter__(self) -> Recording:
        self.thread_id = threading.get_ident()
        try:
            for module in self.places:
                module.register_forward_pre_hook(self.before, with_kwargs=True)
                module.register_forward_hook(self.after)
            return self
        except BaseException:
            go_through(self.unhook)
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        go_through(self.unhook)

    def unhook(self) -> None:
        remove_hooks_of(self, self.places)

    def before(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        # kwargs is None if torch calls a hook that was removed meanwhile, in another thread.
        if threading.get_ident() != self.thread_id:
            return
        place = self.places[module]
        self.counts[place] += 1
        inputs = [show(leaf, room_bytes=0) for leaf in leaves_in((args, kwargs))]
        self.begun.append(Call(place, self.counts[place], inputs))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self.thread_id:
            return
        place = self.places[module]
        while self.begun:  # calls above it ended with exceptions that were caught
            call = self.begun.pop()
            if call.place == place:
                break
        else:
            return
        for leaf in leaves_in(output):
            shown = show(leaf, room_bytes=self.room_bytes)
            self.room_bytes -= shown.kept_bytes
            self.num_dropped += shown.dtype is not None and shown.tensor is None
            call.outputs.append(shown)
        self.calls.append(call)


def remove_hooks_of(owner: object, modules: Iterable[nn.Module]) -> None:
    """Remove the forward hooks that are methods of an object. Needs no handles, which an interrupt could lose."""
    for module in modules:
        for hooks, marks in (
            (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
            (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
        ):
            for number in [number for number, hook in hooks.items() if owner_of(hook) is owner]:
                hooks.pop(number, None)
                for marked in marks:
                    marked.pop(number, None)


def owner_of(hook: Any) -> object:
    while isinstance(hook, partial):
        hook = hook.func
    return getattr(hook, "__self__", None)


def places_of(module: nn.Module, component: Component, prefix: str = "") -> dict[nn.Module, str]:
    """Return the modules to record with their names: blocks, modules with other weights, entries, and the root."""
    blocks = {block.name: module.get_submodule(block.name) for block in component.blocks}
    places = {part: f"{prefix}{name}" for name, part in blocks.items()}
    inside = {part for block in blocks.values() for part in block.modules()}
    for name, part in module.named_modules():
        holds_weights = any(parameter is not None for parameter in part._parameters.values())
        is_entry = name and "." not in name and is_callable(part)
        if part not in inside and part is not module and (is_entry or (holds_weights and is_callable(part))):
            places[part] = f"{prefix}{name}"
    places[module] = prefix.rstrip(".") or component.name
    return places
