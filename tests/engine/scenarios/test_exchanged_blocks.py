"""Blocks that change places in a managed module, and buffers that are assigned from outside."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file
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


class Layered(nn.Module):
    """Layers beside the blocks, and two in each block, that may take each other's place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def take_place(net: Layered) -> None:
    net.first = net.last


def take_place_and_leave(net: Layered) -> None:
    net.first, net.last = net.last, nn.Identity()


def take_place_twice(net: Layered) -> None:
    net.first = net.last
    net.last = nn.Identity()
    net.blocks[2][0] = net.blocks[2][1]


def take_places_in_blocks(net: Layered) -> None:
    for block in net.blocks:
        block[0] = block[1]


def exchange_layers(net: Layered) -> None:
    net.first, net.last = net.last, net.first
    for block in net.blocks:
        block[0], block[1] = block[1], block[0]


LAYER_WAYS = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.04MiB"},
    "split": {"placement": "gpu:0&gpu:1"},
    "eight bits": {"placement": "gpu:0", "precision": "fp8 scaled"},
    "disk": {"placement": "gpu:0:disk"},
    "disk, streamed": {"placement": "gpu:0:disk", "profile": "0.04MiB"},
}


@pytest.mark.parametrize("way", LAYER_WAYS)
@pytest.mark.parametrize(
    "change", [take_place, take_place_and_leave, take_place_twice, take_places_in_blocks, exchange_layers]
)
@pytest.mark.parametrize("again", [False, True], ids=["", "reprofiled"])
@torch.no_grad()
def test_layers_that_take_the_place_of_others_keep_their_weights(
    machine, tmp_path, change: Callable[[Layered], None], way: str, again: bool
) -> None:
    torch.manual_seed(0)
    net = Layered().requires_grad_(False)
    files = {}
    if "disk" in way:
        save_file(net.state_dict(), tmp_path / "net.safetensors")
        files = {"files": {"net": tmp_path / "net.safetensors"}}
    with machine(8, 8) as manager, manage({"net": net}, manager=manager, **files, **LAYER_WAYS[way]) as managed:
        net(X)
        plain = Layered().requires_grad_(False)
        plain.load_state_dict({name: weight.cpu() for name, weight in net.state_dict().items()})
        change(plain)
        change(net)
        for _ in range(2):
            assert torch.allclose(net(X).cpu(), plain(X), atol=1e-6)
        if again:
            managed.reprofile()
            assert torch.allclose(net(X).cpu(), plain(X), atol=1e-6)
        managed.members[0].managed.unload()
        assert torch.allclose(net(X).cpu(), plain(X), atol=1e-6)
        assert all(torch.equal(weight.cpu(), plain.state_dict()[name]) for name, weight in net.state_dict().items())
    assert torch.equal(net(X), plain(X))
    assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in net.state_dict().items())


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
            managed.members[0].managed.unload()
        assign(net)
        for _ in range(2):
            assert torch.allclose(net(X).cpu(), want, atol=1e-6)
        managed.members[0].managed.unload()
        assert torch.allclose(net(X).cpu(), want, atol=1e-6)
    assert torch.equal(net(X), want)
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in net.state_dict().items())
