"""Weights for parts of blocks that a backward pass computes again.

[Note: recomputed parts] Gradient checkpointing keeps nothing of a part of a model and computes it again in the
backward pass. Transformers checkpoints the inside of a layer, diffusers' UNets single layers of a block: these run
again without a call of their block, while its weights rest elsewhere. So in a backward pass a function of torch gets,
in place of a weight at rest, a copy on the device where its block computes. Autograd frees these copies with what it
saved of the part, and so does an exception. They need no lease and no entry in the books.

What is computed again is told from the rest of a backward pass by its gradients, which are enabled only there, or by
another argument that is on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["RestingWeight", "in_backward", "is_recomputing", "with_weights_on_device"]

IN_PLACE = frozenset(
    f"__i{name}__"
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
)
ACCESSES = frozenset(["__set__", "__delete__"])
DEVICE: Any = torch.Tensor.device  # the descriptor


class RestingWeight:
    """A mixin of tensor classes for weights at rest, whose blocks compute on another device."""

    def device_in_backward(self) -> torch.device | None:
        """Return where a backward pass needs it; None if it is there, or if that is unknown."""
        raise NotImplementedError

    def copy_on(self, device: torch.device) -> torch.Tensor:
        """Return a plain copy on a device, as its block computes with it."""
        raise NotImplementedError


def in_backward() -> bool:
    """Whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_recomputing() -> bool:
    """Whether this thread computes in a backward pass what a checkpoint did not keep."""
    return in_backward() and torch.is_grad_enabled()


def with_weights_on_device(
    function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], *, leaves_alone: frozenset[str]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a torch function with copies in place of resting weights that it reads; None if it reads
    none. To be called in a backward pass.

    Args:
        leaves_alone: names of functions that get the weights themselves.
    """
    name = getattr(function, "__name__", "")
    if name in leaves_alone or name in ACCESSES:
        return None
    args, kwargs = tuple(args), dict(kwargs)
    writes = name == "__setitem__" or name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    written = args[:1] if writes else ()
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
