"""The prefetch schedule of a device: which blocks stay resident, how many are prefetched, through how much memory.

Staging memory is what the residents leave of a budget: more of it prefetches further ahead, and leaves fewer residents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from random import Random

from .staging_layout import Offsets, choose_offsets, window_seconds
from .workload import Workload

__all__ = [
    "Schedule",
    "choose_prefetch",
    "choose_schedule",
    "place_streamed",
    "spread_residents",
]

# How many blocks are prefetched where times are not known.
USUAL_PREFETCH = 1

# Another schedule has to be this much faster to be preferred: even spreading and less staging memory vary less.
SMALLEST_GAIN = 0.005
# How many times the bytes of a block the staging memory has where the search begins.
STAGING_SIZES = (2, 1, 1.25, 1.5, 3, 5)
MAX_BLOCK_SIZES = 3
# What is streamed grows by at least this part of the largest block until the residents fit.
SHARE_STEPS = 16
# What the staging memory becomes in a trial of the search.
STAGING_CHANGES = (1.0, 1.0, 1.0, 0.9, 1.1)
# The search: how many starts are improved, and how many get offsets as they are; how many blocks all trials of one
# start may look at, and how much worse than the last a trial may be at first.
NUM_IMPROVED = 2
NUM_PLACED = 4
NUM_HALVINGS = 24
RATE_LIMIT = 100.0
MAX_TRIALS = 250
TRIED_BLOCKS = 10_000
# With many blocks fewer choices are tried: how many blocks all starts may have together, and all that get offsets.
STARTED_BLOCKS = 6_000
PLACED_BLOCKS = 600
# Beyond some 60 blocks far fewer, this over the fourth power of their number: the less does a single one matter. And
# beyond so many, one choice gets one layout.
TRIED_BEYOND = 2_200_000_000
MANY_BLOCKS = 150
SLACK = 0.01


def spread_residents(sizes: Sequence[int], budget_bytes: int) -> set[int]:
    """Return the positions that stay resident: as many bytes as the budget holds, spread evenly.

    Error diffusion along the execution order chooses what streams; then blocks that fit into what rounding left over
    become resident, later ones first. Blocks of no bytes always do.
    """
    total = sum(sizes)
    step = max(1, min(sizes, default=1), max(sizes, default=1) // SHARE_STEPS) / max(1, total)
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


def choose_prefetch(asked: int | None, *, times_are_known: bool) -> int | None:
    """Return how many blocks to prefetch: as many as were asked for, else one; None is what turns out fastest.

    Staging memory costs residents: only measured times tell how much of it is worth that.
    """
    return asked or (None if times_are_known else USUAL_PREFETCH)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What stays, and where in staging memory the others stream; ``pass_s`` is predicted, in the workload's unit."""

    resident: frozenset[int]
    staging_bytes: int
    offsets: Offsets
    """Where each streamed block begins in the staging memory, by its position."""
    pass_s: float


