"""What many runs leave behind: bytes per run, by least squares, and the table that `make soak` keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["MOST_BYTES_PER_RUN", "bytes_per_run", "differences", "keep_row"]

MOST_BYTES_PER_RUN = 10 << 10
HEAD = f"""# Many runs

`make soak`: three workflows in turn that do not fit on the device together. How many bytes each run adds, by least
squares over the last runs; where all models are forgotten every so many runs, with an offset for each place in that
cycle. Allowed: less than {MOST_BYTES_PER_RUN:,}. Resident bytes are those of the process after glibc's `malloc_trim`;
untrimmed, tens of MiB of freed memory come and go in the heap, and that column has no limit. Each picture was compared
with the first one of its workflow and seed. Objects of the pack, tensors and modules were counted: as many near the end
as near the beginning. The record of events, nodes and runs ends at 1,000 entries of each, of 0.4 to 1.2 KB, and grows
until then; in ComfyUI it was made to end at 300, so that it is full before the measured runs begin. Fewer runs say
less: over the first 200 in ComfyUI, what comes and goes in the heap alone made slopes of 10,227 and 12,933 bytes.

| host | runs | measured | untrimmed | resident | page-locked | device | resident MiB, first and last |
|---|---|---|---|---|---|---|---|
"""


def bytes_per_run(values: Sequence[float], cycle: int = 1) -> float:
    """Return the slope of values, one for each run, by least squares.

    Args:
        cycle: every so many runs the same happens again: each place in the cycle has an offset of its own.
    """
    top = bottom = 0.0
    for place in range(cycle):
        ys = values[place::cycle]
        xs = range(place, len(values), cycle)
        if not ys:
            continue
        middle, mean = sum(xs) / len(xs), sum(ys) / len(ys)
        top += sum((x - middle) * (y - mean) for x, y in zip(xs, ys, strict=True))
        bottom += sum((x - middle) ** 2 for x in xs)
    return top / bottom


def differences(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the counts that changed, both of each."""
    names = sorted({*before, *after})
    both = {name: (before.get(name, 0), after.get(name, 0)) for name in names}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def keep_row(
    host: str, runs: Sequence[Mapping[str, float]], measured: Sequence[Mapping[str, float]], cycle: int = 1
) -> None:
    """Write the row of one host to the table, where `make soak` asks for it; the rows of other hosts stay."""
    path = os.environ.get("HIGHWATER_SOAK_RESULTS")
    slopes = [
        bytes_per_run([run[name] for run in measured], cycle) for name in ("untrimmed", "rss", "pinned", "device")
    ]
    ends = f"{measured[0]['rss'] / 2**20:.0f}, {measured[-1]['rss'] / 2**20:.0f}"
    cells = [host, f"{len(runs):,}", f"the last {len(measured):,}", *(f"{slope:,.0f}" for slope in slopes), ends]
    row = f"| {' | '.join(cells)} |"
    print(row)
    if path:
        file = Path(path)
        there = file.read_text().splitlines() if file.exists() else []
        rows = [line for line in there if line.startswith("| ") and not line.startswith((f"| {host} |", "| host |"))]
        file.write_text(HEAD + "\n".join(sorted([*rows, row])) + "\n")
