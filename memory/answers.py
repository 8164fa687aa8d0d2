"""The ``device`` of a managed module: where it computes, while its weights rest elsewhere.

[Note: device] Models of diffusers and transformers have a property that returns the device of their first weight, and
their callers make inputs there: noise, tables, the next tokens. Weights at rest would answer ``cpu``. Only a class can
answer for a property, so while a module is managed its class is a subclass with another answer, as FSDP2's modules
have one. That has the name of the class it stands for and equals it, so that tables of classes find it, and goes with
`release`. A weight itself answers with the device where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

__all__ = ["DeviceAnswers"]

KEY = "_highwater_device"


class AnswersDevice:
    """Base of the classes that answer. It comes first, so that libraries which register subclasses see none."""

    def __init_subclass__(cls) -> None: ...

    @property
    def device(self) -> torch.device:
        answers, inside = vars(self)[KEY]
        return inside if answers.is_inside() else answers.outside or inside  # type: ignore[no-any-return]


class DeviceAnswers:
    """Lets the modules of a component that have a ``device`` answer with the one where they compute.

    Args:
        device_of: where what has this path in the root computes.
        is_inside: whether this thread is in the middle of a forward of the root.
    """

    def __init__(
        self, root: nn.Module, device_of: Callable[[str], torch.device], *, is_inside: Callable[[], bool]
    ) -> None:
        self.is_inside = is_inside
        self.outside: torch.device | None = None
        """The answer outside of forwards, where it is another one: in a pipeline that of its diffusion model."""
        self.changed: list[tuple[nn.Module, type[nn.Module]]] = []
        for path, part in root.named_modules():
            if asks_weights(part):
                vars(part)[KEY] = self, device_of(path)
                self.changed.append((part, type(part)))
                part.__class__ = answering(type(part))

    def end(self) -> None:
        """Give the modules their own classes again. Idempotent."""
        for part, own in self.changed:
            if isinstance(part, AnswersDevice):
                part.__class__ = own  # type: ignore[assignment]
            vars(part).pop(KEY, None)
        self.changed = []


def asks_weights(module: nn.Module) -> bool:
    """Whether the class has a property for the device that answers with where weights rest."""
    answer = getattr(type(module), "device", None)
    if not isinstance(answer, property) or answer.fset is not None or isinstance(module, AnswersDevice):
        return False
    try:
        device = module.device
    except Exception:  # a property of another meaning, or of a module without weights
        return False
    return isinstance(device, torch.device) and device.type in ("cpu", "meta")


known: WeakValueDictionary[type, type] = WeakValueDictionary()


def answering(own: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass that answers in place of a class."""
    found = known.get(own)
    if found is None:
        kind = type(own)
        equal = {"__eq__": lambda stand, other: stand is other or own is other, "__hash__": lambda stand: hash(own)}
        names: dict[str, Any] = {
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
            "__doc__": own.__doc__,
        }
        kind_of_kind: Any = type(kind)
        answering_kind: Any = kind_of_kind(kind.__name__, (kind,), equal)
        found = known[own] = answering_kind(own.__name__, (AnswersDevice, own), names)
    return found
