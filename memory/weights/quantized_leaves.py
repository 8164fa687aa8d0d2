"""Quantized weights of other libraries as their leaves: the plain tensors inside them.

A quantized weight is a wrapper around leaves: packed values, scales, zero points. The wrapper reports the size and
the dtype of what it stands for, has no address, and may re-pack itself when it is moved. So no wrapper is ever
moved: its leaves travel like any other tensors, and where they arrive a new wrapper is put around them, by the
flatten protocol of ``torch.utils._python_dispatch``. Works for optimum-quanto's tensors, for ComfyUI's, and for any
other that torch can trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .storage_form import AS_STORED, StorageForm

__all__ = ["Wrapper", "form_of", "leaves_of"]


@dataclass(frozen=True, slots=True)
class Wrapper(StorageForm):
    """How a quantized weight is assembled from its leaves; holds none of them."""

    kind: type
    inner: tuple[tuple[str, Wrapper | None], ...]
    """Its tensors in order; None for a leaf."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Wrapper | None:
        """Return the wrapper of a quantized weight, None for a plain tensor."""
        if not is_traceable_wrapper_subclass(tensor):
            return None
        names, context = tensor.__tensor_flatten__()
        inner = tuple((name, cls.of(getattr(tensor, name))) for name in names)
        return cls(type(tensor), inner, context, tensor.size(), tensor.stride())

    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return leaves_of(weight)

    def assemble(self, leaves: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return a new weight around the next leaves, in the order of `leaves_of`; copies nothing."""
        inner = {name: nested.assemble(leaves) if nested else next(leaves) for name, nested in self.inner}
        weight: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)  # type: ignore[attr-defined]
        return weight


def form_of(tensor: torch.Tensor) -> StorageForm:
    """Return the form in which a weight came."""
    return Wrapper.of(tensor) or AS_STORED


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors inside a weight, depth first; of a plain tensor, itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [leaf for name in names for leaf in leaves_of(getattr(tensor, name))]
