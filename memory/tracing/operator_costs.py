"""What one operator costs: which are one kernel, which are made of others, and the flops and bytes of a kernel.

[Note: composites] Torch has operators that are made of others. Most are decomposed, into what a backend runs that has
kernels for the rest only. A few are one kernel on every accelerator: attention, which holds no matrix of scores as
flash attention does, convolutions, and normalisations over a layer or a group.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["GATHERS", "INDEXING", "SIZED_BY_VALUES", "How", "Operator", "attend", "bytes_of", "flops_of", "operator_of"]

aten = torch.ops.aten
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

ONE_KERNEL = frozenset(
    f"aten::{name}" for name in ("convolution", "convolution_backward", "native_layer_norm", "native_group_norm")
)
ATTENTION = "aten::scaled_dot_product_attention"
INDEXING = frozenset(
    f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
)
SIZED_BY_VALUES = frozenset(
    f"aten::{name}" for name in ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
)
GATHERS = frozenset(f"aten::{name}" for name in ("embedding", "index", "index_select", "gather"))
IMPLICIT, EXPLICIT = "CompositeImplicitAutograd", "CompositeExplicitAutograd"
# Those that torch takes with plain numbers in place of tensors.
WITH_NUMBERS = frozenset(f"aten::{name}{end}" for name in ("add", "sub", "mul", "div") for end in ("", "_"))
# The argument that is the left matrix of a product.
LEFT_MATRIX = {f"aten::{name}": 0 for name in ("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm")} | {
    f"aten::{name}": 1 for name in ("addmm", "addmm_", "baddbmm", "baddbmm_", "addmv", "addmv_", "_addmm_activation")
}


class How(enum.Enum):
    """How an operator is traced."""

    VIEW = enum.auto()
    """It shares the memory of an argument: nothing runs."""
    COMPOSITE = enum.auto()
    """It is made of others."""
    ATTENTION = enum.auto()
    """One kernel without a matrix of scores."""
    LINEAR = enum.auto()
    """A matrix product, whose composite torch decomposes in another way on the meta device than on others."""
    NO_KERNEL = enum.auto()
    """It allocates, or changes the form of a tensor, and nothing runs."""
    KERNEL = enum.auto()
    """One kernel."""
    COPY = enum.auto()
    """One copy, on the device or from the host."""
    FROM_DATA = enum.auto()
    """It takes over a tensor that Python code made of numbers."""
    READS_VALUES = enum.auto()
    """It needs the values of a tensor."""


NAMED = {
    ATTENTION: How.ATTENTION,
    "aten::linear": How.LINEAR,
    "aten::copy_": How.COPY,
    **dict.fromkeys(("aten::detach_", "aten::lift_fresh"), How.FROM_DATA),
    **dict.fromkeys(("aten::empty", "aten::empty_strided"), How.NO_KERNEL),
    **dict.fromkeys(("aten::_local_scalar_dense", "aten::equal"), How.READS_VALUES),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """What is known of an operator before it is called."""

    name: str
    how: How
    key: torch._C.DispatchKey | None
    """Of the kernel that a composite is decomposed by."""
    written: tuple[int, ...]
    """Which positional arguments it writes to."""
    written_names: frozenset[str]
    tensors: tuple[int, ...]
    """Which positional arguments are tensors, and may come as numbers where that is not allowed."""
    writes_twice: bool
    """Whether it reads what it writes to in another argument, as in-place operators do that are made of ``out=``."""


known: dict[Any, Operator] = {}


def operator_of(function: Any) -> Operator:
    """Return what is known of an operator (``OpOverload``); computed once for each."""
    found = known.get(function)
    if found is None:
        found = known[function] = describe(function)
    return found


def describe(function: Any) -> Operator:
    schema, full = function._schema, function.name()
    name = schema.name
    written = [
        index for index, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write
    ]
    of_tensors = tuple(index for index, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor")
    returns = [returned.alias_info for returned in schema.returns]
    how, key = How.KERNEL, None
    if name in NAMED:
        how = NAMED[name]
    elif torch.Tag.inplace_view in function.tags:
        how = How.NO_KERNEL
    elif has_kernel(full, IMPLICIT):  # some of these return a view where they can
        how, key = How.COMPOSITE, torch._C.DispatchKey.CompositeImplicitAutograd
    elif returns and all(info is not None and not info.is_write for info in returns):
        how = How.VIEW
    elif name not in ONE_KERNEL and has_kernel(full, EXPLICIT):
        how, key = How.COMPOSITE, torch._C.DispatchKey.CompositeExplicitAutograd
    return Operator(
        name=name,
        how=how,
        key=key,
        written=tuple(written),
        written_names=frozenset(schema.arguments[index].name for index in written),
        tensors=() if name in WITH_NUMBERS else of_tensors,
        writes_twice=name.endswith("_") and has_kernel(full, "CompositeExplicitAutogradNonFunctional"),
    )


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes that a kernel touches: an expanded dimension is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride or not size) * tensor.element_size()


def flops_of(operator: Operator, args: Sequence[Any], output: Tensor) -> int:
    """Return the flops of one kernel, by the formulas of `torch.utils.flop_counter`; 0 for what is bound by memory."""
    name = operator.name
    if (index := LEFT_MATRIX.get(name)) is not None:
        left: Tensor = args[index]
        return 2 * output.numel() * (left.shape[-1] if left.dim() else 1)
    if name == "aten::convolution":
        source, weight, is_transposed = args[0], args[1], args[6]
        meetings = source.numel() if is_transposed else output.numel()
        return int(2 * meetings * weight.numel() // weight.shape[0]) if weight.numel() else 0
    if name == ATTENTION:
        query, key, value = args[:3]
        rows = query.numel() // query.shape[-1] if query.shape[-1] else 0
        return int(2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
    return 0


def attend(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Return the output of attention: laid out as the query where a fused kernel takes it, else without gaps."""
    shape = (*query.shape[:-1], value.shape[-1])
    is_fused = (
        query.dim() == key.dim() == value.dim() == 4
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.shape[-2] > 0
        and key.shape[-2] > 0
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and dropout == 0.0
    )
    return torch.empty_like(query) if is_fused else query.new_empty(shape)
