"""Weights that rest in a smaller floating dtype than the one in which they compute: the base of such forms.

Scaled, a weight is divided by the power of two with which its largest element just fits, and multiplied by it again
after it is widened, both of which are exact. Plain, it is cast as it is, and what does not fit is clamped. The narrow
copy is never encoded again: the wide one is scratch, and the next weights overwrite it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import ClassVar, TypeVar

import torch

from ..errors import InvalidInput
from .storage_form import EncodedForm, empty_codes

__all__ = ["LEAST_SCALE", "CastForm", "code_limit", "find_scale", "largest_of", "narrow"]

Own = TypeVar("Own", bound="CastForm")
SCALE = attrgetter("scale")
# The inverse of a smaller scale overflows float32: weights that small become zeros rather than NaN.
LEAST_SCALE = 2.0**-126
# The least that float16 holds: some kernels cast the scale to the dtype that they multiply.
LEAST_HALF = 2.0**-24
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class CastForm(EncodedForm):
    """A weight in another floating dtype, times a power of two that every copy of it shares; 1 where it is plain."""

    scale: float
    stored: ClassVar[torch.dtype]
    """The dtype in which it rests."""
    is_scaled: ClassVar[bool] = False

    @property
    def factor(self) -> float:
        return self.scale

    @classmethod
    def empty_leaves(cls, weight: torch.Tensor) -> list[torch.Tensor]:
        return [empty_codes(weight, cls.stored)]

    @classmethod
    def measure(cls: type[Own], weight: torch.Tensor, *, name: str) -> Own:
        return cls.measure_parts([weight], name=name)

    @classmethod
    def of_stored(cls: type[Own], shape: torch.Size, scale: float) -> Own:
        return cls(scale)

    @classmethod
    def measure_parts(cls: type[Own], parts: Iterable[torch.Tensor], *, name: str) -> Own:
        seen: list[torch.dtype] = []
        largest = largest_of((note_dtype(part, seen) for part in parts), name=name)
        return cls(scale_for(largest, cls.stored, *seen[:1]) if cls.is_scaled else 1.0)

    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return [narrow(weight, self.stored, self.scale)]

    def encode_part(self, part: torch.Tensor, leaf: torch.Tensor) -> None:
        limit = code_limit(part.dtype, self.stored, self.scale)
        if self.scale != 1.0:
            part.mul_(1.0 / self.scale)
        if not self.is_scaled or limit < torch.finfo(self.stored).max:
            part.clamp_(-limit, limit)
        leaf.copy_(part)

    def decode(self, leaves: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        with torch.no_grad():
            return leaves[0].to(dtype) * self.scale

    def decode_into(self, wide: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            wide.copy_(leaves[0])
            if self.scale != 1.0:
                wide.mul_(self.scale)

    @classmethod
    def decode_all(
        cls: type[Own], forms: list[Own], wide: list[torch.Tensor], leaves: list[list[torch.Tensor]]
    ) -> None:
        if wide[0].is_cpu:
            for form, target, own in zip(forms, wide, leaves, strict=True):
                form.decode_into(target, own)
        else:  # two kernels for all of these weights, launched at the price of one weight's
            torch._foreach_copy_(wide, list(chain.from_iterable(leaves)))
            if cls.is_scaled:
                torch._foreach_mul_(wide, list(map(SCALE, forms)))


@torch.no_grad()
def largest_of(parts: Iterable[torch.Tensor], *, name: str) -> float:
    """Return the largest absolute value of a weight that comes in parts.

    Raises:
        InvalidInput: it holds NaN or infinity.
    """
    limits = [abs(float(limit)) for part in parts if part.numel() for limit in torch.aminmax(part)]
    if not all(map(math.isfinite, limits)):
        raise InvalidInput(f"weight {name!r} holds NaN or infinity; exclude it, or use precision 'as stored'")
    return max(limits, default=0.0)


def note_dtype(part: torch.Tensor, seen: list[torch.dtype]) -> torch.Tensor:
    seen.append(part.dtype)
    return part


def scale_for(largest: float, stored: torch.dtype, wide: torch.dtype = torch.float32) -> float:
    """Return the smallest power of two by which a value fits into a dtype, and that the wide dtype can hold."""
    limit = torch.finfo(stored).max
    least = LEAST_HALF if wide is torch.float16 else LEAST_SCALE
    return max(least, 2.0 ** math.ceil(math.log2(largest / limit))) if largest > 0.0 else 1.0


def find_scale(weight: torch.Tensor, *, name: str, stored: torch.dtype = torch.float8_e4m3fn) -> float:
    """Return the scale of a weight that is to rest in a dtype. Raises as `largest_of`."""
    return scale_for(largest_of([weight], name=name), stored, weight.dtype)


def code_limit(wide: torch.dtype, stored: torch.dtype, scale: float) -> float:
    """Return the largest value of a dtype whose product with a number the wide dtype can hold."""
    limit, widest = torch.finfo(stored).max, torch.finfo(wide).max
    if limit * scale <= widest:
        return limit
    code = torch.tensor(widest / scale, dtype=torch.float32).to(stored)
    if float(code) * scale > widest:  # it was rounded up; dtypes of eight bits have no nextafter
        code = (code.view(INTEGERS[stored.itemsize]) - 1).view(stored)
    return float(code)


@torch.no_grad()
def narrow(weight: torch.Tensor, stored: torch.dtype, scale: float) -> torch.Tensor:
    """Return ``weight / scale`` in another dtype, clamped to what that holds; costs one temporary copy.

    Args:
        scale: a power of two.
    """
    limit = code_limit(weight.dtype, stored, scale)
    # The inverse of a small scale is beyond float16. The CPU multiplies in float32; of other devices that is not known.
    weight = weight.float() if weight.dtype == torch.float16 and not weight.is_cpu else weight
    # Out of its range some devices saturate, and others give NaN or infinity.
    return (weight * (1.0 / scale)).clamp_(-limit, limit).to(stored)
