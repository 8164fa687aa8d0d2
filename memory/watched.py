"""Weights at rest in host memory whose ``.data`` is watched.

[Note: data] ``.data`` gives the memory of a weight under a version counter of its own, so what is written there leaves
no trace in the weight. While a weight rests in host memory a copy of it may be staged on a device, and the next pass
computes from that copy. Comparing the bytes would take as long as copying them again. So the parameter object is given
a class whose ``.data`` counts as a write: the staged copy is made anew. Reading ``.data`` costs that copy, and nothing
else. It is a parameter by torch's protocol for tensors of other classes (``_is_param``), never computes on a device,
and is an `nn.Parameter` again when the module is released.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version

from .errors import UnsafeState

__all__ = ["unwatch", "watch"]

AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)
DATA: Any = torch.Tensor.data  # the descriptor


class WatchedTensor(torch.Tensor):
    """A weight whose ``.data`` counts as a write to it ([Note: data]); so does that of what it is detached to."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Return a plain parameter: others make new ones of the class of an old one."""
        return nn.Parameter(data, requires_grad)

    @property
    def data(self) -> torch.Tensor:
        count_write(self)
        return DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        count_write(self)
        DATA.__set__(self, value)

    def numpy(self, *, force: bool = False) -> Any:
        """As `torch.Tensor.numpy`: the array is the weight's memory."""
        count_write(self)
        return super().numpy(force=force)

    def detach(self) -> torch.Tensor:
        """As `torch.Tensor.detach`; one of the same class, which `nn.Parameter()` asks for."""
        # Unlike `as_subclass`, no view: that would keep our memory alive when it is pointed elsewhere.
        return torch.Tensor._make_subclass(WatchedTensor, self)

    def plain(self) -> torch.Tensor:
        """Return a tensor or parameter of torch's own class in the same memory."""
        tensor = super().detach()
        return nn.Parameter(tensor, self.requires_grad) if isinstance(self, nn.Parameter) else tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.plain().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain())


class AbsentWeight(WatchedTensor):
    """A weight that rests in its file: reading ``.data`` is refused, for what is written to it would be lost."""

    @property
    def data(self) -> torch.Tensor:
        raise UnsafeState(
            f"a weight {list(self.shape)} rests in its file and has no memory to write to (fuse a LoRA, change .data): "
            "give its component another placement with reprofile() before that"
        )

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        DATA.__set__(self, value)


def count_write(tensor: torch.Tensor) -> None:
    if not tensor.is_inference():  # those have no counter, and are no masters
        increment_version(tensor)


def watch(tensor: AnyTensor) -> AnyTensor:
    """Watch the ``.data`` of a plain parameter; others stay as they are. Returns the same object."""
    if type(tensor) is nn.Parameter:
        tensor.__class__ = AbsentWeight if tensor.is_meta else WatchedTensor  # type: ignore[assignment]
        tensor._is_param = True
    return tensor


def unwatch(tensor: AnyTensor) -> AnyTensor:
    """Let a watched parameter be a plain one again. Returns the same object."""
    if isinstance(tensor, WatchedTensor):
        tensor.__class__ = nn.Parameter  # type: ignore[assignment]
        vars(tensor).pop("_is_param", None)
    return tensor
