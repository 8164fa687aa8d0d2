"""Weights of a model that core has read for its dynamic VRAM: brought into the dtype that core intends, in our own RAM.

[Note: dtypes] A host with dynamic VRAM builds layers without weights, keeps what the file has in them, also for static
patchers, and records on the module which dtype the model was built for: its own loading converts page by page. For a
dynamic patcher it assigns every tensor of the file like that; some loaders do so on every host. A host without it
copies into tensors of the model's dtype as it reads. So the records say what to convert to. A layer that was built
without a dtype has torch's default; in a VAE it has that of the others, because core brings a VAE into one dtype before
it reads. Vision encoders lack most records: one that is built and not read has the dtypes.

[Note: mapping] The file is mapped read-only: a write in place ends the process. Every tensor that rests in it gets a
copy of its own. With the last of them the mapping goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import aimdo
from .core_fields import forget_dynamic, has_record, record_dtypes, recorded_dtype
from .reading import Reading

__all__ = ["own_weights", "record_dtypes_of_vision"]

# What core hangs on a storage that is a part of a mapped file.
MAPPING = "_comfy_tensor_mmap_refs"


def own_weights(model: torch.nn.Module, kind: str, *, is_assigned: bool, reading: Reading | None = None) -> None:
    """Convert a model that was never loaded to what a host without dynamic VRAM has in RAM; nothing on such a host.

    Costs one copy of each tensor that is in another dtype or in the mapped file; at no time more than one tensor twice.

    Args:
        is_assigned: it was read for a dynamic patcher.
        reading: the reading of its files, if that is still open: what it has converted already is not converted again.
    """
    if not aimdo.is_on():  # which is for the whole process: models of other devices are read like that, too
        return
    forget_dynamic(model)
    default = dtype_of_most(model) if kind == "vae" else torch.get_default_dtype()
    for module, name, tensor in tensors_of(model):
        if is_traceable_wrapper_subclass(tensor):
            for inner in inner_tensors(tensor):
                make_private(inner, inner.dtype)
        elif is_mapped(tensor) and not is_assigned:
            make_private(tensor, tensor.dtype)  # its loader takes the file's tensors as they are, on every host
        else:
            make_private(tensor, intended_dtype(module, name, tensor, default), reading)


def record_dtypes_of_vision(vision: Any) -> None:
    """Record what core does not: the dtypes for which a vision encoder was built. Builds its layers but the linear."""
    if not aimdo.is_on():
        return
    built = dict(type(vision)(vision.config).model.named_modules())
    for module_name, module in vision.model.named_modules():
        if module_name in built:
            record_dtypes(module, built[module_name])


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Return the parameters and buffers with their modules; one that has several names comes with the first."""
    seen: set[int] = set()
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield module, name, tensor


def dtype_of_most(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype for which most elements were built."""
    counts: Counter[torch.dtype] = Counter()
    for module, name, tensor in tensors_of(model):
        recorded = recorded_dtype(module, name)
        if recorded is not None and recorded.is_floating_point:
            counts[recorded] += tensor.numel()
    return max(counts, key=counts.__getitem__, default=torch.get_default_dtype())


def intended_dtype(module: torch.nn.Module, name: str, tensor: torch.Tensor, default: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor has where core reads without dynamic VRAM, see [Note: dtypes]."""
    if not tensor.is_floating_point() or not has_record(module, name):  # what has none came as it is meant
        return tensor.dtype
    return recorded_dtype(module, name) or default


def make_private(tensor: torch.Tensor, dtype: torch.dtype, reading: Reading | None = None) -> None:
    kept = reading.converted(tensor, dtype) if reading is not None and tensor.dtype != dtype else None
    if kept is not None:
        tensor.data = kept
    elif tensor.dtype != dtype:
        tensor.data = tensor.data.to(dtype, memory_format=torch.contiguous_format)
    elif is_mapped(tensor):
        tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)


def is_mapped(tensor: torch.Tensor) -> bool:
    return hasattr(tensor.untyped_storage(), MAPPING)


def inner_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """Return the plain tensors that a wrapper is made of."""
    names, _ = tensor.__tensor_flatten__()
    for inner in (getattr(tensor, name) for name in names):
        if is_traceable_wrapper_subclass(inner):
            yield from inner_tensors(inner)
        else:
            yield inner
