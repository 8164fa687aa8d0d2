"""Attention processors that leave maps in a store: in a split the pipeline joins maps of one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import manage

DIM = 64
SPLIT = {"placement": "gpu:0&gpu:1@0.5"}


@dataclass
class Maps:
    found: list[torch.Tensor] = field(default_factory=list)


class Store:
    """Keeps maps as diffusers' pipelines do: of this step, and summed over the steps."""

    def __init__(self) -> None:
        self.step: dict[str, list[torch.Tensor]] = {"first": [], "second": []}
        self.sums: dict[str, list[torch.Tensor]] = {}
        self.last: tuple[str, torch.Tensor] | None = None
        self.maps = Maps()
        self.inner = [Maps(), Maps()]
        self.num_seen = 0

    def keep(self, tensor: torch.Tensor, number: int) -> None:
        self.step["first" if number < 2 else "second"].append(tensor)
        self.last = ("last", tensor)
        self.maps.found.append(tensor * 2)
        self.inner[number % 2].found.append(tensor * 3)
        self.num_seen += 1
        if number == 5:
            for name, tensors in self.step.items():
                if name in self.sums:
                    for total, each in zip(self.sums[name], tensors, strict=True):
                        total += each
                else:
                    self.sums[name] = [each.clone() for each in tensors]
            self.step = {"first": [], "second": []}

    def join(self) -> torch.Tensor:
        assert self.last is not None
        found = [*self.sums["first"], *self.sums["second"], *self.maps.found, self.last[1]]
        return torch.cat([*found, *self.inner[0].found, *self.inner[1].found])


class Processor:
    def __init__(self, store: Store, number: int) -> None:
        self.store = store
        self.number = number

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid()
        self.store.keep(x, self.number)
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.processor: Any = torch.sigmoid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.processor(self.linear(x))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention() for _ in range(6))).requires_grad_(False)


def run(net: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Return what a store has after two steps."""
    store = Store()
    maps = store.maps.found
    for number, layer in enumerate(net):
        layer.processor = Processor(store, number)
    net(net(x))
    assert store.num_seen == 12 and store.maps.found is maps
    return store.join()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("way", [SPLIT, SPLIT | {"profile": "0.08MiB"}], ids=["split", "streamed"])
def test_the_maps_of_all_blocks_are_on_one_device(machine, way: dict[str, str], mode: Any) -> None:
    x = torch.randn(2, DIM)
    with machine(8, 8) as manager, mode():
        want = run(build(), x)
        with manage(net := build(), manager=manager, **way):
            for _ in range(3):
                got = run(net, x.to("sim:0"))
                assert str(got.device) == "sim:0" and torch.equal(got.cpu(), want)
        del got
        for layer in net:
            layer.processor = None


def test_gradients_pass_through_a_store(machine) -> None:
    x = torch.randn(2, DIM, requires_grad=True)

    def gradient(net: nn.Sequential) -> torch.Tensor:
        (found,) = torch.autograd.grad(run(net, x.to("sim:0")).square().sum(), x)
        for layer in net:
            layer.processor = None
        return found

    with machine(8, 8) as manager:
        want = gradient(build().to("sim:0"))
        with manage(net := build(), manager=manager, **SPLIT, profile="0.08MiB"):
            got = gradient(net)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-4)  # sums are added up in another order


def test_a_store_is_as_it_was_after_a_failure(machine) -> None:
    x = torch.randn(2, DIM)
    store = Store()
    with machine(8, 8) as manager, torch.no_grad(), manage(net := build(), manager=manager, **SPLIT):
        for number, layer in enumerate(net):
            layer.processor = Processor(store, number)
        net(x)
        for kind in (ValueError, KeyboardInterrupt):

            def fail(*_: Any, kind: type[BaseException] = kind) -> None:
                raise kind

            handle = net[4].linear.register_forward_pre_hook(fail)
            with pytest.raises(kind):
                net(x)
            handle.remove()
            if kind is KeyboardInterrupt:  # which skips our exit: the next call recovers
                for layer in net:
                    layer.processor = torch.sigmoid
                net(x)
            assert {str(tensor.device) for tensor in store.maps.found} == {"sim:0"}
            assert {str(tensor.device) for tensors in store.sums.values() for tensor in tensors} == {"sim:0"}
        store.__init__()


class Sum:
    def __init__(self) -> None:
        self.value: Any = 0.0


class Scored(nn.Module):
    """Adds to a sum that comes deep in the arguments, and has a processor that keeps something, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.processor = Processor(Store(), 0)

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        x = self.linear(x)
        options["sum"].value += x.square().mean()
        self.processor.store.step["first"].append(x)
        return x


class Scoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scored() for _ in range(6))

    def forward(self, x: torch.Tensor, total: Sum) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, options={"sum": total})
        return x


@torch.no_grad()
def test_what_comes_as_an_argument_comes_beside_a_store(machine) -> None:
    x = torch.randn(2, DIM)
    torch.manual_seed(0)
    net = Scoring().requires_grad_(False)
    want = Sum()
    net(x, want)
    with machine(8, 8) as manager, manage(net, manager=manager, **SPLIT):
        for _ in range(2):
            got = Sum()
            net(x.to("sim:0"), got)
            assert str(got.value.device) == "sim:0" and torch.equal(got.value.cpu(), want.value)
        del got
        for block in net.blocks:
            assert {str(each.device) for each in block.processor.store.step["first"][1:]} == {"sim:0"}
            block.processor.store = Store()
