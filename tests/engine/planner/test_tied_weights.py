"""Modules whose blocks share weights, in splits: right, or refused before anything moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import InvalidInput
from highwater.memory.planner.run import BlockTimes, Use

DIM, NUM_LAYERS = 32, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.gate(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def share_weight(net: Stack) -> None:
    net.layers[4].linear.weight = net.layers[1].linear.weight


def share_layer(net: Stack) -> None:
    net.layers[4].linear = net.layers[1].linear


def share_block(net: Stack) -> None:
    net.layers[4] = net.layers[1]


def share_with_the_rest(net: Stack) -> None:
    net.layers[4].linear.weight = net.embed.weight


@pytest.mark.parametrize("tie", [share_weight, share_layer, share_block, share_with_the_rest])
def test_a_split_of_tied_weights_computes_or_is_refused_before_anything_moves(
    machine: Callable, tie: Callable[[Stack], None]
) -> None:
    net = Stack().eval().requires_grad_(False)
    tie(net)
    given = torch.randn(2, DIM)
    want, refused = net(given), 0
    for placement in ("gpu:0&gpu:1", "gpu:0&gpu:1/3", "gpu:0&gpu:1/4", "gpu:0&gpu:1&gpu:2/5"):
        with machine(64, 64, 64) as manager, torch.no_grad():
            try:
                managed = manage({"transformer": net}, placement=placement, manager=manager)
            except InvalidInput as error:
                assert "are one weight, which is on one device; place it on gpu:0 alone" in str(error)
                refused += 1
                continue
            with managed:
                got = managed.run_micro_batches([lambda: net(given.to("sim:0"))] * 2)
                assert all(torch.allclose(each.cpu(), want, atol=1e-6) for each in got)
            del got
    assert refused


@pytest.mark.parametrize("tie", [None, share_weight, share_block, share_with_the_rest])
def test_auto_leaves_tied_weights_together(machine: Callable, tie: Callable[[Stack], None] | None) -> None:
    """Where groups in turn are faster, and where a split holds more; others it splits there."""
    net = Stack().eval().requires_grad_(False)
    if tie is not None:
        tie(net)
    num_blocks = NUM_LAYERS - (tie is share_block)
    times = {f"gpu:{index}": BlockTimes(blocks_s=(0.01,) * num_blocks) for index in range(2)}
    use = Use(component="transformer", num_passes=9, num_calls=2, activation_bytes=0, times=times)
    for mebibytes in (64.0, 0.03):
        with (
            machine(mebibytes, mebibytes) as manager,
            manage({"transformer": net}, manager=manager, uses=[use]) as managed,
        ):
            assert len(managed.plan["transformer"].shares) == (2 if tie is None else 1)
