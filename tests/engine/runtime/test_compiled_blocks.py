"""Compiled blocks compute what the others do, with weights that come and go, and compile once per kind."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

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
            (slot,) = managed.report()["components"]
            assert (slot["num_compiles"], slot["uncompiled_blocks"]) == (2, {})  # two kinds of blocks
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
            (slot,) = managed.report()["components"]
            assert slot["num_compiles"] is slot["uncompiled_blocks"] is None
            assert not torch._dynamo.utils.counters["frames"]


def test_inductor_compiles_on_the_cpu(toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, torch.no_grad():
        want = toys.build_net(doubles=2, singles=0)(x)
        net = toys.build_net(doubles=2, singles=0)
        with manage(net, placement="cpu", profile="auto,compile=on", manager=manager):
            assert torch.allclose(net(x), want, atol=1e-5)


class Numbered(nn.Module):
    """A block that knows its number, which dynamo takes for a constant."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (self.number + 1) / 16


class InPython(Numbered):
    """A block that dynamo does not compile."""

    @torch._dynamo.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("profile", ["auto", "0.1MiB"])
def test_blocks_beyond_dynamos_limit_are_said_to_run_uncompiled(machine, profile: str) -> None:
    limit = torch._dynamo.config.recompile_limit
    x = torch.randn(2, 64)
    with machine(8) as manager, torch.no_grad():
        net = nn.Sequential(*map(Numbered, range(limit + 3)))
        want = net.to("sim:0")(x.to("sim:0")).cpu()
        net.to("cpu")
        with manage(net, f"{profile},compile=on", manager=manager) as managed:
            assert managed.report()["components"][0]["uncompiled_blocks"] == {}  # nothing has run
            for _ in range(2):
                assert torch.equal(net(x).cpu(), want)
                (slot,) = managed.report()["components"]
                assert slot["num_compiles"] == limit
                ((reason, num_blocks),) = slot["uncompiled_blocks"].items()
                assert num_blocks == 3 and f"{limit} times (recompile_limit)" in reason
        assert torch._dynamo.config.recompile_limit == limit
        assert all("forward" not in vars(block) for block in net)


def test_blocks_that_cannot_be_compiled_or_have_their_own_forward_are_counted(machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = nn.Sequential(*map(Numbered, range(4)), *map(InPython, range(2)))
        own = net[1].forward = functools.partial(Numbered.forward, net[1])
        with manage(net, "auto,compile=on", manager=manager) as managed:
            assert managed.report()["components"][0]["uncompiled_blocks"] == {
                "the block's forward is not that of its class": 1
            }
            net(torch.randn(2, 64))
            (slot,) = managed.report()["components"]
            assert slot["num_compiles"] == 3
            assert sorted(slot["uncompiled_blocks"].values()) == [1, 2]
        assert net[1].forward is own


def compiled_whole(net: torch.nn.Module) -> torch.nn.Module:
    return torch.compile(net, backend="eager")


def compiled_in_place(net: torch.nn.Module) -> torch.nn.Module:
    net.compile(backend="eager")
    return net


def compiled_blocks(net: torch.nn.Module) -> torch.nn.Module:
    net.singles = torch.nn.ModuleList(torch.compile(block, backend="eager") for block in net.singles)
    return net


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place, compiled_blocks])
def test_what_is_compiled_by_others_is_right_and_traces_nothing_of_ours(
    toys, machine, caplog, compiled, when: str
) -> None:
    torch._dynamo.reset()
    net, plain = toys.build_net(), toys.build_net().to("sim:0")
    x = torch.randn(2, 5, 64)
    want = plain(x.to("sim:0")).cpu()
    del plain
    if when == "after" and compiled is compiled_blocks:
        return  # other modules than those that are managed
    called = compiled(net) if when == "before" else net
    with machine(8) as manager, manage(called, "0.45MiB", placement="gpu:0", manager=manager) as managed:
        called = compiled(net) if when == "after" else called
        for _ in range(3):
            assert torch.equal(called(x).cpu(), want)
            managed.members[0].managed.unload()
    assert "memory/runtime/forwards/forward_hooks.py" not in caplog.text
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("compiled", [compiled_whole, compiled_in_place, compiled_blocks])
@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_what_is_compiled_by_others_follows_every_plan(toys, machine, compiled) -> None:
    net, plain = toys.build_net(), toys.build_net().to("sim:0")
    x = torch.randn(2, 5, 64)
    want = plain(x.to("sim:0")).cpu()
    del plain
    called = compiled(net)
    with machine(8, 8) as manager, manage(called, "auto", placement="gpu:0", manager=manager) as managed:
        for profile, placement in (
            ("auto", "gpu:0"),
            ("0.45MiB", "gpu:0"),
            ("auto", "gpu:0&gpu:1"),
            ("auto", "gpu:0"),
            ("0.45MiB", "gpu:1"),
        ):
            managed.reprofile(profile, placement=placement)
            for _ in range(4):
                assert torch.equal(called(x).cpu(), want), (profile, placement)
