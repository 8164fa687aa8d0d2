"""Host memory that copies read from: bounce buffers for files, and slabs that outlive the copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..weights.source import WeightsSource
from .copy_stream import CopyStream
from .pinned_memory import Slabs, count_slabs

__all__ = ["BounceBuffers", "allocate_slabs"]


class BounceBuffers:
    """Two buffers of host memory through which what is read from a file reaches one device; open while that is loaded.

    One is filled by the host while the other is copied, if they are page-locked.
    """

    def __init__(self, copies: CopyStream) -> None:
        self.copies = copies
        self.slabs: tuple[list[torch.Tensor], dict[str, int]] = [], {}
        self.done = [copies.event(), copies.event()]
        self.source: WeightsSource | None = None
        self.turn = 0
        self.was_refused = False
        """Whether the driver would not lock them."""

    @property
    def buffers(self) -> list[torch.Tensor]:
        return self.slabs[0]

    @property
    def host_bytes(self) -> dict[str, int]:
        """What the buffers take of host memory, by tier."""
        return self.slabs[1]

    def count_bytes(self) -> dict[str, int]:
        """Return the same from the memory that is there now."""
        return count_slabs(self.buffers)

    @property
    def buffer_bytes(self) -> int:
        return self.buffers[0].numel()

    def fill_from(self, source: WeightsSource) -> None:
        """Keep these files open, and the threads that read them, as long as the buffers are there."""
        assert not self.buffers
        self.source = source

    def open(self, buffer_bytes: int, *, locks: bool) -> None:
        """Allocate both buffers, page-locked if that is wanted and the driver agrees."""
        assert not self.buffers
        limit = 4 * buffer_bytes if locks else 0  # where locking rounds up to a power of two it is less than double
        slabs = allocate_slabs([buffer_bytes] * 2, pinned_bytes=limit, streams=[self.copies])
        buffers = [slab.data for slab in slabs]
        pageable_bytes = sum(buffer.numel() for buffer in buffers if not buffer.is_pinned())
        self.slabs = buffers, {"pinned": slabs.locked_bytes, "host": pageable_bytes}
        self.was_refused = slabs.was_refused
        if self.source is not None:
            self.source.hold()

    def close(self) -> None:
        """Give both buffers back once nothing is copied from them."""
        self.copies.wait()
        if self.buffers and self.source is not None:
            self.source.let_go()
        self.slabs = [], {}

    def take(self) -> torch.Tensor:
        """Return the buffer whose turn it is, when its last copy is done."""
        self.turn = 1 - self.turn
        self.done[self.turn].synchronize()
        return self.buffers[self.turn]

    def queue_copies(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue the copies of what was read into parts of the buffer that was taken last, each to its target."""
        for source, target in parts:
            self.copies.copy(target, source)
        self.copies.mark_ready(self.done[self.turn])


def allocate_slabs(sizes: Sequence[int], *, pinned_bytes: int, streams: Sequence[CopyStream]) -> Slabs:
    """Return host slabs, at most so many bytes of them page-locked, that outlive the copies of these streams."""
    copies = list(streams)

    def wait_for_copies() -> None:
        for stream in copies:
            stream.wait()

    return Slabs(sizes, pinned_bytes=pinned_bytes, before_unlock=wait_for_copies)
