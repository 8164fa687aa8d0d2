"""The C library's heap, and what torch caches of page-locked memory: freed memory in them, given back to the system.

[Note: heap] glibc gives freed memory back only at the end of its heap and above a threshold that grows, so the process
keeps small tensors' pages long after they are freed. Its ``malloc_trim`` gives back all whole pages that are free.
musl, macOS and Windows have no such call; there the system's allocator decides by itself.
"""

from __future__ import annotations

import torch

from ..weights.page_cache import find_heap_trim

__all__ = ["give_back_heap", "has_trim"]


def give_back_heap() -> None:
    """Give freed host memory back to the system: torch's cache of page-locked memory, then the C library's heap.

    Takes milliseconds for each GiB of the heap; call it when much was freed, not for each component.
    """
    if torch.accelerator.is_available():
        empty = getattr(torch._C, "_host_emptyCache", None)
        if empty is not None:
            empty()
    trim = find_heap_trim()
    if trim is not None:
        trim(0)


def has_trim() -> bool:
    """Whether the system's C library gives back freed memory when it is asked."""
    return find_heap_trim() is not None
