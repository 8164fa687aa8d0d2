"""Page-locking host memory, as packing a model does arena by arena: what huge pages and touching by all threads save.

With a GPU the driver's call locks the memory, else the system's: both provide each page that was not touched before.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch

from highwater.memory.transfer import slab_memory
from highwater.memory.transfer.pinned_memory import ARENA_BYTES, PORTABLE
from highwater.memory.transfer.slab_memory import SlabMemory
from highwater.memory.units import GIB

from .case import Result

NUM_ARENAS, NUM_RUNS = 2, 3
WAYS = {"4 KiB pages, locked": (False, False), "touched by all threads": (False, True), "huge pages": (True, False)}
OURS = "huge pages, touched by all threads"
WAYS[OURS] = (True, True)

Lock = Callable[[int, int], int]


@contextlib.contextmanager
def locking() -> Iterator[tuple[Lock, Callable[[int, int], int], str]]:
    """Yield what locks and unlocks a range, and who does it."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
        cudart = torch.cuda.cudart()
        yield (
            lambda address, size: int(cudart.cudaHostRegister(address, size, PORTABLE)),
            lambda address, _: int(cudart.cudaHostUnregister(address)),
            "cudaHostRegister",
        )
        return
    libc = ctypes.CDLL(None, use_errno=True)
    yield (
        lambda address, size: libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)),
        lambda address, size: libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(size)),
        "mlock",
    )


def lock_arenas(lock: Lock, unlock: Lock, *, touches: bool) -> float:
    """Return the seconds that allocating and locking takes per GiB."""
    held = []
    begin_s = time.perf_counter()
    for _ in range(NUM_ARENAS):
        memory = SlabMemory(ARENA_BYTES)
        if touches:
            memory.touch()
        address = torch.frombuffer(memory.mapping, dtype=torch.uint8).data_ptr()
        if lock(address, ARENA_BYTES):
            raise SystemExit(f"benchmarks locking: the system refused to lock {ARENA_BYTES} bytes; see ulimit -l")
        held.append((memory, address))
    seconds = time.perf_counter() - begin_s
    for _, address in held:
        unlock(address, ARENA_BYTES)
    return seconds / (NUM_ARENAS * ARENA_BYTES / GIB)


def measure() -> Result:
    """Lock 2 GiB in each way, three times; takes some seconds."""
    runs: dict[str, list[float]] = {way: [] for way in WAYS}
    with locking() as (lock, unlock, who):
        for _ in range(NUM_RUNS):
            for way, (has_huge_pages, touches) in WAYS.items():
                pages = contextlib.nullcontext() if has_huge_pages else patch.object(slab_memory, "HUGE_PAGES", None)
                with pages:
                    runs[way].append(lock_arenas(lock, unlock, touches=touches))
    plain, *_ = runs
    best = {way: min(seconds) for way, seconds in runs.items()}
    return Result(
        question=(
            f"Seconds to allocate and lock a GiB of host memory by {who}, arenas of 1 GiB, {torch.get_num_threads()} "
            f"threads; the least and the most of {NUM_RUNS} runs that take turns."
        ),
        rows=[
            {"way": way, "s per GiB": min(seconds), "most": max(seconds), "over ours": best[way] / best[OURS]}
            for way, seconds in runs.items()
        ],
        ratio=best[OURS] / best[plain],
        meaning="ours over locking pages of 4 KiB that nothing touched before; below 1 is faster",
    )
