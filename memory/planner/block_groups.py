"""Groups of blocks in turn: how a split is cut so that its devices compute micro-batches at the same time.

[Note: groups in turn] With one run of blocks per device the second device waits for the first one's half of the first
micro-batch, and the first one has nothing to do for the second half of the second: two equal devices reach 4/3 of one.
With ``n`` groups in turn, two micro-batches take ``n + 1`` groups' times of the ``2 n`` that one device takes: 1.71 of
one with six, 1.82 with ten. Each border between two groups costs a hop. Each output of a device other than the first
one goes home, beside what computes next. What a hop is beside a block's time is predicted where a plan knows what runs,
and assumed where it does not.

[Note: steady groups] The first micro-batch is launched first, and where both could compute, it may go first. So what
the second one has left of a group when the first one comes back waits for all of the first one's next group. It has
left nothing where no group takes longer than the next one, with a little to spare for hops, which wait for each other:
the second one computes a group while the first one computes the next. So groups take as long, as far as whole blocks
allow, or get longer, whichever is predicted to gain more.

[Note: kinds of blocks] The bytes of a block tell little of its time: in Flux a double block has 2.4 times the bytes of
a single block, and as many flops. So blocks that repeat count alike, as long as none of them was timed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product

from .pipeline import Pipeline
from .step_seconds import StepClock

__all__ = [
    "GROWTHS",
    "HOP_PART",
    "MOST_GROUPS",
    "REST_PART",
    "Gains",
    "balance",
    "best_cut",
    "cut_in_turn",
    "cut_runs",
    "devices_in_turn",
    "gains_of",
    "improve",
    "of_devices",
    "runs_of",
]

# More groups gain a hundredth at most, and each costs a hop.
MOST_GROUPS = 40
# A hop's part of what one device takes for a call, where neither is known: about Flux's at 1024x1024 on an RTX 4090
# over 25 GB/s.
HOP_PART = 0.002
# What is computed before and behind the blocks, on the first device, is assumed to be such a part of a call.
REST_PART = 0.002
# A call takes so much longer than the one before: where both come at the same time, the one before is first.
LATE = 0.003
# By what parts the last group may take longer than the first one.
GROWTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.3)
# Of the cuts that are predicted, so many are looked at closely.
NUM_TRIED = 24
# So many predictions are remembered of a pipeline: some plans make as many.
MOST_KNOWN = 2048
# A block may move to another group so far away.
NEARBY = 2
# What hops may take instead, as factors.
OTHER_HOPS = (0.5, 0.75, 0.9, 1.2, 1.6)
# A gain is no gain below this part, which sums of floats may be off.
ROUNDING = 1e-9
# The longest group is found to this part of its length, which is more than `ROUNDING`.
EXACT = 1e-8
# Blocks without room make groups longer by such a part of what they take: most groups have some room left.
GUESS = 0.7
# A number of groups has to gain so much on a smaller one.
WORTH_MORE = 0.003


def devices_in_turn(num_groups: int, num_devices: int) -> list[int]:
    """Return of each group the number of its device: each in turn, the first one first."""
    return [number % num_devices for number in range(num_groups)]


def balance(speeds: Sequence[float], most: Sequence[float]) -> list[float]:
    """Return each device's part of the blocks: by speed, but at most so much; the faster ones take what is left.

    Where all of them together may take less than everything, the parts are of that.
    """
    parts = [0.0] * len(speeds)
    open_devices = [number for number, limit in enumerate(most) if limit > 0]
    left = 1.0
    while open_devices and left > 1e-12:
        total = sum(speeds[number] for number in open_devices)
        full = [number for number in open_devices if left * speeds[number] / total >= most[number]]
        if not full:
            for number in open_devices:
                parts[number] = left * speeds[number] / total
            return parts
        for number in full:
            parts[number] = most[number]
            left -= most[number]
            open_devices.remove(number)
    whole = sum(parts)
    return [part / whole for part in parts] if whole else [1 / len(speeds)] * len(speeds)


class Gains:
    """How many times as fast as the fastest device alone the calls of a pipeline are, by the lengths of its groups.

    A little less than `step_seconds` says: no cut is to count on two calls that come at the same time.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.alone_s = pipeline.alone_s
        self.clock = StepClock(pipeline, late=LATE)
        self.known: dict[tuple[int, ...], float] = {}

    @cached_property
    def with_other_hops(self) -> list[Gains]:
        """The same where hops take less and more."""
        hop_s = self.pipeline.hop_s
        return [Gains(replace(self.pipeline, hop_s=tuple(factor * hop for hop in hop_s))) for factor in OTHER_HOPS]

    def of(self, lengths: Sequence[int]) -> float:
        """Return the gain of groups in turn of so many blocks each."""
        seconds = self.seconds(lengths)
        return self.alone_s / seconds if seconds else 1.0

    def seconds(self, lengths: Sequence[int]) -> float:
        """Return what all calls take over groups in turn of so many blocks each."""
        key = tuple(lengths)
        if key not in self.known:
            devices = devices_in_turn(len(key), self.pipeline.num_devices)
            if len(self.known) == MOST_KNOWN:
                self.known.clear()
            self.known[key] = self.clock.seconds(list(zip(devices, key, strict=True)))
        return self.known[key]

    def mean_of(self, lengths: Sequence[int]) -> float:
        """Return the mean of the gain, and of those with other hops: a hair's breadth decides who computes first."""
        found = [gains.of(lengths) for gains in (self, *self.with_other_hops)]
        return sum(found) / len(found)


