"""How well copies hide behind computes, in the virtual time of a simulated device.

The engine streams a stack of equal blocks whose compute and copy times are set exactly. A run's time is compared
with the longer of all computing and all copying, which no schedule can beat, plus one copy: that of the first
streamed block, which only a resident block before it can hide. The same runs with weights in pageable memory, and in
a file that is read as fast, whose copies hold the host ([Note: blocking copies] in
`memory/runtime/devices/prefetch.py`). Two schedules that others use stand beside them, written as recurrences.
"""

from __future__ import annotations

import tempfile
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.planner import sizes
from highwater.memory.weights.source import WeightsSource

from .case import Result

NUM_BLOCKS = 48
NUM_STEPS = 8
BLOCK_BYTES = 256 * 1024
# A double block of Flux, 340 MB in bf16, over 25 GB/s: launch costs are as small beside it as they really are.
COPY_S = 0.0136
STREAMED_SHARES = (0.25, 0.50, 0.75)
# Where weights rest, the profile and placement for that, and how many times as fast as the copies the link is.
TIERS = {"pinned": ("", "gpu:0", 1), "pageable": (",pinned=none", "gpu:0", 1), "disk": ("", "gpu:0:disk", 1000)}
COMPUTE_PER_COPY = ((2.0, "2:1"), (1.0, "1:1"), (0.5, "1:2"))


class TimedBlock(nn.Module):
    """A block that reads its weight and takes a given time on its device."""

    def __init__(self, compute_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(BLOCK_BYTES // 4), requires_grad=False)
        self.compute_s = compute_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        simdevice.advance(x.device, self.compute_s)
        return x * self.weight[:1]


def measure_engine(num_streamed: int, compute_s: float, tier: str = "pinned") -> float:
    """Return the virtual seconds of one run of the engine, its residents in place, nothing staged.

    Its budget holds the other blocks and two of those that stream; it may stream one more and copy further ahead.
    """
    pinned, placement, speed = TIERS[tier]
    spec = simdevice.SimDeviceSpec(total_bytes=64 << 20, h2d_bytes_per_s=speed * BLOCK_BYTES / COPY_S)
    model = nn.Sequential(*(TimedBlock(compute_s) for _ in range(NUM_BLOCKS)))
    budget_mb = (NUM_BLOCKS - num_streamed + 2) * BLOCK_BYTES / 1e6
    with (
        tempfile.TemporaryDirectory(prefix="highwater-overlap-") as directory,
        simdevice.cluster([spec]),
        torch.no_grad(),
        # A block has more windows than there are buffers, as one of 340 MB has.
        unittest.mock.patch.object(sizes, "BOUNCE_BUFFER_BYTES", BLOCK_BYTES // 4),
        unittest.mock.patch.object(WeightsSource, "read_into", read_slowly),
    ):
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        path = Path(directory, "model.safetensors")
        save_file(model.state_dict(), path)
        choices: dict[str, Any] = {"profile": f"{budget_mb:.6f}MB{pinned}", "placement": placement}
        with manage({"model": model}, files={"model": [path]}, manager=manager, **choices) as managed:
            managed_component = managed.members[0].managed
            x = torch.ones(1).to("sim:0")
            model(x)
            managed_component.shares[0].free_staging()
            managed_component.load(managed_component.plan)
            torch.accelerator.synchronize(0)
            simdevice.reset_clock()
            for _ in range(NUM_STEPS):
                model(x)
            seconds = simdevice.stream_time_s(torch.accelerator.current_stream(0))
            del x
    return seconds


def read_slowly(source: WeightsSource, targets: Sequence[tuple[Any, ...]], **choices: Any) -> None:
    """Read, in the virtual time that a copy takes."""
    read_into(source, targets, **choices)
    simdevice.advance("cpu", sum(target[1].nbytes for target in targets) / BLOCK_BYTES * COPY_S)


read_into = WeightsSource.read_into


def simulate_schedule(streamed: list[int], num_slots: int, compute_s: float) -> float:
    """Return the seconds of a run in which these blocks stream in order through so many slots."""
    freed: list[float] = []  # when the slot of each streamed use became free again
    copied = now = 0.0
    for _ in range(NUM_STEPS):
        for block in range(NUM_BLOCKS):
            if block in streamed:
                slot_free = freed[-num_slots] if len(freed) >= num_slots else 0.0
                copied = max(copied, slot_free) + COPY_S
                now = max(now, copied)
                freed.append(now + compute_s)
            now += compute_s
    return now


def measure() -> Result:
    """Measure the nine cases, each from three tiers; under half a minute."""
    simdevice.install("sim", num_devices=1)
    rows, ratios = [], []
    for share in STREAMED_SHARES:
        num_streamed = int(NUM_BLOCKS * share)
        for factor, label in COMPUTE_PER_COPY:
            compute_s = COPY_S * factor
            compute, transfer = NUM_BLOCKS * compute_s, num_streamed * COPY_S
            bound = NUM_STEPS * max(compute, transfer) + COPY_S
            engine, pageable, disk = (measure_engine(num_streamed, compute_s, tier) for tier in TIERS)
            prefix = simulate_schedule(list(range(NUM_BLOCKS - num_streamed, NUM_BLOCKS)), 2, compute_s)
            window = simulate_schedule(list(range(NUM_BLOCKS)), NUM_BLOCKS - num_streamed, compute_s)
            ratios += [seconds / bound for seconds in (engine, pageable, disk)]
            rows.append(
                {
                    "streamed": f"{share:.0%}",
                    "compute:copy": label,
                    "bound by": "compute" if compute >= transfer else "transfer",
                    "bound, ms/step": 1e3 * bound / NUM_STEPS,
                    "Highwater, ms/step": 1e3 * engine / NUM_STEPS,
                    "Highwater": engine / bound,
                    "from pageable RAM": pageable / bound,
                    "from disk": disk / bound,
                    "leading residents": prefix / bound,
                    "rotating window": window / bound,
                }
            )
    return Result(
        question=(
            f"Time of a run of {NUM_STEPS} steps over {NUM_BLOCKS} equal blocks, divided by max(compute, transfer) "
            "plus one block's copy per run; weights page-locked, in pageable RAM, or in a file that is read as fast. "
            "Virtual time."
        ),
        rows=rows,
        ratio=max(ratios),
        meaning="worst case over the nine from each tier, target at most 1.05",
    )
