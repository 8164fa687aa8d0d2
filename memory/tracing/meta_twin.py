"""A module's twin on the meta device: the same code and structure, weights without memory, no hooks.

[Note: twin] Of the module's weights nothing is read but their forms, and nothing of it is written. Small tensors that
it holds in RAM beside its weights, such as tables of positions, are copied, as a forward computes with them. The twin
has its own lists and dicts, so what a forward leaves in the module stays in the twin. Other objects that the module
holds, such as attention processors, are shared. Functions that replace methods of a class on one module are left out:
they belong to what hooks modules; bound methods are bound to the twin.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import nn

from .known_values import give_values

__all__ = ["make_twin", "meta_like", "with_values"]

# What other code hangs on a module to run around its forward, or to answer in its place.
LEFT_OUT = ("_hf_hook", "_old_forward", "_compiled_call_impl", "_highwater_device")
LARGEST_TABLE_BYTES = 64 << 20
WRAPPERS = (types.FunctionType, types.BuiltinFunctionType, partial)


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form on the meta device; costs no memory.

    That of a quantized weight is the form that its values have.
    """
    with torch.inference_mode(mode=False):
        meta = torch.empty_strided(tuple(tensor.shape), strides_of(tensor), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(meta, tensor.requires_grad)
        return meta.requires_grad_(tensor.requires_grad) if tensor.requires_grad else meta


def is_table(tensor: torch.Tensor) -> bool:
    """Whether a tensor that is no weight lies in RAM: a forward brings it to the device, as the tables of rotations."""
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.nbytes <= LARGEST_TABLE_BYTES


def with_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return `meta_like` of a tensor, with its values where these are a few integers or truth values in RAM."""
    meta = meta_like(tensor)
    return meta if tensor.is_floating_point() or tensor.is_complex() else give_values(meta, tensor)


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.layout is torch.strided:
        return tuple(tensor.stride())
    return torch.empty(tuple(tensor.shape), device="meta").stride()


def make_twin(module: nn.Module) -> nn.Module:
    """Return a module's twin ([Note: twin]); costs a walk over the tree."""
    return Twins().of(module)


class Twins:
    """The twins of one tree: each module and each tensor has one, wherever it stands."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.tensors: dict[int, torch.Tensor] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if (known := self.modules.get(id(module))) is not None:
            return known
        twin = object.__new__(type(module))
        self.modules[id(module)] = twin
        held = vars(module)
        vars(twin).update(
            (name, self.twin_of(value, is_weight=name in ("_parameters", "_buffers")))
            for name, value in held.items()
            if name not in LEFT_OUT
            and not (isinstance(value, WRAPPERS) and callable(getattr(type(module), name, None)))
        )
        for name, value in held.items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
                vars(twin)[name] = OrderedDict()
        vars(twin)["_compiled_call_impl"] = None
        return twin

    def twin_of(self, value: Any, *, is_weight: bool = False) -> Any:
        """Return what the twin holds in place of a value; the value itself where that holds no module and no tensor."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self.tensors:
                self.tensors[id(value)] = value.clone() if is_table(value) and not is_weight else with_values(value)
            return self.tensors[id(value)]
        if isinstance(value, nn.Module):
            return self.of(value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self.of(value.__self__))
        if type(value) in (list, tuple):
            return type(value)(self.twin_of(item, is_weight=is_weight) for item in value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.twin_of(item, is_weight=is_weight)) for key, item in value.items())
        return value
