"""Layerwise upcasting: weights rest in eight bits with a scale and are widened just before they compute.

A plain cast to e4m3 loses weights as they get small (relative error 0.28 at a standard deviation of 0.002);
dividing by a power of two per tensor first keeps it at 0.026 and multiplies out exactly. The eight-bit master
stays; the wide copy is scratch that the next block overwrites, so nothing is ever cast back.
"""

from __future__ import annotations

import enum
import math
import re
from collections import Counter

import torch

from ..errors import InvalidInput, allowed_values, require
from ..units import format_bytes
from .component import Component, TensorSpec

__all__ = [
    "BY_PROFILE",
    "Precision",
    "cast_tensors",
    "explain_wide",
    "find_scale",
    "parse_precision",
    "quantize_fp8",
    "upcast_into",
]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
# The inverse of a smaller scale overflows float32: weights that small become zeros rather than NaN.
LEAST_SCALE = 2.0**-126
# The word for no precision of one's own.
BY_PROFILE = "by profile"
# Less than this share of what could be cast is not worth a line of the plan.
WORTH_A_LINE = 0.001
WIDE_DTYPES = {"F32", "F16", "BF16"}
# Layers that place tokens: an error there moves the whole picture.
SKIPPED_NAMES = re.compile(r"pos_?emb|position_embed|patch_embed|rope|relative_attention_bias")


class Precision(enum.Enum):
    """In which form the weights rest; they always compute in the form in which they were stored."""

    AS_STORED = "as stored"
    """Nothing is cast."""
    FP8_SCALED = "fp8 scaled"
    """Block weights as float8_e4m3fn with one power-of-two scale each: half the bytes of bf16."""


def parse_precision(text: str | None) -> Precision | None:
    """Return the precision that a text names; None, for `BY_PROFILE` and for no text, is what the profile says.

    Raises:
        InvalidInput: an unknown precision; lists the known ones.
    """
    if text is None:
        return None
    names = [*(precision.value for precision in Precision), BY_PROFILE]
    require(text, str, what="precision", allowed=f"a text, one of {', '.join(names)}")
    if text not in names:
        raise InvalidInput(f"precision {text!r} is unknown; {allowed_values(text, names)}")
    return None if text == BY_PROFILE else Precision(text)


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


@torch.no_grad()
def find_scale(weight: torch.Tensor, *, name: str) -> float:
    """Return the smallest power of two by which the largest weight fits into float8_e4m3fn, at least `LEAST_SCALE`.

    Raises:
        InvalidInput: the weight holds NaN or infinity.
    """
    largest = float(weight.abs().amax()) if weight.numel() else 0.0
    if not math.isfinite(largest):
        raise InvalidInput(f"weight {name!r} holds NaN or infinity; use precision 'as stored'")
    return max(LEAST_SCALE, 2.0 ** math.ceil(math.log2(largest / FP8_MAX))) if largest > 0.0 else 1.0


@torch.no_grad()
def quantize_fp8(weight: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``weight / scale`` in float8_e4m3fn; costs one temporary copy.

    Args:
        scale: from `find_scale`, so that no quotient exceeds 448: above, some devices saturate and others give NaN.
    """
    # In float16 a small scale would push large weights out of range.
    weight = weight.float() if weight.dtype == torch.float16 else weight
    return (weight * (1.0 / scale)).to(FP8)


@torch.no_grad()
def upcast_into(wide: torch.Tensor, stored: torch.Tensor, scale: float) -> None:
    """Write ``stored * scale`` into ``wide`` (same shape, same device); no allocation.

    Two passes on a device. On the CPU, whose casts from eight bits are slow, four passes that together are about seven
    times as fast ([Note: bits]).
    """
    if wide.is_cpu and wide.numel() >= WORTH_SHIFTING and shift_into(wide, stored, scale):
        return
    wide.copy_(stored)
    if scale != 1.0:
        wide.mul_(scale)


# [Note: bits] A wide float has more bits of exponent and mantissa than float8_e4m3fn, in the same order. Shifted to the
# place of these bits, an eight-bit float reads as its value divided by a power of two: the difference of the exponents'
# biases. Small values read as subnormal numbers, which a thread may be set to flush to zero.
WORTH_SHIFTING = 1 << 14
BITS = {
    torch.bfloat16: (torch.int16, 4, 0x87F0 - (1 << 16), 2.0**120),
    torch.float16: (torch.int16, 7, 0xBF80 - (1 << 16), 2.0**8),
    torch.float32: (torch.int32, 20, 0x87F00000 - (1 << 32), 2.0**120),
}
"""By dtype: the integer type of its size, the shift, the mask of the bits to keep, and that power of two."""
SUBNORMAL = torch.tensor(1, dtype=torch.int32).view(torch.float32)


def shift_into(wide: torch.Tensor, stored: torch.Tensor, scale: float) -> bool:
    """Do what `upcast_into` does with integer operations; returns whether that is possible. NaN becomes 480 * scale."""
    integers, distance, mask, bias = BITS.get(wide.dtype, (None, 0, 0, 1.0))
    if integers is None or scale * bias >= 2.0**127 or not float(SUBNORMAL * 2.0**120):
        return False
    bits = wide.view(integers)
    bits.copy_(stored.view(torch.int8))  # the sign goes to all bits in front
    bits.bitwise_left_shift_(distance).bitwise_and_(mask)
    wide.mul_(scale * bias)
    return True
