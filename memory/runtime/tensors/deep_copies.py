"""`copy.deepcopy` of weights and layers of a managed module: the copies are plain and not managed.

[Note: deep copies] `copy.deepcopy` keeps its copies in a memo, by the ``id`` of the original, and keeps the originals
alive as long as the memo. A tensor that we create only to be copied is not kept alive by it: another tensor could get
the same ``id`` and would then be taken for the copied one. So such a tensor is kept in `Copied.kept` before its ``id``
goes into the memo.

The memo also holds one `Copied` object, with what several originals share. Views of one weight share memory, and so do
their copies. Copies of layers get the hooks of their originals while they are made; when `copy.deepcopy` returns, the
memo and the `Copied` object die, and the latter removes these hooks.

Parts of a managed module can be copied like this; the whole module cannot.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import UnsafeState

__all__ = ["Copied", "OwnHook", "copy_view"]

KEY = "highwater"  # torch keeps the storages that it has copied under "torch"


class Copied:
    """Our object in the memo of one `copy.deepcopy` ([Note: deep copies])."""

    def __init__(self) -> None:
        self.kept: list[object] = []
        """Objects kept alive because their ids are keys of the memo or of ``found``."""
        self.found: dict[Any, torch.Tensor] = {}
        """Copies of memory that several originals share."""
        self.at_end: list[Callable[[], None]] = []

    @classmethod
    def of(cls, memo: dict[Any, Any]) -> Copied:
        noted = memo.get(KEY)
        if noted is None:
            noted = memo[KEY] = cls()
        return noted

    def __deepcopy__(self, memo: object) -> Copied:
        return self

    def __del__(self) -> None:
        for end in self.at_end:
            end()


class OwnHook(partial[Any]):
    """A hook of the engine on a module; copies of the module do not get it.

    Args:
        function: the function to call, followed by its first arguments.
    """

    own_module: weakref.ref[nn.Module]
    owner: str
    """The name of the component."""
    is_root: bool
    """Whether the module is the component's, not a part of it."""

    @classmethod
    def on(
        cls, module: nn.Module, function: Callable[..., Any], *args: Any, owner: str, is_root: bool = False
    ) -> OwnHook:
        hook = cls(function, *args)
        hook.own_module, hook.owner, hook.is_root = weakref.ref(module), owner, is_root
        return hook

    def __deepcopy__(self, memo: dict[Any, Any]) -> Callable[..., None]:
        if self.is_root:
            raise UnsafeState(f"{self.owner} is managed: release it before copying its module")
        copied = memo.get(id(self.own_module()))
        if copied is not None:
            Copied.of(memo).at_end.append(partial(strip, weakref.ref(copied)))
        return left_out

    def __reduce__(self) -> Any:
        raise UnsafeState(f"{self.owner} is managed: release it before pickling its module, or save its state_dict()")


def left_out(*args: Any) -> None:
    """Do nothing. Stands in for a hook in a copied module until it is removed."""


def strip(copied: weakref.ref[nn.Module]) -> None:
    """Remove what stands in for our hooks from a copied module."""
    module = copied()
    tables = [table for name, table in vars(module).items() if name.endswith(TABLES)] if module is not None else []
    numbers = {number for table in tables for number, hook in table.items() if is_left_out(hook)}
    for table in tables:
        for number in numbers:
            table.pop(number, None)


TABLES = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def is_left_out(hook: Any) -> bool:
    return getattr(hook, "hook", hook) is left_out  # torch wraps some


def copy_view(tensor: torch.Tensor, whole: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Return a copy of a plain tensor with the same strides. Copies of views of one weight share memory, too.

    Args:
        whole: the weight; its bytes are copied once. If the tensor does not lie in it, the tensor's own bytes are
            copied.
    """
    copied = Copied.of(memo)
    own, (storage, begin, end) = extent(tensor), extent(whole)
    if own[0] != storage or not begin <= own[1] <= own[2] <= end or begin % tensor.itemsize:
        whole, (storage, begin, end) = tensor, own
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        found = copied.found.get((storage, begin, end))
        if found is None:
            flat = torch.empty(0, dtype=torch.uint8).set_(whole.untyped_storage(), begin, (end - begin,), (1,))
            found = copied.found[storage, begin, end] = flat.clone()
            copied.kept.append(whole)
        offset = tensor.storage_offset() - begin // tensor.itemsize
        result = torch.empty(0, dtype=tensor.dtype)
        result.set_(found.untyped_storage(), offset, tensor.size(), tensor.stride())
        if tensor.is_conj():
            result = result.conj_physical()
        return result.neg() if tensor.is_neg() else result


def extent(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a plain tensor's storage, and the bytes in it where the tensor begins and ends."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage()._cdata, begin, begin + (steps + 1) * tensor.itemsize if tensor.numel() else begin
