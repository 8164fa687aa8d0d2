"""Staging memory on paper: where in it each streamed block comes to lie, and how long a pass then takes.

[Note: offsets] A streamed block has an offset in one range of staging memory, and such ranges of blocks overlap. What
a block lacks in its range is copied piece by piece as the blocks that lie there have computed, the piece first that is
free first; what is still there from a pass before is not copied again. So staging memory need not be a multiple of
anything: in memory for a block and a quarter, a quarter of each copy runs beside the compute of the block before, and
small blocks leave no byte idle that a larger one would need. Offsets are fixed, because views of weights are made once
for each; an odd number of equal blocks needs two rounds of them, which passes take in turns.

[Note: steady state] Passes follow each other, so the first blocks of the next pass are copied while the last of this
one compute. Copies go in the order of use, one after the other; a block computes when the block before it has and its
own bytes are there. That holds for synchronous copies, too ([Note: blocking copies] in `runtime/devices/prefetch.py`).
After some passes they repeat themselves, mostly each the one before it, else in turns of a few: `pass_seconds` plays
them until one ends as an earlier one did.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from .workload import Workload

__all__ = ["Occupancy", "Offsets", "choose_offsets", "first_seconds", "pass_seconds", "window_seconds"]

Offsets: TypeAlias = tuple[dict[int, int], ...]
"""Rounds: where each streamed block begins in the staging memory, by its number."""

# Even, for two rounds.
WARM_UP_PASSES = 2
TIMED_PASSES = 2
LONG_PASS = 150
# So many passes are played until they repeat themselves; where they do not, half of them are the warm-up.
MOST_PASSES = 32
# To how many places of the least time of a pass two states count as one: sums of floats differ in the last.
PLACES = 9
# Beside how many pieces of memory offsets are looked for, for all blocks of a round: those behind the last block have
# been free for longest.
TRIED_PIECES = 2_000
# With hundreds of blocks fewer: so many for all pairs of them.
TRIED_PAIRS = 120_000

State: TypeAlias = tuple[int, float, tuple[tuple[int, tuple[int, int] | None, float], ...]]
"""What a pass leaves to the next one: its round, the time of its last copy, and of each piece of memory whose bytes lie
there and when it is free; times are relative to its end."""
Owner = TypeVar("Owner")


class Occupancy(Generic[Owner]):
    """The owner of each byte in a range of memory; ``None`` for free ones.

    A change costs a bisection and moves the list entries behind it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.pieces: list[tuple[int, int, Owner | None]] = [(0, num_bytes, None)] if num_bytes else []
        """Begin, end and owner, in order, without gaps; neighbours have different owners. A tuple of only an address is
        less than the piece that begins there, by which pieces are found."""

    def within(self, begin: int, end: int) -> list[tuple[int, int, Owner | None]]:
        """Return what lies between two addresses, cut off there."""
        pieces = self.pieces
        first = bisect_left(pieces, (begin + 1,)) - 1
        if end <= pieces[first][1]:
            return [(begin, end, pieces[first][2])]
        found = pieces[first : bisect_left(pieces, (end,), first)]
        found[0] = begin, found[0][1], found[0][2]
        found[-1] = found[-1][0], end, found[-1][2]
        return found

    def following(self, address: int, count: int) -> list[tuple[int, int, Owner | None]]:
        """Return the next so many pieces behind an address, the first of all after the last, each once."""
        first = bisect_left(self.pieces, (address,))
        turned = max(0, first + count - len(self.pieces))
        return self.pieces[first : first + count] + self.pieces[: min(first, turned)]

    def take(self, begin: int, end: int, owner: Owner) -> None:
        """Give these bytes another owner; an interrupt finds that done or not begun."""
        # With the neighbours, which may be the same owner's.
        first = max(0, bisect_left(self.pieces, (begin,)) - 1)
        last = bisect_left(self.pieces, (end + 1,))
        before, after = self.pieces[first], self.pieces[last - 1]
        taken: list[tuple[int, int, Owner | None]] = []
        if before[0] < begin:
            if before[2] == owner:
                begin = before[0]
            else:
                taken.append((before[0], begin, before[2]))
        if end < after[1]:
            if after[2] == owner:
                end = after[1]
                taken.append((begin, end, owner))
            else:
                taken += (begin, end, owner), (end, after[1], after[2])
        else:
            taken.append((begin, end, owner))
        self.pieces[first:last] = taken


