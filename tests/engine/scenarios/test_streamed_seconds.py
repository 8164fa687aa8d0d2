"""The seconds that a plan tells of a forward that streams are those that a device takes, of kernels small or large."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.planner import BlockTimes, Stretch
from highwater.memory.planner.launched_passes import launched_pass_seconds
from highwater.memory.planner.sizes import Sizes
from highwater.memory.tracing import launched, trace_forward

WIDTH = 256
RATES = {"flops_per_s": 1e12, "memory_bytes_per_s": 1e11, "launch_s": 5e-6}


class Block(nn.Module):
    """A matrix, and kernels that the host launches for longer than they compute."""

    def __init__(self, num_small: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)
        self.num_small = num_small

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_small):
            x = x + 1
        return self.linear(x)[:, :WIDTH]


class Net(nn.Module):
    def __init__(self, num_small: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(num_small, WIDTH * (2 + n % 3)) for n in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("gap", [0, 30])
@pytest.mark.parametrize("link", [2e9, 8e9, 40e9])
@pytest.mark.parametrize(("rows", "num_small"), [(8, 2), (8, 25), (2000, 2)])
def test_a_forward_takes_as_long_as_the_plan_says(
    machine: Any, rows: int, num_small: int, link: float, gap: int
) -> None:
    net = Net(num_small).requires_grad_(False)
    x = torch.zeros(rows, WIDTH)
    trace = trace_forward(net, (x,), blocks=[f"blocks.{n}" for n in range(9)])
    rates = RATES | {"link_bytes_per_s": link}
    with machine(256, h2d_bytes_per_s=link, **RATES) as manager, torch.inference_mode():
        managed = manage({"net": net}, manager=manager, placement="gpu:0", profile="3.3MiB")
        part = managed.members[0].managed
        here = x.to("sim:0")
        taken: list[list[torch.Event]] = []

        def mark() -> torch.Event:
            event = torch.Event(device=torch.device("sim:0"), enable_timing=True)
            event.record(torch.accelerator.current_stream(0))
            return event

        net.register_forward_pre_hook(lambda *_: taken.append([mark()]))
        net.register_forward_hook(lambda *_: taken[-1].append(mark()))
        for _ in range(10):
            net(here)
            for _ in range(gap):
                here += 0
        torch.accelerator.synchronize("sim:0")
        (share,) = part.plan.shares
        assert share.streamed
        found = median(begin.elapsed_time(end) / 1e3 for begin, end in taken[-4:])
        names = {block.name: number for number, block in enumerate(part.component.blocks)}
        stretches = [
            Stretch(block=names.get(each.block), launch_s=one.launch_s, busy_s=one.busy_s, end_s=one.end_s)
            for each in trace.segments
            for one in launched(each.kernels, **rates)
        ]
        between = Stretch(block=None, launch_s=gap * RATES["launch_s"], busy_s=0.0, end_s=gap * RATES["launch_s"])
        times = BlockTimes(
            blocks_s=(0.0,) * 9,
            stretches=tuple(stretches),
            following=(between,),
            copy_launch_s=RATES["launch_s"],
        )
        told = launched_pass_seconds(share, times, Sizes(part.component, part.plan.forms).blocks, link)
        assert told == pytest.approx(found, rel=0.04)
        del here
        managed.release()
