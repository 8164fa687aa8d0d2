"""Which blocks stay on a device, and where a split cuts them: arithmetic on their bytes in execution order."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["cut_runs", "spread_residents"]


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
