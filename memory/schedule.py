"""Which blocks stay on a device, through how many slots the others stream, and where a split cuts them.

[Note: steady state] Passes follow each other, so the first blocks of the next pass are copied while the last of this
one compute. A copy begins when the copy before it has ended and its slot is free, which is when the block that had
the slot has computed; a block computes when the block before it has and its own copy is there. After a pass or two
every further one takes the same time: that is what `pass_seconds` finds and `choose_schedule` makes small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import TypeAlias

__all__ = [
    "DEPTHS",
    "USUAL_DEPTHS",
    "BlockSeconds",
    "Schedule",
    "balanced_seconds",
    "choose_schedule",
    "cut_runs",
    "pass_seconds",
    "spread_residents",
]

BlockSeconds: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]
"""Of computing and of copying, per block in the order in which they run."""

# How many blocks may be copied ahead of the one that computes; each takes a slot, and that one takes one too. None at
# all leaves most room for residents, which pays where copies take far longer than computes.
DEPTHS = (0, 1, 2, 3, 4)
# Where times are not known.
USUAL_DEPTHS = (1,)
WARM_UP_PASSES = 2
TIMED_PASSES = 2
# Another schedule has to be this much faster to be preferred: fewer slots and even spreading vary less.
SMALLEST_GAIN = 0.005
# The search: how many starts, how many blocks are looked at in all trials of one, and how much worse than the last
# a trial may be at first.
MAX_SLOT_SIZES = 4
MAX_STARTS = 2
NUM_HALVINGS = 24
RATE_LIMIT = 100.0
MAX_TRIALS = 500
TRIED_BLOCKS = 16_000
SLACK = 0.01


def cut_runs(sizes: Sequence[int], ratios: Sequence[float]) -> list[tuple[int, ...]]:
    """Return the positions of one run of blocks per ratio, in order; each has at least one block.

    The block that straddles a boundary goes to the side that has more of it.
    """
    runs: list[tuple[int, ...]] = []
    begin, target = 0, 0.0
    for index, ratio in enumerate(ratios):
        target += ratio * sum(sizes)
        end = begin + 1
        while end < len(sizes) and sum(sizes[:end]) + sizes[end] / 2 <= target:
            end += 1
        last_end = len(sizes) - (len(ratios) - 1 - index)
        end = last_end if index == len(ratios) - 1 else min(end, last_end)
        runs.append(tuple(range(begin, end)))
        begin = end
    return runs


def spread_residents(sizes: Sequence[int], budget_bytes: int) -> set[int]:
    """Return the positions that stay resident: as many bytes as the budget holds, spread evenly.

    The streamed ones are chosen by error diffusion along the execution order; then whatever still fits into
    what rounding left over is added, the later of equals first.
    """
    total = sum(sizes)
    step = max(1, min(sizes, default=1)) / max(1, total)
    streamed_share = 1.0 - max(0, budget_bytes) / total if total else 0.0
    while True:
        resident, owed = set(), 0.0
        for position, size in enumerate(sizes):
            owed += size * streamed_share
            if owed >= size * (1 - 1e-9):
                owed -= size
            else:
                resident.add(position)
        used = sum(sizes[position] for position in resident)
        if used <= budget_bytes or streamed_share >= 1.0:
            break
        streamed_share = min(1.0, streamed_share + step)
    for position in range(len(sizes) - 1, -1, -1):
        if position not in resident and used + sizes[position] <= budget_bytes:
            resident.add(position)
            used += sizes[position]
    return resident


def pass_seconds(
    compute_s: Sequence[float],
    copy_s: Sequence[float],
    resident: Collection[int],
    num_slots: int,
    *,
    idle_s: float = 0.0,
) -> float:
    """Return the seconds of one pass in the steady state ([Note: steady state]).

    Args:
        compute_s: per block, in the order in which they run; ``copy_s`` likewise.
        idle_s: seconds between two passes in which this device computes nothing.
    """
    # Per streamed block: its copy, its compute, and what computes from there to the next one that streams.
    streamed: list[list[float]] = []
    lead_s = 0.0
    for position, seconds in enumerate(compute_s):
        if position not in resident:
            streamed.append([copy_s[position], seconds, 0.0])
        elif streamed:
            streamed[-1][2] += seconds
        else:
            lead_s += seconds
    if len(streamed) <= num_slots:  # they stay where they are
        return sum(compute_s) + idle_s
    free_at = [0.0] * num_slots
    slot, copied, now, begin = 0, 0.0, 0.0, 0.0
    for number in range(WARM_UP_PASSES + TIMED_PASSES):
        if number == WARM_UP_PASSES:
            begin = now
        now += lead_s
        for copying, computing, following in streamed:
            free = free_at[slot]
            copied = (copied if copied > free else free) + copying
            if copied > now:
                now = copied
            now += computing
            free_at[slot] = now
            now += following
            slot = slot + 1 if slot + 1 < num_slots else 0
        now += idle_s
    return (now - begin) / TIMED_PASSES


def balanced_seconds(sizes: Sequence[int], room_bytes: int) -> BlockSeconds:
    """Return what takes the place of seconds where speeds are not known.

    Computes are taken to be in proportion to bytes, and all of them as long as all copies: where one of the two is
    far longer any order will do, where they are equal the order matters most.
    """
    streamed_share = 1 - min(1.0, max(0, room_bytes - 2 * max(sizes)) / sum(sizes))
    return tuple(size * streamed_share for size in sizes), tuple(float(size) for size in sizes)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What stays and how the rest streams; ``pass_s`` is predicted, in the unit of the times that it was made from."""

    resident: frozenset[int]
    num_slots: int
    pass_s: float


