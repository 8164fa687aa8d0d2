"""Managed modules under export, tracing and dispatch modes: what makes a graph is refused, all else computes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from highwater.memory import manage
from highwater.memory.errors import UnsafeState

X = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
REFUSED = "a managed module cannot be exported or traced: release it first"
WAYS = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.45MiB"},
    "split": {"placement": "gpu:0&gpu:1@0.5"},
    "eight bits": {"placement": "gpu:0", "profile": "0.45MiB", "precision": "fp8 scaled"},
}


def compute_fake(net: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        net(X)


def compute_functional(net: nn.Module) -> None:
    from torch._functorch.aot_autograd import aot_module

    aot_module(net, fw_compiler=lambda graph, inputs: graph)(X)


TRACES: dict[str, Callable[[nn.Module], object]] = {
    "torch.export": lambda net: torch.export.export(net, (X,)),
    "export of a block": lambda net: torch.export.export(net.singles[2], (X, X)),
    "export of what contains it": lambda net: torch.export.export(nn.Sequential(net, nn.Tanh()), (X,)),
    "make_fx": lambda net: make_fx(net)(X),
    "torch.jit.trace": lambda net: torch.jit.trace(net, X),
    "trace of a block": lambda net: torch.jit.trace(net.singles[2], (X, X)),
    "symbolic_trace": torch.fx.symbolic_trace,
    "fake tensors": compute_fake,
    "aot": compute_functional,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_what_makes_a_graph_of_a_managed_module_is_refused_and_changes_nothing(
    toys, machine, sim, trace: str, way: str
) -> None:
    net = toys.build_net()
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        before = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
        want = net(X).cpu()
        for unloads in (False, True):
            if unloads:
                managed.members[0].managed.unload()
            gc.collect()
            used = [sim.stats(index).used_bytes for index in range(2)]
            with pytest.raises(UnsafeState, match=f"^{REFUSED}"):
                TRACES[trace](net)
            gc.collect()  # what torch made for its graph is in cycles
            assert [sim.stats(index).used_bytes for index in range(2)] == used
        assert not managed.members[0].leases
        assert not any(isinstance(tensor, FakeTensor) for tensor in net.state_dict().values())
        assert torch.equal(net(X).cpu(), want)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert not any(module._forward_pre_hooks for module in net.modules())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_strict_export_is_refused_by_torch_with_the_remedy(toys, machine, way: str) -> None:
    """Its tracer may not look into the hook, so torch words the refusal."""
    net = toys.build_net()
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]):
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Highwater moves weights here: .* release it first"):
            torch.export.export(net, (X,), strict=True)
        assert not torch.compiler.is_compiling()
        net(X)


@torch.no_grad()
def test_a_released_module_is_exported_as_ever(toys, machine) -> None:
    net = toys.build_net()
    with machine(8) as manager:
        managed = manage(net, "0.45MiB", placement="gpu:0", manager=manager)
        net(X)
        managed.release()
    assert torch.equal(torch.export.export(net, (X,)).module()(X), net(X))


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def count_flops(net: nn.Module) -> torch.Tensor:
    with FlopCounterMode(display=False) as counter:
        out = net(X)
    assert counter.get_total_flops() > 0
    return out


def log_operators(net: nn.Module) -> torch.Tensor:
    with Log() as log:
        out = net(X)
    assert "aten.gelu.default" in log.names
    return out


def make_on_device(net: nn.Module) -> torch.Tensor:
    with torch.device("sim:0"):
        return net(X)


def keep_some(net: nn.Module) -> torch.Tensor:
    def contexts() -> object:
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    with torch.enable_grad():
        return checkpoint(net, X.clone().requires_grad_(), use_reentrant=False, context_fn=contexts).detach()


MODES = {
    "flops": count_flops,
    "log": log_operators,
    "device": make_on_device,
    "selective checkpoint": keep_some,
}


@pytest.mark.parametrize("way", ["resident", "streamed", "split"])
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_modes_that_compute_numbers_are_welcome(toys, machine, mode: str, way: str) -> None:
    net = toys.build_net()
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]):
        want = net(X).cpu()
        assert torch.equal(MODES[mode](net).cpu(), want)
        assert torch.equal(net(X).cpu(), want)
