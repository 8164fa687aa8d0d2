"""The tensor that a module of `load_model` holds for a weight that is still in its file.

[Note: unread] Such a weight has a form but no memory. Torch computes with such tensors, and often in silence: a linear
layer without a bias returns memory with random content, a text encoder an output without values. So all that needs
more of the weight than its form raises one line that says what to do. While its module is managed and the weight rests
in its file, the same object stands for it (`absent_weight.py`). If it has no memory after that, it is unread again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...errors import UnsafeState, one_line
from ...weights.source import WeightsSource
from .form_functions import ASKS_FOR_FORM, CONVERSIONS, FORM
from .reported_device import plainly

__all__ = ["Unread", "UnreadWeight", "mark_unread", "unread_of"]

PLAIN = (torch.Tensor, nn.Parameter)
ASKS = ASKS_FOR_FORM - {"type_as"}  # which takes the values of one of two tensors
# Beside those that ask for the form: what shows a tensor, and what `nn.Module.to` asks before it assigns one.
SHOWS = frozenset(("__repr__", "__format__", "__dir__", "_has_compatible_shallow_copy_type"))


@dataclass(frozen=True, slots=True, eq=False)
class Unread:
    """Which weight of which files a tensor without memory is."""

    source: WeightsSource
    names: frozenset[str]
    """All names that its module has for it."""

    @property
    def told(self) -> str:
        """Where it is, for a message."""
        name = min(self.names)
        file, _ = self.source.files[name]
        return f"{name!r} is still in {file.path}"

    def refusal(self) -> UnsafeState:
        """Return the error for what needs the weight."""
        return UnsafeState(one_line(f"{self.told}: manage its model, or call load_weights(model), before you use it"))


class UnreadWeight(torch.Tensor):
    """A weight that is still in its file, or its ``.data`` ([Note: unread])."""

    unread: Unread

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Return a plain parameter: other libraries create parameters by ``type(old)(data)``."""
        return nn.Parameter(data, requires_grad)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name not in CONVERSIONS and (function in FORM or name in ASKS or name in SHOWS):
            with plainly():
                return function(*args, **kwargs)
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        own = next(value for value in given if isinstance(value, UnreadWeight))
        if name in CONVERSIONS and args[0] is own:
            return own.convert(function, args, kwargs)
        others = [value for value in given if not isinstance(value, UnreadWeight)]
        # Between tensors without memory, as code computes to learn shapes, only the form matters.
        is_form = bool(others) and all(type(other) in PLAIN and other.is_meta for other in others)
        if not (is_form or function in FORM or name in ASKS or name in SHOWS):
            raise own.unread.refusal()
        with plainly():
            return function(*args, **kwargs)

    def convert(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return itself where a conversion changes neither device nor dtype; raises `UnsafeState` for others."""
        with plainly():
            try:
                moved = function(*args, **kwargs)
            except NotImplementedError:  # torch's for what has no memory and is moved
                raise self.unread.refusal() from None
            if isinstance(moved, torch.Tensor) and (not moved.is_meta or moved.dtype is not self.dtype):
                raise self.unread.refusal()
        return self if isinstance(moved, torch.Tensor) else moved

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if unread_of(value) is not self.unread:  # its own is assigned by `nn.Module.to`
            raise self.unread.refusal()

    def detach(self) -> torch.Tensor:
        alias = torch.Tensor._make_subclass(UnreadWeight, self)
        alias.unread = self.unread
        return alias

    def __deepcopy__(self, memo: dict[Any, Any]) -> torch.Tensor:
        """Return a copy without memory, which is the same weight of the same files."""
        if id(self) not in memo:
            with plainly():
                form = torch.empty_like(self)
                copied = nn.Parameter(form, self.requires_grad) if isinstance(self, nn.Parameter) else form
            memo[id(self)] = mark_unread(copied, self.unread)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self.unread.refusal()


def mark_unread(tensor: torch.Tensor, unread: Unread) -> torch.Tensor:
    """Make a tensor without memory stand for a weight in its file. Returns the same object."""
    assert tensor.is_meta
    is_parameter = isinstance(tensor, nn.Parameter)
    tensor.__class__ = UnreadWeight
    tensor.unread = unread  # type: ignore[attr-defined]
    if is_parameter:
        tensor._is_param = True
    return tensor


def unread_of(tensor: torch.Tensor) -> Unread | None:
    """Return which weight a tensor is that came unread, whatever it stands for now; None for others."""
    found: Unread | None = vars(tensor).get("unread")
    return found
