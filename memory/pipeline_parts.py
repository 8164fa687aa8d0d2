"""The parts of a managed pipeline, and which of them were replaced or added since.

[Note: other parts] A program may replace a module of its pipeline (``pipe.unet = other``) or add one
(``pipe.load_ip_adapter`` adds an image encoder). The new module rests in host memory, and the pipeline would compute
there. So before a managed part computes it checks whether the pipeline has a new part; `reprofile` manages that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .errors import InvalidInput, UnsafeState
from .runtime.managed_component import attached
from .weights.discovery import discover_components

__all__ = ["Parts"]


class Parts:
    """The modules in the attributes that are a pipeline's components.

    Args:
        has_devices: whether any managed part computes elsewhere than in host memory.
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
        """What each attribute held when it was last checked."""
        try:
            self.pipeline: Callable[[], Any] = weakref.ref(pipeline)  # weakly: it holds its parts, and those hold us
        except TypeError:
            self.known, self.pipeline = {}, lambda: None

    def find_new(self) -> dict[str, nn.Module]:
        """Return the modules that came since and are not managed, by their names in the pipeline."""
        pipeline = self.pipeline()
        attributes = vars(pipeline) if pipeline is not None else {}
        changed = {name for name, before in self.known.items() if attributes.get(name) is not before}
        if not changed:
            return {}
        managed = {part for managed_component in list(attached) for part in managed_component.module.modules()}
        try:
            found = discover_components({name: attributes[name] for name in changed if name in attributes})
        except InvalidInput:  # no module at all
            found = {}
        new = {name: module for name, module in found.items() if name in changed and is_new(module, managed)}
        self.known |= {name: attributes.get(name) for name in changed - new.keys()}
        return new

    def refuse_new(self) -> None:
        """Refuse to compute beside a new part that rests in host memory and is not managed. Costs 50 ns per part.

        Raises:
            UnsafeState: the pipeline has such a part.
        """
        new = self.find_new() if self.has_devices() else {}
        for name, module in new.items():
            pipeline = type(self.pipeline()).__name__
            raise UnsafeState(
                f"{name} of the {pipeline} is now a {type(module).__name__} that is not managed: "
                "call the handle's reprofile(), which manages it, or move it to the device"
            )


def is_new(module: nn.Module, managed: Iterable[nn.Module]) -> bool:
    """Whether a module has weights in host memory that no managed module holds, itself or inside it."""
    managed = set(managed)
    return any(
        weight.device.type in ("cpu", "meta")
        for part in module.modules()
        if part not in managed
        for weight in part._parameters.values()
        if weight is not None
    )
