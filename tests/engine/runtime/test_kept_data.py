"""Data of weights that other code keeps while the weights have other data, and gives back later."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import UnsafeState
from highwater.memory.weights.cast_form import find_scale
from highwater.memory.weights.fp8 import encode_fp8

X = torch.randn(2, 5, 64)
WAYS = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.45MiB"},
    "pageable": {"placement": "gpu:0:host", "profile": "0.45MiB"},
    "split": {"placement": "gpu:0&gpu:1@0.5"},
    "eight bits": {"placement": "gpu:0", "precision": "fp8 scaled"},
    "eight bits, streamed": {"placement": "gpu:0", "precision": "fp8 scaled", "profile": "0.45MiB"},
    "on the CPU": {"placement": "cpu"},
    "eight bits on the CPU": {"placement": "cpu", "precision": "fp8 scaled"},
}
ALWAYS_RIGHT = ("eight bits", "eight bits, streamed", "eight bits on the CPU")
"""Of matrices; in the other ways former data may be refused."""
NAMES = [
    "doubles.1.up.weight",
    "doubles.2.up.weight",
    "singles.0.up.weight",
    "singles.1.up.weight",
    "singles.1.up.bias",
]


def round_to_eight_bits(net: nn.Module, names) -> None:
    for name in names:
        weight = net.get_parameter(name)
        scale = find_scale(weight, name=name)
        weight.copy_(encode_fp8(weight.detach(), scale).to(weight.dtype) * scale)


class Keeper:
    """Does with the data of a module's weights what a seed says."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.kept: list[tuple[str, torch.Tensor]] = []

    def do(self, seed: int) -> None:
        chosen = random.Random(seed)
        deed = chosen.choice(["keep", "keep", "keep a view", "assign", "assign", "give back", "exchange"])
        name = chosen.choice(NAMES)
        weight = self.net.get_parameter(name)
        if deed == "keep":
            self.kept.append((name, weight.data))
        elif deed == "keep a view":
            self.kept.append((name, weight.data.view(weight.shape)))
        elif deed == "assign":
            weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed))
        elif deed == "give back" and self.kept:
            name, data = chosen.choice(self.kept)
            self.net.get_parameter(name).data = data
        elif deed == "exchange":
            one, other = (self.net.get_parameter(name) for name in NAMES[2:4])
            one.data, other.data = other.data, one.data


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_what_is_kept_stays_and_counts_when_it_is_given_back(toys, machine, way: str, evicts: bool, seed: int) -> None:
    net, other = toys.build_net(), toys.build_net()
    ours, theirs = Keeper(net), Keeper(other)
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        forms = managed.members[0].managed.plan.forms
        for step in range(10):
            number = 100 * seed + step
            try:
                ours.do(number)
            except UnsafeState as refusal:
                assert "keep a clone()" in str(refusal) and "\n" not in str(refusal) and way not in ALWAYS_RIGHT
                continue
            theirs.do(number)
            if random.Random(number).random() < 0.6:
                round_to_eight_bits(other, forms)
                assert torch.equal(net(X).cpu(), other(X))
                if evicts:
                    managed.members[0].managed.unload()
        round_to_eight_bits(other, forms)
        assert torch.equal(net(X).cpu(), other(X))
        ours.kept.clear()
        managed.release()
        for name, weight in net.named_parameters():
            assert torch.equal(weight, other.get_parameter(name))


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_two_weights_exchange_their_data(toys, machine, way: str) -> None:
    net, other = toys.build_net(), toys.build_net()
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        round_to_eight_bits(other, managed.members[0].managed.plan.forms)
        for module in (net, other):
            for path in ("up.weight", "down.bias"):
                one, another = (module.get_parameter(f"singles.{number}.{path}") for number in (0, 1))
                one.data, another.data = another.data, one.data
            if module is net:
                for _ in range(2):
                    got = net(X).cpu()
        assert torch.equal(got, other(X))


@torch.no_grad()
def test_data_kept_over_the_release_stay_what_they_were(toys, machine) -> None:
    net = toys.build_net()
    with machine(8) as manager, manage(net, placement="gpu:0", precision="fp8 scaled", manager=manager) as managed:
        weight = net.singles[0].up.weight
        kept, want = weight.data, weight.detach().clone()
        weight.data = torch.zeros(weight.shape)
        net(X)
        managed.release()
        assert torch.equal(kept, want) and not net.singles[0].up.weight.any()


def assign(weight: nn.Parameter, value: torch.Tensor) -> None:
    weight.data = value


def write_together(weight: nn.Parameter, value: torch.Tensor) -> None:
    torch._foreach_mul_([weight], 0.5)
    torch._foreach_add_([weight], [value.to(weight.device)])


WRITES = {
    "assigns data": assign,
    "multiplies": lambda weight, value: weight.mul_(1.25),
    "copies": lambda weight, value: weight.copy_(value),
    "sets items": lambda weight, value: weight.__setitem__(slice(0, 3), value[:3]),
    "adds to data": lambda weight, value: weight.data.add_(value.to(weight.device)),
    "as an optimizer": write_together,
}


@pytest.mark.parametrize(("taken", "evicts"), [("at rest", False), ("at rest", True), ("after a forward", False)])
@pytest.mark.parametrize(
    ("way", "write"),
    [
        pytest.param(way, write, marks=[] if way == "resident" or write == "assigns data" else [pytest.mark.slow])
        for way in WAYS
        for write in WRITES
    ],
)
@torch.no_grad()
def test_writes_to_kept_parameters_count_each_time(
    toys, machine, way: str, write: str, taken: str, evicts: bool
) -> None:
    """Parameters from before the module was loaded, as an EMA or an optimizer keeps them."""
    net, other = toys.build_net(), toys.build_net()
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        forms = managed.members[0].managed.plan.forms
        round_to_eight_bits(other, forms)
        if taken == "after a forward":
            net(X)
        ours, theirs = list(net.parameters()), list(other.parameters())
        if taken == "at rest":
            net(X)
        for number in range(3):
            for seed, weights in enumerate(zip(ours, theirs, strict=True)):
                for weight in weights:
                    random_values = torch.Generator().manual_seed(1000 * number + seed)
                    WRITES[write](weight, torch.randn(weight.shape, generator=random_values) * 0.1)
            round_to_eight_bits(other, forms)
            assert torch.equal(net(X).cpu(), other(X)), number
            if evicts:
                managed.members[0].managed.unload()


@torch.no_grad()
def test_writes_on_the_device_and_to_a_kept_parameter_are_refused_in_one_line(toys, machine) -> None:
    net, other = toys.build_net(), toys.build_net()
    with machine(8) as manager, manage(net, placement="gpu:0", manager=manager):
        kept = net.singles[0].up.weight
        net(X)
        for module in (net, other):
            module.singles[0].up.weight.mul_(2)
        kept.add_(1)
        with pytest.raises(UnsafeState, match=r"^model: [^\n]*changed both on the device and in RAM; [^\n]*$"):
            net(X)
        assert torch.equal(net(X).cpu(), other(X))


@torch.no_grad()
def test_what_a_forward_keeps_in_buffers_stays_when_a_kept_parameter_is_written(toys, machine) -> None:
    net, other = toys.build_net(), toys.build_net()
    with machine(8) as manager, manage(net, placement="gpu:0", manager=manager):
        kept = [module.singles[0].up.weight for module in (net, other)]
        net(X)
        for module, weight in zip((net, other), kept, strict=True):
            module.singles[0].gain.mul_(3)
            weight.mul_(2)
        for _ in range(2):
            assert torch.equal(net(X).cpu(), other(X))
