"""Streaming: which block comes next, and getting it into staging memory before it is needed.

The order is learned: at first that of definition, then that of the last whole pass, which outlives the staging memory,
or of two equal ones. A prefetch is a hint that is checked when the block is entered, so skipped, repeated or re-ordered
blocks (step caching, skip-layer guidance) cost at most the copies that were under way and leave nothing behind.

[Note: blocking copies] A copy from pageable memory holds the host until it is done, and a file has to be read. Queued
ahead, such a copy would keep the host from launching what computes meanwhile; so it is made when its block is entered:
all that runs before has been launched then, and computes while the host waits for memory, reads and copies. Copies go
in the order of use either way, each as soon as the one before it is done and its memory free, so passes take the same
time as with copies that are queued ahead. Prefetching stops in front of such a block. Only with the block that the next
pass begins with does nothing wait behind it: that one is copied at the end of a pass, where a host often waits anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import InvalidInput
from ..blocks.bundle import Bundle
from ..blocks.staging import StagingArea, StagingSlot

__all__ = ["Streamer"]


class Streamer:
    """Moves the streamed blocks of one device through its staging memory, ahead of their use.

    Args:
        order: in which they are taken to run in the first pass; each at least once.
    """

    def __init__(self, groups: Mapping[int, Bundle], area: StagingArea, order: Sequence[int]) -> None:
        self.groups = groups
        self.area = area
        self.order = list(order)
        self.position = 0
        self.pass_number = 0
        self.trace: list[int] = []
        self.last_trace: list[int] = []
        self.ahead: list[StagingSlot] = []
        """Where the next blocks are, the next one first. No block is overwritten for one that comes after it."""
        self.reach = 0
        """The position in the order behind these blocks; past its end, it is in the next pass."""
        self.latest: StagingSlot | None = None
        """The slot of the last block; it may still compute."""
        self.versions: dict[int, int] = {}
        """By block, the version of its weights at rest when the pass began or the block was last entered."""

    def begin_pass(self) -> None:
        """Start recording a pass; queues the first blocks unless the last pass already did."""
        self.trace = []
        self.versions = {block: bundle.version for block, bundle in self.groups.items()}
        self.look_again()
        self.prefetch()

    def end_pass(self, *, completed: bool, began_with: int | None = None) -> None:
        """Adopt the order that a completed pass ran, and queue the first blocks of the next one.

        A pass that left blocks out has to come twice: caches of steps and ControlNets take turns with whole ones.

        Args:
            began_with: the block that ran before all others, if it was one of this device.
        """
        if self.trace and completed:
            if self.trace == self.last_trace or set(self.trace) == self.groups.keys():
                self.order = self.trace
            self.last_trace = self.trace
        self.trace, self.position = [], 0
        self.pass_number += 1
        self.look_again()
        if completed:
            self.prefetch(began_with)

    def acquire(self, block: int) -> StagingSlot:
        """Return where the block is, queuing its copy if no prefetch did; `StagingArea.use` is for the caller."""
        self.trace.append(block)
        position, ahead = self.position, self.ahead
        is_next = position < len(self.order) and self.order[position] == block
        self.position = position + 1 if is_next else self.find_after(block)
        if is_next and ahead and ahead[0].block == block:
            staging_slot = ahead.pop(0)
        else:
            staging_slot = None
            self.look_again()
        bundle = self.groups[block]
        version = self.versions[block] = bundle.version  # it may have been written to since
        if staging_slot is None or not staging_slot.holds(version):
            staging_slot = self.find(block, self.pass_number)
            if not staging_slot.holds(version):
                self.look_again()  # what is ahead may be overwritten
                is_there = self.area.fill(staging_slot, bundle, version)
                assert is_there, "a block computes: blocks cannot nest"
        return staging_slot

    def give_back(self, staging_slot: StagingSlot) -> None:
        """Free a block's memory: it may be overwritten when the compute stream reaches this point."""
        self.area.give_back(staging_slot)
        self.latest = staging_slot

    def prefetch(self, next_to_run: int | None = None) -> None:
        """Queue copies of the next blocks into what memory is free, the nearest first ([Note: blocking copies]).

        Args:
            next_to_run: the block that no other one runs before.
        """
        ahead = self.ahead
        if self.reach > self.position + len(ahead):  # it skipped blocks that come again: they may be nearer by now
            self.look_again()
        order, num_blocks = self.order, len(self.order)
        for step in range(self.reach, self.position + num_blocks):
            block = order[step % num_blocks]
            version = self.versions[block]
            staging_slot = self.area.find(block, self.pass_number + step // num_blocks, version)
            must_copy = not staging_slot.holds(version)
            if must_copy:
                bundle = self.groups[block]
                blocks_host = bundle.blocks_host
                if blocks_host and block != next_to_run:
                    return
                # Not to wait for the end of what computes.
                keep = [*ahead, self.latest] if blocks_host and self.latest is not None else ahead
                try:
                    is_there = self.area.fill(staging_slot, bundle, version, keep)
                except InvalidInput:  # of a file: raised again when the block is entered
                    return
                if not is_there:
                    return
            if staging_slot not in ahead:  # else the block comes twice in the order
                ahead.append(staging_slot)
            self.reach = step + 1
            if must_copy and blocks_host:
                return

    def look_again(self) -> None:
        """Find out anew which of the next blocks are there."""
        self.ahead.clear()
        self.reach = self.position

    def find_after(self, block: int) -> int:
        """Return the position behind the block's next place in the order; where we are if it has none."""
        coming, gone = self.order[self.position :], self.order[: self.position]
        if block in coming:
            return self.position + coming.index(block) + 1
        return gone.index(block) + 1 if block in gone else self.position

    def is_there(self, staging_slot: StagingSlot) -> bool:
        return staging_slot.holds(self.versions[staging_slot.block])

    def find(self, block: int, pass_number: int) -> StagingSlot:
        return self.area.find(block, pass_number, self.versions[block])
