"""The modules of a managed pipeline; finds those that were replaced or added after `manage`.

[Note: other parts] A program may replace a module of its pipeline (``pipe.unet = other``) or add one
(``pipe.load_ip_adapter`` adds an image encoder). The new module is in host memory, and the pipeline would compute it
there. So before a managed module computes, it checks whether the pipeline has a new module; `reprofile` manages new
modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from .errors import InvalidInput, UnsafeState
from .runtime.holders import attached
from .weights.discovery import discover_components

__all__ = ["Parts"]


class Parts:
    """The modules in a pipeline's component attributes.

    Args:
        has_devices: returns whether any managed module computes on an accelerator.
    """

    def __init__(self, pipeline: Any, has_devices: Callable[[], bool]) -> None:
        self.has_devices = has_devices
        attributes = getattr(pipeline, "__dict__", {})
        components = getattr(pipeline, "components", None)
        names = components if isinstance(components, dict) else attributes
        self.known = {
            name: attributes[name]
            for name in names
            if name in attributes and (attributes[name] is None or isinstance(attributes[name], nn.Module))
        }
        """The module in each attribute at the last check."""
        try:
            self.pipeline: Callable[[], Any] = weakref.ref(pipeline)  # weak: its modules hold this object
        except TypeError:
            self.known, self.pipeline = {}, lambda: None

    def find_new(self) -> dict[str, nn.Module]:
        """Return the new modules that are not managed, by their names in the pipeline."""
        pipeline = self.pipeline()
        attributes = vars(pipeline) if pipeline is not None else {}
        changed = {name for name, before in self.known.items() if attributes.get(name) is not before}
        if not changed:
            return {}
        managed = {part for places in attached for part in places.module.modules()}
        try:
            found = discover_components({name: attributes[name] for name in changed if name in attributes})
        except InvalidInput:  # none of the values has modules
            found = {}
        new = {name: module for name, module in found.items() if name in changed and is_new(module, managed)}
        self.known |= {name: attributes.get(name) for name in changed - new.keys()}
        return new

    def note_taken(self, new: Mapping[str, nn.Module]) -> None:
        """Note modules of `find_new` that are managed now."""
        self.known |= new

    def refuse_new(self) -> None:
        """Refuse to compute beside a new module in host memory that is not managed. Takes 50 ns per module."""
        new = self.find_new() if self.has_devices() else {}
        for name, module in new.items():
            pipeline = type(self.pipeline()).__name__
            raise UnsafeState(
                f"{name} of the {pipeline} is now a {type(module).__name__} that is not managed: "
                "call reprofile() of the handle to manage it, or move it to the device"
            )


def is_new(module: nn.Module, managed: Iterable[nn.Module]) -> bool:
    """Whether a module has weights in host memory outside of managed modules."""
    managed = set(managed)
    return any(
        weight.device.type in ("cpu", "meta")
        for part in module.modules()
        if part not in managed
        for weight in part._parameters.values()
        if weight is not None
    )
