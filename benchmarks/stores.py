"""What a step takes whose blocks stream from another GPU, from page-locked RAM, or from their file, in virtual time.

Two simulated cards whose links to the host are slower than what joins them: 12 GB/s against 48, as on boards that give
each card eight lanes and have a bridge between both. A stack of equal blocks with the copy and compute times of a Flux
double block streams a part of them. From the other card they come directly, or, on cards without access to each other's
memory, in two legs through page-locked RAM. A file is read at 3 GB/s. A run's time is compared with the longer of all
computing and all copying from the other card, which no schedule can beat, plus one copy.
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
from highwater.memory.transfer import peer_copies
from highwater.memory.weights.source import WeightsSource

from .case import Result
from .overlap import BLOCK_BYTES, NUM_STEPS, TimedBlock, read_into

NUM_BLOCKS = 24
# A double block of Flux in bf16, and what it computes in a step on a card of that class.
REAL_BYTES = 340e6
COMPUTE_S = 0.012
HOST_BYTES_PER_S, PEER_BYTES_PER_S, FILE_BYTES_PER_S = 12e9, 48e9, 3e9
STREAMED_SHARES = (0.25, 0.50, 0.75)
# Placement and whether the cards have access to each other, by what the column says.
WAYS = {
    "from gpu:1, peer": ("gpu:0:gpu:1", True),
    "from gpu:1, through RAM": ("gpu:0:gpu:1", False),
    "page-locked RAM": ("gpu:0:pinned", True),
    "file": ("gpu:0:disk", True),
}
PIECES = 16


def scaled(bytes_per_s: float) -> float:
    """Return the speed at which a block of the simulation takes as long as a real one."""
    return bytes_per_s * BLOCK_BYTES / REAL_BYTES


def measure_way(num_streamed: int, placement: str, *, has_peer_access: bool) -> float:
    """Return the virtual seconds of one run, its residents in place and nothing staged.

    Its budget holds the other blocks and two of those that stream.
    """
    spec = simdevice.SimDeviceSpec(
        total_bytes=64 << 20,
        h2d_bytes_per_s=scaled(HOST_BYTES_PER_S),
        d2h_bytes_per_s=scaled(HOST_BYTES_PER_S),
        peer_bytes_per_s=scaled(PEER_BYTES_PER_S),
        has_peer_access=has_peer_access,
    )
    model = nn.Sequential(*(TimedBlock(COMPUTE_S) for _ in range(NUM_BLOCKS)))
    budget_mb = (NUM_BLOCKS - num_streamed + 2) * BLOCK_BYTES / 1e6
    with (
        tempfile.TemporaryDirectory(prefix="highwater-stores-") as directory,
        simdevice.cluster([spec] * 2),
        torch.no_grad(),
        # A block has more pieces than there are buffers, as one of 340 MB has.
        unittest.mock.patch.object(sizes, "BOUNCE_BUFFER_BYTES", BLOCK_BYTES // 4),
        unittest.mock.patch.object(peer_copies, "BUFFER_BYTES", BLOCK_BYTES // PIECES),
        unittest.mock.patch.object(WeightsSource, "read_into", read_slowly),
    ):
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        path = Path(directory, "model.safetensors")
        save_file(model.state_dict(), path)
        files: dict[str, Any] = {"files": {"model": [path]}} if placement.endswith("disk") else {}
        with manage(
            {"model": model}, f"gpu:0={budget_mb:.6f}MB", placement=placement, manager=manager, **files
        ) as managed:
            managed_component = managed.members[0].managed
            x = torch.ones(1).to("sim:0")
            model(x)
            (share,) = managed_component.plan.shares
            assert len(share.streamed) >= num_streamed - 2
            assert (len(share.stored) == len(share.streamed)) == (placement == "gpu:0:gpu:1")
            managed_component.shares[0].free_staging()
            managed_component.load(managed_component.plan)
            for index in range(2):
                torch.accelerator.synchronize(index)
            simdevice.reset_clock()
            for _ in range(NUM_STEPS):
                model(x)
            seconds = simdevice.stream_time_s(torch.accelerator.current_stream(0))
            del x
    return seconds


def read_slowly(source: WeightsSource, targets: Sequence[tuple[Any, ...]], **choices: Any) -> bool:
    """Read, in the virtual time that a disk takes."""
    was_cached = read_into(source, targets, **choices)
    simdevice.advance("cpu", sum(target[1].nbytes for target in targets) / scaled(FILE_BYTES_PER_S))
    return was_cached


def measure() -> Result:
    """Measure three shares of streamed blocks, each in four ways; under a minute."""
    simdevice.install("sim", num_devices=2)
    rows, ratios = [], []
    copy_s = REAL_BYTES / PEER_BYTES_PER_S
    for share in STREAMED_SHARES:
        num_streamed = int(NUM_BLOCKS * share)
        bound = NUM_STEPS * max(NUM_BLOCKS * COMPUTE_S, num_streamed * copy_s) + copy_s
        taken = {
            way: measure_way(num_streamed, placement, has_peer_access=peer) for way, (placement, peer) in WAYS.items()
        }
        ratios.append(taken["from gpu:1, peer"] / bound)
        rows.append(
            {
                "streamed": f"{share:.0%}",
                "bound, ms": 1e3 * bound / NUM_STEPS,
                **{f"{way}, ms": 1e3 * seconds / NUM_STEPS for way, seconds in taken.items()},
            }
        )
    return Result(
        question=(
            f"Time of a step over {NUM_BLOCKS} equal blocks of 340 MB that compute for 12 ms each, by where the "
            "streamed ones come from: the other of two cards, directly at 48 GB/s or through page-locked RAM at 12 "
            "GB/s a leg; page-locked RAM at 12 GB/s; a file that is read at 3 GB/s. Virtual time; bound: all "
            "computing, or all copying from the other card at 48 GB/s."
        ),
        rows=rows,
        ratio=max(ratios),
        meaning="directly from the other card, to the bound, worst case; target at most 1.05",
    )
