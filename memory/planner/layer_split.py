"""Where a split is cut: the blocks of a component in one run for each of its devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate

from ..options.placement import SplitRatio
from ..options.profile import OffloadProfile
from ..weights.component import Component
from .capacity import Machine
from .device_limit import find_limit
from .sizes import Sizes

__all__ = ["split_blocks"]


def split_blocks(
    sizes: Sizes,
    devices: Sequence[SplitRatio],
    machine: Machine,
    profile: OffloadProfile,
    reasons: list[str],
) -> list[tuple[int, ...]]:
    """Cut the blocks into one run per device, in order, by bytes: as the ratios say, else by what is available.

    Without ratios, if a run needs more than its device may give, the nearest cut that fits is taken.
    """
    if len(devices) == 1:
        return [tuple(range(len(sizes.component.blocks)))]
    left = 1.0 - sum(split.ratio or 0.0 for split in devices)
    available = [machine.device(split.device).available_bytes for split in devices]
    open_bytes = sum(num_bytes for split, num_bytes in zip(devices, available, strict=True) if split.ratio is None)
    ratios = [
        split.ratio if split.ratio is not None else left * num_bytes / max(1, open_bytes)
        for split, num_bytes in zip(devices, available, strict=True)
    ]
    runs = cut_runs(sizes.blocks, ratios)
    fitting = runs
    if all(split.ratio is None for split in devices):
        limits = [weight_limit(sizes.component, split.device, machine, profile) for split in devices]
        needs = [sizes.least_bytes(run, first=index == 0) for index, run in enumerate(runs)]
        if any(need > limit for need, limit in zip(needs, limits, strict=True)):
            fitting = nearest_fitting(sizes, runs, limits) or runs
    for split, run, ratio in zip(devices, fitting, ratios, strict=True):
        reasons.append(f"split: blocks {run[0]} to {run[-1]} on {split.device} (target {ratio:.0%})")
    if fitting != runs:
        reasons.append("split: cut moved so that the largest block of each device fits")
    return fitting


def cut_runs(sizes: Sequence[int], ratios: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the positions of one run of blocks per ratio, in order; each has at least one block.

    The block that straddles a boundary goes to the side that has more of it.
    """
    runs: list[tuple[int, ...]] = []
    ends = [0, *accumulate(sizes)]
    begin, target = 0, 0.0
    for index, ratio in enumerate(ratios):
        target += ratio * ends[-1]
        end = begin + 1
        while end < len(sizes) and ends[end] + sizes[end] / 2 <= target:
            end += 1
        last_end = len(sizes) - (len(ratios) - 1 - index)
        end = last_end if index == len(ratios) - 1 else min(end, last_end)
        runs.append(tuple(range(begin, end)))
        begin = end
    return runs


def weight_limit(component: Component, device: str, machine: Machine, profile: OffloadProfile) -> int:
    """Return the most bytes of a device that weights may take when a profile's own budget is raised as needed."""
    if device == "cpu":
        return sys.maxsize
    limit, _, _ = find_limit(component, machine.device(device), profile, sys.maxsize, sys.maxsize)
    return limit


def nearest_fitting(
    sizes: Sizes, runs: Sequence[tuple[int, ...]], limits: Sequence[int]
) -> list[tuple[int, ...]] | None:
    """Return the runs nearest to these with which each device can compute within its limit; None if there are none.

    The distance is the number of blocks by which the cuts are moved, summed over all cuts.
    """
    numbers = range(len(sizes.component.blocks))
    buffers = sizes.buffer_bytes()
    non_block = sizes.fixed_bytes(numbers, first=True) - sum(buffers)
    # By the block at which the next run may begin: the distance so far, and the ends of the runs before it.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for index, (run, limit) in enumerate(zip(runs, limits, strict=True)):
        last_end = len(numbers) - (len(runs) - 1 - index)
        reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begin, (moved, ends) in best.items():
            fixed, largest, scratch = 0 if index else non_block, 0, 0
            for end in range(begin + 1, last_end + 1):
                fixed += buffers[end - 1]
                largest = max(largest, sizes.blocks[end - 1])
                width = sizes.widths[end - 1]
                scratch = scratch + width if sizes.component.widens_whole else max(scratch, width)
                if fixed + largest + scratch > limit:
                    break
                cost = moved + abs(end - (run[-1] + 1))
                if end not in reached or cost < reached[end][0]:
                    reached[end] = cost, (*ends, end)
        best = reached
    if len(numbers) not in best:
        return None
    _, ends = best[len(numbers)]
    return [tuple(range(begin, end)) for begin, end in zip((0, *ends), ends, strict=False)]
