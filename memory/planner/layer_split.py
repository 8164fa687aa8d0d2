"""Where a split is cut: the blocks of a component in one run for each of its devices, or in groups in turn."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product

from ..options.placement import AUTO_GROUPS, SplitRatio
from ..options.profile import OffloadProfile
from ..weights.component import Component
from .block_groups import (
    GROWTHS,
    HOP_PART,
    MOST_GROUPS,
    REST_PART,
    balance,
    best_cut,
    cut_in_turn,
    cut_runs,
    devices_in_turn,
    gains_of,
    improve,
    of_devices,
    runs_of,
)
from .capacity import Machine
from .device_limit import find_limit
from .pipeline import NUM_CALLS, Pipeline, hop_seconds_between, pipeline_of
from .run import Use
from .sizes import Sizes
from .step_seconds import StepClock

__all__ = ["Cutter", "count_groups", "split_blocks", "split_in_turn"]

# So many blocks are cut one by one; of more, some that follow each other are one unit.
MOST_UNITS = 96


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


def split_in_turn(
    sizes: Sizes,
    devices: Sequence[SplitRatio],
    num_groups: int,
    machine: Machine,
    profile: OffloadProfile,
    reasons: list[str],
    block_seconds: Mapping[int, float] | None = None,
    use: Use | None = None,
) -> list[tuple[int, ...]] | None:
    """Cut the blocks into groups that the devices have in turn ([Note: groups in turn] in `block_groups.py`).

    Returns each device's blocks. By ratios if there are any, else by the devices' speeds, as far as their memory
    allows. None if no device could have its blocks resident, or a group would have none.

    Args:
        num_groups: of all devices together; `AUTO_GROUPS`: as many as are predicted to gain most.
        block_seconds: what each block was measured to compute.
        use: what the component computes, with the times that are predicted of it.
    """
    numbers = range(len(sizes.component.blocks))
    pipeline, by = find_pipeline(sizes, devices, machine, block_seconds, use)
    tried = range(len(devices), MOST_GROUPS + 1) if num_groups == AUTO_GROUPS else [num_groups]
    cutter = Cutter(sizes, devices, machine, profile, pipeline, most_groups=max(tried))
    best = cutter.best(tried, GROWTHS)
    if best is None:
        return None
    gain = gains_of(pipeline).of([*map(len, best)])
    chosen, groups = len(best), of_devices(best, len(devices))
    if num_groups > chosen:
        reasons.append(f"split: {num_groups} groups asked for, {chosen} possible: it has {len(numbers)} blocks")
    for index, (split, blocks, ratio) in enumerate(zip(devices, groups, cutter.ratios, strict=True)):
        turns = len(devices_in_turn(chosen, len(devices))[index :: len(devices)])
        what = f"{len(blocks)} blocks in {turns} of {chosen} groups" if turns > 1 else f"{len(blocks)} blocks in a run"
        reasons.append(f"split: {what} on {split.device} (target {ratio:.0%})")
    reasons.append(
        f"micro-batches: {' and '.join(split.device for split in devices)} compute at the same time; two halves of a "
        f"step are expected to take 1/{gain:.2f} of the time of the fastest device alone, by {by}"
    )
    return groups


class Cutter:
    """Cuts the blocks of a component into groups for devices in turn.

    By ratios if there are any, else by the devices' speeds, as far as their memory allows. Of hundreds of blocks some
    that follow each other stay together.
    """

    def __init__(
        self,
        sizes: Sizes,
        devices: Sequence[SplitRatio],
        machine: Machine,
        profile: OffloadProfile,
        pipeline: Pipeline,
        *,
        most_groups: int = MOST_GROUPS,
    ) -> None:
        self.num_devices = len(devices)
        self.is_open = not any(split.ratio for split in devices)
        self.rooms = [
            room_for(sizes, split.device, machine, profile, first=not index) for index, split in enumerate(devices)
        ]
        count = len(sizes.component.blocks)
        together = -(-count // max(MOST_UNITS, 2 * most_groups))
        self.units = [range(begin, min(count, begin + together)) for begin in range(0, count, together)]
        self.ends = [0, *accumulate(sum(sizes.blocks[number] for number in unit) for unit in self.units)]
        """The bytes of all units up to each one, with a 0 before."""
        self.gains = gains_of(pipeline if together == 1 else pipeline.joined(self.units))
        takes = [sum(seconds) for seconds in pipeline.block_s]
        speeds = [min(takes) / seconds if seconds else 1.0 for seconds in takes]
        self.ratios = ratios_in_turn(devices, speeds, [room / sum(sizes.blocks) for room in self.rooms])
        self.times = self.gains.pipeline.block_s[speeds.index(max(speeds))]

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether each device can have its groups of units resident."""
        ends = [0, *accumulate(lengths)]
        for device, room in enumerate(self.rooms):
            own = range(device, len(lengths), self.num_devices)
            if sum(self.ends[ends[index + 1]] - self.ends[ends[index]] for index in own) > room:
                return False
        return True

    def cuts(self, numbers: Iterable[int], growths: Sequence[float]) -> list[tuple[int, ...]]:
        """Return the cuts into so many groups that fit, each once, as the numbers of units of their groups."""
        if min(self.ratios) <= 0:
            return []
        possible = sorted({max(self.num_devices, min(number, len(self.units))) for number in numbers})
        found = (tuple(cut_in_turn(self.times, self.ratios, *each)) for each in product(possible, growths))
        return [lengths for lengths in dict.fromkeys(found) if self.fits(lengths)]

    def best(
        self, numbers: Iterable[int], growths: Sequence[float], *, is_close: bool = True, most_moved: int = MOST_GROUPS
    ) -> list[tuple[int, ...]] | None:
        """Return the blocks of each group of the cut that gains most; None if no device could have its blocks.

        Args:
            is_close: predict those that gain most again, with other hops.
            most_moved: then move single blocks between no more groups than these, unless ratios say how many each
                device has.
        """
        cuts = self.cuts(numbers, growths)
        if not cuts:
            return None
        lengths: Sequence[int] = best_cut(self.gains, cuts) if is_close else max(cuts, key=self.gains.of)
        if len(lengths) <= most_moved and self.is_open:
            lengths = improve(self.gains, lengths, self.fits)
        return [tuple(number for unit in run for number in self.units[unit]) for run in runs_of(lengths)]

    def seconds(self, runs: Sequence[Sequence[int]]) -> float:
        """Return what all calls take over groups of whole units."""
        lengths = [-(-len(run) // len(self.units[0])) for run in runs]
        devices = devices_in_turn(len(runs), self.num_devices)
        return StepClock(self.gains.pipeline).seconds(list(zip(devices, lengths, strict=True)))


def count_groups(shares: Sequence[Sequence[int]]) -> int:
    """Return the number of groups of consecutive blocks on one device."""
    device_of = {number: index for index, blocks in enumerate(shares) for number in blocks}
    order = [device_of[number] for number in sorted(device_of)]
    return sum(device != before for device, before in zip(order, [-1, *order], strict=False))


def find_pipeline(
    sizes: Sizes,
    devices: Sequence[SplitRatio],
    machine: Machine,
    block_seconds: Mapping[int, float] | None,
    use: Use | None,
) -> tuple[Pipeline, str]:
    """Return what calls take on the devices of a split, and by what: in seconds, or in any unit if nothing was timed.

    A hop takes what the link and the bytes between blocks say, where they and the times are known, else `HOP_PART`.
    """
    count = len(sizes.component.blocks)
    num_calls = use.num_calls if use is not None and use.num_calls > 1 else NUM_CALLS
    names = [split.device for split in devices]
    is_measured = block_seconds is not None and block_seconds.keys() == {*range(count)}
    predicted = pipeline_of(use, names, machine) if use is not None and not is_measured else None
    if predicted is not None:
        return replace(predicted, num_calls=num_calls), "predicted times of blocks and hops"
    times, by = find_times(sizes, len(devices), block_seconds if is_measured else None)
    alike = Pipeline.alike(
        block_s=times,
        speeds=find_speeds(devices, machine),
        hop_s=sum(times) * HOP_PART,
        rest_s=sum(times) * REST_PART,
        num_calls=num_calls,
    )
    hops = hop_seconds_between(names, use.carried_bytes, machine) if use is not None and use.carried_bytes else None
    if is_measured and hops is not None:
        return replace(alike, hop_s=hops), f"{by} and predicted ones of hops"
    return alike, by


def find_times(
    sizes: Sizes, num_devices: int, block_seconds: Mapping[int, float] | None
) -> tuple[tuple[float, ...], str]:
    """Return what each block is assumed to take, in any unit, and by what ([Note: kinds of blocks])."""
    count = len(sizes.component.blocks)
    if block_seconds is not None:
        return tuple(block_seconds[number] for number in range(count)), "measured times of blocks"
    kinds = Counter(tuple(tensor.shape for tensor in block.tensors) for block in sizes.component.blocks)
    if min(kinds.values(), default=0) > num_devices:
        return (1.0,) * count, "number of blocks"
    return tuple(map(float, sizes.blocks)), "bytes of blocks"


def find_speeds(devices: Sequence[SplitRatio], machine: Machine) -> tuple[float, ...]:
    """Return how fast each device is beside the fastest; all alike if one of them is not known."""
    known = [machine.device(split.device).speed for split in devices]
    speeds = [speed for speed in known if speed]
    return tuple(speed / max(speeds) for speed in speeds) if len(speeds) == len(devices) else (1.0,) * len(devices)


def ratios_in_turn(devices: Sequence[SplitRatio], speeds: Sequence[float], rooms: Sequence[float]) -> list[float]:
    """Return each device's part of the time: what was asked for, else by speed, as far as there is room."""
    asked = [split.ratio for split in devices]
    left = 1.0 - sum(ratio or 0.0 for ratio in asked)
    unasked = [index for index, ratio in enumerate(asked) if ratio is None]
    most = [1.0 if any(asked) else rooms[index] / max(left, 1e-9) for index in unasked]
    parts = balance([speeds[index] for index in unasked], most)
    found = [ratio or 0.0 for ratio in asked]
    for index, part in zip(unasked, parts, strict=True):
        found[index] = left * part
    return found


def room_for(sizes: Sizes, device: str, machine: Machine, profile: OffloadProfile, *, first: bool) -> int:
    """Return the most bytes of blocks that a device can have resident, beside non-block weights and buffers."""
    fixed = sizes.fixed_bytes(range(len(sizes.component.blocks)), first=True) if first else sum(sizes.buffer_bytes)
    scratch = sizes.scratch_bytes(range(len(sizes.component.blocks)))
    return max(0, weight_limit(sizes.component, device, machine, profile) - fixed - scratch)


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
    buffers = sizes.buffer_bytes
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
                scratch = scratch + width if sizes.component.widens_whole else max(scratch, sizes.decodes * width)
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
