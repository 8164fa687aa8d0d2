"""Compiled blocks compute what the others do, with weights that come and go, and compile once per kind."""

from __future__ import annotations

import pytest
import torch
from highwater.memory import manage


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("profile", ["auto", "0.45MiB", "0.8MiB"])
def test_resident_and_streamed_blocks_compile_once_per_kind(toys, machine, profile: str) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, torch.no_grad():
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        net = toys.build_net()
        with manage(net, profile=f"{profile},compile=on", manager=manager) as managed:
            for _ in range(4):
                assert torch.equal(net(x).cpu(), want)
            assert managed.report()["components"][0]["num_compiles"] == 2  # two kinds of blocks
            assert not torch._dynamo.utils.counters["graph_break"]
        assert all("forward" not in vars(block) for block in [*net.doubles, *net.singles])


def test_another_shape_of_inputs_compiles_again_and_is_counted(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, profile="auto,compile=on", manager=manager) as managed:
            net(torch.randn(2, 5, 64))
            before = managed.report()["components"][0]["num_compiles"]
            net(torch.randn(2, 9, 64))
            assert managed.report()["components"][0]["num_compiles"] > before


def test_nothing_is_compiled_unless_asked(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, manager=manager) as managed:
            net(torch.randn(2, 5, 64))
            assert managed.report()["components"][0]["num_compiles"] is None
            assert not torch._dynamo.utils.counters["frames"]


def test_inductor_compiles_on_the_cpu(toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, torch.no_grad():
        want = toys.build_net(doubles=2, singles=0)(x)
        net = toys.build_net(doubles=2, singles=0)
        with manage(net, placement="cpu", profile="auto,compile=on", manager=manager):
            assert torch.allclose(net(x), want, atol=1e-5)
