"""Micro-batches of a split whose weights rest encoded, and what may happen inside a step: the same bits, no races."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import Managed, MemoryManager, manage
from highwater.memory.errors import UnsafeState
from highwater.memory.hosted_component import HostedComponent, SideFactors
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision
from highwater.memory.planner.sizes import Sizes

DIM = 64
SPLIT = "gpu:0&gpu:1/4"
ON = "micro-batches: gpu:0 and gpu:1 compute at the same time"


def inputs(num_calls: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, DIM, generator=generator).bfloat16().to("sim:0") for _ in range(num_calls)]


def clear(*lists: list[torch.Tensor]) -> None:
    """Drop tensors before their devices go."""
    for each in lists:
        each.clear()


def at_once(managed: Managed, net: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return managed.run_micro_batches([lambda x=x: net(x) for x in given])


@pytest.mark.parametrize(
    ("precision", "placement", "num_calls"),
    [
        ("fp8 scaled", SPLIT, 2),
        ("fp8 per row", "gpu:1&gpu:0/auto", 5),
        ("int8", SPLIT, 3),
        ("qint8", "gpu:0&gpu:1&gpu:2/6", 2),
        ("qint4", "gpu:0&gpu:1&gpu:2/6", 5),
    ],
)
def test_encoded_blocks_compute_the_same_bits_at_once(
    machine, toys, precision: str, placement: str, num_calls: int
) -> None:
    net = toys.build_net(dim=DIM, dtype=torch.bfloat16)
    with machine(8, 8, 8) as manager, torch.no_grad():
        x = [each.to("sim:1") for each in inputs(num_calls)] if placement.startswith("gpu:1") else inputs(num_calls)
        with manage(net, placement=placement, precision=precision, manager=manager) as managed:
            assert managed.plan["model"].forms, "nothing is encoded, so nothing is shown"
            want = [net(each) for each in x]
            assert not managed.members[0].managed.why_one_by_one()
            for _ in range(2):
                got = at_once(managed, net, x)
                assert all(map(torch.equal, got, want))
                manager.ledger.check()
        clear(x, got, want)


@pytest.mark.parametrize("granularity", ["block", "component"])
def test_the_plan_counts_scratch_for_two_micro_batches(machine, toys, granularity: str) -> None:
    net = toys.build_net(dim=DIM, dtype=torch.bfloat16)
    precision = Precision("fp8 scaled", granularity=granularity)
    with machine(8, 8) as manager, torch.no_grad():
        x = inputs(2)
        for placement in ("gpu:0&gpu:1", SPLIT):
            with manage(net, placement=placement, precision=precision, manager=manager) as managed:
                at_once(managed, net, x)
                plan = managed.plan["model"]
                books = sum(manager.ledger.held(managed.members[0].id, share.device) for share in plan.shares)
                assert books == sum(share.device_bytes for share in plan.shares)
                assert (ON in " ".join(plan.reasons)) == (placement == SPLIT)
                once = Sizes(managed.members[0].managed.component, plan.forms)
                for share in plan.shares:  # "component": each block's wide weights have a place of their own
                    times = 2 if placement == SPLIT and granularity == "block" else 1
                    assert share.scratch_bytes == times * once.scratch_bytes([*share.resident])
        clear(x)


def test_without_room_for_two_the_calls_are_made_one_after_the_other_and_the_plan_says_so(machine, toys) -> None:
    net = toys.build_net(dim=DIM, dtype=torch.bfloat16)
    with machine(8, 8) as manager, torch.no_grad():
        x = inputs(2)
        with manage(net, placement=SPLIT, precision="fp8 scaled", manager=manager) as managed:
            want = [net(each) for each in x]
            shares = managed.plan["model"].shares
            full = max(share.device_bytes for share in shares)
            assert all(share.decodes == 2 for share in shares)
        budget = full - min(share.scratch_bytes for share in shares) // 2
        profile = f"gpu:0={budget / 2**20:.4f}MiB,gpu:1={budget / 2**20:.4f}MiB"
        with manage(net, profile, placement=SPLIT, precision="fp8 scaled", manager=manager) as managed:
            plan = managed.plan["model"]
            assert all(share.decodes == 1 and not share.streamed for share in plan.shares)
            assert "micro-batches: off: there is no room to decode weights for each half of a step" in plan.reasons
            assert all(map(torch.equal, at_once(managed, net, x), want))
            assert managed.members[0].managed.why_one_by_one().startswith("weights are decoded into one scratch memory")
        clear(x, want)


def test_devices_decode_at_the_same_time(machine, toys, steady_seconds) -> None:
    net = toys.build_net(dim=DIM, doubles=0, singles=12, dtype=torch.bfloat16)
    rates = {"flops_per_s": 1e8, "launch_s": 0, "latency_s": 0, "peer_bytes_per_s": 1e12}
    with machine(8, 8, **rates) as manager, torch.no_grad():
        x = inputs(2)

        with manage(net, placement="gpu:0&gpu:1/auto", precision="fp8 scaled", manager=manager) as managed:
            in_turn_s = steady_seconds(lambda: [net(each) for each in x])
            assert in_turn_s / steady_seconds(lambda: at_once(managed, net, x)) > 1.25
        clear(x)


@pytest.mark.parametrize("precision", ["fp8 scaled", "qint4"])
def test_side_factors_are_added_in_each_micro_batch(
    machine, toys, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    net = toys.build_net(dim=DIM, dtype=torch.bfloat16)
    torch.manual_seed(3)
    with machine(8, 8) as manager, torch.no_grad():
        monkeypatch.setattr("highwater.memory.hosted_component.default_manager", lambda: manager)
        x = inputs(3)
        placement = parse_placement(SPLIT, devices=["gpu:0", "gpu:1"])
        hosted = HostedComponent("net", "diffusion", precision=Precision(precision), placement=placement)
        hosted.join(net, torch.device("sim:0"))
        try:
            hosted.load()
            plain = [net(each) for each in x]
            names = sorted(hosted.encoded_names)
            factors = {}
            for name in names:
                rows, columns = net.get_submodule(name.rpartition(".")[0]).weight.shape
                factors[name] = SideFactors(up=torch.randn(rows, 2) * 0.2, down=torch.randn(2, columns) * 0.2)
            hosted.set_factors(factors)
            hosted.load()
            want = [net(each) for each in x]
            assert not any(map(torch.equal, plain, want))
            assert not hosted.why_one_by_one()
            for _ in range(2):
                got = hosted.run_micro_batches([lambda each=each: net(each) for each in x])
                assert all(map(torch.equal, got, want))
        finally:
            hosted.release()
        clear(x, plain, want, got)


# -- what may happen inside a step


@pytest.mark.parametrize(("where", "precision"), [("between calls", "as stored"), ("in a call", "fp8 scaled")])
def test_a_release_inside_a_micro_batch_is_refused(machine, toys, where: str, precision: str) -> None:
    net = toys.build_net(dim=DIM, dtype=torch.bfloat16)
    with machine(8, 8) as manager, torch.no_grad():
        x = inputs(2)
        with manage(net, placement=SPLIT, precision=precision, manager=manager) as managed:
            want = [net(each) for each in x]

            def release(*_: Any) -> None:
                with pytest.raises(UnsafeState, match="computes now; release it after that"):
                    managed.release()
                with pytest.raises(UnsafeState, match="computes now; release it after that"):
                    manager.commands.release_between_runs(managed.members[0], reason="asked")

            def first() -> torch.Tensor:
                got = net(x[0])
                if where == "between calls":
                    release()
                return got

            handle = net.singles[0].register_forward_pre_hook(release) if where == "in a call" else None
            got = managed.run_micro_batches([first, lambda: net(x[1])])
            if handle is not None:
                handle.remove()
            assert all(map(torch.equal, got, want))
            assert all(map(torch.equal, at_once(managed, net, x), want))
        assert type(net.singles[0].up.weight) is nn.Parameter, "released behind the step"
        clear(x, want, got)


@pytest.mark.parametrize(("inside", "precision"), [(0, "as stored"), (1, "fp8 scaled")])
def test_a_component_that_is_evicted_between_two_calls_comes_back(machine, toys, inside: int, precision: str) -> None:
    """Another component computes in a micro-batch, and there is no room for both: the next call loads it again."""
    net = toys.build_net(dim=DIM, dtype=torch.bfloat16)
    other = toys.build_net(seed=1, dim=DIM, singles=40, dtype=torch.bfloat16)
    with machine(2.4, 2.4, low=64 << 10, high=64 << 10) as manager, torch.no_grad():
        x = inputs(3)
        with (
            manage(net, placement=SPLIT, precision=precision, manager=manager) as managed,
            manage(other, "gpu:0=2.3MiB", placement="gpu:0", manager=manager) as beside,
        ):
            want = [net(each) for each in x]
            want[inside] = other(want[inside])

            def call(number: int) -> torch.Tensor:
                got = net(x[number])
                return other(got) if number == inside else got

            for _ in range(2):
                before = len(evictions(manager))
                got = managed.run_micro_batches([lambda number=number: call(number) for number in range(3)])
                assert all(map(torch.equal, got, want))
                manager.ledger.check()
                assert len(evictions(manager)) > before, "there was room for both"
            del beside
        clear(x, want, got)


def evictions(manager: MemoryManager) -> list[Any]:
    return [event for event in manager.event_log.events if event.kind == "evict"]
