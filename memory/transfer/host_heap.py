"""The C library's heap, and what torch caches of page-locked memory: freed memory in them, given back to the system.

[Note: heap] glibc gives freed memory back only at the end of its heap and above a threshold that grows, so the process
keeps small tensors' pages long after they are freed. Its ``malloc_trim`` gives back all whole pages that are free.
musl, macOS and Windows have no such call; there the system's allocator decides by itself. Threads have heaps of their
own, of up to 64 MiB each; the end of these stays with the process.
"""

from __future__ import annotations

import sys

import torch

from ..weights.page_cache import find_heap_trim

__all__ = ["describe_return", "give_back_heap", "has_trim"]


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


def describe_return(platform: str = sys.platform, *, trims: bool | None = None) -> str:
    """Return in words which freed host memory goes back to the system here, and which does not.

    Args:
        trims: whether there is a call that gives the heap back; None: look.
    """
    trims = has_trim() if trims is None else trims
    if platform == "win32":
        return (
            "Windows: device memory and page-locked RAM are free again at once; released weights are copied out of it, "
            "and go back to the system one by one as they are dropped. No call gives back the rest of the heap"
        )
    if platform == "darwin":
        return (
            "macOS: pages of freed weights are marked as reusable, and the system takes them when it needs them; until "
            "then the process's resident size may count them. No call gives back the rest of the heap"
        )
    rest = (
        "the C library's heap when all idle models are freed (malloc_trim), except the end of each thread's own heap, "
        "up to 64 MiB: MALLOC_ARENA_MAX=1 in the environment of ComfyUI avoids these heaps"
        if trims
        else "this C library has no call that gives back the rest of its heap"
    )
    return f"device memory, page-locked RAM and weights' own pages go back to the system at once; {rest}"
