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

    def end_pass(self, *, completed: bool) -> None:
        """Adopt the order that a completed pass ran, and queue the first blocks of the next one."""
        if self.trace and completed:
            self.order = self.trace
        self.trace, self.position = [], 0
        if completed:
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

    def give_back(self, slot: StagingSlot, *, prefetches: bool) -> None:
        """The block has computed: its slot may be refilled once the compute stream gets there."""
        self.copies.mark_free(slot)
        if prefetches:
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
        unit = self.units[block]
        assert unit.master is not None
        self.copies.await_slot(slot)
        slot.block = None  # until the copy is queued: reading a file may fail
        unit.master.copy_to(slot.slab[: unit.slab_bytes], self.copies, slot.ready)
        slot.block, slot.version = block, unit.master.version
        self.bytes_moved += unit.slab_bytes

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
        master = self.units[block].master
        assert master is not None
        return next((slot for slot in self.slots if slot.holds(block, master.version)), None)

    def choose_slot(self, keep: Sequence[int]) -> StagingSlot | None:
        """Return a slot that neither computes nor holds a block to keep; of several, the one needed last."""
        coming = list(self.upcoming())
        idle = [slot for slot in self.slots if not slot.in_use and slot.block not in keep]
        return max(
            idle, key=lambda slot: coming.index(slot.block) if slot.block in coming else len(coming), default=None
        )
