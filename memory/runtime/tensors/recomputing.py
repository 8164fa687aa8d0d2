"""Weights for parts of blocks that a backward pass recomputes.

[Note: recomputed parts] Gradient checkpointing saves no activations of a part of a model and recomputes the part in the
backward pass. Transformers checkpoints the inside of a layer, diffusers' UNets checkpoint single layers of a block:
these run again without a call of their block, so its weights are not loaded. In a backward pass every torch function
therefore gets, in place of a weight at rest, a copy on the device where the weight's block computes. The copies are
freed with the activations that autograd saved of the part, or by an exception. They need no lease and no ledger entry.

A recomputation is recognised in a backward pass because gradients are enabled only there, or because another argument
of the function is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from .form_functions import writes_first

__all__ = ["RestingWeight", "in_backward", "is_recomputing", "with_weights_on_device"]

ACCESSES = frozenset(["__set__", "__delete__"])
DEVICE: Any = torch.Tensor.device  # the descriptor


class RestingWeight:
    """A mixin of tensor classes for weights at rest, whose blocks compute on another device."""

    def answer_with(self, asked: Callable[[], torch.device | None] | None) -> None:
        """Call this function from now on when it is asked for its device ([Note: asked] in `reported_device.py`)."""
        vars(self)["asked"] = asked

    def device_in_backward(self) -> torch.device | None:
        """Return the device on which a backward pass needs the weight; None if the weight is on it, or if it is
        unknown.
        """
        raise NotImplementedError

    def copy_on(self, device: torch.device) -> torch.Tensor:
        """Return a plain copy on a device, in the form in which the block computes."""
        raise NotImplementedError


def in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_recomputing() -> bool:
    """Whether this thread recomputes a checkpointed part in a backward pass."""
    return in_backward() and torch.is_grad_enabled()


def with_weights_on_device(
    function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], *, leaves_alone: frozenset[str]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a torch function with copies in place of the resting weights that it reads.

    Returns None if it reads none. Call this only in a backward pass.

    Args:
        leaves_alone: names of functions that get the weights themselves, not copies.
    """
    name = getattr(function, "__name__", "")
    if name in leaves_alone or name in ACCESSES:
        return None
    args, kwargs = tuple(args), dict(kwargs)
    written = args[:1] if writes_first(function) else ()
    read: Any = (args[len(written) :], {key: value for key, value in kwargs.items() if key != "out"})
    tensors = [each for each in tree_leaves((read, written)) if isinstance(each, torch.Tensor)]
    used = {id(each): device for each in tensors if (device := wanted_on(each)) is not None}
    if not used:
        return None
    if not torch.is_grad_enabled():
        with torch._C.DisableTorchFunctionSubclass():
            others = {DEVICE.__get__(each) for each in tensors if id(each) not in used}
        if others.isdisjoint(used.values()):
            return None
    copies: dict[int, torch.Tensor] = {}

    def copy(weight: Any) -> torch.Tensor:
        if id(weight) not in used:
            return weight  # type: ignore[no-any-return]
        if id(weight) not in copies:
            copies[id(weight)] = weight.copy_on(used[id(weight)])
        return copies[id(weight)]

    read_args, read_kwargs = tree_map_only(RestingWeight, copy, read)
    return (*written, *read_args), kwargs | read_kwargs


def wanted_on(tensor: torch.Tensor) -> torch.device | None:
    return tensor.device_in_backward() if isinstance(tensor, RestingWeight) else None
