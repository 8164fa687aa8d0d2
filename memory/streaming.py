"""Streaming: which block comes next, and getting it into a slot before it is needed.

The order is learned: at first the order of definition, then whatever the last complete pass ran. A prefetch is a
hint that is checked when the block is entered, so skipped, repeated or re-ordered blocks (step caching, skip-layer
guidance) cost at most one waiting copy and leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .residency import Unit
from .transfer import CopyStream, StagingSlot

__all__ = ["Streamer"]


class Streamer:
    """Moves the streamed blocks of one device through its staging slots, ahead of their use."""

    def __init__(self, units: Mapping[int, Unit], slots: Sequence[StagingSlot], copies: CopyStream) -> None:
        self.units = units
        self.slots = list(slots)
        self.copies = copies
        self.order: list[int] = sorted(units)
        self.position = 0
        self.trace: list[int] = []
        self.bytes_moved = 0

    def begin_pass(self) -> None:
        """Start recording a pass; queues the first blocks unless the last pass already did."""
        self.trace = []
        self.prefetch()

    def end_pass(self) -> None:
        """Adopt the order that the finished pass ran, and queue the first blocks of the next one."""
        if self.trace:
            self.order = self.trace
        self.trace, self.position = [], 0
        self.prefetch()

    def acquire(self, block: int) -> StagingSlot:
        """Return the slot that holds the block, queuing its copy if no prefetch did; lets the compute stream wait."""
        self.trace.append(block)
        self.position = self.find_after(block)
        slot = self.slot_of(block)
        if slot is None:
            slot = self.choose_slot(keep=())
            assert slot is not None, "every staging slot computes: blocks cannot nest"
            self.refill(slot, block)
        slot.in_use = True
        self.copies.await_on_compute(slot.ready)
        return slot

    def give_back(self, slot: StagingSlot) -> None:
        """The block has computed: its slot may be refilled once the compute stream gets there."""
        self.copies.mark_free(slot)
        self.prefetch()

    def prefetch(self) -> None:
        """Queue copies of the next blocks into slots that do not compute, the nearest first."""
        coming = list(self.upcoming())
        for index, block in enumerate(coming):
            if self.slot_of(block) is None:
                slot = self.choose_slot(keep=coming[: index + 1])
                if slot is None:
                    return
                self.refill(slot, block)

    def forget(self) -> None:
        """Take it that no slot holds its block as the master now is; for writers that bypass versions (``.data``)."""
        for slot in self.slots:
            assert not slot.in_use
            slot.block = None

    def refill(self, slot: StagingSlot, block: int) -> None:
        source = self.units[block].host_slab
        assert source is not None
        self.copies.refill(slot, block, source)
        self.bytes_moved += source.numel()

    def upcoming(self) -> Iterator[int]:
        """Yield the next distinct blocks, as many as there are slots, wrapping round to the next pass."""
        seen: list[int] = []
        for step in range(len(self.order)):
            block = self.order[(self.position + step) % len(self.order)]
            if block not in seen:
                seen.append(block)
                yield block
                if len(seen) == len(self.slots):
                    return

    def find_after(self, block: int) -> int:
        """Return the position behind the block's next place in the order; where we are if it has none."""
        for step in range(len(self.order)):
            place = (self.position + step) % len(self.order)
            if self.order[place] == block:
                return (place + 1) % len(self.order)
        return self.position

    def slot_of(self, block: int) -> StagingSlot | None:
        source = self.units[block].host_slab
        assert source is not None
        return next((slot for slot in self.slots if slot.holds(block, source)), None)

    def choose_slot(self, keep: Sequence[int]) -> StagingSlot | None:
        """Return a slot that neither computes nor holds a block to keep; of several, the one needed last."""
        coming = list(self.upcoming())
        idle = [slot for slot in self.slots if not slot.in_use and slot.block not in keep]
        return max(
            idle, key=lambda slot: coming.index(slot.block) if slot.block in coming else len(coming), default=None
        )
