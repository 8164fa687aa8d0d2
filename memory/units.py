"""Bytes are ints everywhere inside; units appear only where people read or write them."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable

from .errors import InvalidInput, quoted

__all__ = ["ALLOWED_UNITS", "GIB", "KIB", "MIB", "align_up", "format_bytes", "parse_bytes", "slab_offsets"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Tensors inside a slab begin at multiples of this, as an allocator would place them: kernels see no difference.
SLAB_ALIGNMENT = 256

LOCK_LIMIT_BYTES = 2 * GIB
PAGE_BYTES = mmap.PAGESIZE

UNITS = {"GiB": GIB, "MiB": MIB, "GB": 10**9, "MB": 10**6}
# As people write them, in any case: a G is a GiB.
SPELLINGS = {name.lower(): num_bytes for name, num_bytes in UNITS.items()} | {"g": GIB, "m": MIB}
ALLOWED_UNITS = (*UNITS, "G", "M")
SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
# What drivers and torch count in; a size has no more digits than this and its fraction.
LARGEST_SIZE = 2**63 - 1


def parse_bytes(text: str, *, what: str = "size") -> int:
    """Return the bytes of ``"1.5GiB"``, ``"800 mb"`` or ``"6G"``; only 0 needs no unit.

    Raises:
        InvalidInput: no number, no unit, a unit other than GiB, MiB, GB, MB, G, M, or more than 2**63 - 1 bytes.
    """
    match = SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise InvalidInput(f"{what} {quoted(text)} is not a size; write a number and a unit, such as 6GiB or 800MiB")
    problem = unit_problem(match["number"], match["unit"])
    if problem is not None:
        raise InvalidInput(f"{what} {text!r} {problem}; allowed: {', '.join(ALLOWED_UNITS)}")
    num_bytes = float(match["number"]) * SPELLINGS.get(match["unit"].lower(), 1)
    if num_bytes > LARGEST_SIZE:
        raise InvalidInput(f"{what} {text!r} is more than any machine has; allowed: up to {LARGEST_SIZE >> 30}GiB")
    return int(num_bytes)


def unit_problem(number: str, unit: str) -> str | None:
    """Return what is wrong with the unit behind a number, None if nothing is; 0 needs none."""
    if unit.lower() in SPELLINGS or (not unit and not number.strip("0.")):
        return None
    return f"has the unknown unit {unit!r}" if unit else "has no unit"


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
