"""Host memory of slabs, which can be handed over to the weights in pieces.

[Note: huge pages] The system provides a page, and clears it, when it is first touched. At 4 KiB each that takes longer
than copying the weights, above all in a virtual machine, whose host provides the page in turn; and the call that locks
memory touches its pages one after the other. So ranges of 2 MiB and more ask for huge pages, where the system has them
(Linux), and `SlabMemory.touch` touches the pages with torch's threads: one for each 128 MiB, so eight for an arena of
1 GiB. Measured on an H200's machine and on two cores: `benchmarks/results/locking.md`.

[Note: pieces] The weights of a block lie in one range, so one copy moves them to a device. After release they can stay
there: each weight gets its own storage over exactly its part of the range, so other code sees ordinary tensors that
share nothing. When a piece is freed and no slab is left, its pages go back to the system. A piece that is freed before
its neighbours leaves less than two pages allocated, and its address space; where these pages are huge, Linux takes the
rest of them back when memory runs short. A view into the slab that other code keeps counts as a slab: as long as it
lives no pages are given back, because this would change its contents.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import Counter, deque

import torch

from ..units import MIB, PAGE_BYTES, align_up

__all__ = ["CAN_CUT", "SlabMemory"]

CAN_CUT = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MADV_DONTNEED")
"""Whether the system takes back single pages. Windows does not, so there released weights are copied out of slabs."""
# macOS keeps MADV_DONTNEED pages allocated, but takes back pages marked as reusable.
GIVE_BACK = getattr(mmap, "MADV_FREE_REUSABLE", getattr(mmap, "MADV_DONTNEED", 0))
HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
# A shorter range may have no huge page in it at all.
HUGE_PAGE_BYTES = 2 * MIB


class SlabMemory:
    """A page-aligned range of host memory, zero at first, for slabs and later for pieces of them.

    It is freed with its last slab or piece. Finalizers may run in any thread at any moment, so they only put freed
    ranges into a queue, which one thread at a time works off.
    """

    def __init__(self, num_bytes: int) -> None:
        assert CAN_CUT
        self.mapping = mmap.mmap(-1, align_up(num_bytes, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if HUGE_PAGES is not None and len(self.mapping) >= HUGE_PAGE_BYTES:
            with contextlib.suppress(OSError):  # a kernel without them
                self.mapping.madvise(HUGE_PAGES)
        self.num_users: Counter[tuple[int, int]] = Counter()
        """The number of users by range: of the pieces, and of the gaps between them."""
        self.ended: deque[tuple[int, int]] = deque()
        """Freed ranges; given back when no slab is left."""
        self.has_slabs = True
        self.working = threading.Lock()

    def touch(self) -> None:
        """Have the system provide every page now, by torch's threads ([Note: huge pages]). Overwrites bytes."""
        with torch.inference_mode(False):
            torch.frombuffer(self.mapping, dtype=torch.uint8)[::PAGE_BYTES].zero_()

    def slab_view(self) -> memoryview:
        """Return the memory for slab tensors, which keep it alive. Call `end_slabs` when the last of them is freed."""
        return memoryview(self.mapping)

    def piece(self, begin: int, num_bytes: int) -> torch.Tensor:
        """Return a part of the range as a tensor with its own storage, without a copy. Call it while a slab exists.

        Two pieces must be the same bytes or not overlap.
        """
        with torch.inference_mode(False):
            if not num_bytes:
                return torch.empty(0, dtype=torch.uint8)
            self.forget_ended()
            view = memoryview(self.mapping)[begin : begin + num_bytes]
            self.num_users[begin, begin + num_bytes] += 1
            weakref.finalize(view, self.end, begin, begin + num_bytes).atexit = False
            return torch.frombuffer(view, dtype=torch.uint8)

    def forget_ended(self) -> None:
        """Count freed pieces no more: while slabs are left no pages go back, and the next model's pieces come."""
        while self.ended:
            ended = self.ended.popleft()
            self.num_users[ended] -= 1
            if not self.num_users[ended]:
                del self.num_users[ended]

    def has_pieces(self, begin: int, num_bytes: int) -> bool:
        """Whether a piece exists that has any of these bytes."""
        users = self.num_users.copy()
        users.subtract(tuple(self.ended))  # a finalizer may add to it meanwhile
        end = begin + num_bytes
        return any(number > 0 and first < end and begin < last for (first, last), number in users.items())

    def end_slabs(self) -> None:
        """Give back the pages between the pieces and those of freed pieces. No view of a slab may be left."""
        pieces = sorted(self.num_users)
        ends = [0, *(end for _, end in pieces)]
        gaps = list(zip(ends, [*(begin for begin, _ in pieces), len(self.mapping)], strict=True))
        self.num_users.update(gaps)
        self.ended.extend(gaps)
        self.has_slabs = False
        if HUGE_PAGES is not None and pieces:
            with contextlib.suppress(OSError):  # else the kernel may make huge pages again of what pieces leave
                self.mapping.madvise(mmap.MADV_NOHUGEPAGE)
        self.give_back()

    def end(self, begin: int, end: int) -> None:
        self.ended.append((begin, end))
        self.give_back()

    def give_back(self) -> None:
        """Give the whole pages in freed ranges back to the system."""
        while self.ended and not self.has_slabs and self.working.acquire(blocking=False):
            try:
                while self.ended:
                    ended = self.ended.popleft()
                    self.num_users[ended] -= 1
                    begin, end = align_up(ended[0], PAGE_BYTES), ended[1] // PAGE_BYTES * PAGE_BYTES
                    if begin < end and not self.num_users[ended]:
                        self.mapping.madvise(GIVE_BACK, begin, end - begin)
            finally:
                self.working.release()
