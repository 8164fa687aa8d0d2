"""Page-locked host memory in a few arenas of exact size: which slabs share one, how much may be locked, unlocking.

[Note: registering] torch's pinned allocator rounds every allocation up to a power of two (pytorch issues 95823 and
150517), so a pinned block wastes up to its own size. This file instead locks ordinary memory of the exact size with the
driver's host-register call, as ComfyUI does. torch binds this call for CUDA and ROCm under one name, in the result of
the device module's ``cudart()`` (``torch/csrc/cuda/shared/cudart.cpp``). Without such a call (XPU), arenas come from
torch's allocator. Four rules of the driver shape this file:

1. Locking works by pages. Arenas share no pages: an arena begins and ends at page boundaries inside its allocation.
2. A copy must lie within one registered range or touch none; otherwise the driver refuses it as an invalid argument
   (CUDA driver API, "API synchronization behavior"; seen in sglang pull request 36798). So one slab never lies in two
   arenas.
3. Linux 6.11 and 6.12 cannot lock 2 GiB or more in one call, and leak the memory (OneTrainer pull request 1649;
   NVIDIA/NV-Kernels pull request 108). So arenas are smaller.
4. A refused call stays the thread's last error until it is read (`discard_error`).

[Note: unlocking] Each slab is a tensor with its own storage and version over the arena's pages, and keeps them alive.
When the last tensor in an arena is freed, the arena is unlocked and freed. torch's allocator keeps memory until copies
from it are done; for registered memory nothing does so. So the caller passes a function that waits for these copies; it
runs before the arena is unlocked.
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

from ..units import GIB, KEPT_RAM_SHARE, KIB, LOCK_LIMIT_BYTES, PAGE_BYTES, SLAB_ALIGNMENT, align_up
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

# The largest arena of several slabs. Packing copies a module's weights arena by arena, so it takes this much RAM beside
# the weights. It is the largest power of two below the limit of one call.
ARENA_BYTES = GIB

# cudaHostRegisterPortable: pinned for every device, not only the current one.
PORTABLE = 1
# cudaErrorHostMemoryNotRegistered: it was not locked, because Ctrl-C came just before.
NOT_REGISTERED = 713

# The share of the RAM that may be locked, as in ComfyUI (`MAX_PINNED_MEMORY`).
LOCKABLE_SHARE = 0.90
# Under WDDM locked memory is shared GPU memory, which is limited to half the RAM for all programs together
# ("Calculating graphics memory" in Microsoft's display driver documentation). A tenth of this half is left to other
# programs.
LOCKABLE_SHARE_WDDM = 0.45
# Of the free RAM so much stays pageable, at most half of it, or `KEPT_RAM_SHARE` if that is more.
KEPT_BYTES = 2 * GIB
# Smaller pageable slabs come from torch's CPU allocator, which reuses freed memory of such sizes.
OWN_PAGES_BYTES = 128 * KIB


# -- layout: arithmetic only


@dataclass(frozen=True, kw_only=True, slots=True)
class Arena:
    """One range that is locked in one call: the numbers of the slabs in it, and their offsets."""

    slabs: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int
    """The locked bytes, rounding included."""


def round_to_pages(num_bytes: int) -> int:
    return align_up(num_bytes, PAGE_BYTES)


def round_to_power_of_two(num_bytes: int) -> int:
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def lay_out(
    sizes: Sequence[int], *, pinned_bytes: int, rounding: Callable[[int], int] = round_to_pages
) -> tuple[Arena, ...]:
    """Return the arenas for slabs of these sizes, in the order of their first slabs. Allocates nothing.

    The arenas together lock at most ``pinned_bytes``. Earlier slabs are preferred; a slab that no longer fits is
    skipped, and a later one that fits is taken. Slabs in no arena stay pageable: skipped ones, empty ones, and those of
    `LOCK_LIMIT_BYTES` or more. Neighbours share an arena of up to `ARENA_BYTES`; a larger slab has its own. Rounded to
    pages, an arena wastes less than a page and the alignment of its slabs (nothing if their sizes are multiples of it).
    Rounded to powers of two, slabs share an arena only if it locks no more than two arenas would. So it wastes at most
    what torch would waste on them, which is up to their own size.

    Args:
        rounding: converts requested bytes to locked bytes.
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
    """Data that the slabs of one locked arena share."""

    arena: Arena
    slab_bytes: int
    """The bytes of all its slabs."""
    waits: list[Callable[[], object]]
    """Functions called before unlocking: each waits for copies from the slabs."""
    is_shared: bool = False
    """Whether slabs of it are shared by components, and so the arena is in the books as none of theirs."""

    def copy_by(self, waits: Iterable[Callable[[], object]]) -> None:
        """Wait for the copies so far, and before unlocking for those that these functions wait for."""
        for wait in self.waits:
            wait()
        self.waits[:] = waits

    def share(self, shares: bool) -> None:
        """Note whether components share slabs of it."""
        self.is_shared = shares

    def join(self, wait: Callable[[], object]) -> None:
        """Wait for these copies, too, before unlocking."""
        if wait not in self.waits:
            self.waits.append(wait)

    def leave(self, wait: Callable[[], object]) -> None:
        """Wait for these copies now instead of before unlocking."""
        wait()
        if wait in self.waits:
            self.waits.remove(wait)


