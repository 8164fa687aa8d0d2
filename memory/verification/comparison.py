"""Compares two results: finds their tensors by path, checks them for equal bits, and measures differences."""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from ..weights.quantized_leaves import leaves_of

__all__ = ["Gap", "Leaf", "Shown", "compare_leaves", "leaves_in", "same_bits", "show"]

# The depth and the number of values to which a result is searched.
MAX_DEPTH = 12
MAX_LEAVES = 10_000
LEAVES = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor or plain value of a result, with its path, such as ``[0].sample``."""

    path: str
    value: Any


def leaves_in(value: Any) -> Iterator[Leaf]:
    """Yield the tensors and plain values in a result. Searches containers, dataclasses, objects, arrays and images."""
    seen: set[int] = set()
    for number, leaf in enumerate(walk(value, "", seen, 0)):
        if number == MAX_LEAVES:
            return
        yield leaf


def walk(value: Any, path: str, seen: set[int], depth: int) -> Iterator[Leaf]:
    if isinstance(value, LEAVES):
        yield Leaf(path, value)
        return
    if depth == MAX_DEPTH or id(value) in seen or isinstance(value, type | torch.nn.Module):
        return
    seen.add(id(value))
    array = as_array(value)
    if array is not None:
        yield Leaf(path, array)
    elif isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield from walk(item, f"{path}[{key!r}]", seen, depth + 1)
    elif isinstance(value, list | tuple | deque):
        for index, item in enumerate(value):
            yield from walk(item, f"{path}[{index}]", seen, depth + 1)
    elif is_dataclass(value):
        for field in fields(value):
            yield from walk(getattr(value, field.name, None), f"{path}.{field.name}", seen, depth + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for name, item in list(vars(value).items()):
            yield from walk(item, f"{path}.{name}", seen, depth + 1)


def as_array(value: Any) -> torch.Tensor | None:
    """Return a numeric numpy array or a PIL image as a tensor; None for anything else."""
    numpy, picture = sys.modules.get("numpy"), sys.modules.get("PIL.Image")
    if numpy is None:
        return None
    if picture is not None and isinstance(value, picture.Image):
        value = numpy.asarray(value)
    if not isinstance(value, numpy.ndarray) or value.dtype.kind not in "biufc":
        return None
    return torch.from_numpy(numpy.ascontiguousarray(value))


@dataclass(frozen=True, slots=True)
class Shown:
    """A value that is kept for a later comparison: a digest, and a copy on the CPU if there is room."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    digest: bytes
    tensor: torch.Tensor | None = None
    plain: Any = None
    """The value, if it is no tensor."""

    @property
    def kept_bytes(self) -> int:
        return 0 if self.tensor is None else self.tensor.nbytes


def show(leaf: Leaf, *, room_bytes: int) -> Shown:
    """Return what to keep of a leaf. Waits for its device. Keeps a copy of tensors of at most ``room_bytes``."""
    if not isinstance(leaf.value, torch.Tensor):
        return Shown(leaf.path, (), None, repr(leaf.value).encode(), plain=leaf.value)
    with torch.no_grad(), torch.inference_mode(False):
        parts = [part.detach().to("cpu", copy=True).contiguous() for part in leaves_of(leaf.value)]
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        array: Any = bytes_of(part).numpy()
        digest.update(array)
    keeps = len(parts) == 1 and parts[0].nbytes <= room_bytes
    return Shown(
        leaf.path, tuple(leaf.value.shape), leaf.value.dtype, digest.digest(), tensor=parts[0] if keeps else None
    )


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a plain tensor as a flat tensor; copies a tensor that is not contiguous."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # an expanded tensor, or a single value with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same dtype and device have the same bytes."""
    return one.numel() == other.numel() and torch.equal(bytes_of(one), bytes_of(other))


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference between two values. The numbers are None if a tensor was not kept, or if they are no tensors."""

    path: str
    text: str
    max_abs: float | None = None
    relative: float | None = None
    cosine: float | None = None


def compare_leaves(ours: list[Shown], theirs: list[Shown]) -> Gap | None:
    """Return the difference of the first leaves that differ; None if all have the same bits."""
    for one, other in zip(ours, theirs, strict=False):
        if one.path != other.path:
            return Gap(one.path, f"has {one.path or 'a value'} where the reference has {other.path or 'a value'}")
        gap = compare_leaf(one, other)
        if gap is not None:
            return gap
    if len(ours) != len(theirs):
        return Gap("", f"has {len(ours)} values where the reference has {len(theirs)}")
    return None


def compare_leaf(ours: Shown, theirs: Shown) -> Gap | None:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return Gap(
            ours.path, f"is {ours.dtype} {list(ours.shape)}, the reference's {theirs.dtype} {list(theirs.shape)}"
        )
    if ours.digest == theirs.digest:
        return None
    if ours.dtype is None:
        return Gap(ours.path, f"is {str(ours.plain)[:60]!r}, the reference's {str(theirs.plain)[:60]!r}")
    if ours.tensor is None or theirs.tensor is None:
        return Gap(ours.path, "differs; it was too large to be kept, so the difference is not measured")
    return measure_gap(ours.path, ours.tensor, theirs.tensor)


def measure_gap(path: str, ours: torch.Tensor, theirs: torch.Tensor) -> Gap:
    """Measure the difference of two tensors of one shape. Costs a 64-bit copy of each."""
    wide = torch.complex128 if ours.is_complex() else torch.float64
    with torch.no_grad(), torch.inference_mode(False):
        a, b = ours.to(wide).flatten(), theirs.to(wide).flatten()
        finite = a.isfinite() & b.isfinite()
        num_odd = int(((~a.isfinite()) != (~b.isfinite())).sum())
        a, b = a[finite], b[finite]
        difference = (a - b).abs()
        max_abs = float(difference.max()) if difference.numel() else 0.0
        size = float(torch.linalg.vector_norm(b))
        distance = float(torch.linalg.vector_norm(difference))
        relative = distance / size if size else (0.0 if not distance else float("inf"))
        own = float(torch.linalg.vector_norm(a))
        cosine = float((a * b.conj()).sum().real) / (own * size) if own and size else 0.0
    text = f"max abs {max_abs:.3g}, relative error {relative:.3g}"
    if num_odd:
        text += f", {num_odd} values are NaN or infinite in only one of them"
    elif not max_abs:
        text += " (equal values with different bits)"
    return Gap(path, text, max_abs, relative, cosine)
