"""The fastest of all schedules of a few blocks, in place of the planner's search."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

from highwater.memory.planner.prefetch_schedule import Schedule, place_streamed
from highwater.memory.planner.staging_layout import window_seconds
from highwater.memory.planner.workload import Workload

__all__ = ["fastest_schedule"]


@lru_cache(maxsize=100_000)
def fastest_schedule(work: Workload, room_bytes: int, *, prefetch_blocks: int | None = None) -> Schedule:
    """Return the fastest schedule over all choices of residents, beside all the staging memory that these leave.

    Arguments as of `choose_schedule`. Exponential in the number of blocks. Layouts of the staging memory are the
    planner's own; a choice gets one only if its bound is below the best so far.
    """
    bounds = []
    for count in range(len(work.sizes)):
        for resident in map(frozenset, combinations(range(len(work.sizes)), count)):
            staging_bytes = room_bytes - sum(work.sizes[position] for position in resident)
            least_bytes = ((prefetch_blocks or 0) + 1) * max(work.streamed_sizes(resident))
            if staging_bytes >= min(least_bytes, room_bytes // max(work.sizes) * max(work.sizes)):
                bounds.append((window_seconds(work, resident, staging_bytes), -count, sorted(resident), staging_bytes))
    best: Schedule | None = None
    for bound_s, _, kept, staging_bytes in sorted(bounds):
        if best is not None and best.pass_s <= bound_s * (1 + 1e-9):
            break
        found = place_streamed(work, frozenset(kept), staging_bytes)
        if best is None or found.pass_s < best.pass_s:
            best = found
    assert best is not None
    return best