@dataclass(frozen=True, slots=True)
class HostSlab:
    """A slab, and the memory in which it lies."""

    data: torch.Tensor
    memory: SlabMemory | None = None
    """None if the memory cannot be cut into pieces."""
    begin: int = 0
    """The slab's offset in the memory."""
    lock: ArenaLock | None = None
    """None for a pageable slab."""

    def piece(self, begin: int, end: int) -> torch.Tensor | None:
        """Return bytes of the slab as a piece ([Note: pieces] in `slab_memory.py`); None if it cannot be cut."""
        return self.memory.piece(self.begin + begin, end - begin) if self.memory is not None else None

    def has_pieces(self) -> bool:
        """Whether a piece of the slab exists."""
        return self.memory is not None and self.memory.has_pieces(self.begin, self.data.numel())


class Slabs:
    """Host slabs of the requested sizes, in this order, each allocated when the iteration reaches it. Iterate once.

    An arena is locked when its first slab is reached. So the source of one arena's slabs can be freed before the next
    arena takes memory. `Tensor.is_pinned` tells which slabs are locked. After the driver's first refusal all further
    slabs are pageable, and `was_refused` is True; nothing is raised, and no CUDA error stays pending.

    Args:
        sizes: the bytes of each slab; earlier ones are locked first.
        pinned_bytes: the most bytes that may be locked, rounding included.
        before_unlock: waits until all copies from and to these slabs are done. Called before an arena is unlocked, in
            the thread that drops its last tensor. Must not keep a slab alive ([Note: unlocking]).
    """

    def __init__(self, sizes: Sequence[int], *, pinned_bytes: int, before_unlock: Callable[[], object]) -> None:
        self.sizes = tuple(sizes)
        self.before_unlock = before_unlock
        self.locker = find_locker()
        self.arenas: tuple[Arena, ...] = ()
        if self.locker is not None:
            self.arenas = lay_out(sizes, pinned_bytes=pinned_bytes, rounding=self.locker.rounding)
        self.locked_bytes = 0
        """The bytes locked so far, rounding included."""
        self.was_refused = False

    def __iter__(self) -> Iterator[HostSlab]:
        arenas = {arena.slabs[0]: arena for arena in self.arenas}
        locked: dict[int, HostSlab] = {}
        for number, size in enumerate(self.sizes):
            if number in arenas and not self.was_refused:
                locked = self.allocate(arenas[number])
            yield locked.pop(number) if number in locked else allocate_slab(size)

    def allocate(self, arena: Arena) -> dict[int, HostSlab]:
        """Return an arena's slabs by number; none if the driver refuses to lock."""
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

# The bytes of every locked arena by address. A finalizer may run at any moment, so only single entries are set and
# removed, and no sum is kept.
locked_arenas: dict[int, int] = {}
# Memory that the driver refused to unlock; kept alive because it must not be reused.
stuck: list[SlabMemory | torch.Tensor] = []

Locked: TypeAlias = tuple[memoryview, SlabMemory | None]
"""Locked bytes, unlocked when the last tensor on them is freed; and their memory, None if it cannot be cut."""