@lru_cache(maxsize=8)
def gains_of(pipeline: Pipeline) -> Gains:
    """Return the gains of a pipeline; those that were predicted are remembered for the next plan."""
    return Gains(pipeline)


def best_cut(gains: Gains, cuts: Sequence[Sequence[int]]) -> Sequence[int]:
    """Return which of these cuts is predicted to gain most, each as the lengths of its groups.

    Of those that gain about as much, it is the one with the fewest groups. Those that gain most count by their mean.
    """
    order = sorted(range(len(cuts)), key=lambda number: gains.of(cuts[number]), reverse=True)
    means = {number: gains.mean_of(cuts[number]) for number in order[:NUM_TRIED]}
    enough = max(means.values()) * (1 - WORTH_MORE)
    return cuts[min((len(cuts[number]), -gain, number) for number, gain in means.items() if gain >= enough)[-1]]


def improve(gains: Gains, lengths: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return groups with single blocks moved to others nearby, as long as that gains something."""
    best, gain = [*lengths], gains.of(lengths)
    moves = [(a, b) for a, b in product(range(len(best)), repeat=2) if 0 < abs(a - b) <= NEARBY]
    is_better = True
    while is_better:
        is_better = False
        for source, target in moves:
            if best[source] > 1:
                moved = [*best]
                moved[source] -= 1
                moved[target] += 1
                found = gains.of(moved)
                if found > gain * (1 + ROUNDING) and fits(moved):
                    gain, best, is_better = found, moved, True
    return best


def cut_in_turn(times: Sequence[float], ratios: Sequence[float], num_groups: int, growth: float = 0.0) -> list[int]:
    """Return how many blocks each of some groups in turn has if they are steady ([Note: steady groups]); at least one.

    Args:
        ratios: each device's part of the time, beside those of the others.
        growth: by what part the last group is to take longer than the first one.
    """
    parts = [
        ratios[device] * (1 + growth * index / num_groups)
        for index, device in enumerate(devices_in_turn(num_groups, len(ratios)))
    ]
    ends, whole = [0.0, *accumulate(times)], sum(parts)
    # Of a group with part 1: what is less than low leaves blocks without room, high is enough.
    low, high, tried = 0.0, math.inf, ends[-1] / whole
    lengths: list[int] = []
    while low < high * (1 - EXACT):
        found, left, longest, next_longer = fill_from_the_end(ends, parts, tried * (1 + ROUNDING))
        if left:
            low = next_longer
            tried = max(low, tried + GUESS * ends[left] / whole)
        else:
            high, lengths = longest, found
        if not left or tried >= high:
            tried = (low + high) / 2
    return lengths


def fill_from_the_end(
    ends: Sequence[float], parts: Sequence[float], most_s: float
) -> tuple[list[int], int, float, float]:
    """Return how many blocks each group has if the last ones are filled first, and how many blocks have no room.

    With these, of the groups of several blocks the most that one takes, and the least with which one has a block more,
    both in the unit of ``most_s``.

    Args:
        ends: what all blocks up to each one take, with a 0 before.
        parts: how long each group may be, in parts of ``most_s``; the block that is its only one may be longer.
    """
    lengths = [0] * len(parts)
    left, longest, next_longer = len(ends) - 1, 0.0, math.inf
    for index in range(len(parts) - 1, -1, -1):
        end_s, part = ends[left], parts[index]
        begin = bisect_left(ends, end_s - most_s * part, index, left - 1)
        lengths[index] = left - begin
        if left - begin > 1 and end_s - ends[begin] > longest * part:
            longest = (end_s - ends[begin]) / part
        if begin > index and end_s - ends[begin - 1] < next_longer * part:
            next_longer = (end_s - ends[begin - 1]) / part
        left = begin
    return lengths, left, longest, next_longer


def runs_of(lengths: Iterable[int]) -> list[tuple[int, ...]]:
    """Return runs of so many blocks each, one behind the other."""
    ends = [0, *accumulate(lengths)]
    return [tuple(range(begin, end)) for begin, end in pairwise(ends)]


def of_devices(runs: Sequence[tuple[int, ...]], num_devices: int) -> list[tuple[int, ...]]:
    """Return the blocks of each device, in their order."""
    order = devices_in_turn(len(runs), num_devices)
    return [
        tuple(number for run, owner in zip(runs, order, strict=True) if owner == device for number in run)
        for device in range(num_devices)
    ]


def cut_runs(sizes: Sequence[float], ratios: Sequence[float]) -> list[tuple[int, ...]]:
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
