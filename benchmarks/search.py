"""The best residents that a search finds, beside staging memory that could be cut anywhere: all for a dozen parts.

Copies go in the order of use, and a byte is copied as soon as there is memory for it (`run_window`): what is left to
choose is who stays.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .schedules import Work, held_bytes, run_window

__all__ = ["Found", "find_best", "find_good"]

NUM_EXCHANGES = 300
NUM_HALVINGS = 40
# How many times the largest part the staging memory has at first.
STAGING_SIZES = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A choice of residents, the staging memory that they leave, and the seconds of its run."""

    seconds: float
    resident: frozenset[int]
    staging_bytes: int
    offsets: tuple[Mapping[int, int], ...] = ()
    """Where the others lie in the staging memory, in steps that take turns; empty if it can be cut anywhere."""


def find_best(work: Work, budget_bytes: int, num_steps: int) -> Found | None:
    """Return the fastest of all choices within a budget; None if nothing fits. Exponential."""
    best: Found | None = None
    for count in range(len(work.movable), -1, -1):
        for resident in itertools.combinations(work.movable, count):
            best = faster(best, evaluate(work, frozenset(resident), budget_bytes, num_steps))
            if best is not None and is_perfect(best, work, num_steps):
                return best
    return best


def find_good(work: Work, budget_bytes: int, num_steps: int, start: frozenset[int] | None = None) -> Found | None:
    """Return a fast choice within a budget, no slower than that of ``start``; for works too large to try all.

    Spreads residents so that what streams is copied evenly through the *compute time*, beside staging memory of several
    sizes; then exchanges residents for streamed parts at random where that helps (always the same exchanges).
    """
    best = evaluate(work, start, budget_bytes, num_steps) if start is not None else None
    for resident in spread_by_compute(work, budget_bytes):
        best = faster(best, evaluate(work, resident, budget_bytes, num_steps))
    dice = random.Random(0)
    for _ in range(NUM_EXCHANGES):
        if best is None or is_perfect(best, work, num_steps):
            break
        best = faster(best, evaluate(work, exchange(work, best, dice), budget_bytes, num_steps))
    return best


def evaluate(work: Work, resident: frozenset[int], budget_bytes: int, num_steps: int) -> Found | None:
    """Return a choice with all that its residents leave of the budget as staging memory; None if that is too little."""
    streamed = [work.parts[index].weight_bytes for index in work.movable if index not in resident]
    staging_bytes = budget_bytes - held_bytes(work, resident) if streamed else 0
    if staging_bytes < max(streamed, default=0) or held_bytes(work, resident) > budget_bytes:
        return None
    seconds = run_window(work, resident, staging_bytes, num_steps).seconds
    return Found(seconds=seconds, resident=resident, staging_bytes=staging_bytes)


def faster(best: Found | None, other: Found | None) -> Found | None:
    return other if best is None or (other is not None and other.seconds <= best.seconds) else best


def is_perfect(found: Found, work: Work, num_steps: int) -> bool:
    """Whether nothing waits for a copy."""
    return found.seconds <= num_steps * work.compute_s * (1 + 1e-12)


def spread_by_compute(work: Work, budget_bytes: int) -> Iterator[frozenset[int]]:
    """Yield residents such that the bytes streamed so far keep step with the compute time so far.

    Error diffusion, at the highest rate of copying that the budget asks for; then the largest that still fit stay.
    """
    sizes = {index: work.parts[index].weight_bytes for index in work.movable}
    if budget_bytes >= work.weight_bytes:
        yield frozenset(sizes)
    for largest, factor in itertools.product(sorted(set(sizes.values()), reverse=True)[:4], STAGING_SIZES):
        room = budget_bytes - work.rest_bytes - int(factor * largest)
        forced = frozenset(index for index, size in sizes.items() if size > largest)
        room -= sum(sizes[index] for index in forced)

        def stay(bytes_per_s: float, forced: frozenset[int] = forced) -> set[int]:
            resident, owed = set(), 0.0
            for index, part in enumerate(work.parts):
                owed += part.compute_s * bytes_per_s
                if index in sizes:
                    if index in forced or owed < sizes[index] * (1 - 1e-9):
                        resident.add(index)
                    else:
                        owed -= sizes[index]
            return resident

        slow, fast = 0.0, 100 * work.weight_bytes / work.compute_s
        for _ in range(NUM_HALVINGS):
            middle = (slow + fast) / 2
            fits = sum(sizes[index] for index in stay(middle) - forced) <= room
            slow, fast = (slow, middle) if fits else (middle, fast)
        resident = stay(fast)
        left = room - sum(sizes[index] for index in resident - forced)
        for index in sorted(sizes.keys() - resident, key=lambda index: -sizes[index]):
            if sizes[index] <= left:
                resident.add(index)
                left -= sizes[index]
        if left >= 0 and len(resident) < len(sizes):
            yield frozenset(resident)


def exchange(work: Work, found: Found, dice: random.Random) -> frozenset[int]:
    """Return residents with up to three fewer, and more where they stand or elsewhere until the memory is taken."""
    stay = sorted(found.resident)
    dropped = dice.sample(stay, min(len(stay), dice.choice((0, 1, 1, 2, 3))))
    resident = set(found.resident).difference(dropped)
    left = sum(work.parts[index].weight_bytes for index in dropped)
    left += int(found.staging_bytes * dice.choice((0.0, 0.0, 0.1, 0.3, -0.1)))
    candidates = [index for index in work.movable if index not in found.resident]
    dice.shuffle(candidates)
    for index in candidates:
        if work.parts[index].weight_bytes <= left:
            resident.add(index)
            left -= work.parts[index].weight_bytes
    return frozenset(resident)