def count_slabs(slabs: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return the bytes that slabs take of each host tier. Page-locked slabs count with their whole arenas."""
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
    """Return the bytes that this module has page-locked, rounding included."""
    return sum(locked_arenas.copy().values())


@dataclass(frozen=True, slots=True)
class Registrar:
    """Locks ordinary memory with the driver's host-register call."""

    accelerator: torch.device
    cudart: Any
    rounding = staticmethod(round_to_pages)

    def lock(self, num_bytes: int, before_unlock: Callable[[], object]) -> Locked | None:
        """Return ``num_bytes`` of locked memory, None if the driver refuses. Touches every page."""
        memory: SlabMemory | torch.Tensor
        if CAN_CUT:
            memory = SlabMemory(num_bytes)
            memory.touch()
            pages = memory.slab_view()[:num_bytes]
        else:
            memory = allocate_bytes(num_bytes + PAGE_BYTES)
            start = -memory.data_ptr() % PAGE_BYTES
            pages = memory.numpy().data[start : start + num_bytes]
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        # The finalizer references the memory, so it is freed after unlocking. It is there before the memory is locked,
        # because Ctrl-C may come as soon as that is done. It does not run at the exit of the process: devices may be
        # closed by then, and the driver unlocks everything.
        finalizer = weakref.finalize(pages, self.unlock, memory, address, before_unlock)
        finalizer.atexit = False
        locked_arenas[address] = num_bytes
        if int(self.cudart.cudaHostRegister(address, num_bytes, PORTABLE)):
            finalizer.detach()
            del locked_arenas[address]
            discard_error(self.accelerator)
            return None
        return pages, memory if isinstance(memory, SlabMemory) else None

    def unlock(self, memory: SlabMemory | torch.Tensor, address: int, before_unlock: Callable[[], object]) -> None:
        try:
            before_unlock()
        finally:
            error = int(self.cudart.cudaHostUnregister(address))
            if error:
                discard_error(self.accelerator)
            if error and error != NOT_REGISTERED:
                stuck.append(memory)
            else:
                locked_arenas.pop(address, None)
                if isinstance(memory, SlabMemory):
                    memory.end_slabs()


@dataclass(frozen=True, slots=True)
class TorchAllocator:
    """Takes locked memory from torch's allocator, in powers of two. Torch caches freed memory."""

    rounding = staticmethod(round_to_power_of_two)

    def lock(self, num_bytes: int, before_unlock: Callable[[], object]) -> Locked | None:
        """Return ``num_bytes`` of locked memory, None if the driver refuses. Torch clears the error itself."""
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
            before_unlock()  # torch does not track copies from our slabs, whose tensors it did not allocate
        finally:
            del locked_arenas[memory.data_ptr()]


def find_locker() -> Registrar | TorchAllocator | None:
    """Return the object that locks memory on this machine; None without an accelerator."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    if hasattr(module, "cudart"):
        return Registrar(accelerator, module.cudart())
    return TorchAllocator()


def discard_error(accelerator: torch.device) -> None:
    """Clear the error that a refused call left in this thread, so that no unrelated operator raises it.

    torch does not bind cudaGetLastError. But it reads the error after each kernel launch, and the allocator reads it
    when an allocation fails, so a kernel on one byte clears it. `Tensor.item` waits for the kernel, because the error
    may also appear asynchronously (ComfyUI's `discard_cuda_async_error` does the same).
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, dtype=torch.uint8, device=accelerator).item()


# -- the limit


def pin_limit_bytes(
    memory: HostMemory, *, used_bytes: int | None = None, freed_bytes: int = 0, platform: str = sys.platform
) -> int:
    """Return how many more bytes may be page-locked now. Locks nothing.

    The result is the smaller of two limits. The first: `LOCKABLE_SHARE` of the RAM (under Windows
    `LOCKABLE_SHARE_WDDM`) less the bytes locked already. The second: free RAM plus ``freed_bytes``, less the part that
    stays pageable (`KEPT_RAM_SHARE`, `KEPT_BYTES`). The constants name their sources. "RAM" is the container's limit,
    if it has one (`HostMemory.now`).
    """
    used = pinned_used_bytes() if used_bytes is None else used_bytes
    share = LOCKABLE_SHARE_WDDM if platform == "win32" else LOCKABLE_SHARE
    kept = max(int(memory.free_bytes * KEPT_RAM_SHARE), min(KEPT_BYTES, memory.free_bytes // 2))
    return max(0, min(int(memory.total_bytes * share) - used, memory.free_bytes + freed_bytes - kept))
