"""The tensor that a module holds for a weight that rests in its file.

[Note: absent] A weight that rests in its file has a form (shape, dtype) but no memory: writes to it would be lost, and
results computed from it would be meaningless. Torch functions that need only its form get it as it is. For all other
functions its block is read into host memory, where it stays, and they get the real weight. A tensor returned by
``.data`` behaves in the same way. Moves keep nothing in RAM: `Module.to` of a device leaves the weight as it is,
because the engine undoes moves; ``weight.to(device)`` gives a copy that is read for it alone.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .deep_copies import Copied
from .form_functions import ASKS_FOR_FORM, CONVERSIONS, FORM, LEFT_ALONE
from .recomputing import in_backward, with_weights_on_device
from .reported_device import Asked, plainly
from .unread_weight import UnreadWeight
from .watched_data import AnyTensor, WatchedTensor, refuse_absent

__all__ = ["AbsentWeight", "Reader", "stand_for"]

APPLY = nn.Module._apply.__code__


class Reader(Protocol):
    """Reads a weight that rests in its file.

    A protocol because `ReadOnUse`, which does it, needs the slots of weights, and these need this file.
    """

    def __call__(self) -> torch.Tensor:
        """Read the weight into memory; returns the tensor that the module then holds."""
        ...

    def read_on(self, device: torch.device) -> torch.Tensor:
        """Return a copy on a device; the weight still rests in its file."""
        ...


class AbsentWeight(WatchedTensor):
    """A weight that rests in its file, or its ``.data`` ([Note: absent])."""

    reader: Reader
    """Reads the weight into memory; returns the tensor that the module then holds."""
    is_data = False

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if in_backward() and function not in FORM:
            on_device = with_weights_on_device(function, args, kwargs or {}, leaves_alone=LEFT_ALONE)
            if on_device is not None:
                return function(*on_device[0], **on_device[1])
        if UnreadWeight in types:
            return NotImplemented  # it refuses what needs values
        given: Any = (args, dict(kwargs or {}))
        name = getattr(function, "__name__", "")
        is_first = not args or isinstance(args[0], AbsentWeight)
        if name in CONVERSIONS and is_first and getattr(args[0], "_is_param", False):  # ``.data`` is read
            moved = args[0].move(function, args[1:], given[1], is_module=is_applied(sys._getframe(1)))
            if moved is not None:
                return moved
        # `Module.to` asks before it assigns to ``data``.
        is_itself = name == "_has_compatible_shallow_copy_type" and args[0] is args[1]
        asks = function in FORM or (name in ASKS_FOR_FORM and name != "type_as") or is_itself
        # Values of others go to the weight's device, as far as others see.
        if args and (name == "new_tensor" if is_first else name in ("to", "type_as")):
            given = tree_map_only(AbsentWeight, AbsentWeight.form_on_device, given)
        # If another argument has no memory either (a layer before its weights are loaded), only the form matters.
        elif not asks and not any(map(has_no_memory, tree_leaves(given))):
            given = tree_map_only(AbsentWeight, AbsentWeight.present, given)
        with plainly():
            return function(*given[0], **given[1])

    def form_on_device(self) -> torch.Tensor:
        """Return an empty tensor of the dtype and on the device that the weight reports."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def move(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_module: bool
    ) -> Any:
        """Return what a conversion gives that leaves the dtype as it is; None for one to another dtype, which reads.

        Args:
            is_module: for `Module.to` and its like: the engine undoes moves of modules, so they read nothing.
        """
        with plainly():
            empty = torch.empty((0,) * self.dim(), dtype=self.dtype)  # at rest it is on the CPU, as far as others see
            moved = function(empty, *args, **kwargs)
            if not isinstance(moved, torch.Tensor):
                return moved
            if moved.dtype is not self.dtype:
                return None
            if moved is empty or is_module:
                return self
            return torch.empty_like(self, device="meta") if moved.is_meta else self.copy_on(moved.device)

    def present(self) -> torch.Tensor:
        """Return the weight, read into memory.

        Raises:
            UnsafeState: the weight's component computes now.
            InvalidInput: the file has changed.
        """
        weight = self.reader()
        return weight.data if self.is_data else weight

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, AbsentWeight) and value.reader is self.reader:
            return  # its own, as `Module.float` assigns it to a weight that is in float32 already
        refuse_absent(value)
        self.reader().data = value

    def copy_on(self, device: torch.device) -> torch.Tensor:
        return self.reader.read_on(device)

    def detach(self) -> torch.Tensor:
        if (copy := self.recomputed()) is not None:
            return copy
        alias = torch.Tensor._make_subclass(AbsentWeight, self)
        alias.reader, alias.is_data = self.reader, True
        return alias

    def numpy(self, *, force: bool = False) -> Any:
        return self.present().numpy(force=force)

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.Tensor:
        if id(self) not in memo:
            present = self.present()
            Copied.of(memo).kept.append(present)
            memo[id(self)] = copy.deepcopy(present, memo)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.present().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def is_applied(frame: FrameType) -> bool:
    """Whether a frame is of the function that `Module.to` or its like applies to a parameter."""
    return frame.f_back is not None and frame.f_back.f_code is APPLY


def has_no_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, AbsentWeight)


def stand_for(tensor: AnyTensor, reader: Reader, asked: Asked | None = None) -> AnyTensor:
    """Make a plain parameter without memory stand for its weight. Returns the same object, other tensors unchanged.

    Args:
        asked: as in `watch`.
    """
    if isinstance(tensor, AbsentWeight):
        tensor.reader = reader  # a component that was released before could not read it
    elif type(tensor) in (nn.Parameter, UnreadWeight):
        tensor.__class__ = AbsentWeight  # type: ignore[assignment]
        tensor.reader, tensor._is_param = reader, True  # type: ignore[attr-defined]
    if isinstance(tensor, AbsentWeight):
        tensor.answer_with(asked)
    return tensor
