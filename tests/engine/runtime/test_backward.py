"""Backward passes through managed modules: gradients of inputs are those of the module unmanaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import UnsafeState
from highwater.memory.options.precision import Precision

DIM = 64
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.45MiB"},
    "pageable": {"placement": "gpu:0", "profile": "0.45MiB,pinned=none"},
    "split": {"placement": "gpu:0&gpu:1@0.5"},
    "split and streamed": {"placement": "gpu:0&gpu:1@0.5", "profile": "gpu:0=0.45MiB,gpu:1=0.3MiB"},
    "fp8": {"placement": "gpu:0", "precision": "fp8 scaled"},
    "fp8 streamed": {"placement": "gpu:0", "precision": "fp8 scaled", "profile": "0.32MiB"},
    "fp8, layers": {"placement": "gpu:0", "precision": Precision("fp8 scaled", granularity="layer")},
    "fp8, layers streamed": {
        "placement": "gpu:0",
        "precision": Precision("fp8 per row", granularity="layer"),
        "profile": "0.2MiB",
    },
    "fp8, whole": {"placement": "gpu:0", "precision": Precision("fp8 scaled", granularity="component")},
    "bf16": {"placement": "gpu:0", "precision": "bf16", "profile": "0.45MiB"},
    "fp8 on the CPU": {"placement": "cpu", "precision": "fp8 scaled"},
}


def input_gradient(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x)
    return gradient.cpu()


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_of_an_input_is_right(toys, machine, way: str) -> None:
    x = torch.randn(2, 5, DIM)
    with machine(8, 8) as manager:
        net = toys.build_net()
        with manage(net, manager=manager, **WAYS[way]) as managed:
            shares = managed.plan.components[0].shares
            assert any(share.streamed for share in shares) == ("streamed" in way or way in ("pageable", "bf16"))
            got = [input_gradient(net, x) for _ in range(3)]
        device = "cpu" if "CPU" in way else "sim:0"
        want = input_gradient(net.to(device), x.to(device))  # eight bits come back widened
        net.to("cpu")
        assert all(torch.equal(each, want) for each in got)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


class Keeping(nn.Module):
    """Lets what is in the middle of a block be seen from outside, as stores of attention maps do."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.first(x).sigmoid()
        self.kept.append(middle)
        return self.second(middle)


@pytest.mark.parametrize("way", ["resident", "streamed", "fp8"])
def test_a_gradient_may_enter_in_the_middle_of_a_block(machine, way: str) -> None:
    torch.manual_seed(0)
    kept: list[torch.Tensor] = []
    net = nn.Sequential(*(Keeping(kept) for _ in range(6))).requires_grad_(False)
    x = torch.randn(2, DIM, requires_grad=True)

    def gradient() -> torch.Tensor:
        kept.clear()
        net(x)
        (found,) = torch.autograd.grad(sum(each.cpu().square().sum() for each in kept[1:4]), x)
        kept.clear()
        return found

    ways = {**WAYS, "streamed": {"placement": "gpu:0", "profile": "0.08MiB"}}
    with machine(8, 8) as manager:
        with manage(net, manager=manager, **ways[way]) as managed:
            assert bool(managed.plan.components[0].shares[0].streamed) == (way == "streamed")
            got = [gradient() for _ in range(2)]
        want = gradient()
        assert all(torch.equal(each, want) for each in got)


@pytest.mark.parametrize("way", ["streamed", "fp8"])
def test_a_backward_pass_after_the_end_of_management_is_refused(toys, machine, way: str) -> None:
    x = torch.randn(2, 5, DIM, requires_grad=True)
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, manager=manager, **WAYS[way]):
            result = net(x).sum()
        with pytest.raises(UnsafeState, match=r"^model: block (doubles|singles)\.\d was released before its backward"):
            result.backward()
        del result


def test_a_weight_that_was_changed_before_the_backward_pass_is_refused(toys, machine) -> None:
    x = torch.randn(2, 5, DIM, requires_grad=True)
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, manager=manager, **WAYS["streamed"]):
            result = net(x).sum()
            for block in net.singles:
                block.up.weight.mul_(2)
            with pytest.raises(UnsafeState, match=r"^a weight of model: block singles\.\d was changed before its back"):
                result.backward()
            del result


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).exp()
        return y.mul(2) + y.add_(1)


def test_a_program_that_overwrites_what_it_needs_is_told_as_torch_tells_it(machine) -> None:
    net = nn.Sequential(*(Writing() for _ in range(6))).requires_grad_(False)
    x = torch.randn(2, DIM, requires_grad=True)
    with machine(8) as manager:
        for way in ({"profile": "0.04MiB"}, {}):
            with manage(net, placement="gpu:0", manager=manager, **way):
                result = net(x).sum()
                with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
                    result.backward()
                del result


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_torchs_stack_of_hooks_is_empty_after_a_failure(toys, machine, kind: type[BaseException]) -> None:
    x = torch.randn(2, 5, DIM)
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, manager=manager, **WAYS["streamed"]):

            def fail(*_: Any) -> None:
                raise kind

            handle = net.singles[2].up.register_forward_pre_hook(fail)
            with pytest.raises(kind):
                net(x)
            handle.remove()
            got = input_gradient(net, x)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        want = input_gradient(net.to("sim:0"), x.to("sim:0"))
        net.to("cpu")
        assert torch.equal(got, want)


def test_hooks_of_others_stay_in_place(toys, machine) -> None:
    x = torch.randn(2, 5, DIM)
    packed = []
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, manager=manager, **WAYS["streamed"]):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
                got = input_gradient(net, x)
            assert packed
            packed.clear()
        want = input_gradient(net.to("sim:0"), x.to("sim:0"))
        net.to("cpu")
        assert torch.equal(got, want)
