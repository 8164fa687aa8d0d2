"""The tensor that a module holds for a weight that rests in its file.

[Note: absent] A weight that rests in its file has a form (shape, dtype) but no memory: writes to it would be lost, and
results computed from it would be meaningless. Torch functions that need only its form get it as it is. For all other
functions its block is read into host memory, where it stays, and they get the real weight. A tensor returned by
``.data`` behaves in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .deep_copies import Copied
from .form_functions import ASKS_FOR_FORM, FORM, LEFT_ALONE
from .recomputing import in_backward, with_weights_on_device
from .reported_device import Asked, plainly
from .watched_data import AnyTensor, WatchedTensor, refuse_absent

__all__ = ["AbsentWeight", "Reader", "stand_for"]

# Calls that ``Module.to`` and similar methods make for each parameter. The engine undoes moves, so they read no file;
# to another dtype the weight itself is converted.
CONVERSIONS = frozenset(("to", "cpu", "cuda", "xpu", "npu", "half", "bfloat16", "float", "double", "type"))


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
        given: Any = (args, dict(kwargs or {}))
        name = getattr(function, "__name__", "")
        converts = name in CONVERSIONS and not args[0].is_data
        if converts:
            with plainly():
                moved = function(*args, **(kwargs or {}))
            if not isinstance(moved, torch.Tensor) or moved.dtype is args[0].dtype:
                return moved
        asks = name in ASKS_FOR_FORM or function in FORM
        # If another argument has no memory either (a layer before its weights are loaded), only the form matters.
        if not asks and not any(map(has_no_memory, tree_leaves(given))):
            given = tree_map_only(AbsentWeight, AbsentWeight.present, given)
        with plainly():
            return function(*given[0], **given[1])

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


def has_no_memory(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta and not isinstance(value, AbsentWeight)


def stand_for(tensor: AnyTensor, reader: Reader, asked: Asked | None = None) -> AnyTensor:
    """Make a plain parameter without memory stand for its weight. Returns the same object, other tensors unchanged.

    Args:
        asked: as in `watch`.
    """
    if isinstance(tensor, AbsentWeight):
        tensor.reader = reader  # a component that was released before could not read it
    elif type(tensor) is nn.Parameter:
        tensor.__class__ = AbsentWeight  # type: ignore[assignment]
        tensor.reader, tensor._is_param = reader, True  # type: ignore[attr-defined]
    if isinstance(tensor, AbsentWeight):
        tensor.answer_with(asked)
    return tensor
