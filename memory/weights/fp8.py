"""The form `fp8 scaled`: weights rest in eight bits with a scale and are decoded just before they compute.

A plain cast to e4m3 loses weights as they get small (relative error 0.28 at a standard deviation of 0.002);
dividing by a power of two per tensor first keeps it at 0.026 and multiplies out exactly. The eight-bit weight store
stays; the wide copy is scratch that the next block overwrites, so nothing is ever encoded again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import torch

from ..errors import InvalidInput
from .known_forms import SCALED_FP8
from .storage_form import EncodedForm

__all__ = ["ScaledFp8", "decode_fp8_into", "encode_fp8", "find_scale"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
SCALE = attrgetter("scale")
# The inverse of a smaller scale overflows float32: weights that small become zeros rather than NaN.
LEAST_SCALE = 2.0**-126


@dataclass(frozen=True, slots=True)
class ScaledFp8(EncodedForm):
    """A weight as float8_e4m3fn, times a power of two that every copy of it shares."""

    numbers = SCALED_FP8
    scale: float

    @property
    def factor(self) -> float:
        return self.scale

    @classmethod
    def empty_leaves(cls, weight: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(weight, dtype=FP8, device="meta")]

    @classmethod
    def measure(cls, weight: torch.Tensor, *, name: str) -> ScaledFp8:
        return cls(find_scale(weight, name=name))

    @classmethod
    def measure_parts(cls, parts: Iterable[torch.Tensor], *, name: str) -> ScaledFp8:
        return cls(find_scale_of_parts(parts, name=name))

    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return [encode_fp8(weight, self.scale)]

    def encode_part(self, part: torch.Tensor, leaf: torch.Tensor) -> None:
        leaf.copy_(part.mul_(1.0 / self.scale))

    def decode(self, leaves: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            return leaves[0].to(dtype) * self.scale

    def decode_into(self, wide: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        decode_fp8_into(wide, leaves[0], self.scale)

    @classmethod
    def decode_all(cls, forms: list[ScaledFp8], wide: list[torch.Tensor], leaves: list[list[torch.Tensor]]) -> None:
        if wide[0].is_cpu:
            for form, target, (stored,) in zip(forms, wide, leaves, strict=True):
                decode_fp8_into(target, stored, form.scale)
        else:  # two kernels for the whole block, launched at the price of one weight's
            torch._foreach_copy_(wide, list(chain.from_iterable(leaves)))
            torch._foreach_mul_(wide, list(map(SCALE, forms)))


@torch.no_grad()
def find_scale(weight: torch.Tensor, *, name: str) -> float:
    """Return the smallest power of two by which the largest weight fits into float8_e4m3fn, at least `LEAST_SCALE`.

    Raises:
        InvalidInput: the weight holds NaN or infinity.
    """
    return find_scale_of_parts([weight], name=name)


@torch.no_grad()
def find_scale_of_parts(parts: Iterable[torch.Tensor], *, name: str) -> float:
    """Do the same for a weight that comes in parts."""
    limits = [abs(float(limit)) for part in parts if part.numel() for limit in torch.aminmax(part)]
    largest = max(limits, default=0.0)
    if not all(map(math.isfinite, limits)):
        raise InvalidInput(f"weight {name!r} holds NaN or infinity; use precision 'as stored'")
    return max(LEAST_SCALE, 2.0 ** math.ceil(math.log2(largest / FP8_MAX))) if largest > 0.0 else 1.0


@torch.no_grad()
def encode_fp8(weight: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``weight / scale`` in float8_e4m3fn; costs one temporary copy.

    Args:
        scale: from `find_scale`, so that no quotient exceeds 448: above, some devices saturate and others give NaN.
    """
    # The inverse of a small scale is beyond float16. The CPU multiplies in float32; of other devices that is not known.
    weight = weight.float() if weight.dtype == torch.float16 and not weight.is_cpu else weight
    return (weight * (1.0 / scale)).to(FP8)


@torch.no_grad()
def decode_fp8_into(wide: torch.Tensor, stored: torch.Tensor, scale: float) -> None:
    """Write ``stored * scale`` into ``wide`` (same shape, same device); no allocation.

    Two passes on a device. On the CPU, whose casts from eight bits are slow, four passes that together are about seven
    times as fast ([Note: bits]).
    """
    if wide.is_cpu and wide.numel() >= WORTH_SHIFTING and decode_by_shifts(wide, stored, scale):
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


def decode_by_shifts(wide: torch.Tensor, stored: torch.Tensor, scale: float) -> bool:
    """Do what `decode_fp8_into` does with integer operations; returns whether that is possible: not for NaN."""
    integers, distance, mask, bias = BITS.get(wide.dtype, (None, 0, 0, 1.0))
    if integers is None or scale * bias >= 2.0**127 or not float(SUBNORMAL * 2.0**120) or holds_nan(stored):
        return False
    bits = wide.view(integers)
    bits.copy_(stored.view(torch.int8))  # the sign goes to all bits in front
    bits.bitwise_left_shift_(distance).bitwise_and_(mask)
    wide.mul_(scale * bias)
    return True


def holds_nan(stored: torch.Tensor) -> bool:
    """Whether a code is NaN, which would read as 480: 0x7F is the largest signed byte, 0xFF the largest unsigned one.

    `find_scale` refuses NaN, so only bytes from elsewhere hold it. Takes 1 to 5 % of the time of decoding, for the
    smallest weights 12 %.
    """
    return int(stored.view(torch.int8).amax()) == 0x7F or int(stored.view(torch.uint8).amax()) == 0xFF
