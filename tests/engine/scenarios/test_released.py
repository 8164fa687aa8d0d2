"""A released component is gone with its last reference: no cycle of ours keeps its memory until Python collects it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from highwater.memory import manage
from highwater.memory.errors import DoesNotFit
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import parse_profile

X = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
TIGHT = "0.45MiB"


class Interrupt(BaseException):
    """As a host's, which is no Exception."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


FORMS = {
    "resident": ("auto", "gpu:0", "as stored"),
    "streamed": (TIGHT, "gpu:0", "as stored"),
    "split": ("auto", "gpu:0&gpu:1", "as stored"),
    "split and streamed": (TIGHT, "gpu:0&gpu:1", "as stored"),
    "eight bits": ("auto", "gpu:0", "fp8 scaled"),
}


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("trouble", [None, RuntimeError, torch.OutOfMemoryError, Interrupt])
@pytest.mark.parametrize("is_hosted", [True, False], ids=["hosted", "managed"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_released_module_is_freed_with_its_last_reference(
    toys, machine, form: str, is_hosted: bool, trouble: type[BaseException] | None
) -> None:
    profile, placement, precision = FORMS[form]
    names = ["gpu:0", "gpu:1"]
    with machine(8, 8) as manager:
        end = manager.watch_loading(lambda component, done, total: None)

        def join() -> tuple[torch.nn.Module, object]:  # a kept frame keeps what it names
            net = toys.build_net()
            (member,), _ = manager.add(
                {"model": net},
                placement=parse_placement(placement, devices=names),
                profile=parse_profile(profile, devices=names),
                precision=Precision(precision),
                name=None,
                node_id=None,
                is_hosted=is_hosted,
            )
            return net, member

        net, member = join()
        if is_hosted:
            manager.hosting.load(member)
        if trouble is not None:

            def fail(*_: object) -> None:
                raise trouble("on purpose")

            handle = net.singles[1].register_forward_hook(fail)
            with contextlib.suppress(trouble):
                net(X.to("sim:0") if is_hosted else X)
            handle.remove()
            del handle
        net(X.to("sim:0") if is_hosted else X)
        kept = weakref.ref(net)
        manager.remove(member)
        del member, net
        assert kept() is None
        end()


class Group(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Groups(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.groups = torch.nn.ModuleList(Group() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for group in self.groups:
            x = group(x)
        return x


@pytest.mark.usefixtures("no_collection")
@torch.no_grad()
def test_a_plan_that_was_refused_before_one_that_fits_keeps_nothing(machine) -> None:
    """The first has blocks of 130 KiB, too large for the budget; a kept refusal would keep its frames."""

    def join(manager: object) -> weakref.ref[torch.nn.Module]:
        net = Groups().requires_grad_(False)
        (member,), plan = manager.add(
            {"model": net},
            placement=parse_placement("gpu:0", devices=["gpu:0"]),
            profile=parse_profile("0.1MiB", devices=["gpu:0"]),
            precision=None,
            name=None,
            node_id=None,
        )
        assert plan["model"].num_blocks > 3
        net(X)
        manager.remove(member)
        return weakref.ref(net)

    with machine(8) as manager:
        assert join(manager)() is None


@pytest.mark.usefixtures("no_collection")
def test_a_module_of_which_no_plan_fits_is_freed_with_its_last_reference(machine) -> None:
    def join(manager: object) -> weakref.ref[torch.nn.Module]:
        net = Groups().requires_grad_(False)
        with pytest.raises(DoesNotFit):
            manager.add(
                {"model": net},
                placement=parse_placement("gpu:0", devices=["gpu:0"]),
                profile=parse_profile("auto", devices=["gpu:0"]),
                precision=None,
                name=None,
                node_id=None,
            )
        return weakref.ref(net)

    with machine(0.01) as manager:
        assert join(manager)() is None


@torch.no_grad()
def test_every_release_has_its_reason_once(toys, machine):
    """What is released is one event, with all of its weights; of what leaves on request no policy chose any."""
    x = torch.ones(1, 3, 64)
    with machine(8, 8) as manager:
        net, other = toys.build_net(), toys.build_net(1)
        managed = manage({"net": net}, placement="gpu:0&gpu:1", manager=manager)
        manage({"other": other}, placement="gpu:0", manager=manager)
        net(x), other(x)
        manager.commands.free_idle("released on request")
        evicted = [event for event in manager.report()["events"] if event["kind"] == "evict"]
        assert sorted((event["component"], event["device"]) for event in evicted) == [
            ("net", "gpu:0"),
            ("net", "gpu:1"),
            ("other", "gpu:0"),
        ]
        assert all(event["reason"].startswith("released on request") for event in evicted)
        assert not any(word in event["reason"] for event in evicted for word in ("recently", "next use"))
        net(x)
        held = manager.ledger.bytes_by_place("net")
        managed.reprofile("auto", placement="gpu:0")
        managed.release()
        first, last = [event for event in manager.report()["events"] if event["kind"] == "release"]
        assert set(first["device"].split("&")) == held.keys() >= {"gpu:0", "gpu:1"}
        assert first["bytes"] == sum(held.values()) and first["reason"] == "packed anew for other choices"
        assert last["component"] == "net" and last["reason"] == "what loaded it released it"
