"""The parts of a pipeline that is managed, and whether it has others by now.

[Note: other parts] A program gives its pipeline another module (``pipe.unet = other``), or one that it had not
(``pipe.load_ip_adapter`` brings an image encoder). That one rests in host memory, and the pipeline would compute with
it there. So the managed parts look, before they compute, whether the pipeline has what it had; `reprofile` takes what
came.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from .attachment import attached
from .discovery import discover_components
from .errors import InvalidInput, UnsafeState

__all__ = ["Parts"]


class Parts:
    """What a pipeline has in the attributes that are its components.

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
        """What each attribute held when it was looked at last."""
        try:
            self.pipeline: Callable[[], Any] = weakref.ref(pipeline)  # it holds its parts, and those hold us
        except TypeError:
            self.known, self.pipeline = {}, lambda: None

    def find_new(self) -> dict[str, nn.Module]:
        """Return the modules that nobody manages, by their names in the pipeline."""
        pipeline = self.pipeline()
        attributes = vars(pipeline) if pipeline is not None else {}
        changed = {name for name, before in self.known.items() if attributes.get(name) is not before}
        if not changed:
            return {}
        managed = {part for attachment in list(attached) for part in attachment.module.modules()}
        try:
            found = discover_components({name: attributes[name] for name in changed if name in attributes})
        except InvalidInput:  # no module at all
            found = {}
        new = {name: module for name, module in found.items() if name in changed and is_new(module, managed)}
        self.known |= {name: attributes.get(name) for name in changed - new.keys()}
        return new

    def refuse_new(self) -> None:
        """Refuse to compute beside a part that rests in host memory and is not managed. Costs 50 ns for each part.

        Raises:
            UnsafeState: there is one.
        """
        new = self.find_new() if self.has_devices() else {}
        for name, module in new.items():
            pipeline = type(self.pipeline()).__name__
            raise UnsafeState(
                f"{name} of the {pipeline} is a {type(module).__name__} by now that is not managed: "
                "call reprofile() of the handle, which takes it, or move it to the device"
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
