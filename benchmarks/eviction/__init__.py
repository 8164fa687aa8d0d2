"""Bytes that eviction policies move, beside the least that any could: by trace, and by what is seen of the queue."""

from __future__ import annotations

import timeit

from highwater.memory.manager.policies.candidate import Candidate
from highwater.memory.manager.policies.next_use import NextUse

from ..case import Result
from .bound import least_bytes
from .runs import CAPACITY_BYTES, run_trace, size_of
from .traces import TRACES, Trace

__all__ = ["measure"]

SEEN = (0, 2, 8)
NUM_RESIDENTS = 200


def measure() -> Result:
    """Measure every trace; less than a minute."""
    rows, seen_8 = [], []
    for name, trace in TRACES.items():
        least = least_bytes(trace.uses(), size_of, CAPACITY_BYTES)
        moved = {"lru": sum(run_trace(trace, "lru")), "size": sum(run_trace(trace, "size"))}
        for visible in SEEN:
            moved[f"next-use, {visible} seen"] = sum(run_trace(trace, "next-use", visible))
        for policy, num_bytes in moved.items():
            rows.append(
                {
                    "trace": name,
                    "policy": policy,
                    "MiB moved": num_bytes / 2**20,
                    "least, MiB": least / 2**20,
                    "of the least": num_bytes / least,
                    "of lru": num_bytes / moved["lru"],
                }
            )
        seen_8.append(moved["next-use, 8 seen"] / least)
    repeats = run_trace(Trace([TRACES["alternating workflows"].prompts[0]] * 2), "next-use")
    return Result(
        question=(
            "Bytes of weights copied to a simulated device, streaming's included, by the real manager; beside an "
            "offline lower bound (a fractional relaxation that knows the whole trace and needs no staging memory). "
            "A policy sees the rest of the running prompt, and so many waiting ones."
        ),
        rows=rows,
        ratio=sum(seen_8) / len(seen_8),
        meaning=f"next-use with 8 prompts seen over the bound, mean; worst {max(seen_8):.3f}; targets 1.10 and 1.25",
        more={
            "Other targets:": [
                {"what": "second run of a workflow that fits, bytes moved", "measured": repeats[1], "target": "0"},
                {"what": f"one decision among {NUM_RESIDENTS} residents, ms", "measured": decide_ms(), "target": "1"},
            ]
        },
    )


def decide_ms() -> float:
    """Return the milliseconds of one decision, the least of many."""
    candidates = [
        Candidate(component=str(n), device_bytes=n + 1, last_use=n % 37, next_use=n % 11 or None, idle_s=1.0)
        for n in range(NUM_RESIDENTS)
    ]
    return min(timeit.repeat(lambda: NextUse().order(candidates), number=10, repeat=30)) * 100
