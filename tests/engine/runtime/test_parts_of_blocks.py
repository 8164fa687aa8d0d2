"""Blocks whose parents call what is inside them: they are brought for it, or waited for, and never guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from highwater.memory import manage


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
        manage(net, "0.45MiB", manager=manager)
        manage(modulated, "0.12MiB", manager=manager)
        before = num_hooked(net), num_hooked(modulated)
        net.skip = frozenset([2])
        net(torch.randn(2, 3, 64))
        modulated(torch.randn(3, 64))
        assert num_hooked(net) == before[0] - 7 * 3  # all blocks but the one that was left out
        assert num_hooked(modulated) == before[1]


def test_what_is_called_outside_of_forwards_is_entered_after_quiet_ones(toys, machine) -> None:
    """All stays on one device, and forwards do nothing at blocks; a block that is called by itself comes all the
    same."""
    net, x = toys.build_net().requires_grad_(False), torch.randn(2, 3, 64)
    given = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    with machine(8) as manager, torch.no_grad():
        managed = manage(net, placement="gpu:0", manager=manager)
        (member,) = managed.members
        block = net.get_submodule(member.managed.component.blocks[2].name)
        want, alone = net(x).cpu(), block(*given).cpu()
        for change in (lambda: None, member.managed.unload, lambda: member.managed.shrink("gpu:0", 1)):
            for _ in range(3):
                assert torch.equal(net(x).cpu(), want)
            change()
            before = member.last_use
            assert torch.equal(block(*given).cpu(), alone)
            assert member.last_use > before


@pytest.mark.parametrize("profile", ["0.12MiB", "auto"])
def test_what_is_inside_compiled_blocks_is_called_from_outside(machine, profile: str) -> None:
    net, x = Modulated().requires_grad_(False), torch.randn(3, 64)
    with machine(8) as manager, torch.no_grad():
        with manage(net, placement="gpu:0", manager=manager):
            want = net(x).cpu()
        with manage(net, profile, placement="gpu:0", compile=True, manager=manager):
            for _ in range(3):
                assert torch.allclose(net(x).cpu(), want, atol=1e-5)


def test_a_weight_that_is_used_without_a_call_has_arrived_each_time(machine) -> None:
    """Also of a block that is called later, and when the component comes back."""

    class Borrowing(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x * self.blocks[5][2].bias)
            return x

    net, x = Borrowing().requires_grad_(False), torch.randn(3, 64)
    with machine(8, h2d_bytes_per_s=1e7) as manager, torch.no_grad():
        here, want = x.to("sim:0"), net.to("sim:0")(x.to("sim:0")).cpu()
        net.to("cpu")
        managed = manage(net, placement="gpu:0", manager=manager)
        for _ in range(3):
            assert torch.equal(net(here).cpu(), want)
            managed.members[0].managed.unload()
        del here


def test_parts_of_blocks_on_two_devices_take_turns(machine) -> None:
    class Alternating(Modulated):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, last = self.blocks[0], self.blocks[5]
            shift = last.modulation(x)
            return first(x, shift) + last.inner(first.inner(last.modulation(x)))

    net, x = Alternating().requires_grad_(False), torch.randn(3, 64)
    with machine(8, 8) as manager, torch.no_grad():
        want = net(x)
        manage(net, placement="gpu:0&gpu:1@0.5", manager=manager)
        for _ in range(2):
            assert torch.allclose(net(x).cpu(), want, atol=1e-5)


class Staged(nn.Module):
    """Stages that are cut into the layers inside them where the budget is small."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, D]
            for inner in self.layers:
                x = torch.tanh(inner(x))
            return x

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(self.Stage() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


@pytest.mark.parametrize("profiles", [("auto", "0.04MiB"), ("0.04MiB", "auto"), ("auto", "0.04MiB", "auto")])
@pytest.mark.parametrize("is_used_between", [True, False])
def test_another_profile_cuts_other_blocks(machine, profiles: tuple[str, ...], is_used_between: bool) -> None:
    net, x = Staged().requires_grad_(False), torch.randn(3, 64)
    with machine(8) as manager, torch.no_grad():
        with manage(net, placement="gpu:0", manager=manager):
            want = net(x).cpu()
        with manage(net, profiles[0], placement="gpu:0", manager=manager) as managed:
            cuts = set()
            for profile in profiles[1:]:
                cuts.add(len(managed.members[0].managed.component.blocks))
                if is_used_between:
                    assert torch.equal(net(x).cpu(), want)
                managed.reprofile(profile, placement="gpu:0")
            cuts.add(len(managed.members[0].managed.component.blocks))
            assert cuts == {2, 6}
            for _ in range(2):
                assert torch.equal(net(x).cpu(), want)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())


def test_another_profile_brings_no_second_hooks(toys, machine) -> None:
    net = toys.build_net()
    with machine(8) as manager, manage(net, manager=manager) as managed:
        before = {module: len(module._forward_pre_hooks) for module in net.modules()}
        managed.reprofile("0.45MiB")
        managed.reprofile("auto")
        assert {module: len(module._forward_pre_hooks) for module in net.modules()} == before


def test_a_backward_pass_through_parts_that_stream_is_right(machine) -> None:
    torch.manual_seed(0)
    net, x = Layers().requires_grad_(False), torch.randn(3, 64, requires_grad=True)
    (want,) = torch.autograd.grad(net(x).square().sum(), x)
    with machine(8) as manager:
        manage(net, "0.12MiB", manager=manager)
        (gradient,) = torch.autograd.grad(net(x).square().sum(), x)
        assert torch.equal(gradient, want)
