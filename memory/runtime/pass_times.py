"""How long the blocks of one device compute, taken once after each loading."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..transfer.devices import Device
from ..transfer.timing import Stopwatch

__all__ = ["PassTimes"]

# The first pass that is not the first: that one warms up.
TIMED_PASS = 2
# After so many passes that left blocks out nothing is timed any more.
MAX_PARTIAL = 8


class PassTimes:
    """The seconds that each block computes in one pass.

    Args:
        blocks: those that the pass has to run.
    """

    def __init__(self, device: Device, blocks: Collection[int]) -> None:
        self.device = device
        self.blocks = frozenset(blocks)
        self.passes = self.num_partial = 0
        self.watch: Stopwatch[int] | None = None
        """While a pass is timed, and until its times are taken."""

    def start_over(self) -> None:
        """Time a pass again: the component was loaded in another form."""
        self.passes = self.num_partial = 0

    def begin(self) -> None:
        """Time the pass that begins, if it is the one to time."""
        self.passes += 1
        if self.passes == TIMED_PASS and not self.device.is_cpu:
            self.watch = Stopwatch(self.device)

    def start(self, block: int, stream: torch.Stream) -> None:
        """Time a block from here on, widening included: it waits for no copy any more."""
        if self.watch is not None and self.passes == TIMED_PASS:
            self.watch.start(block, stream)

    def stop(self, block: int, stream: torch.Stream) -> None:
        if self.watch is not None and self.passes == TIMED_PASS:
            self.watch.stop(block, stream)

    def take(self) -> dict[int, float] | None:
        """Return the seconds of each block, in the order in which they ran, once, when they are known."""
        if self.watch is None or self.passes <= TIMED_PASS:
            return None
        seconds = self.watch.read()
        if seconds is None:
            return None
        self.watch = None
        if seconds.keys() == self.blocks:
            return seconds
        if self.num_partial < MAX_PARTIAL:  # blocks were skipped: the next pass may be a whole one
            self.num_partial += 1
            self.passes = TIMED_PASS - 1
        return None
