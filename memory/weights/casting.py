"""Weights that a file has in another floating dtype than their module: which may be cast, and the cast.

[Note: casts] A module may have another dtype than its file. Weights for which it came without memory are cast each time
they are read: each element is rounded to the nearest even value, which gives the same bits every time, and widening is
exact. Weights that came in memory are not cast from their file, because a library may have changed them. Nor are eight
bits where the file has a scale for them: their values are products, which only their library knows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .file_reader import Target, torch_dtype
from .fp8 import decode_fp8_into
from .safetensors_header import TensorHeader

__all__ = ["EIGHT_BITS", "NUM_AT_A_TIME", "Reading", "can_cast", "cast_into", "convert_in_place", "stored_begin"]

WIDE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
EIGHT_BITS = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
# How many elements are converted at a time. Fewer cost half of the speed where torch has several threads, which meet
# after each operation.
NUM_AT_A_TIME = 1 << 20
# How many of them have room beside the memory: the few whose results would lie where they lie themselves.
NUM_BESIDE = 1 << 16


def can_cast(stored: torch.dtype | None, wanted: torch.dtype | None) -> bool:
    """Whether weights that a file has in one dtype are cast when they are read into memory of another."""
    return stored is not wanted and wanted in WIDE and stored in WIDE | EIGHT_BITS


def stored_begin(num_elements: int, stored: torch.dtype, wanted: torch.dtype) -> int:
    """Return from which byte on elements are read into the memory in which `convert_in_place` converts them.

    The memory has room for them in the wider of both dtypes, and no element is overwritten before it is converted.
    """
    return num_elements * max(0, wanted.itemsize - stored.itemsize)


@torch.no_grad()
def convert_in_place(
    memory: torch.Tensor,
    num_elements: int,
    stored: torch.dtype,
    wanted: torch.dtype,
    convert: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> None:
    """Convert elements that were read into memory; they then begin at its first byte. Takes 2 MiB beside it at most.

    Args:
        memory: bytes, from an address that is a multiple of eight on, with the elements from `stored_begin` on.
        convert: fills its second argument, in the dtype that is wanted, with the elements of its first, which it may
            overwrite; by default it casts them.
    """
    convert = convert or cast_into
    begin = stored_begin(num_elements, stored, wanted)
    read = memory[begin : begin + num_elements * stored.itemsize].view(stored)
    converted = memory[: num_elements * wanted.itemsize].view(wanted)
    num_beside = NUM_AT_A_TIME if stored.itemsize == wanted.itemsize else NUM_BESIDE
    beside = torch.empty(min(num_elements, num_beside), dtype=wanted)
    first = 0
    while first < num_elements:
        # So many results end before the first element that is still to be converted, or was just read, begins.
        apart = (begin + first * (stored.itemsize - wanted.itemsize)) // wanted.itemsize
        if apart >= num_beside:
            last = min(num_elements, first + NUM_AT_A_TIME, first + apart)
            convert(read[first:last], converted[first:last])
        else:
            last = min(num_elements, first + num_beside)
            convert(read[first:last], beside[: last - first])
            converted[first:last].copy_(beside[: last - first])
        first = last


def cast_into(elements: torch.Tensor, target: torch.Tensor) -> None:
    """Fill a target with elements in its dtype: what ``elements.to()`` gives, faster from eight bits."""
    if elements.dtype is torch.float8_e4m3fn:
        decode_fp8_into(target, elements, 1.0)
    else:
        target.copy_(elements)


class Reading:
    """A weight that is read into a CPU tensor: as it is, from one of its bytes on, or whole and cast."""

    def __init__(self, tensor: TensorHeader, target: torch.Tensor, *begin: int) -> None:
        self.tensor = tensor
        self.target = target
        self.begin = begin
        self.stored = torch_dtype(tensor.dtype)
        self.casts = can_cast(self.stored, target.dtype)
        if self.casts:
            assert self.stored is not None
            num_bytes = target.numel() * self.stored.itemsize
            assert num_bytes == tensor.weight_bytes, f"{tensor.weight_bytes} bytes of {tensor.name!r} into {num_bytes}"
        self.needs_room = self.casts and tensor.weight_bytes > target.nbytes
        """Whether the file's bytes of it need memory of their own."""
        self.room: torch.Tensor | None = None
        self.num_read = tensor.weight_bytes if self.casts else target.nbytes
        """The bytes of it that are read from the file."""

    def part(self) -> Target:
        """Return what is to be read where; takes the memory that the file's bytes need."""
        if not self.casts:
            return (self.tensor.name, self.target, self.begin[0]) if self.begin else (self.tensor.name, self.target)
        assert not self.begin
        if self.needs_room:
            with torch.inference_mode(False):
                self.room = torch.empty(self.tensor.weight_bytes, dtype=torch.uint8)
            return self.tensor.name, self.room
        memory = self.target.detach().reshape(-1).view(torch.uint8)
        return self.tensor.name, memory[memory.numel() - self.tensor.weight_bytes :]

    def finish(self) -> None:
        """Cast what was read, and give that memory back."""
        if not self.casts:
            return
        assert self.stored is not None
        memory = self.target.detach().reshape(-1).view(torch.uint8) if self.room is None else self.room
        convert_in_place(memory, self.target.numel(), self.stored, self.target.dtype)
        if self.room is not None:
            self.target.detach().reshape(-1).view(torch.uint8).copy_(self.room[: self.target.nbytes])
            self.room = None
