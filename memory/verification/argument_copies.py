"""Copies of arguments that a call may change: tensors, generators, and the containers that hold them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from ..errors import UnsafeState

__all__ = ["copy_arguments"]


def copy_arguments(arguments: Any, shared: Sequence[Any]) -> Any:
    """Return a copy of arguments. Copies of tensors that share memory share memory, too.

    Modules, functions, the objects in ``shared`` and objects that cannot be copied are not copied.
    """
    return copy_value(arguments, {id(thing): thing for thing in shared})


def copy_value(value: Any, memo: dict[Any, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module | FunctionType | BuiltinFunctionType | MethodType | type):
        return value
    copied: Any
    if isinstance(value, torch.Generator):
        copied = value.clone_state()
    elif isinstance(value, torch.Tensor):
        copied = copy_tensor(value, memo)
    elif type(value) in (list, tuple, set):
        copied = type(value)(copy_value(item, memo) for item in value)
    elif type(value) is dict:
        copied = {key: copy_value(item, memo) for key, item in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        copied = type(value)(*(copy_value(item, memo) for item in value))
    elif is_dataclass(value) and not isinstance(value, Mapping):
        copied = copy.copy(value)
        for part in fields(value):
            object.__setattr__(copied, part.name, copy_value(getattr(value, part.name, None), memo))
    else:
        try:
            copied = copy.deepcopy(value, {**memo})
        except (TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError, UnsafeState):
            copied = value
    memo[id(value)] = copied
    memo[-id(value)] = value  # keeps the value alive, so its id is not reused while the memo exists
    return copied


def copy_tensor(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Return a copy with the same strides. Copies of views of one memory share memory, too."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        storage = tensor.untyped_storage()
        key = "storage", storage._cdata
        if key not in memo:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            memo[key] = whole.clone()
        copied = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copied.set_(memo[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return copied.requires_grad_(tensor.requires_grad) if tensor.is_leaf and not tensor.is_inference() else copied
