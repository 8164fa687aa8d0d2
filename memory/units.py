"""Bytes are ints everywhere inside; units appear only where people read or write them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .errors import InvalidInput

__all__ = ["GIB", "KIB", "MIB", "align_up", "format_bytes", "parse_bytes", "slab_offsets"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Tensors inside a slab begin at multiples of this, as an allocator would place them: kernels see no difference.
SLAB_ALIGNMENT = 256

UNITS = {"GiB": GIB, "MiB": MIB, "GB": 10**9, "MB": 10**6}
SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)")


def parse_bytes(text: str, *, what: str = "size") -> int:
    """Return the bytes of ``"1.5GiB"``; the unit is required and case-sensitive.

    Raises:
        InvalidInput: no number, no unit, or a unit other than GiB, MiB, GB, MB.
    """
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidInput(f"{what} {text!r} is not a size; write a number and a unit, such as 6GiB or 800MiB")
    if match["unit"] not in UNITS:
        problem = "has no unit" if not match["unit"] else f"has the unknown unit {match['unit']!r}"
        raise InvalidInput(f"{what} {text!r} {problem}; allowed: {', '.join(UNITS)}")
    return int(float(match["number"]) * UNITS[match["unit"]])


def format_bytes(num_bytes: int) -> str:
    """Return bytes for people: three digits and a unit that `parse_bytes` takes, such as ``"31.5MiB"``."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    if size < 100 * KIB:
        return f"{sign}{size / KIB:.3g}KiB" if size >= KIB else f"{sign}{size}B"
    unit, name = (GIB, "GiB") if size >= 1000 * MIB else (MIB, "MiB")
    amount = size / unit
    return f"{sign}{amount:.{0 if amount >= 100 else 1 if amount >= 10 else 2}f}{name}"


def align_up(num_bytes: int, alignment: int) -> int:
    """Return the next multiple of ``alignment``, in bytes."""
    return -(-num_bytes // alignment) * alignment


def slab_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return where tensors of these bytes begin in one flat slab, and the bytes of the slab."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += align_up(size, SLAB_ALIGNMENT)
    return offsets, end
