"""The forms of optimum-quanto: `qint8`, `qfloat8` and `qint4`, with its codes, scales and shifts to the bit.

The library itself is not used: importing it imports much of transformers, which fails in some hosts. Weights are
widened as in all other forms, which gives what its ``dequantize`` gives. Its kernel for qint8 takes 2.4 times as long
on a CPU, and ends the process where rows or addresses are odd; its tensors report the size of what they stand for, and
cannot be used in inference mode where they are not made in it. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from .cast_form import code_limit, largest_of
from .component import TensorSpec
from .form_numbers import FormNumbers
from .known_forms import QFLOAT8, QINT4, QINT8, quanto_group
from .row_scales import RowForm, beside
from .storage_form import EncodedForm

__all__ = ["QFloat8", "QInt4", "QInt8"]

LARGEST_CODE = 15  # of four bits


class QuantoRows(RowForm):
    """A weight in eight bits, times a scale for each row, in the dtype in which the weight computes."""

    __slots__ = ()
    most: ClassVar[float]
    """What the largest element of a row becomes."""
    largest_code: ClassVar[float]
    """The largest code below zero."""

    @classmethod
    def scale_dtype(cls, weight: torch.Tensor) -> torch.dtype:
        return weight.dtype

    @torch.no_grad()
    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return codes and scales, computed in the dtype of the weight as optimum-quanto does."""
        weight = weight.detach()
        if not weight.numel():
            return [torch.empty_like(leaf, device="cpu") for leaf in self.empty_leaves(weight)]
        scale = usable(weight.abs().flatten(1).amax(1) / self.most, self.largest_code)
        codes = weight / beside(scale, weight)
        if not self.stored.is_floating_point:
            codes.round_()
        codes.clamp_(-self.largest_code, self.most)
        return [torch.empty_like(weight, dtype=self.stored).copy_(codes), scale]


class QInt8(QuantoRows):
    """A weight as optimum-quanto's qint8."""

    __slots__ = ()
    numbers = QINT8
    stored = torch.int8
    most, largest_code = 127, 128


class QFloat8(QuantoRows):
    """A weight as optimum-quanto's qfloat8, which is float8_e4m3fn."""

    __slots__ = ()
    numbers = QFLOAT8
    stored = torch.float8_e4m3fn
    most = largest_code = 448


@dataclass(frozen=True, slots=True)
class QInt4(EncodedForm):
    """A weight as optimum-quanto's qint4: 16 steps between the least and the largest value of a group.

    The codes of the first half of all groups lie in the low bits, those of the second in the high bits.
    """

    row_shape: tuple[int, ...]
    numbers: ClassVar[FormNumbers] = QINT4

    @classmethod
    def empty_leaves(cls, weight: torch.Tensor) -> list[torch.Tensor]:
        num_groups, width = groups_of(weight.shape)
        own = [torch.empty(num_groups, dtype=weight.dtype, device="meta") for _ in range(2)]
        return [torch.empty(-(-num_groups // 2), width, dtype=torch.uint8, device="meta"), *own]

    @classmethod
    def measure(cls, weight: torch.Tensor, *, name: str) -> QInt4:
        largest_of([weight], name=name)  # refuses NaN and infinity
        return cls(tuple(weight.shape[1:]))

    @classmethod
    def of_stored(cls, shape: torch.Size, scale: float) -> QInt4:
        return cls(tuple(shape[1:]))

    @torch.no_grad()
    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        groups = weight.detach().reshape(groups_of(weight.shape))
        least, largest = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scale = usable((largest - least) / LARGEST_CODE, LARGEST_CODE)
        codes = ((groups - least) / scale).round_().clamp_(0, LARGEST_CODE).to(torch.uint8)
        half = -(-len(groups) // 2)
        packed = codes[:half].clone()
        packed[: len(groups) - half] |= codes[half:] << 4
        return [packed, scale.reshape(-1), -least.reshape(-1)]

    def encoded_parts(self, weight: torch.Tensor, most: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        groups = weight.reshape(groups_of(weight.shape))
        half, width = -(-len(groups) // 2), groups.shape[1]
        num_pairs = max(1, most // (2 * width))
        for begin in range(0, half, num_pairs):
            low = groups[begin : min(begin + num_pairs, half)]
            high = groups[half + begin : half + begin + len(low)]
            codes, *beside = QInt4((width,)).encode(torch.cat([low, high]))
            yield 0, begin * width, codes
            for number, leaf in enumerate(beside, 1):
                yield number, begin, leaf[: len(low)]
                yield number, half + begin, leaf[len(low) :]

    @torch.no_grad()
    def decode(self, leaves: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scales, shifts = leaves
        unpacked = torch.cat([codes & 15, codes >> 4])[: len(scales)]
        return (scales[:, None] * unpacked - shifts[:, None]).view(-1, *self.row_shape)

    @torch.no_grad()
    def decode_into(self, wide: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        codes, scales, shifts = leaves
        if not wide.is_contiguous():
            wide.copy_(self.decode(leaves, wide.dtype))
            return
        groups = wide.view(len(scales), -1)
        low, high = groups[: len(codes)], groups[len(codes) :]
        # As floats, which hold 255 and its sixteenths exactly: no memory is needed for codes apart.
        high.copy_(codes[: len(high)]).mul_(1 / 16).floor_()
        low.copy_(codes)
        low[: len(high)].sub_(high, alpha=16)
        groups.mul_(beside(scales, groups)).sub_(beside(shifts, groups))


def groups_of(shape: torch.Size) -> tuple[int, int]:
    """Return how many groups a weight has that is not empty, and how many elements each of them."""
    spec = TensorSpec(name="", dtype="F32", shape=tuple(shape))
    width = quanto_group(spec) or spec.num_elements // max(1, shape[0])
    return spec.num_elements // max(1, width), width


def usable(scale: torch.Tensor, largest_code: float) -> torch.Tensor:
    """Return scales by which can be divided, and whose products with codes their dtype can hold.

    Where all elements are equal, or too small for the dtype, optimum-quanto has zero.
    """
    limit = code_limit(scale.dtype, scale.dtype, largest_code)
    return torch.where(scale == 0, torch.ones_like(scale), scale.clamp(max=limit))
