"""Page-locked host memory in few exact pieces: which slabs share a piece, how much may be locked, when it is unlocked.

[Note: registering] torch's own pinned allocator rounds every allocation up to a power of two (pytorch issues 95823
and 150517), so a pinned block wastes up to its own size. Here ordinary memory of the exact size is locked by the
driver's host-register call instead, as in ComfyUI. torch binds that call for CUDA and ROCm under one name, in what
the device module's ``cudart()`` returns (``torch/csrc/cuda/shared/cudart.cpp``). Where a module has no such call
(XPU), arenas come from torch's allocator. Four rules of the driver shape this file:

1. Locking works by pages. An arena's pages are its own: it begins and ends at a page's edge inside its allocation.
2. A copy lies in one registered range or touches none, else it is an invalid argument (CUDA driver API, "API
   synchronization behavior"; seen in sglang pull request 36798). So a slab is never cut.
3. From 2 GiB on, Linux 6.11 and 6.12 cannot lock in one call, and lose the memory (OneTrainer pull request 1649;
   NVIDIA/NV-Kernels pull request 108). So an arena is smaller.
4. A refused call stays the thread's last error until it is read (`discard_error`).

[Note: unlocking] Each slab is a tensor with a storage and a version of its own over the arena's pages, and keeps them
alive. When the last tensor that shows any of them is gone, the arena is unlocked and freed. torch's allocator would
hold memory back while a copy from it is under way; nothing does that for memory that was only registered. So the caller
that allocates passes a function that waits for those copies, which runs first.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..units import GIB, KIB, LOCK_LIMIT_BYTES, PAGE_BYTES, SLAB_ALIGNMENT, align_up
from .devices import HostMemory
from .slab_memory import CAN_CUT, SlabMemory

__all__ = [
    "ARENA_BYTES",
    "Arena",
    "ArenaLock",
    "HostSlab",
    "Slabs",
    "allocate_slab",
    "count_slabs",
    "lay_out",
    "pin_limit_bytes",
    "pinned_used_bytes",
]

# The largest arena of several slabs. While a module is packed its weights are copied arena by arena, so this is the
# RAM that packing takes beside the weights; and it is the largest power of two below the limit of one call.
ARENA_BYTES = GIB

# cudaHostRegisterPortable: pinned for every device, not only for the current one.
PORTABLE = 1

# Of the RAM, the part that may be locked at all, as in ComfyUI (`MAX_PINNED_MEMORY`).
LOCKABLE_SHARE = 0.90
# Under WDDM locked memory is shared GPU memory, of which there is half the RAM for all programs together ("Calculating
# graphics memory" in Microsoft's display driver documentation); a tenth of that half is left to the others.
LOCKABLE_SHARE_WDDM = 0.45
# Of the free RAM, what stays pageable: a tenth or 2 GiB, whichever is more, as in stable-diffusion.cpp; but of less
# than 4 GiB only half.
KEPT_SHARE = 0.10
KEPT_BYTES = 2 * GIB
# Smaller slabs that are pageable come from torch's allocator, which keeps freed memory of such sizes for its next.
OWN_PAGES_BYTES = 128 * KIB


# -- layout: arithmetic only


@dataclass(frozen=True, kw_only=True, slots=True)
class Arena:
    """One range that is locked in one call: which of the slabs lie in it, and where they begin."""

    slabs: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    """As locked, rounding included."""


def round_to_pages(num_bytes: int) -> int:
    return align_up(num_bytes, PAGE_BYTES)


def round_to_power_of_two(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def lay_out(
    sizes: Sequence[int], *, pinned_bytes: int, rounding: Callable[[int], int] = round_to_pages
) -> tuple[Arena, ...]:
    """Return the arenas for slabs of these bytes, in the order of their first slabs. Allocates nothing.

    Earlier slabs come first, whole ones only, and together the arenas lock at most ``pinned_bytes``; one that does
    not fit any more is passed over for a later one that does. Slabs in no arena are to be pageable: those, empty
    ones, and one that `LOCK_LIMIT_BYTES` cannot hold. Neighbours share an arena up to `ARENA_BYTES`, a larger one is
    alone. Rounded to pages, an arena wastes less than a page and the alignment of its slabs, which is nothing if
    they are multiples of it. Rounded to powers of two, slabs share an arena only if that locks no more than two
    would, so that it wastes at most what torch would waste on them, which is up to as much again.

    Args:
        rounding: bytes asked for to bytes locked.
    """
    arenas: list[Arena] = []
    slabs: list[int] = []
    offsets: list[int] = []
    end = locked = 0  # of the open arena; of the closed ones

    def close() -> None:
        nonlocal slabs, offsets, end, locked
        if slabs:
            arenas.append(Arena(slabs=tuple(slabs), offsets=tuple(offsets), num_bytes=rounding(end)))
            locked += rounding(end)
        slabs, offsets, end = [], [], 0

    for number, size in enumerate(sizes):
        slab_bytes = align_up(size, SLAB_ALIGNMENT)
        alone = rounding(slab_bytes)
        if not size or alone >= LOCK_LIMIT_BYTES:
            continue
        together = rounding(end + slab_bytes)
        joins = together <= min(ARENA_BYTES, rounding(end) + alone)
        if locked + (together if joins else rounding(end) + alone) > pinned_bytes:
            continue
        if not joins:
            close()
        slabs.append(number)
        offsets.append(end)
        end += slab_bytes
    close()
    return tuple(arenas)


# -- allocation


@dataclass(eq=False, slots=True)
class ArenaLock:
    """What the slabs of one locked arena have in common."""

    arena: Arena
    slab_bytes: int
    """Of all its slabs."""
    waits: list[Callable[[], object]]
    """What is called before it is unlocked: each waits until no copy from the slabs is under way somewhere."""


@dataclass(frozen=True, slots=True)
class HostSlab:
    """A slab, and the memory that it lies in."""

    data: torch.Tensor
    memory: SlabMemory | None = None
    """None where that cannot be cut into pieces."""
    begin: int = 0
    """Where in it the slab begins."""
    lock: ArenaLock | None = None
    """None for one that is pageable."""

    def piece(self, begin: int, end: int) -> torch.Tensor | None:
        """Return bytes of the slab as memory of their own ([Note: pieces] in `slab_memory.py`), where that can be."""
        return self.memory.piece(self.begin + begin, end - begin) if self.memory is not None else None


class Slabs:
    """Host slabs of the bytes asked for, in that order, each made when its turn comes. Iterate once.

    An arena is locked when its first slab is asked for, so what is copied into one slab may be freed before the
    next arena takes its memory. `Tensor.is_pinned` tells which slabs are locked. After the driver's first refusal
    all others are pageable, and `was_refused` is set; nothing is raised, and no error is left behind.

    Args:
        sizes: the bytes of each slab; earlier ones are locked first.
        pinned_bytes: the most that may be locked, rounding included.
        before_unlock: waits until no copy from or to these slabs is under way. Called before an arena is unlocked,
            by whichever thread drops its last tensor; must not keep a slab alive ([Note: unlocking]).
    """

    def __init__(self, sizes: Sequence[int], *, pinned_bytes: int, before_unlock: Callable[[], object]) -> None:
        self.sizes = tuple(sizes)
        self.before_unlock = before_unlock
        self.locker = find_locker()
        self.arenas: tuple[Arena, ...] = ()
        if self.locker is not None:
            self.arenas = lay_out(sizes, pinned_bytes=pinned_bytes, rounding=self.locker.rounding)
        self.locked_bytes = 0
        """What has been locked so far, rounding included."""
        self.was_refused = False

    def __iter__(self) -> Iterator[HostSlab]:
        arenas = {arena.slabs[0]: arena for arena in self.arenas}
        locked: dict[int, HostSlab] = {}
        for number, size in enumerate(self.sizes):
            if number in arenas and not self.was_refused:
                locked = self.allocate(arenas[number])
            yield locked.pop(number) if number in locked else allocate_slab(size)

    def allocate(self, arena: Arena) -> dict[int, HostSlab]:
        """Return an arena's slabs by their numbers; none if the driver refuses."""
        assert self.locker is not None
        waits = [self.before_unlock]
        locked = self.locker.lock(arena.num_bytes, lambda: call_all(waits))
        if locked is None:
            self.was_refused = True
            return {}
        self.locked_bytes += arena.num_bytes
        pages, memory = locked
        lock = ArenaLock(arena, sum(self.sizes[number] for number in arena.slabs), waits)
        with torch.inference_mode(False):
            return {
                number: HostSlab(
                    torch.frombuffer(pages, dtype=torch.uint8, offset=offset, count=self.sizes[number]),
                    memory,
                    offset,
                    lock,
                )
                for number, offset in zip(arena.slabs, arena.offsets, strict=True)
            }


