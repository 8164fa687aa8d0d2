"""Sizes in bytes as text, and alignments. The code counts in bytes; units appear only in texts."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable

from .errors import InvalidInput, quoted

__all__ = [
    "ALLOWED_UNITS",
    "GIB",
    "KIB",
    "MIB",
    "align_up",
    "format_bytes",
    "format_seconds",
    "parse_bytes",
    "slab_offsets",
]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Tensors inside a slab begin at multiples of this, as torch's allocator places them, so kernels run the same.
SLAB_ALIGNMENT = 256

LOCK_LIMIT_BYTES = 2 * GIB
# The part of the RAM that is left to the system, as in stable-diffusion.cpp.
KEPT_RAM_SHARE = 0.10
PAGE_BYTES = mmap.PAGESIZE

UNITS = {"GiB": GIB, "MiB": MIB, "GB": 10**9, "MB": 10**6}
# Spellings that users write, in any case: G means GiB.
SPELLINGS = {name.lower(): num_bytes for name, num_bytes in UNITS.items()} | {"g": GIB, "m": MIB}
ALLOWED_UNITS = (*UNITS, "G", "M")
SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
# The largest size that drivers and torch can count.
LARGEST_SIZE = 2**63 - 1


def parse_bytes(text: str, *, what: str = "size") -> int:
    """Return the bytes of a size such as ``"1.5GiB"``, ``"800 mb"`` or ``"6G"``; only 0 needs no unit.

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
        raise InvalidInput(f"{what} {text!r} is too large; allowed: up to {LARGEST_SIZE >> 30}GiB")
    return int(num_bytes)


def unit_problem(number: str, unit: str) -> str | None:
    """Return the problem of the unit after a number, None if it is valid; 0 needs no unit."""
    if unit.lower() in SPELLINGS or (not unit and not number.strip("0.")):
        return None
    return f"has the unknown unit {unit!r}" if unit else "has no unit"


def format_bytes(num_bytes: int) -> str:
    """Return bytes as text: three digits and a unit, such as ``"31.5MiB"``."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    if size < 100 * KIB:
        return f"{sign}{size / KIB:.3g}KiB" if size >= KIB else f"{sign}{size}B"
    unit, name = (GIB, "GiB") if size >= 1000 * MIB else (MIB, "MiB")
    amount = size / unit
    return f"{sign}{amount:.{0 if amount >= 100 else 1 if amount >= 10 else 2}f}{name}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: two digits in s, or in ms if it is less than 0.1 s."""
    amount, unit = (seconds, "s") if seconds >= 0.1 else (seconds * 1e3, "ms")
    return f"{float(f'{amount:.2g}'):g} {unit}"


def align_up(num_bytes: int, alignment: int) -> int:
    """Return the next multiple of ``alignment``, in bytes."""
    return -(-num_bytes // alignment) * alignment


def slab_offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the offsets of tensors of these sizes in a slab, and the size of the slab, in bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += align_up(size, SLAB_ALIGNMENT)
    return offsets, end
