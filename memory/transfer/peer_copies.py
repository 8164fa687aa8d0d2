"""Copies of weights from the memory of one device to another, from end to end or through page-locked RAM.

[Note: two streams] torch queues a copy between devices on the current stream of the device it comes from, behind what
is queued on the current stream of the other one, which then waits for it. So both current streams are set: that on
which the store was filled, and the copy stream of the device that computes. Nothing that computes on either device
waits for such a copy, and no order beside that of the two streams is needed.

Where the hardware has no access from one device to the other, a copy goes in two legs through two page-locked buffers,
piece by piece: one is filled while the other is emptied. Only events order the legs, so that these copies are queued
ahead like all others, and the host waits for none.
"""

from __future__ import annotations

import torch

from ..units import MIB
from .bounce_buffers import allocate_slabs
from .copy_stream import CopyStream
from .devices import peers_of
from .pinned_memory import count_slabs
from .timing import TELLING_BYTES, Stopwatch

__all__ = ["PeerCopies"]

# Of a buffer of copies in two legs: a copy of so many bytes takes far longer than its launch, and the first leg of a
# block's first piece, for which the second one waits, far less than a block.
BUFFER_BYTES = 2 * MIB
# How many copies of equally many bytes are timed: the first may take longer.
NUM_TIMED = 2


class PeerCopies:
    """Copies from the memory of one device, on its own stream, to another.

    Args:
        source: the stream of the device that stores, on which the store is filled.
        target: the copy stream of the device that computes.
    """

    def __init__(self, source: CopyStream, target: CopyStream) -> None:
        self.source = source
        self.target = target
        self.is_direct = source.device.name in peers_of(target.device)
        self.was_refused = False
        """Whether the driver refused to page-lock the buffers: copies through them hold the host."""
        self.buffers: list[torch.Tensor] = []
        self.filled: list[torch.Event] = []
        self.emptied: list[torch.Event] = []
        self.turn = 0
        self.watch: Stopwatch[tuple[int, int]] | None = Stopwatch(target.device)
        """Times the first copies; None once their speed was taken."""

    # -- the buffers of copies in two legs

    @property
    def blocks_host(self) -> bool:
        """Whether a copy holds the host until it is done."""
        return bool(self.buffers) and not self.buffers[0].is_pinned()

    @property
    def host_bytes(self) -> dict[str, int]:
        """The bytes of host memory that the buffers take, by tier."""
        return count_slabs(self.buffers)

    def open(self) -> None:
        """Allocate the buffers if copies need any."""
        if self.is_direct or self.buffers:
            return
        streams = [self.source, self.target]
        slabs = allocate_slabs([BUFFER_BYTES] * 2, pinned_bytes=4 * BUFFER_BYTES, streams=streams)
        self.buffers = [slab.data for slab in slabs]
        self.was_refused = slabs.was_refused
        self.filled = [self.source.event() for _ in self.buffers]
        self.emptied = [self.target.event() for _ in self.buffers]

    def close(self) -> None:
        """Wait for copies through the buffers, then free them."""
        if self.buffers:
            self.wait()
        self.buffers = []

    def wait(self) -> None:
        """Wait on the host until no copy reads the store or the buffers."""
        self.source.wait()
        self.target.wait()

    # -- copies

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy to the device that computes; the host goes on."""
        key = self.key_of(source) if self.watch is not None and source.nbytes >= TELLING_BYTES else None
        if key is not None and self.watch is not None:
            self.watch.start(key, self.target.stream)
            self.source.stream.wait_stream(self.target.stream)  # no leg begins sooner
        if self.is_direct:
            with self.source.stream, self.target.stream:
                target.copy_(source, non_blocking=True)
        else:
            for onto, piece in zip(torch.split(target, BUFFER_BYTES), torch.split(source, BUFFER_BYTES), strict=True):
                self.copy_piece(onto, piece)
        if key is not None and self.watch is not None:
            self.watch.stop(key, self.target.stream)

    def copy_piece(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy in two legs, of no more than a buffer holds."""
        self.turn = 1 - self.turn
        buffer = self.buffers[self.turn][: source.numel()]
        filled, emptied = self.filled[self.turn], self.emptied[self.turn]
        self.source.stream.wait_event(emptied)
        with self.source.stream:
            buffer.copy_(source, non_blocking=True)
        filled.record(self.source.stream)
        self.target.stream.wait_event(filled)
        with self.target.stream:
            target.copy_(buffer, non_blocking=True)
        emptied.record(self.target.stream)

    # -- how fast they are

    def key_of(self, source: torch.Tensor) -> tuple[int, int] | None:
        """Return under which key a copy is timed; None where enough of this size were."""
        assert self.watch is not None
        keys = [(source.nbytes, number) for number in range(NUM_TIMED)]
        return next((key for key in keys if key not in self.watch.stretches), None)

    def take_speed(self) -> float | None:
        """Return the bytes per second of the fastest copy that was timed, once, when it is known."""
        if self.watch is None or not self.watch.stretches:
            return None
        found = [num_bytes / seconds for (num_bytes, _), seconds in (self.watch.read() or {}).items() if seconds]
        if not found:
            return None
        self.watch = None
        return max(found)
