"""Makes a managed module report the ``device`` on which it computes, although its weights rest elsewhere.

[Note: device] Models of diffusers and transformers have a ``device`` property that returns the device of their first
weight; their callers create inputs there (noise, tables, the next tokens). For weights at rest it would be ``cpu``.
Only a class can override a property, so a managed module gets a subclass of its class that reports another device;
FSDP2 replaces the class of its modules, too. The subclass has the name of the original class and compares equal to it,
so lookups by class find it. Calling it creates a module of the original class. `release` restores the class. For the
device that a single weight reports, see [Note: asked] in `reported_device.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import nn

from ...errors import UnsafeState
from ..tensors.deep_copies import Copied

__all__ = ["DeviceAnswers"]

KEY = "_highwater_device"


class AnswersDevice:
    """First base of the subclasses. Its empty ``__init_subclass__`` keeps libraries from registering them."""

    def __init_subclass__(cls) -> None: ...

    @property
    def device(self) -> torch.device:
        answers, inside = vars(self).get(KEY, (None, None))
        if answers is None or answers.is_ended:  # a shallow copy of a module that has been released
            return super().device  # type: ignore[misc, no-any-return]
        return inside if answers.is_inside() else answers.outside or inside  # type: ignore[no-any-return]

    def __copy__(self) -> AnswersDevice:
        copied: AnswersDevice = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the original class. `DeviceAnswers` refuses pickling while the module is managed."""
        how: Any = super().__reduce_ex__(protocol)
        own = type(self).__mro__[2]
        args = tuple(own if value is type(self) else value for value in how[1])
        return call, (how[0], args), *how[2:]  # pickle's `copyreg.__newobj__` accepts no other class


class DeviceAnswers:
    """Makes the modules of a component that have a ``device`` property report the device on which they compute.

    Args:
        device_of: returns the device on which the submodule with this path computes.
        is_inside: returns whether this thread runs a forward of the root.
    """

    def __init__(
        self, root: nn.Module, device_of: Callable[[str], torch.device], *, is_inside: Callable[[], bool]
    ) -> None:
        self.root = ref(root)
        self.is_inside = is_inside
        self.outside: torch.device | None = None
        """The device to report outside of forwards, if another one."""
        self.is_ended = False
        self.changed: list[tuple[nn.Module, type[nn.Module]]] = []
        for path, part in root.named_modules():
            if asks_weights(part):
                vars(part)[KEY] = self, device_of(path)
                self.changed.append((part, type(part)))
                part.__class__ = answering(type(part))

    def report_outside(self, device: torch.device) -> None:
        """Report this device outside of forwards from now on: in a pipeline that of its diffusion model."""
        self.outside = device

    def end(self) -> None:
        """Restore the classes of the modules. Idempotent."""
        for part, own in self.changed:
            give_back(ref(part), own)
        self.changed = []
        self.is_ended = True

    # -- copying or pickling a module copies or pickles this object, too

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceAnswers:
        if not self.is_ended:
            if id(self.root()) in memo:
                raise UnsafeState("the module is managed: release it before you copy it")
            for part, own in self.changed:
                copied = memo.get(id(part))
                if copied is not None:
                    Copied.of(memo).at_end.append(partial(give_back, ref(copied), own))
        return self

    def __reduce__(self) -> Any:
        if not self.is_ended:
            raise UnsafeState("the module is managed: release it before you pickle it, or save its state_dict()")
        return ended, ()


def give_back(module: Callable[[], Any], own: type[nn.Module]) -> None:
    """Restore the class of a module that is still alive."""
    part = module()
    if isinstance(part, AnswersDevice):
        part.__class__ = own  # type: ignore[assignment]
    if part is not None:
        vars(part).pop(KEY, None)


def call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def ended() -> DeviceAnswers:
    """Return an ended object, for pickles of shallow copies of released modules."""
    answers = DeviceAnswers(nn.Module(), lambda path: torch.device("cpu"), is_inside=bool)
    answers.end()
    return answers


def asks_weights(module: nn.Module) -> bool:
    """Whether the module's class has a ``device`` property that reports where the weights rest."""
    answer = getattr(type(module), "device", None)
    if not isinstance(answer, property) or answer.fset is not None or isinstance(module, AnswersDevice):
        return False
    try:
        device = module.device
    except Exception:  # another library's property may raise any error, for example if there are no weights
        return False
    return isinstance(device, torch.device) and device.type in ("cpu", "meta")


known: WeakValueDictionary[type, type] = WeakValueDictionary()


def answering(own: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass that replaces a class."""
    found = known.get(own)
    if found is None:
        kind = type(own)
        equal = {
            "__eq__": lambda stand, other: stand is other or own is other,
            "__hash__": lambda stand: hash(own),
            "__call__": lambda stand, *args, **options: own(*args, **options),  # a new module is not managed
            "__instancecheck__": lambda stand, module: isinstance(module, own),
            "__subclasscheck__": lambda stand, other: issubclass(other, own),
        }
        names: dict[str, Any] = {
            "__module__": own.__module__,
            "__qualname__": own.__qualname__,
            "__doc__": own.__doc__,
        }
        kind_of_kind: Any = type(kind)
        answering_kind: Any = kind_of_kind(kind.__name__, (kind,), equal)
        found = known[own] = answering_kind(own.__name__, (AnswersDevice, own), names)
    return found
