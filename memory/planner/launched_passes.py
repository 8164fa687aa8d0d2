"""How long a forward takes that streams, launched by a host that waits at times, too: for what a plan tells of seconds.

[Note: launched passes] `staging_layout` plays passes of blocks that each take their time, which is what schedules are
chosen by. Small kernels end as soon as they were launched, so their block takes what the host takes; one that had to
wait for its weights was launched meanwhile, and takes far less. The host itself is no further ahead than the staging
memory is large, as it waits for the copy that it overwrites next. Each piece of memory that is free at another time is
a copy of its own, which the host launches, too. While the caller computes between two forwards, copies go on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

from .device_plan import DevicePlan
from .run import BlockTimes
from .staging_layout import Occupancy
from .workload import COPY_LATENCY_S

__all__ = ["launched_pass_seconds"]

# So many forwards are played, and the last of them count: an even number, as two rounds of offsets take turns.
NUM_PASSES = 10
NUM_COUNTED = 4

Stay = tuple[int, int]
"""A block, and where it begins in the staging memory."""


def launched_pass_seconds(
    share: DevicePlan, times: BlockTimes, sizes: Sequence[int], bytes_per_s: float
) -> float | None:
    """Return the mean seconds of a forward from its first kernel to its last, after some ([Note: launched passes]).

    None where the stretches of the forward, or where its blocks lie in the staging memory, are not known.

    Args:
        share: of all blocks, with its schedule.
        sizes: the bytes of each block.
        bytes_per_s: how fast copies are, beside the latency of each.
    """
    if not times.stretches or not share.offsets:
        return None
    staging = Staging(share, sizes, bytes_per_s)
    host_s = device_s = 0.0
    took: list[float] = []
    for number in range(NUM_PASSES):
        began_s = max(host_s, device_s)
        for stretch in times.stretches:
            stay = None
            if stretch.block is not None and stretch.block in share.streamed:
                before = staging.num_copies
                stay = staging.fetch(stretch.block, number)
                host_s += (staging.num_copies - before) * times.copy_launch_s
                device_s = max(device_s, staging.copied_s[stay])
            device_s = max(device_s + stretch.busy_s, host_s + stretch.end_s)
            host_s += stretch.launch_s
            if stretch.copy_s:
                device_s = host_s = max(host_s, device_s) + stretch.copy_s
            if stay is not None:
                staging.freed_s[stay] = device_s
                host_s = max(host_s, staging.copied_s[stay])
        took.append(device_s - began_s)
        for stretch in times.following:
            device_s = max(device_s + stretch.busy_s, host_s + stretch.end_s)
            host_s += stretch.launch_s
            if stretch.copy_s:
                device_s = host_s = max(host_s, device_s) + stretch.copy_s
    return sum(took[-NUM_COUNTED:]) / NUM_COUNTED


class Staging:
    """The staging memory of a device while passes are played: what lies where, and when it may be overwritten."""

    def __init__(self, share: DevicePlan, sizes: Sequence[int], bytes_per_s: float) -> None:
        self.offsets: Sequence[Mapping[int, int]] = share.offsets
        self.sizes = sizes
        self.bytes_per_s = bytes_per_s
        self.occupancy = Occupancy[Stay](share.staging_bytes)
        self.freed_s: dict[Stay | None, float] = defaultdict(float)
        self.copied_s: dict[Stay, float] = {}
        self.link_s = self.awaited_s = 0.0
        self.num_copies = 0

    def fetch(self, block: int, pass_number: int) -> Stay:
        """Return where a block computes, and copy there what is missing, the pieces first that are free first."""
        size, rounds = self.sizes[block], len(self.offsets)
        turns = [self.offsets[(pass_number + turn) % rounds] for turn in range(rounds)]
        stays = list(dict.fromkeys((block, here[block]) for here in turns))
        for stay in stays:
            if stay in self.copied_s and all(owner == stay for _, _, owner in self.pieces_of(stay, size)):
                return stay
        stay = stays[0]
        free = []
        for begin, end, owner in self.pieces_of(stay, size):
            if owner != stay:
                freed_s = self.freed_s[owner]
                free.append((freed_s if freed_s > self.awaited_s else 0.0, begin, end))
        for freed_s, pieces in groupby(sorted(free), key=lambda piece: piece[0]):
            reach = -1
            self.link_s = max(self.link_s, freed_s)
            for _, begin, end in pieces:
                if begin != reach:
                    self.num_copies += 1
                    self.link_s += COPY_LATENCY_S
                self.link_s += (end - begin) / self.bytes_per_s
                reach = end
            self.awaited_s = max(self.awaited_s, freed_s)
        self.occupancy.take(stay[1], stay[1] + size, stay)
        self.copied_s[stay] = self.link_s
        return stay

    def pieces_of(self, stay: Stay, size: int) -> list[tuple[int, int, Stay | None]]:
        return self.occupancy.within(stay[1], stay[1] + size)