@lru_cache(maxsize=256)
def choose_schedule(work: Workload, room_bytes: int, *, prefetch_blocks: int | None = None) -> Schedule:
    """Return which blocks stay and where the others stream, so that a pass is short and both fit into so many bytes.

    Staging memory is what the residents leave. The search begins with residents spread evenly, beside staging memory
    of several sizes, and changes a few blocks of the best of these while that gains. The same numbers always give the
    same answer, which is remembered. A search takes some 100 ms for the 57 blocks of Flux, and less for
    hundreds of blocks, of which it tries fewer choices. Blocks of no bytes stay.

    Args:
        work: its blocks need more than ``room_bytes``; `balanced_workload` where times are not known.
        room_bytes: what residents and staging memory may take together.
        prefetch_blocks: how many blocks the staging memory holds beside the one that computes, as far as they fit; a
            further block is made resident. None: as much staging memory as is fastest.
    """
    largest = max(work.sizes)
    assert largest <= room_bytes, (largest, room_bytes)
    depth = min(prefetch_blocks or 0, room_bytes // largest - 1)

    def timed(resident: Collection[int]) -> Trial | None:
        """Return a lower bound of a choice's pass; None where it leaves too little staging memory."""
        streamed = work.streamed_sizes(resident)
        staging_bytes = room_bytes - work.num_bytes + sum(streamed)
        if not streamed or staging_bytes < (depth + 1) * max(streamed):
            return None
        pass_s = window_seconds(work, resident, staging_bytes)
        return Trial(frozenset(resident), staging_bytes, pass_s)

    def changed(resident: Collection[int]) -> Trial | None:
        """Return the same; None, too, where a block streams that could stay beside the prefetched ones."""
        trial = timed(resident)
        if trial is None or prefetch_blocks is None:
            return trial
        streamed = work.streamed_sizes(resident)
        return trial if trial.staging_bytes < (depth + 1) * max(streamed) + min(streamed) else None

    spread = spread_beside_staging(work, room_bytes, depth)
    starts = list(islice(filter(None, map(timed, spread)), max(2, affordable(STARTED_BLOCKS, len(work.sizes)))))
    enough_s = work.least_s * (1 + SMALLEST_GAIN)
    # The sort is stable: of equals, even spreading and less staging memory come first.
    fastest = sorted(dict.fromkeys(starts), key=lambda trial: trial.pass_s)
    improved = [improve(start, work.sizes, room_bytes, enough_s, changed) for start in fastest[:NUM_IMPROVED]]
    best: Schedule | None = None
    # The bound is not always reached: it depends on where blocks can lie in the staging memory.
    choices = dict.fromkeys([starts[0], *improved, *fastest[:NUM_PLACED]])
    num_choices = max(1, PLACED_BLOCKS // len(work.sizes)) if len(work.sizes) <= MANY_BLOCKS else 1
    kept = set(sorted(choices, key=lambda trial: trial.pass_s)[:num_choices])
    for trial in (trial for trial in choices if trial in kept):
        schedule = place_streamed(work, trial.resident, trial.staging_bytes)
        if best is None or schedule.pass_s < best.pass_s * (1 - SMALLEST_GAIN):
            best = schedule
        if best.pass_s <= enough_s:
            break
    assert best is not None
    return best


def place_streamed(work: Workload, resident: frozenset[int], staging_bytes: int) -> Schedule:
    """Return the schedule for these residents: where the others lie in so much staging memory, or in less."""

    def place(staging_bytes: int, num_rounds: int) -> Schedule:
        offsets, pass_s = choose_offsets(work, resident, staging_bytes, num_rounds=num_rounds)
        return Schedule(resident, staging_bytes, offsets, pass_s)

    streamed = work.streamed_sizes(resident)
    # Of equal blocks a whole number lie best side by side.
    whole_bytes = staging_bytes // max(streamed) * max(streamed)
    if len(work.sizes) > MANY_BLOCKS:
        return place(whole_bytes if min(streamed) == max(streamed) else staging_bytes, 1)
    best = place(whole_bytes, 1)
    for less, num_rounds in ((staging_bytes, 1), (whole_bytes, 2), (staging_bytes, 2)):
        if best.pass_s <= work.least_s * (1 + SMALLEST_GAIN):
            break
        other = place(less, num_rounds)
        if other.pass_s < best.pass_s * (1 - SMALLEST_GAIN):
            best = other
    return best


def affordable(num_blocks: int, each: int) -> int:
    """Return how many choices of so many blocks each a search may look at."""
    return min(num_blocks // each, TRIED_BEYOND // each**4)


@dataclass(frozen=True, slots=True)
class Trial:
    """A choice of residents, the staging memory beside them, and a lower bound of its pass."""

    resident: frozenset[int]
    staging_bytes: int
    pass_s: float


def improve(
    start: Trial,
    sizes: Sequence[int],
    room_bytes: int,
    enough_s: float,
    timed: Callable[[Collection[int]], Trial | None],
) -> Trial:
    """Return the best choice found by changing a few blocks at a time; a little worse is accepted at first.

    The same start gives the same result: the choice of changes is seeded.
    """
    random = Random(len(sizes))
    smallest = min(size for size in sizes if size)
    num_trials = min(MAX_TRIALS, affordable(TRIED_BLOCKS, len(sizes)))
    best = current = start
    for trial in range(num_trials):
        if best.pass_s <= enough_s:
            break
        kept = [position for position in sorted(current.resident) if sizes[position]]
        leaving = random.sample(kept, min(len(kept), 1 + trial % 2))
        changed = set(current.resident).difference(leaving)
        coming = [position for position in range(len(sizes)) if position not in changed]
        # Now and then the staging memory gives a part to residents, or takes one.
        staging_bytes = int(current.staging_bytes * random.choice(STAGING_CHANGES))
        left = room_bytes - staging_bytes - sum([sizes[position] for position in changed])
        # Half of the time blocks nearby come instead, half of the time any.
        middle = leaving[0] if leaving and trial % 4 < 2 else random.randrange(len(sizes))
        for position in sorted(coming, key=[abs(position - middle) for position in range(len(sizes))].__getitem__):
            if left < smallest:
                break
            if sizes[position] <= left and position not in leaving:
                changed.add(position)
                left -= sizes[position]
        candidate = timed(changed)
        if candidate is not None and candidate.pass_s <= current.pass_s * (1 + SLACK * (1 - trial / num_trials)):
            current = candidate
            if current.pass_s < best.pass_s:
                best = current
    return best


def spread_beside_staging(work: Workload, room_bytes: int, depth: int) -> Iterator[set[int]]:
    """Yield residents spread by bytes, and by time, beside staging memory for the largest block, then for smaller ones.

    Blocks that are too large for it stay. The first choice is spread by bytes, beside staging memory for two of the
    largest blocks, or for as many as were asked for; if some copies are synchronous, a choice with as few of these as
    possible comes before it.
    """
    sizes = work.sizes
    for block_bytes in sorted(set(sizes), reverse=True)[:MAX_BLOCK_SIZES]:
        too_large = {position for position, size in enumerate(sizes) if size > block_bytes}
        for factor in (depth + 1,) if depth else STAGING_SIZES:
            left = room_bytes - int(factor * block_bytes)
            if left < sum(sizes[position] for position in too_large):
                continue
            all_positions = range(len(sizes))
            if 0 < len(work.blocking) < len(sizes):
                yield spread_among(sizes, too_large, left, work.blocking, all_positions)
            yield spread_among(sizes, too_large, left, all_positions)
            yield spread_by_compute(
                sizes, work.compute_s, too_large, left - sum(sizes[position] for position in too_large)
            )


def spread_among(sizes: Sequence[int], kept: Collection[int], budget_bytes: int, *groups: Collection[int]) -> set[int]:
    """Return what is kept and, while the budget lasts, residents spread evenly within one group after the other."""
    resident = set(kept)
    for among in groups:
        others = sorted(set(among) - resident)
        left = budget_bytes - sum(sizes[position] for position in resident)
        resident |= {others[place] for place in spread_residents([sizes[position] for position in others], left)}
    return resident


def spread_by_compute(
    sizes: Sequence[int], compute_s: Sequence[float], too_large: Collection[int], budget_bytes: int
) -> set[int]:
    """Return the positions that stay resident such that the bytes streamed keep step with the compute time.

    Error diffusion like `spread_residents`, but by the time in which a copy could have run, which resident blocks give,
    too; the rate is the lowest whose residents fit.
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

    # What is too large stays anyway: it counts as of no bytes, which streams and takes nothing.
    pairs = [(compute_s[position], 0 if position in too_large else size) for position, size in enumerate(sizes)]

    def used(bytes_per_s: float) -> int:
        """Return the bytes that stay at a rate, beside what is too large."""
        resident_bytes, owed = 0, 0.0
        for seconds, size in pairs:
            owed += seconds * bytes_per_s
            if owed < size * (1 - 1e-9):
                resident_bytes += size
            else:
                owed -= size
        return resident_bytes

    slow, fast = 0.0, RATE_LIMIT * sum(sizes) / (sum(compute_s) or 1.0)
    for _ in range(NUM_HALVINGS if len(sizes) <= MANY_BLOCKS else NUM_HALVINGS // 2):
        middle = (slow + fast) / 2
        slow, fast = (slow, middle) if used(middle) <= budget_bytes else (middle, fast)
    resident = stay(fast)
    left = budget_bytes - used(fast)
    if left < 0:  # no rate is high enough where a block computes in no time
        resident, left = set(too_large), budget_bytes
    for position in sorted(range(len(sizes)), key=lambda position: -sizes[position]):
        if position not in resident and sizes[position] <= left:
            resident.add(position)
            left -= sizes[position]
    return resident
