"""A component that streams and computes two sizes in a run: each use takes what the plan says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.planner import BlockTimes, Use
from highwater.memory.units import MIB

NUM_BLOCKS = 12
LINK = 1e9
COPY_S = MIB / LINK
ROW_S = COPY_S / 10
RATES = {"flops_per_s": 1e30, "memory_bytes_per_s": 1e30, "launch_s": 0.0, "h2d_bytes_per_s": LINK}


class RowBlock(nn.Module):
    """Computes for as long as its input has rows."""

    def __init__(self, advance: Callable[[torch.device, float], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MIB // 4), requires_grad=False)
        self.advance = advance

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.advance(hidden.device, len(hidden) * ROW_S)
        return hidden + 1


class RowNet(nn.Module):
    def __init__(self, advance: Callable[[torch.device, float], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RowBlock(advance) for _ in range(NUM_BLOCKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.mark.parametrize(("first", "second"), [(20, 1), (10, 4), (4, 10)])
@pytest.mark.parametrize("room_mib", [4.5, 7.5, 10.5])
def test_each_use_takes_what_was_predicted(
    machine: Any, sim: Any, steady_seconds: Callable[..., float], first: int, second: int, room_mib: float
) -> None:
    uses = [
        Use(
            component="net",
            kind="diffusion",
            num_passes=6,
            activation_bytes=0,
            times={"gpu:0": BlockTimes(blocks_s=(rows * ROW_S,) * NUM_BLOCKS)},
        )
        for rows in (first, second)
    ]
    net = RowNet(sim.advance)
    with machine(64, **RATES) as manager, torch.no_grad():
        manager.capacity.note_link(manager.capacity.devices["gpu:0"], LINK, is_pinned=True)
        managed = manage({"net": net}, manager=manager, placement="gpu:0", profile=f"{room_mib}MiB", uses=uses)
        with managed:
            run = managed.plan.run
            assert run is not None and managed.plan["net"].streams
            predicted = [use.pass_s for use in run.uses]
            taken = []
            for rows in (first, second):
                hidden = torch.zeros(rows, 4, device="sim:0")
                for _ in range(4):
                    net(hidden)
                taken.append(steady_seconds(lambda hidden=hidden: [net(hidden) for _ in range(8)]) / 8)
            assert predicted == pytest.approx(taken, rel=0.05)
            del hidden