def choose_offsets(
    work: Workload, resident: Collection[int], staging_bytes: int, *, num_rounds: int = 1
) -> tuple[Offsets, float]:
    """Return where in the staging memory the streamed blocks begin, each fits, and the seconds of a pass then.

    One after the other they get the offset at which their copy is done soonest, of equals the one that has been
    free for longest. Every streamed block has bytes.
    """
    offsets: Offsets = tuple({} for _ in range(num_rounds))
    # The passes that choose are the first ones that have these offsets.
    pass_s = pass_seconds(work, resident, staging_bytes, offsets)
    return offsets, pass_s


def pass_seconds(work: Workload, resident: Collection[int], staging_bytes: int, offsets: Offsets) -> float:
    """Return the mean seconds of a pass in the steady state ([Note: steady state])."""
    passes = play(work, resident, staging_bytes, offsets)
    if len(work.sizes) > LONG_PASS:
        # Of hundreds of blocks the first pass is steady before its end, and one round needs no second pass.
        warm_up, timed = (1, 1) if len(offsets) == 1 else (WARM_UP_PASSES, TIMED_PASSES)
        ends = [end_s for end_s, _ in itertools.islice(passes, warm_up + timed)]
        return (ends[-1] - ends[warm_up - 1]) / timed
    ends = []
    known: dict[State, int] = {}
    for number, (end_s, state) in enumerate(itertools.islice(passes, MOST_PASSES)):
        ends.append(end_s)
        before = known.setdefault(state, number)
        if before < number:
            return (end_s - ends[before]) / (number - before)
    return (ends[-1] - ends[MOST_PASSES // 2 - 1]) / (MOST_PASSES // 2)


def play(
    work: Workload, resident: Collection[int], staging_bytes: int, offsets: Offsets
) -> Iterator[tuple[float, State]]:
    """Yield when each pass ends, and what it leaves, for ever.

    A block without an offset in a round gets one when its turn comes.
    """
    compute_s, copy_s = work.compute_s, work.copy_s
    occupancy = Occupancy[tuple[int, int]](staging_bytes)
    freed_at: dict[tuple[int, int] | None, float] = defaultdict(float)
    copied = now = 0.0
    latest = Latest((-1, 0), 0)
    unit_s = work.least_s or 1.0
    num_pieces = max(1, min(TRIED_PIECES // len(work.sizes), TRIED_PAIRS // len(work.sizes) ** 2))
    for number, here in itertools.cycle(enumerate(offsets)):
        others = [there for there in offsets if there is not here]
        for position, size in enumerate(work.sizes):
            if position in resident:
                now += compute_s[position]
                continue
            copy = PlannedCopy(copied, copy_s[position] / size)
            if position not in here:
                here[position] = copy.find_offset(occupancy, freed_at, size, latest, num_pieces)
            lacking: list[tuple[float, int]] = []
            begins = [here[position], *(there.get(position, 0) for there in others)]
            for begin in begins if len(begins) < 2 else dict.fromkeys(begins):
                stay = position, begin
                missing = free_pieces(occupancy, freed_at, stay, size)
                if not missing:  # it is still there
                    break
                lacking = lacking or missing
            else:
                stay = position, here[position]
                copied = copy.end_s(lacking)
                latest = Latest(stay, stay[1] + size)
                occupancy.take(stay[1], latest.reach, stay)
            now = max(now, copied) + compute_s[position]
            freed_at[stay] = now
        now += work.idle_s
        # What was free before the next copy begins is free, no matter since when.
        free = ((begin, owner, max(copied, freed_at[owner]) - now) for begin, _, owner in occupancy.pieces)
        places = tuple((begin, owner, round(left_s / unit_s, PLACES)) for begin, owner, left_s in free)
        yield now, (number, round((copied - now) / unit_s, PLACES), places)


def free_pieces(
    occupancy: Occupancy[tuple[int, int]],
    freed_at: Mapping[tuple[int, int] | None, float],
    stay: tuple[int, int],
    size: int,
) -> list[tuple[float, int]]:
    """Return when what a block lacks in its range is free, and the bytes of it, in the order of copying."""
    pieces = occupancy.within(stay[1], stay[1] + size)
    free = [(freed_at[owner], last - first) for first, last, owner in pieces if owner != stay]
    free.sort()
    return free


class Latest(NamedTuple):
    """What was copied last, and where it ends."""

    stay: tuple[int, int]
    reach: int


class PlannedCopy(NamedTuple):
    """The copy of one block, which begins when the copy before it ends."""

    begin_s: float
    seconds_per_byte: float

    def end_s(self, pieces: Iterable[tuple[float, int]]) -> float:
        """Return when these pieces are copied."""
        copied, each_s = self
        for free_s, num_bytes in pieces:
            if free_s > copied:
                copied = free_s
            copied += num_bytes * each_s
        return copied

    def find_offset(
        self,
        occupancy: Occupancy[tuple[int, int]],
        freed_at: Mapping[tuple[int, int] | None, float],
        size: int,
        latest: Latest,
        num_pieces: int,
    ) -> int:
        """Return where so many bytes are copied soonest; of equals, where memory has been free for longest.

        They begin where one of some pieces behind the latest copy begins or ends, or end where all memory does.
        """
        last_begin, reach = occupancy.pieces[-1][1] - size, latest.reach
        edges = {0, last_begin}
        for first, last, _ in occupancy.following(reach, num_pieces):
            edges |= {first, last}
        begins = sorted(edges)
        # First those behind the latest copy: over it goes none that would wait for it longer than one of these takes.
        behind = bisect_left(begins, reach)
        freed_s = freed_at[latest.stay]
        best = math.inf, 0.0, 0
        for begin in begins[behind:] + begins[:behind]:
            if begin < 0 or begin > last_begin or (begin < reach <= begin + size and freed_s > best[0]):
                continue
            pieces = free_pieces(occupancy, freed_at, (-1, begin), size)
            end_s = self.end_s(pieces)
            if end_s <= best[0]:
                best = min(best, (end_s, sum([free_s * num_bytes for free_s, num_bytes in pieces]), begin))
        return best[2]


def first_seconds(work: Workload, resident: Collection[int], staging_bytes: int, offsets: Offsets) -> float:
    """Return what a pass takes with these offsets before which the staging memory holds nothing."""
    return next(play(work, resident, staging_bytes, offsets))[0]


def window_seconds(work: Workload, resident: Collection[int], staging_bytes: int, *, is_first: bool = False) -> float:
    """Return what a pass takes in the steady state if staging memory could be cut anywhere, and nothing stays in it.

    A byte is copied as soon as the bytes that the staging memory holds after it may be overwritten. Needs no offsets
    and a tenth of the time of `pass_seconds`, so searches ask it.

    Args:
        is_first: what the first pass takes, before which nothing was copied.
    """
    sizes, compute_s, copy_s = work.sizes, work.compute_s, work.copy_s
    # Per streamed block: its bytes, seconds per byte, its compute, and what computes from there to the next one.
    streamed: list[tuple[int, float, float, float]] = []
    following_s = 0.0
    for position in range(len(sizes) - 1, -1, -1):
        if position in resident:
            following_s += compute_s[position]
        else:
            size = sizes[position]
            streamed.append((size, copy_s[position] / size, compute_s[position], following_s))
            following_s = 0.0
    lead_s = following_s
    streamed.reverse()
    if sum(size for size, *_ in streamed) <= staging_bytes and not is_first:  # they stay where they are
        return work.least_s
    # Of the blocks that have computed: where their bytes end in the stream of all that is copied, and since when.
    freed: deque[tuple[int, float]] = deque()
    reach, end = staging_bytes, 0
    copied = now = begin_s = 0.0
    warm_up, timed = (1, 1) if len(sizes) > LONG_PASS else (WARM_UP_PASSES, TIMED_PASSES)
    warm_up, timed = (0, 1) if is_first else (warm_up, timed)
    for number in range(warm_up + timed):
        if number == warm_up:
            begin_s = now
        now += lead_s
        for size, second_per_byte, computing, following in streamed:
            position, end = end, end + size
            while reach < end:
                if reach > position:
                    copied += (reach - position) * second_per_byte
                    position = reach
                last, free_s = freed.popleft()
                reach = last + staging_bytes
                if free_s > copied:
                    copied = free_s
            copied += (end - position) * second_per_byte
            if copied > now:
                now = copied
            now += computing
            freed.append((end, now))
            now += following
        now += work.idle_s
    return (now - begin_s) / timed
