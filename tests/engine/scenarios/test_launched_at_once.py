"""Calls that compute at the same time share one host: what a step of small kernels is predicted to take, and takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.planner import Use
from highwater.memory.tracing import trace_forward
from highwater.memory.weights.module_component import component_from_module
from highwater.nodes.call_seconds import times_of
from highwater.nodes.described_hardware import DeviceRates

WIDTH = 256
NUM_BLOCKS = 8
NUM_CALLS = 3
LINK = 10e9
LINKS = {"h2d_bytes_per_s": LINK, "d2h_bytes_per_s": LINK, "peer_bytes_per_s": LINK}
RATES = {"flops_per_s": 1e12, "memory_bytes_per_s": 1e11, "launch_s": 5e-6}
# About as many kernels as a block of a diffusion transformer has.
NUM_SMALL = 60


class Block(nn.Module):
    """A matrix, and kernels that change its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(NUM_SMALL):
            x = x + 1
        return self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def use_of(net: nn.Module, rows: int) -> Use:
    """Return steps of several calls, with the times of a traced one on each of two devices."""
    component = component_from_module(net, name="net", kind="diffusion")
    trace = trace_forward(net, (torch.zeros(rows, WIDTH),), blocks=[block.name for block in component.blocks])
    times = times_of(trace, component, DeviceRates(link_bytes_per_s=LINK, **RATES))
    return Use(
        component="net",
        kind="diffusion",
        num_passes=4,
        num_calls=NUM_CALLS,
        carried_bytes=rows * WIDTH * 4,
        activation_bytes=0,
        times={"gpu:0": times, "gpu:1": times},
    )


def note_links(manager: Any) -> None:
    for device in ("gpu:0", "gpu:1"):
        manager.capacity.note_link(manager.capacity.devices[device], LINK, is_pinned=True)


@pytest.mark.parametrize("placement", ["gpu:0&gpu:1", "gpu:0&gpu:1/4"])
@pytest.mark.parametrize("rows", [8, 300, 2000], ids=["the host's time", "both", "the device's time"])
def test_a_step_takes_what_was_predicted_from_the_kernels_of_a_call(
    machine: Any, steady_seconds: Callable[..., float], placement: str, rows: int
) -> None:
    net = Net().requires_grad_(False)
    with machine(256, 256, **LINKS, **RATES) as manager, torch.no_grad():
        note_links(manager)
        with manage({"net": net}, manager=manager, placement=placement, uses=[use_of(net, rows)]) as managed:
            given = [torch.zeros(rows, WIDTH, device="sim:0") for _ in range(NUM_CALLS)]
            calls = [partial(net, each) for each in given]
            step_s = steady_seconds(lambda: managed.run_micro_batches(calls))
            run = managed.plan.run
            assert run is not None
            assert run.uses[0].pass_s == pytest.approx(step_s, rel=0.05)
            given.clear()
            calls.clear()


@pytest.mark.parametrize(("rows", "num_devices"), [(8, 1), (2000, 2)], ids=["the host's time", "the device's time"])
def test_auto_splits_only_what_the_host_leaves_time_for(machine: Any, rows: int, num_devices: int) -> None:
    net = Net().requires_grad_(False)
    with machine(256, 256, **LINKS, **RATES) as manager, torch.no_grad():
        note_links(manager)
        with manage({"net": net}, manager=manager, placement="auto", uses=[use_of(net, rows)]) as managed:
            assert len(managed.plan["net"].shares) == num_devices
