"""Which weights rest in eight bits, and what keeps the others wide."""

from __future__ import annotations

import re
from collections import Counter

from ..options.precision import Precision
from ..units import format_bytes
from ..weights.component import Component, TensorSpec

__all__ = ["cast_tensors", "explain_wide"]

# Less than this share of what could be cast is not worth a line of the plan.
WORTH_A_LINE = 0.001
WIDE_DTYPES = {"F32", "F16", "BF16"}
# Layers that place tokens: an error there moves the whole picture.
SKIPPED_NAMES = re.compile(r"pos_?emb|position_embed|patch_embed|rope|relative_attention_bias")


def cast_tensors(component: Component, precision: Precision) -> frozenset[str]:
    """Return the names of the weights that rest in eight bits.

    The rest of a component is never cast: its embedders, norms and output layers are few bytes and cost the
    most quality. Norm weights and biases inside blocks are vectors and stay too, and so does what `why_wide` says.
    """
    if precision is Precision.AS_STORED:
        return frozenset()
    usual = usual_dtype(component)
    return frozenset(
        tensor.name
        for block in component.blocks
        for tensor in block.tensors
        if is_cast(tensor) and not why_wide(tensor, usual)
    )


def is_cast(tensor: TensorSpec) -> bool:
    """Whether a weight can rest in eight bits."""
    return tensor.castable and tensor.dtype in WIDE_DTYPES


def usual_dtype(component: Component) -> str:
    """Return the dtype of most of the weights that can be cast; empty if there are none."""
    numbers: Counter[str] = Counter()
    for block in component.blocks:
        for tensor in block.tensors:
            if is_cast(tensor):
                numbers[tensor.dtype] += tensor.num_elements
    return max(numbers, key=lambda dtype: numbers[dtype], default="")


def why_wide(tensor: TensorSpec, usual: str) -> str:
    """Return what keeps a weight of a block out of eight bits; empty for one that is cast.

    ComfyUI declares no names: a class builds what needs it in float32, in a model of 16 bits.
    """
    if tensor.kept_by:
        return tensor.kept_by
    if SKIPPED_NAMES.search(tensor.name):
        return "positions"
    if tensor.dtype == "F32" and usual != "F32":
        return f"stored in F32 beside {usual}"
    return ""


def explain_wide(component: Component) -> str:
    """Return how many bytes of the blocks stay as stored though they could be cast, and why; empty for next to none."""
    usual = usual_dtype(component)
    kept: Counter[str] = Counter()
    total_bytes = 0
    for block in component.blocks:
        for tensor in filter(is_cast, block.tensors):
            total_bytes += tensor.weight_bytes
            if reason := why_wide(tensor, usual):
                kept[reason] += tensor.weight_bytes
    if kept.total() < WORTH_A_LINE * total_bytes or not kept:
        return ""
    reasons = ", ".join(f"{reason} {format_bytes(num_bytes)}" for reason, num_bytes in kept.most_common())
    return f"{format_bytes(kept.total())} of the blocks stay as stored: {reasons}"


def stored_bytes(tensor: TensorSpec, cast: frozenset[str]) -> tuple[int, ...]:
    """Return the bytes that the weight takes at rest, tensor by tensor."""
    if tensor.name in cast:
        return (tensor.num_elements,)
    return tensor.leaves or (tensor.weight_bytes,)
