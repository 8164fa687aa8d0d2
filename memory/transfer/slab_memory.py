"""Host memory that slabs lie in, and that can become the weights' own, piece by piece.

[Note: pieces] The weights of a block lie in one range, so that one copy brings them to a device. When they are managed
no more they can stay where they are: each gets a storage of its own over its part of the range, of exactly its bytes,
so that other code sees ordinary tensors which share nothing. Pages go back to the system when the piece on them is
gone, and no slab is left. What remains taken is less than two pages for each piece that was dropped before its
neighbours, and address space. A view into the slab that other code has kept is a slab, too: until it is gone nothing is
given back, which would change what it shows.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import Counter, deque

import torch

from ..units import PAGE_BYTES, align_up

__all__ = ["CAN_CUT", "SlabMemory"]

CAN_CUT = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MADV_DONTNEED")
"""Whether the system takes single pages back. Windows does not: there weights leave their slab by a copy."""
# macOS keeps pages that are not needed, unless they are called free.
GIVE_BACK = getattr(mmap, "MADV_FREE_REUSABLE", getattr(mmap, "MADV_DONTNEED", 0))


class SlabMemory:
    """A range of host memory, zero at first, aligned to pages, for one slab or several and then for pieces of them.

    It is freed with the last slab and piece in it. Finalizers run in any thread, between any two steps of another, so
    they only put what is to be given back into a queue, and one thread at a time works on that.
    """

    def __init__(self, num_bytes: int) -> None:
        assert CAN_CUT
        self.mapping = mmap.mmap(-1, align_up(num_bytes, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.num_users: Counter[tuple[int, int]] = Counter()
        """Of the pieces, and of what lies between them."""
        self.ended: deque[tuple[int, int]] = deque()
        """Ranges that nothing needs, as soon as the slabs are gone."""
        self.has_slabs = True
        self.working = threading.Lock()

    def slab_view(self) -> memoryview:
        """Return the memory for tensors of slabs, which keep it; `end_slabs` is to be called when they are gone."""
        return memoryview(self.mapping)

    def piece(self, begin: int, num_bytes: int) -> torch.Tensor:
        """Return bytes of the range as a tensor with a storage of its own; copies nothing. A slab is still there.

        Two pieces overlap only if they are the same bytes.
        """
        with torch.inference_mode(False):
            if not num_bytes:
                return torch.empty(0, dtype=torch.uint8)
            view = memoryview(self.mapping)[begin : begin + num_bytes]
            self.num_users[begin, begin + num_bytes] += 1
            weakref.finalize(view, self.end, begin, begin + num_bytes).atexit = False
            return torch.frombuffer(view, dtype=torch.uint8)

    def end_slabs(self) -> None:
        """No view into a slab is left: give back the pages between the pieces, and those of pieces that are gone."""
        pieces = sorted(self.num_users)
        ends = [0, *(end for _, end in pieces)]
        gaps = list(zip(ends, [*(begin for begin, _ in pieces), len(self.mapping)], strict=True))
        self.num_users.update(gaps)
        self.ended.extend(gaps)
        self.has_slabs = False
        self.give_back()

    def end(self, begin: int, end: int) -> None:
        self.ended.append((begin, end))
        self.give_back()

    def give_back(self) -> None:
        """Give whole pages of what has ended back to the system."""
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
