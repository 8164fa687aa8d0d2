"""Host memory from which copies read: bounce buffers for files, and slabs that outlive their copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..units import MIB
from ..weights.file_reader import count_cached_threads
from ..weights.source import WeightsSource
from .copy_stream import CopyStream
from .pinned_memory import Slabs, count_slabs

__all__ = ["BounceBuffers", "WindowCopies", "allocate_slabs"]

# How much of a buffer each reading thread fills at a time from a file that is in RAM, where what was read is converted
# before it is copied: it should still be in the processor's caches then.
CACHED_BYTES = 4 * MIB


class BounceBuffers:
    """Two host buffers through which weights from a file are copied to one device. Open only during a load.

    If they are page-locked, one is filled while the other is copied.
    """

    def __init__(self, copies: CopyStream) -> None:
        self.copies = copies
        self.slabs: tuple[list[torch.Tensor], dict[str, int]] = [], {}
        self.done = [copies.event(), copies.event()]
        self.source: WeightsSource | None = None
        self.turn = 0
        self.was_cached = True
        """Whether what was read last was in RAM; as long as nothing was, that costs the least to find out."""
        self.was_refused = False
        """Whether the driver refused to lock them."""

    @property
    def buffers(self) -> list[torch.Tensor]:
        return self.slabs[0]

    @property
    def host_bytes(self) -> dict[str, int]:
        """The host memory that the buffers took when they were opened, by tier."""
        return self.slabs[1]

    def count_bytes(self) -> dict[str, int]:
        """Return the same, counted from the buffers that exist now."""
        return count_slabs(self.buffers)

    @property
    def buffer_bytes(self) -> int:
        """How many bytes each buffer has."""
        return self.buffers[0].numel()

    @property
    def convertible_bytes(self) -> int:
        """How many bytes of the next buffer to fill where they are converted there."""
        num_bytes = self.buffer_bytes
        return min(num_bytes, count_cached_threads() * CACHED_BYTES) if self.was_cached else num_bytes

    def fill_from(self, source: WeightsSource) -> None:
        """Set the files that stay open, with their reader threads, as long as the buffers are open."""
        assert not self.buffers
        self.source = source

    def open(self, buffer_bytes: int, *, locks: bool) -> None:
        """Allocate both buffers, page-locked if ``locks`` is True and the driver agrees."""
        assert not self.buffers
        limit = 4 * buffer_bytes if locks else 0  # rounding up to a power of two less than doubles a buffer
        slabs = allocate_slabs([buffer_bytes] * 2, pinned_bytes=limit, streams=[self.copies])
        buffers = [slab.data for slab in slabs]
        pageable_bytes = sum(buffer.numel() for buffer in buffers if not buffer.is_pinned())
        self.slabs = buffers, {"pinned": slabs.locked_bytes, "host": pageable_bytes}
        self.was_cached = True
        self.was_refused = slabs.was_refused
        if self.source is not None:
            self.source.hold()

    def close(self) -> None:
        """Wait for copies from both buffers, then free them."""
        self.copies.wait()
        if self.buffers and self.source is not None:
            self.source.let_go()
        self.slabs = [], {}

    def take(self) -> torch.Tensor:
        """Return the next buffer, after waiting for the last copy from it."""
        self.turn = 1 - self.turn
        self.done[self.turn].synchronize()
        return self.buffers[self.turn]

    def queue_copies(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue copies from parts of the buffer that was taken last, each to its target; more may follow."""
        for source, target in parts:
            self.copies.copy(target, source)
        self.copies.mark_ready(self.done[self.turn])

    def note_cached(self, was_cached: bool) -> None:
        """Note whether what was read last was in RAM."""
        self.was_cached = was_cached


class WindowCopies:
    """Queues the copies of a buffer that is being filled, as its bytes come.

    They leave the processor's caches for the device then, and the device waits for no more than the first of them.

    Args:
        parts: each part of the buffer and its target, in the order in which they are filled.
    """

    def __init__(self, bounce: BounceBuffers, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.bounce = bounce
        self.parts = parts
        self.left = list(reversed(parts))
        self.num_queued = 0

    def follow(self, num_filled: int) -> None:
        """Queue the copies of so many bytes from the first part on, as far as they are not queued."""
        coming = []
        while self.num_queued < num_filled:
            part, target = self.left.pop()
            num_bytes = min(part.numel(), num_filled - self.num_queued)
            if num_bytes < part.numel():
                self.left.append((part[num_bytes:], target[num_bytes:]))
            coming.append((part[:num_bytes], target[:num_bytes]))
            self.num_queued += num_bytes
        if coming:
            self.bounce.queue_copies(coming)

    def restart(self) -> None:
        """Wait for the copies so far; the buffer may be filled anew then."""
        self.bounce.copies.wait()
        self.left, self.num_queued = list(reversed(self.parts)), 0


def allocate_slabs(sizes: Sequence[int], *, pinned_bytes: int, streams: Sequence[CopyStream]) -> Slabs:
    """Return host slabs that outlive copies on these streams. At most ``pinned_bytes`` are page-locked."""
    copies = list(streams)

    def wait_for_copies() -> None:
        for stream in copies:
            stream.wait()

    return Slabs(sizes, pinned_bytes=pinned_bytes, before_unlock=wait_for_copies)
