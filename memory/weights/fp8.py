"""The forms `fp8 scaled` and `fp8 plain`: weights rest in float8_e4m3fn, with a scale per tensor or without.

A plain cast loses weights as they get small (relative error 0.28 at a standard deviation of 0.002); with a power of two
per tensor it stays at 0.026.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cast_form import CastForm, narrow
from .known_forms import PLAIN_FP8, SCALED_FP8

__all__ = ["PlainFp8", "ScaledFp8", "decode_fp8_into", "encode_fp8"]

FP8 = torch.float8_e4m3fn


class PlainFp8(CastForm):
    """A weight as float8_e4m3fn."""

    __slots__ = ()
    numbers = PLAIN_FP8
    stored = FP8

    def decode_into(self, wide: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        decode_fp8_into(wide, leaves[0], self.scale)


class ScaledFp8(PlainFp8):
    """A weight as float8_e4m3fn, times a power of two."""

    __slots__ = ()
    numbers = SCALED_FP8
    is_scaled = True


def encode_fp8(weight: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``weight / scale`` in float8_e4m3fn, as `narrow`."""
    return narrow(weight, FP8, scale)


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
