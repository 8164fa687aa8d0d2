"""Blocks whose parents call what is inside them: they are brought for it, or waited for, and never guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import UnsafeState


def layer() -> nn.Linear:
    return nn.Linear(64, 64)


class Layers(nn.Module):
    """Sequential blocks whose layers the parent calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(layer(), nn.Tanh(), layer()) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, D]
        for block in self.blocks:
            for inner in block:
                x = inner(x)
        return x


class Levels(nn.Module):
    """Levels that are bare modules, as those of the usual VAE decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList()
        for _ in range(4):
            level = nn.Module()
            level.block = nn.ModuleList(layer() for _ in range(3))
            self.up.append(level)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, D]
        for level in reversed(self.up):
            for block in level.block:
                x = torch.tanh(block(x))
        return x


class Modulated(nn.Module):
    """Blocks whose modulations are all computed before the first of them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.modulation, self.inner = layer(), layer()

        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:  # [B, D] each
            return self.inner(x) + shift

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifts = [block.modulation(x) for block in self.blocks]
        for block, shift in zip(self.blocks, shifts, strict=True):
            x = block(x, shift)
        return x


class Weights(nn.Module):
    """Blocks whose weights the parent uses without calling anything."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(nn.functional.linear(x, block.weight, block.bias))
        return x


PLACES = {
    "resident": ("auto", "gpu:0"),
    "streamed": ("0.12MiB", "gpu:0"),
    "split": ("auto", "gpu:0&gpu:1"),
    "split and streamed": ("gpu:0=0.08MiB,gpu:1=0.08MiB", "gpu:0&gpu:1"),
}


@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [Layers, Levels, Modulated])
def test_what_is_inside_a_block_is_called_from_outside(machine, kind, place: str, precision: str) -> None:
    net, x = kind().requires_grad_(False), torch.randn(3, 64)
    profile, placement = PLACES[place]
    with machine(8, 8) as manager, torch.no_grad():
        here = x.to("sim:0")  # no copy of the input may hide a race
        with manage(net, placement="gpu:0", precision=precision, manager=manager):
            want = net(x).cpu()
        with manage(net, profile, placement=placement, precision=precision, manager=manager):
            for _ in range(3):
                assert torch.equal(net(here).cpu(), want)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
        del here


@pytest.mark.parametrize("compiles", [False, True])
def test_weights_that_are_used_without_a_call_have_arrived(machine, compiles: bool) -> None:
    net, x = Weights().requires_grad_(False), torch.randn(3, 64)
    with machine(8) as manager, torch.no_grad():
        here, want = x.to("sim:0"), net.to("sim:0")(x.to("sim:0")).cpu()
        net.to("cpu")
        with manage(net, compile=compiles, manager=manager):
            assert torch.equal(net(here).cpu(), want)
        del here


def test_hooks_inside_blocks_go_once_nobody_needs_them(toys, machine) -> None:
    net, modulated = toys.build_net(), Modulated().requires_grad_(False)

    def num_hooked(root: nn.Module) -> int:
        return sum(bool(module._forward_pre_hooks) for module in root.modules())

    with machine(8) as manager, torch.no_grad():
        manage({"net": net, "modulated": modulated}, manager=manager)
        before = num_hooked(net), num_hooked(modulated)
        net.skip = frozenset([2])
        net(torch.randn(2, 3, 64))
        modulated(torch.randn(3, 64))
        assert num_hooked(net) == before[0] - 7 * 3  # all blocks but the one that was left out
        assert num_hooked(modulated) == before[1]


def test_another_profile_brings_no_second_hooks(toys, machine) -> None:
    net = toys.build_net()
    with machine(8) as manager, manage(net, manager=manager) as managed:
        before = {module: len(module._forward_pre_hooks) for module in net.modules()}
        managed.reprofile("0.45MiB")
        managed.reprofile("auto")
        assert {module: len(module._forward_pre_hooks) for module in net.modules()} == before


def test_a_backward_pass_through_a_part_that_streams_is_refused(machine) -> None:
    net, x = Layers().requires_grad_(False), torch.randn(3, 64, requires_grad=True)
    with machine(8) as manager:
        manage(net, "0.12MiB", manager=manager)
        with pytest.raises(UnsafeState, match="streams"):
            net(x).sum().backward()