@lru_cache(maxsize=256)
def choose_schedule(
    sizes: tuple[int, ...],
    room_bytes: int,
    *,
    seconds: BlockSeconds,
    depths: tuple[int, ...] = DEPTHS,
    idle_s: float = 0.0,
) -> Schedule:
    """Return which blocks stay and how many slots the others share, so that a pass is short and the room holds both.

    Begins with residents spread evenly, tries slots for each depth and slots too small for the largest blocks (which
    then all stay), and changes a few blocks of the best of these while that gains. The same numbers always give the
    same answer; for the 57 blocks of Flux it takes some 40 ms where it has to search, and is remembered.

    Args:
        sizes: bytes per block, in the order in which they run; not all fit into the room.
        seconds: of computing and of copying, per block; `balanced_seconds` where they are not known.
        depths: how many blocks may be copied ahead. Where the room holds not even two slots there is only one.
    """
    largest = max(sizes)
    assert largest <= room_bytes, (largest, room_bytes)
    slots = [depth + 1 for depth in depths if (depth + 1) * largest <= room_bytes]
    if not slots:  # fewer than were asked for
        slots = [max(1, min(room_bytes // largest, min(depths) + 1))]
    compute_s, copy_s = seconds

    def timed(resident: Collection[int], num_slots: int) -> Schedule:
        kept = frozenset(resident)
        return Schedule(kept, num_slots, pass_seconds(compute_s, copy_s, kept, num_slots, idle_s=idle_s))

    starts: list[Schedule] = []
    for num_slots in slots:
        spread = spread_beside_slots(sizes, compute_s, room_bytes, num_slots)
        starts += [timed(resident, num_slots) for resident in spread if len(resident) < len(sizes)]
    best = starts[0]
    # The sort is stable: of equals, fewer slots come first.
    for start in sorted(starts, key=lambda start: start.pass_s)[:MAX_STARTS]:
        streamed = [size for position, size in enumerate(sizes) if position not in start.resident]
        resident_bytes = room_bytes - start.num_slots * max(streamed, default=0)
        # No pass is shorter than all computes, or than the copies of what a room filled to the last byte leaves.
        least_s = max(sum(compute_s) + idle_s, sum(copy_s) * (1 - resident_bytes / sum(sizes)))
        found = improve(start, sizes, room_bytes, least_s * (1 + SMALLEST_GAIN), timed)
        if found.pass_s < best.pass_s * (1 - SMALLEST_GAIN):
            best = found
    return best


def improve(
    start: Schedule,
    sizes: Sequence[int],
    room_bytes: int,
    enough_s: float,
    timed: Callable[[Collection[int], int], Schedule],
) -> Schedule:
    """Return the best schedule found by changing a few blocks at a time; a little worse is accepted at first.

    The same start gives the same result: the choice of changes is seeded.
    """
    random = Random(len(sizes))
    smallest = min(sizes)
    num_trials = min(MAX_TRIALS, TRIED_BLOCKS // len(sizes))
    best = current = start
    for trial in range(num_trials):
        if best.pass_s <= enough_s:
            break
        kept = sorted(current.resident)
        leaving = random.sample(kept, min(len(kept), 1 + trial % 2))
        changed = set(current.resident).difference(leaving)
        coming = [position for position in range(len(sizes)) if position not in changed]
        left = room_bytes - start.num_slots * max([sizes[position] for position in coming])
        left -= sum([sizes[position] for position in changed])
        if left < 0:  # a large block would have to stream: no slot is wide enough for it
            continue
        # Half of the time blocks nearby come instead, half of the time any.
        middle = leaving[0] if leaving and trial % 4 < 2 else random.randrange(len(sizes))
        for position in sorted(coming, key=[abs(position - middle) for position in range(len(sizes))].__getitem__):
            if left < smallest:
                break
            if sizes[position] <= left and position not in leaving:
                changed.add(position)
                left -= sizes[position]
        candidate = timed(changed, start.num_slots)
        if candidate.pass_s <= current.pass_s * (1 + SLACK * (1 - trial / num_trials)):
            current = candidate
            if current.pass_s < best.pass_s:
                best = current
    return best


def spread_beside_slots(
    sizes: Sequence[int], compute_s: Sequence[float], room_bytes: int, num_slots: int
) -> Iterator[set[int]]:
    """Yield residents spread by bytes, and by time: for slots that hold every block, then for ever smaller ones."""
    for slot_bytes in sorted(set(sizes), reverse=True)[:MAX_SLOT_SIZES]:
        too_large = {position for position, size in enumerate(sizes) if size > slot_bytes}
        left = room_bytes - num_slots * slot_bytes - sum(sizes[position] for position in too_large)
        if left < 0:
            return
        others = [position for position in range(len(sizes)) if position not in too_large]
        other_sizes = [sizes[position] for position in others]
        yield too_large | {others[place] for place in spread_residents(other_sizes, left)}
        yield spread_by_compute(sizes, compute_s, too_large, left)


def spread_by_compute(
    sizes: Sequence[int], compute_s: Sequence[float], too_large: Collection[int], budget_bytes: int
) -> set[int]:
    """Return the positions that stay resident such that the bytes streamed keep step with the compute time.

    Error diffusion like `spread_residents`, but what is owed grows with the time in which a copy could have run, of
    large resident blocks too; the rate is the lowest whose residents fit.
    """

    def stay(bytes_per_s: float) -> set[int]:
        resident, owed = set(), 0.0
        for position, size in enumerate(sizes):
            owed += compute_s[position] * bytes_per_s
            if position in too_large or owed < size * (1 - 1e-9):
                resident.add(position)
            else:
                owed -= size
        return resident

    def used(resident: set[int]) -> int:
        return sum(sizes[position] for position in resident if position not in too_large)

    slow, fast = 0.0, RATE_LIMIT * sum(sizes) / (sum(compute_s) or 1.0)
    for _ in range(NUM_HALVINGS):
        middle = (slow + fast) / 2
        slow, fast = (slow, middle) if used(stay(middle)) <= budget_bytes else (middle, fast)
    resident = stay(fast)
    left = budget_bytes - used(resident)
    if left < 0:  # no rate is high enough where a block computes in no time
        resident, left = set(too_large), budget_bytes
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        if position not in resident and sizes[position] <= left:
            resident.add(position)
            left -= sizes[position]
    return resident
