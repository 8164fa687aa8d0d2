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

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, product

from .step_seconds import Pipeline, step_seconds

__all__ = [
    "GROWTHS",
    "HOP_PART",
    "MOST_GROUPS",
    "REST_PART",
    "balance",
    "best_cut",
    "cut_in_turn",
    "cut_runs",
    "devices_in_turn",
    "devices_of",
    "improve",
    "of_devices",
    "predict",
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
# A block may move to another group so far away.
NEARBY = 2
# What hops may take instead, as factors.
OTHER_HOPS = (0.5, 0.75, 0.9, 1.2, 1.6)
# A gain is no gain below this part.
ROUNDING = 1e-9
# The longest group is found to this part of its length.
EXACT = 1e-6
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


def predict(pipeline: Pipeline, runs: Sequence[Sequence[int]]) -> float:
    """Return how many times as fast as the fastest device alone the calls are, launched in turn over these groups.

    A little less than `step_seconds` says: no cut is to count on two calls that come at the same time.
    """
    longest_s = step_seconds(pipeline, devices_of(runs, pipeline.num_devices), late=LATE)
    return pipeline.alone_s / longest_s if longest_s else 1.0


def best_cut(pipeline: Pipeline, cuts: Sequence[list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return which of these cuts is predicted to gain most.

    Of those that gain about as much, it is the one with the fewest groups. Those that gain most are predicted again
    with shorter and longer hops, and count by the mean: a hair's breadth decides who computes first.
    """
    gains = sorted(((predict(pipeline, runs), number) for number, runs in enumerate(cuts)), reverse=True)
    others = [replace(pipeline, hop_s=tuple(factor * hop_s for hop_s in pipeline.hop_s)) for factor in OTHER_HOPS]
    means = {
        number: (gain + sum(predict(other, cuts[number]) for other in others)) / (1 + len(others))
        for gain, number in gains[:NUM_TRIED]
    }
    enough = max(means.values()) * (1 - WORTH_MORE)
    chosen = min((len(cuts[number]), -gain, number) for number, gain in means.items() if gain >= enough)[-1]
    return cuts[chosen]


def improve(
    pipeline: Pipeline, runs: list[tuple[int, ...]], fits: Callable[[list[tuple[int, ...]]], bool]
) -> list[tuple[int, ...]]:
    """Return a cut with single blocks moved to other groups nearby, as long as that gains something."""
    gain, lengths = predict(pipeline, runs), [len(run) for run in runs]
    moves = [(a, b) for a, b in product(range(len(runs)), repeat=2) if 0 < abs(a - b) <= NEARBY]
    is_better = True
    while is_better:
        is_better = False
        for source, target in moves:
            if lengths[source] > 1:
                moved = list(lengths)
                moved[source] -= 1
                moved[target] += 1
                found = runs_of(moved)
                found_gain = predict(pipeline, found)
                if found_gain > gain * (1 + ROUNDING) and fits(found):
                    gain, lengths, runs, is_better = found_gain, moved, found, True
    return runs


def runs_of(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Return runs of so many blocks each, one behind the other."""
    ends = list(accumulate(lengths))
    return [tuple(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]


def cut_in_turn(
    times: Sequence[float], ratios: Sequence[float], num_groups: int, growth: float = 0.0
) -> list[tuple[int, ...]]:
    """Cut blocks into runs for devices in turn, in steady groups ([Note: steady groups]); each has at least one block.

    Args:
        ratios: each device's part of the time, beside those of the others.
        growth: by what part the last group is to take longer than the first one.
    """
    parts = [
        ratios[device] * (1 + growth * index / num_groups)
        for index, device in enumerate(devices_in_turn(num_groups, len(ratios)))
    ]
    low, high = 0.0, sum(times) / min(parts)  # of a group with part 1
    lengths = fill_from_the_end(times, parts, high)
    assert lengths is not None
    while high - low > EXACT * high:
        middle = (low + high) / 2
        found = fill_from_the_end(times, parts, middle)
        if found is None:
            low = middle
        else:
            high, lengths = middle, found
    return runs_of(lengths)


def fill_from_the_end(times: Sequence[float], parts: Sequence[float], most_s: float) -> list[int] | None:
    """Return how many blocks each group has if the last ones are filled first; None if some blocks have no room.

    Args:
        parts: how long each group may be, in parts of ``most_s``; the block that is its only one may be longer.
    """
    lengths = [0] * len(parts)
    left = len(times)
    for index in range(len(parts) - 1, -1, -1):
        room_s = most_s * parts[index]
        while left > index and (not lengths[index] or times[left - 1] <= room_s):
            left -= 1
            lengths[index] += 1
            room_s -= times[left]
    return None if left else lengths


def devices_of(runs: Sequence[Sequence[int]], num_devices: int) -> list[int]:
    """Return of each block, in order, the number of the device that has its group."""
    order = devices_in_turn(len(runs), num_devices)
    return [device for run, device in zip(runs, order, strict=True) for _ in run]


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
