"""Quantized weights of other libraries as their leaves: the plain tensors inside them.

A quantized weight is a wrapper around leaves: packed values, scales, zero points. The wrapper reports the size and
the dtype of what it stands for, has no address, and may re-pack itself when it is moved. So no wrapper is ever
moved: its leaves travel like any other tensors, and where they arrive a new wrapper is put around them, by the
flatten protocol of ``torch.utils._python_dispatch``. Works for optimum-quanto's tensors, for ComfyUI's, and for any
other that torch can trace.

A packed weight is one plain range of bytes of a tensor class that says in Python attributes what they mean, and so has
a ``shape`` of its own: ComfyUI-GGUF's tensors, and those of packs that follow it. Its only leaf is that memory. The
attributes are shared by all tensors that stand for the weight: what other code sets on one, such as the patches that
its layer applies as it unpacks, holds for those from which the block computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from .storage_form import AS_STORED, StorageForm

__all__ = ["PackedForm", "Wrapper", "form_of", "leaves_of"]


@dataclass(frozen=True, slots=True)
class Wrapper(StorageForm):
    """How a quantized weight is assembled from its leaves; holds none of them."""

    kind: type
    inner: tuple[tuple[str, Wrapper | None], ...]
    """Its tensors in order; None for a leaf."""
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    keeps_mode: ClassVar[bool] = True
    """Whether what is made outside of inference mode cannot be used inside it."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Wrapper | None:
        """Return the wrapper of a quantized weight, None for a plain tensor."""
        if is_wrapper_class(type(tensor)):
            wrapper: Any = tensor
            names, context = wrapper.__tensor_flatten__()
            inner = tuple((name, Wrapper.of(getattr(tensor, name))) for name in names)
            return Wrapper(type(tensor), inner, context, tensor.size(), tensor.stride())
        if is_packed_class(type(tensor)):
            return PackedForm(type(tensor), (), vars(tensor), tensor.size(), tensor.stride())
        return None

    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return leaves_of(weight)

    def assemble(self, leaves: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return a new weight around the next leaves, in the order of `leaves_of`; copies nothing."""
        inner = {name: nested.assemble(leaves) if nested else next(leaves) for name, nested in self.inner}
        weight: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)  # type: ignore[attr-defined]
        return weight


class PackedForm(Wrapper):
    """The form of a packed weight. Its context is the dict of attributes that all tensors of the weight share."""

    __slots__ = ()
    keeps_mode = False

    @property
    def attributes(self) -> dict[str, Any]:
        """What its tensors say of the bytes."""
        attributes: dict[str, Any] = self.context
        return attributes

    def say(self, attributes: Mapping[str, Any]) -> None:
        """Make all tensors of the weight say this, and nothing else."""
        said = dict(attributes)
        self.attributes.clear()
        self.attributes.update(said)

    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return [plain_memory(weight)]

    def assemble(self, leaves: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return a tensor of the class in the memory of the next leaf."""
        with torch._C.DisableTorchFunctionSubclass():
            weight: torch.Tensor = torch.Tensor._make_subclass(self.kind, next(leaves))
        weight.__dict__ = self.attributes
        return weight


def form_of(tensor: torch.Tensor) -> StorageForm:
    """Return the form in which a weight came."""
    return Wrapper.of(tensor) or AS_STORED


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors inside a weight, depth first; of a plain tensor, itself."""
    kind = type(tensor)
    if is_plain_class(kind):
        return [tensor]
    if is_packed_class(kind):
        return [plain_memory(tensor)]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return [leaf for name in names for leaf in leaves_of(getattr(tensor, name))]


@cache
def is_plain_class(kind: type) -> bool:
    """Whether the tensors of a class are their own only leaves."""
    return not is_wrapper_class(kind) and not is_packed_class(kind)


@cache
def is_wrapper_class(kind: type) -> bool:
    """Whether the tensors of a class are wrappers around others, which torch can take apart."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


@cache
def is_packed_class(kind: type) -> bool:
    """Whether the tensors of a class have a shape of their own over plain memory."""
    own_shape = inspect.getattr_static(kind, "shape", None)
    return isinstance(own_shape, property) and not is_wrapper_class(kind)


def plain_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a packed weight as a tensor of torch's own class."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.detach(tensor)
