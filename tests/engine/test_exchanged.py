"""Blocks that change places in a managed module, and buffers that are assigned from outside."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import UnsafeState

DIM = 32
X = torch.randn(3, DIM, generator=torch.Generator().manual_seed(0))
WAYS = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.013MiB"},
    "split": {"placement": "gpu:0&gpu:1"},
    "split and streamed": {"placement": "gpu:0&gpu:1", "profile": "gpu:0=0.013MiB,gpu:1=0.013MiB"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.register_buffer("gain", torch.full((DIM,), 0.5))
        self.register_buffer("shift", torch.full((DIM,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, D]
        return self.inner(x) * self.gain + self.shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.register_buffer("scale", torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def exchange(net: Net, first: int, second: int) -> None:
    net.blocks[first], net.blocks[second] = net.blocks[second], net.blocks[first]


def exchange_inside(net: Net) -> None:
    first, last = net.blocks[1], net.blocks[4]
    first.inner, last.inner = last.inner, first.inner


def turn_round(net: Net) -> None:
    net.blocks = nn.ModuleList(list(net.blocks)[::-1])


EXCHANGES: dict[str, Callable[[Net], None]] = {
    "neighbours": lambda net: exchange(net, 1, 2),
    "first and last": lambda net: exchange(net, 0, 4),
    "all": turn_round,
    "layers inside": exchange_inside,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", EXCHANGES)
@torch.no_grad()
def test_blocks_that_change_places_are_refused_until_reprofile_takes_them(machine, kind: str, way: str) -> None:
    torch.manual_seed(0)
    net = Net().requires_grad_(False)
    plain = copy.deepcopy(net)
    EXCHANGES[kind](plain)
    want = plain(X)
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        net(X)
        EXCHANGES[kind](net)
        for _ in range(2):
            with pytest.raises(UnsafeState, match=r"^model: blocks\.\d holds layers of blocks\.\d now: call reprofile"):
                net(X)
        assert not managed.members[0].leases
        managed.reprofile()
        for _ in range(2):
            assert torch.allclose(net(X).cpu(), want, atol=1e-6)
    assert torch.equal(net(X), want)


@torch.no_grad()
def test_blocks_that_are_back_at_their_places_compute_again(machine) -> None:
    net = Net().requires_grad_(False)
    with machine(8) as manager, manage(net, manager=manager, **WAYS["streamed"]):
        want = net(X).cpu()
        exchange(net, 1, 2)
        with pytest.raises(UnsafeState):
            net(X)
        exchange(net, 1, 2)
        assert torch.equal(net(X).cpu(), want)


def assign_gain(net: Net) -> None:
    net.blocks[3].gain = torch.full((DIM,), 2.0)


def assign_all(net: Net) -> None:
    for block in net.blocks:
        block.gain, block.shift = torch.full((DIM,), 2.0), torch.full((DIM,), 0.25)
    net.scale = torch.full((DIM,), 3.0)


def assign_another_form(net: Net) -> None:
    net.blocks[1].gain = torch.full((1,), 2.0)
    net.blocks[4].shift = torch.full((DIM,), 2.0, dtype=torch.float16)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("assign", "state"),
    [
        (assign_gain, "loaded"),
        (assign_gain, "unloaded"),
        (assign_all, "loaded"),
        (assign_all, "unloaded"),
        (assign_another_form, "loaded"),
    ],
)
@torch.no_grad()
def test_a_buffer_that_is_assigned_in_host_memory_counts_from_the_next_forward_on(
    machine, assign: Callable[[Net], None], way: str, state: str
) -> None:
    net = Net().requires_grad_(False)
    plain = copy.deepcopy(net)
    assign(plain)
    want = plain(X)
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        net(X)
        if state == "unloaded":
            managed.members[0].attachment.unload()
        assign(net)
        for _ in range(2):
            assert torch.allclose(net(X).cpu(), want, atol=1e-6)
        managed.members[0].attachment.unload()
        assert torch.allclose(net(X).cpu(), want, atol=1e-6)
    assert torch.equal(net(X), want)
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in net.state_dict().items())