def call_all(functions: Sequence[Callable[[], object]]) -> None:
    for function in functions:
        function()


def allocate_slab(num_bytes: int) -> HostSlab:
    """Return a pageable slab."""
    if not CAN_CUT or num_bytes < OWN_PAGES_BYTES:
        return HostSlab(allocate_bytes(num_bytes))
    memory = SlabMemory(num_bytes)
    pages = memory.slab_view()
    weakref.finalize(pages, memory.end_slabs).atexit = False
    with torch.inference_mode(False):
        return HostSlab(torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes), memory)


def allocate_bytes(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)


# -- locking

# The bytes of every arena that is locked now, by address. A finalizer may run between any two steps of anybody, so
# entries are put and popped, and no sum is kept.
locked_arenas: dict[int, int] = {}
# Memory that the driver would not unlock: it must not be given to anyone else.
stuck: list[SlabMemory | torch.Tensor] = []

Locked: TypeAlias = tuple[memoryview, SlabMemory | None]
"""Locked bytes, which are unlocked when the last tensor on them is gone; and the memory, if that can be cut then."""


def count_slabs(slabs: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return the bytes that slabs take of each host tier: of page-locked memory the whole arenas they lie in."""
    arenas = locked_arenas.copy()
    begins = sorted(arenas)
    found, pageable_bytes = set[int](), 0
    for slab in slabs:
        place = bisect_right(begins, slab.data_ptr()) - 1
        if place >= 0 and slab.data_ptr() < begins[place] + arenas[begins[place]]:
            found.add(begins[place])
        else:
            pageable_bytes += slab.numel()
    return {"pinned": sum(arenas[begin] for begin in found), "host": pageable_bytes}


def pinned_used_bytes() -> int:
    """Return the bytes that this process has page-locked here, rounding included."""
    return sum(locked_arenas.copy().values())


@dataclass(frozen=True, slots=True)
class Registrar:
    """Locks ordinary memory by the driver's call."""

    accelerator: torch.device
    cudart: Any
    rounding = staticmethod(round_to_pages)

    def lock(self, num_bytes: int, before_unlock: Callable[[], object]) -> Locked | None:
        """Return so many locked bytes, or None if the driver refuses. Touches every page."""
        memory: SlabMemory | torch.Tensor
        if CAN_CUT:
            memory = SlabMemory(num_bytes)
            pages = memory.slab_view()[:num_bytes]
        else:
            memory = allocate_bytes(num_bytes + PAGE_BYTES)
            start = -memory.data_ptr() % PAGE_BYTES
            pages = memory.numpy().data[start : start + num_bytes]
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        if int(self.cudart.cudaHostRegister(address, num_bytes, PORTABLE)):
            discard_error(self.accelerator)
            return None
        locked_arenas[address] = num_bytes
        # The finalizer holds the memory, so that it is freed after it was unlocked. It is not called at the end
        # of the process: devices may be gone by then, and the driver unlocks everything.
        weakref.finalize(pages, self.unlock, memory, address, before_unlock).atexit = False
        return pages, memory if isinstance(memory, SlabMemory) else None

    def unlock(self, memory: SlabMemory | torch.Tensor, address: int, before_unlock: Callable[[], object]) -> None:
        try:
            before_unlock()
        finally:
            if int(self.cudart.cudaHostUnregister(address)):
                stuck.append(memory)
                discard_error(self.accelerator)
            else:
                del locked_arenas[address]
                if isinstance(memory, SlabMemory):
                    memory.end_slabs()


@dataclass(frozen=True, slots=True)
class TorchAllocator:
    """Takes locked memory from torch's allocator, in powers of two; torch keeps what is given back for its next."""

    rounding = staticmethod(round_to_power_of_two)

    def lock(self, num_bytes: int, before_unlock: Callable[[], object]) -> Locked | None:
        """Return so many locked bytes, or None if the driver refuses; torch reads the error itself."""
        try:
            memory = allocate_bytes(num_bytes, pinned=True)
        except RuntimeError:  # torch.OutOfMemoryError is one
            return None
        pages = memory.numpy().data
        locked_arenas[memory.data_ptr()] = num_bytes
        weakref.finalize(pages, self.unlock, memory, before_unlock).atexit = False
        return pages, None

    def unlock(self, memory: torch.Tensor, before_unlock: Callable[[], object]) -> None:
        try:
            before_unlock()  # torch knows of no copy from slabs that it did not allocate
        finally:
            del locked_arenas[memory.data_ptr()]


def find_locker() -> Registrar | TorchAllocator | None:
    """Return the way in which this machine locks memory; None without an accelerator."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    if hasattr(module, "cudart"):
        return Registrar(accelerator, module.cudart())
    return TorchAllocator()


def discard_error(accelerator: torch.device) -> None:
    """Read the error that a refused call left in this thread, so that no unrelated operator raises it.

    torch binds no cudaGetLastError. But it reads the error after each kernel that it launches, and the allocator reads
    it when it finds no memory, so a kernel on one byte is enough; `Tensor.item` waits for it, because a refusal may
    also reach the device's queue (ComfyUI's `discard_cuda_async_error` does the same).
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, dtype=torch.uint8, device=accelerator).item()


# -- the limit


def pin_limit_bytes(
    memory: HostMemory, *, used_bytes: int | None = None, freed_bytes: int = 0, platform: str = sys.platform
) -> int:
    """Return how many more bytes may be page-locked now; locks nothing.

    The smaller of two sums. What may be locked at all: `LOCKABLE_SHARE` of the RAM, under Windows
    `LOCKABLE_SHARE_WDDM`, less what is locked already. And what is there: the free RAM and ``freed_bytes``, less what
    stays pageable (`KEPT_SHARE`, `KEPT_BYTES`). The constants name their sources. "RAM" is the container's, if it has
    a limit (`HostMemory.now`).

    Args:
        used_bytes: locked already, by us (the default) or by the host as well.
        freed_bytes: what the weights that are to be packed occupy now and give back.
    """
    used = pinned_used_bytes() if used_bytes is None else used_bytes
    share = LOCKABLE_SHARE_WDDM if platform == "win32" else LOCKABLE_SHARE
    kept = max(int(memory.free_bytes * KEPT_SHARE), min(KEPT_BYTES, memory.free_bytes // 2))
    return max(0, min(int(memory.total_bytes * share) - used, memory.free_bytes + freed_bytes - kept))
