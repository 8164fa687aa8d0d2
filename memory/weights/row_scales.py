"""Forms with eight bits for each element and a scale for each row of a weight: `fp8 per row`, `e5m2 per row`, `int8`.

The scales of float8 are powers of two, which lose nothing; that of `int8` is the largest value of its row over 127.
A row is a weight's first dimension: what belongs to one output of a layer (of a transposed convolution, one input), or
one entry of an embedding. Rows of very different size, as an outlier makes them, keep the precision that one scale for
all of them would cost the small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeVar

import torch

from .cast_form import LEAST_SCALE, code_limit, largest_of
from .known_forms import INT8, ROW_E5M2, ROW_FP8
from .storage_form import EncodedForm, empty_codes

__all__ = ["Int8", "RowE5m2", "RowForm", "RowFp8"]

Own = TypeVar("Own", bound="RowForm")
MOST = 127  # as many below zero as above
LEAST_INT8_SCALE = 1e-30  # of a row of zeros


class RowForm(EncodedForm):
    """A weight in eight bits, times a scale for each row: one instance serves all weights."""

    __slots__ = ()
    stored: ClassVar[torch.dtype]

    @classmethod
    def empty_leaves(cls, weight: torch.Tensor) -> list[torch.Tensor]:
        scales = torch.empty(weight.shape[0], dtype=cls.scale_dtype(weight), device="meta")
        return [empty_codes(weight, cls.stored), scales]

    @classmethod
    def scale_dtype(cls, weight: torch.Tensor) -> torch.dtype:
        """Return the dtype of the scales."""
        return torch.float32

    @classmethod
    def measure(cls: type[Own], weight: torch.Tensor, *, name: str) -> Own:
        largest_of([weight], name=name)  # refuses NaN and infinity
        return cls()

    @classmethod
    def of_stored(cls: type[Own], shape: torch.Size, scale: float) -> Own:
        return cls()

    @torch.no_grad()
    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        rows = weight.detach().flatten(1).float()
        scales = self.scales_of(rows, weight.dtype)
        codes = self.codes_of(rows, scales, weight.dtype)
        return [torch.empty_like(weight, dtype=self.stored).copy_(codes.view(weight.shape)), scales]

    def scales_of(self, rows: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        """Return the scale of each of some float32 rows, whose products with codes the dtype of the weight can hold."""
        return row_scales(rows, self.stored)

    def codes_of(self, rows: torch.Tensor, scales: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        """Return the codes of these rows, whose products with the scales that dtype can hold."""
        limits = row_limits(wide, self.stored, scales)
        return (rows / scales[:, None]).clamp_(-limits, limits).to(self.stored)

    @torch.no_grad()
    def decode(self, leaves: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scales = leaves
        # Scales may be too small for float16, in which their products are not.
        return (codes.float() * beside(scales, codes)).to(dtype)

    @torch.no_grad()
    def decode_into(self, wide: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        codes, scales = leaves
        wide.copy_(codes)
        wide.mul_(beside(scales, codes))  # in float32, and rounded once


class RowFp8(RowForm):
    """A weight as float8_e4m3fn, times a power of two for each row."""

    __slots__ = ()
    numbers = ROW_FP8
    stored = torch.float8_e4m3fn


class RowE5m2(RowForm):
    """A weight as float8_e5m2, times a power of two for each row."""

    __slots__ = ()
    numbers = ROW_E5M2
    stored = torch.float8_e5m2


class Int8(RowForm):
    """A weight as int8, times the largest value of each row over 127: what ComfyUI calls int8_tensorwise, per row."""

    __slots__ = ()
    numbers = INT8
    stored = torch.int8

    def scales_of(self, rows: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        if not rows.shape[1]:
            return torch.ones(rows.shape[0])
        largest = code_limit(wide, torch.float32, MOST)
        return (rows.abs().amax(1) / MOST).clamp_(LEAST_INT8_SCALE, largest)

    def codes_of(self, rows: torch.Tensor, scales: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        return (rows / scales[:, None]).round_().clamp_(-MOST, MOST).to(self.stored)


def beside(scales: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the scales so that each multiplies a row of the codes."""
    return scales.view(-1, *[1] * (codes.dim() - 1))


def row_scales(rows: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """Return for each row the smallest power of two by which its largest element fits into a dtype."""
    if not rows.shape[1]:
        return torch.ones(rows.shape[0], device=rows.device)
    largest = rows.abs().amax(1)
    mantissa, exponent = torch.frexp(largest / torch.finfo(stored).max)
    scales = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
    return torch.where(largest > 0, scales.clamp_(min=LEAST_SCALE), 1.0)


def row_limits(wide: torch.dtype, stored: torch.dtype, scales: torch.Tensor) -> torch.Tensor:
    """Return for each row the largest code of which the wide dtype can hold the product with its scale."""
    limit, widest = torch.finfo(stored).max, torch.finfo(wide).max
    bounds = (widest / scales.double()).clamp(max=limit).float()
    codes = bounds.to(stored)
    lower = (codes.view(torch.uint8) - 1).view(stored)
    return torch.where(codes.float() > bounds, lower.float(), codes.float())[:, None]
