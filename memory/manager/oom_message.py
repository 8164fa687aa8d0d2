"""Out-of-memory errors as numbers: which device, the bytes asked for, the bytes that the driver had left."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..units import GIB, KIB, MIB, format_bytes

__all__ = ["Shortage", "add_line", "read_shortage", "tell_holders"]

UNITS = {"": 1, "bytes": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
AMOUNT = r"(\d{1,15}(?:\.\d+)?)\s*(bytes|[KMG]iB|B)\b"
# torch's caching allocators (CUDA, HIP, XPU), its cudaMallocAsync one, and the simulated devices.
ASKED = re.compile(rf"(?:Tried to allocate|Requested\s*:)\s*{AMOUNT}")
FREE = (
    re.compile(rf"of which {AMOUNT} is free"),
    re.compile(rf"Free \(according to CUDA\)\s*:\s*{AMOUNT}"),
    re.compile(r"bytes: (\d{1,18})() free of"),
)
# What torch's allocator held at that time: live tensors, and its cache.
HELD = re.compile(rf"Of the allocated memory {AMOUNT} is allocated by PyTorch, and {AMOUNT} is reserved")
SIMULATED_HELD = re.compile(r", (\d{1,18}) in use")
DEVICE = re.compile(r"GPU (\d{1,3}) has|on device (\d{1,3})|^\w+:(\d{1,3}) out of memory")
# Errors about host memory, and errors of libraries, which have no numbers.
HOST = re.compile(r"pinned memory|cudaHostAlloc|host memory|CPUAllocator", re.IGNORECASE)
LIBRARIES = re.compile(r"CUDA error: out of memory|HIP error: out of memory|CU(BLAS|DNN|SOLVER)_STATUS_ALLOC_FAILED")
MAX_CAUSES = 8
# The most components that a message names.
MOST_NAMED = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """One allocation that failed; a field is None where the error does not say it."""

    error: BaseException
    device_index: int | None
    asked_bytes: int | None
    free_bytes: int | None
    """What the driver had left."""
    held_bytes: int | None
    """What torch's allocator held."""


def read_shortage(error: BaseException | None) -> Shortage | None:
    """Return the shortage that an exception, or its cause, reports of a device; None for all other exceptions."""
    for _ in range(MAX_CAUSES):
        if error is None:
            return None
        if is_out_of_memory(error):
            return parse_shortage(error)
        error = error.__cause__
    return None


def is_out_of_memory(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or HOST.search(str(error)):
        return False
    return isinstance(error, torch.OutOfMemoryError) or LIBRARIES.search(str(error)) is not None


def parse_shortage(error: BaseException) -> Shortage:
    text = str(error)
    device = DEVICE.search(text)
    free = (amount for pattern in FREE if (amount := read_amount(pattern, text)) is not None)
    return Shortage(
        error=error,
        device_index=int(next(group for group in device.groups() if group)) if device else None,
        asked_bytes=read_amount(ASKED, text),
        free_bytes=next(free, None),
        held_bytes=read_held(text),
    )


def read_held(text: str) -> int | None:
    found = HELD.search(text)
    if found is not None:
        return int(float(found[1]) * UNITS[found[2]]) + int(float(found[3]) * UNITS[found[4]])
    simulated = SIMULATED_HELD.search(text)
    return int(simulated[1]) if simulated else None


def read_amount(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(float(found[1]) * UNITS[found[2]]) if found else None


def tell_holders(total_bytes: int, free_bytes: int, components: Mapping[str, int], tensor_bytes: int) -> str:
    """Say what holds the memory of a device, so that all parts add up to its size.

    Args:
        components: the bytes that the manager counts for each component.
        tensor_bytes: what else torch's allocator in this process has in tensors, such as activations.
    """
    largest = sorted(components.items(), key=lambda entry: -entry[1])
    parts = [(name, held) for name, held in largest[:MOST_NAMED] if held]
    rest = largest[MOST_NAMED:]
    parts.append((f"{len(rest)} other components", sum(held for _, held in rest)))
    parts.append(("activations and other tensors", tensor_bytes))
    others = total_bytes - free_bytes - sum(components.values()) - tensor_bytes
    parts.append(("the driver and other programs", others))
    held = [f"{name} {format_bytes(num_bytes)}" for name, num_bytes in parts if num_bytes > 0]
    return f"of {format_bytes(total_bytes)}: {', '.join([*held, f'free {format_bytes(max(0, free_bytes))}'])}"


def add_line(error: BaseException, line: str) -> None:
    """Add a line to the message of an exception on its way to the user.

    Not a note: Python 3.10 has none, and a page that shows messages shows no notes.
    """
    if error.args and isinstance(error.args[0], str) and line not in error.args[0]:
        error.args = (f"{error.args[0]}\n{line}", *error.args[1:])
