"""The best schedules with residents and slots that a search finds: all of them for a dozen parts, good ones for more.

Copies go in the order of use: with slots of one size no other order is faster (`tests/engine/test_schedules.py` tries
them all). What is left to choose is who stays and how many slots there are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from .schedules import Work, held_bytes, run_slots

__all__ = ["Found", "find_best", "find_good"]

NUM_EXCHANGES = 300
NUM_HALVINGS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A choice of residents and slots, and the seconds of its run."""

    seconds: float
    resident: frozenset[int]
    num_slots: int


def find_best(work: Work, budget_bytes: int, num_steps: int, num_slots: Collection[int]) -> Found | None:
    """Return the fastest of all choices within a budget, slots included; None if nothing fits.

    Tries every set to which nothing can be added, as one more resident never takes longer. Exponential.
    """
    best: Found | None = None
    for count in num_slots:
        for resident in fullest_residents(work, budget_bytes, count):
            best = faster(best, evaluate(work, resident, count, num_steps))
            if best.seconds <= num_steps * work.compute_s * (1 + 1e-12):
                return best
    return best


def find_good(
    work: Work, budget_bytes: int, num_steps: int, num_slots: Collection[int], start: Found | None = None
) -> Found | None:
    """Return a fast choice within a budget, no slower than ``start``; for works too large to try all.

    Spreads residents so that what streams is copied evenly through the *compute time*, for every number and size of
    slots; then exchanges residents for streamed parts at random where that helps (always the same exchanges).
    """
    best = start
    for count in num_slots:
        for resident in spread_by_compute(work, budget_bytes, count):
            best = faster(best, evaluate(work, resident, count, num_steps))
    dice = random.Random(0)
    for _ in range(NUM_EXCHANGES):
        if best is None or best.seconds <= num_steps * work.compute_s * (1 + 1e-12):
            break
        resident = exchange(work, budget_bytes, best, dice)
        if resident is not None:
            best = faster(best, evaluate(work, resident, best.num_slots, num_steps))
    return best


def evaluate(work: Work, resident: frozenset[int], num_slots: int, num_steps: int) -> Found:
    seconds = run_slots(work, resident, num_slots, num_steps).seconds
    return Found(seconds=seconds, resident=resident, num_slots=num_slots)


def faster(best: Found | None, other: Found) -> Found:
    return other if best is None or other.seconds <= best.seconds else best


def fullest_residents(work: Work, budget_bytes: int, num_slots: int) -> Iterator[frozenset[int]]:
    """Yield the sets of residents that leave room for the slots and for no further resident."""
    sizes = {index: work.parts[index].weight_bytes for index in work.movable}
    if work.weight_bytes <= budget_bytes:
        yield frozenset(sizes)
        return
    for slot_bytes, forced, room in slot_choices(work, budget_bytes, num_slots):
        free = [index for index, size in sizes.items() if size <= slot_bytes]
        for chosen in fullest_subsets([sizes[index] for index in free], room):
            if len(chosen) < len(free):
                yield forced | {free[position] for position in chosen}


def slot_choices(work: Work, budget_bytes: int, num_slots: int) -> Iterator[tuple[int, frozenset[int], int]]:
    """Yield for each size of slots the parts that have to stay because they are larger, and the room beside them."""
    sizes = {index: work.parts[index].weight_bytes for index in work.movable}
    for slot_bytes in sorted(set(sizes.values()), reverse=True):
        forced = frozenset(index for index, size in sizes.items() if size > slot_bytes)
        room = budget_bytes - work.rest_bytes - num_slots * slot_bytes - sum(sizes[index] for index in forced)
        if room >= 0:
            yield slot_bytes, forced, room


def fullest_subsets(sizes: Sequence[int], room: int) -> Iterator[tuple[int, ...]]:
    """Yield the positions of every subset within the room to which nothing can be added."""

    def extend(position: int, chosen: tuple[int, ...], left: int, smallest_skipped: float) -> Iterator[tuple[int, ...]]:
        if position == len(sizes):
            if smallest_skipped > left:
                yield chosen
            return
        if sizes[position] <= left:
            yield from extend(position + 1, (*chosen, position), left - sizes[position], smallest_skipped)
        yield from extend(position + 1, chosen, left, min(smallest_skipped, sizes[position]))

    return extend(0, (), room, math.inf)


def spread_by_compute(work: Work, budget_bytes: int, num_slots: int) -> Iterator[frozenset[int]]:
    """Yield residents such that the bytes streamed so far keep step with the compute time so far.

    Error diffusion, at the highest rate of copying that the budget asks for; then the largest that still fit stay.
    """
    sizes = {index: work.parts[index].weight_bytes for index in work.movable}
    for slot_bytes, forced, room in slot_choices(work, budget_bytes, num_slots):
        for phase in (0.0, 0.5):

            def stay(bytes_per_s: float, forced: frozenset[int] = forced, owed: float = phase * slot_bytes) -> set[int]:
                resident = set()
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


def exchange(work: Work, budget_bytes: int, found: Found, dice: random.Random) -> frozenset[int] | None:
    """Return residents with one more part and up to three fewer, filled up again; None if that does not fit."""
    streamed = [index for index in work.movable if index not in found.resident]
    stay = sorted(found.resident)
    dropped = dice.sample(stay, min(len(stay), dice.choice((0, 1, 1, 2, 3))))
    resident = found.resident - set(dropped) | {dice.choice(streamed)}
    candidates = [index for index in work.movable if index not in resident and index not in dropped]
    dice.shuffle(candidates)
    if held_bytes(work, resident, found.num_slots) > budget_bytes:
        return None
    for index in candidates:
        if held_bytes(work, resident | {index}, found.num_slots) <= budget_bytes:
            resident |= {index}
    return resident
