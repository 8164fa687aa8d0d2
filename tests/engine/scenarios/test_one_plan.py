"""A plan is made once per load: `manage` makes it, and the first forward makes another only if memory has changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.hosted_component import HostedComponent
from highwater.memory.manager import live_capacity, module_plans
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.planner.run import BlockTimes, Use
from highwater.memory.units import MIB
from highwater.memory.weights.component import guess_kind


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the planner's functions that were called."""
    called: list[str] = []

    def count(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return function(*args, **kwargs)

    for module, name in ((module_plans, "plan_request"), (live_capacity, "replan")):
        monkeypatch.setattr(module, name, partial(count, name, getattr(module, name)))
    yield called


def build_net(num_blocks: int = 8, width: int = 256) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_blocks)))
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return net.requires_grad_(False)


@pytest.mark.parametrize("kind", ["net", "transformer", "vae"])
def test_a_resident_component_is_planned_once(sim: Any, plans: list[str], kind: str) -> None:
    net = build_net()
    expected = net(torch.ones(1, 256))
    manager = MemoryManager()
    device = manager.devices["gpu:0"].torch_device
    with manage({kind: net}, manager=manager, placement="gpu:0"):
        for _ in range(3):  # the input takes some of the free memory: what is resident still fits
            assert torch.equal(net(torch.ones(1, 256, device=device)).cpu(), expected)
        assert plans == ["plan_request"]


def test_a_streamed_component_is_planned_once_while_memory_is_the_same(sim: Any, plans: list[str]) -> None:
    net = build_net()
    manager = MemoryManager()
    with manage(net, manager=manager, placement="gpu:0", profile="1MiB") as managed:
        made = len(plans)  # a tight budget cuts blocks, and plans each cut
        net(torch.ones(1, 256))
        assert managed.members[0].managed.plan.streams
        assert len(plans) == made


# Devices in MiB, and what is asked of `manage`; each net has 2 MiB in 8 blocks.
LOADS: dict[str, tuple[tuple[float, ...], dict[str, Any]]] = {
    "resident": ((64,), {"placement": "gpu:0"}),
    "streamed": ((1.5,), {"placement": "gpu:0", "profile": "auto,reserve=0.2MiB"}),
    "within a budget": ((64,), {"placement": "gpu:0", "profile": "1.2MiB"}),
    "split": ((64, 64), {"placement": "gpu:0&gpu:1"}),
    "split and streamed": ((1.2, 1.2), {"placement": "gpu:0&gpu:1"}),
    "in pageable memory": ((64,), {"placement": "gpu:0:host", "profile": "1.2MiB"}),
    "not page-locked": ((64,), {"placement": "gpu:0", "profile": "1.2MiB,pinned=none"}),
    "in eight bits": ((64,), {"placement": "gpu:0", "profile": "0.8MiB", "precision": "fp8 scaled"}),
}


@pytest.mark.parametrize("load", LOADS)
def test_the_plan_shown_is_the_plan_executed(
    machine: Any, plans: list[str], monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    """The first forward, a second one, and one of another run plan nothing while nothing has changed."""
    mebibytes, asked = LOADS[load]
    monkeypatch.setattr("highwater.memory.manager.leases.learn_times", lambda member, capacity: None)
    with machine(*mebibytes) as manager, manage({"net": build_net()}, manager=manager, **asked) as managed:
        shown, made = managed.plan["net"], len(plans)
        for _ in range(2):
            for _ in range(2):
                managed.members[0].managed.module(torch.ones(1, 256))
                assert managed.members[0].managed.plan == shown
            manager.begin_run("1", "run")
            manager.end_run()
        assert len(plans) == made
        for share in shown.shares:
            assert manager.ledger.held("net", share.device) == share.device_bytes


def test_known_times_are_planned_with_once(machine: Any, plans: list[str]) -> None:
    with machine(64, h2d_bytes_per_s=1e10) as manager:
        manager.capacity.note_link(manager.devices["gpu:0"], 1e10, is_pinned=True)
        managed = manage({"net": build_net()}, manager=manager, placement="gpu:0", profile="1.2MiB")
        net = managed.members[0].managed.module
        for run in range(8):
            if run == 5:
                assert managed.members[0].managed.plan.shares[0].pass_s is not None  # the times are known by now
                plans.clear()
            manager.begin_run(str(run), "run")
            net(torch.ones(1, 256))
            manager.end_run()
        assert plans == []


def test_what_could_not_be_page_locked_is_in_the_plan_shown(
    machine: Any, plans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("highwater.memory.manager.live_capacity.pin_limit_bytes", lambda host, freed_bytes: MIB // 2)
    monkeypatch.setattr("highwater.memory.manager.leases.learn_times", lambda member, capacity: None)
    with machine(64) as manager:
        managed = manage({"net": build_net()}, manager=manager, placement="gpu:0", profile="1.2MiB")
        shown, made = managed.plan["net"], len(plans)
        assert 0 < shown.pinned_bytes < shown.host_bytes and shown.streams
        assert shown.shares[0].blocking
        managed.members[0].managed.module(torch.ones(1, 256))
        assert managed.members[0].managed.plan is shown and len(plans) == made


def test_a_hosted_component_is_planned_once_for_its_size_its_joining_and_its_load(
    sim: Any, plans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ComfyUI calls it for each run: the bytes first, then the load."""
    manager, net = MemoryManager(), build_net()
    monkeypatch.setattr("highwater.memory.hosted_component.default_manager", lambda: manager)
    device = manager.devices["gpu:0"].torch_device
    hosted = HostedComponent("net", "diffusion", profile=OffloadProfile())
    for _ in range(3):
        assert hosted.planned_bytes(net, device) == sum(p.nbytes for p in net.parameters())
        hosted.join(net, device)
        hosted.load(None)
        net(torch.ones(1, 256, device=device))
        assert plans == ["plan_request"]
    hosted.release()


def test_another_plan_is_made_where_memory_has_become_short(sim: Any, plans: list[str]) -> None:
    net = build_net(num_blocks=16, width=512)  # 16 MiB
    expected = net(torch.ones(1, 512))
    manager = MemoryManager()
    device = manager.devices["gpu:0"]
    with manage({"net": net}, manager=manager, placement="gpu:0", profile="auto") as managed:
        assert not managed.plan["net"].streams
        num_bytes = device.free_bytes() - 12 * MIB
        occupied = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        manager.set_watermark("gpu:0", 0, 0)
        assert torch.equal(net(torch.ones(1, 512)).cpu(), expected)
        assert plans == ["plan_request", "replan"]
        assert managed.members[0].managed.plan.streams
        assert manager.ledger.used("gpu:0") <= 12 * MIB
        del occupied


def test_the_plan_of_a_split_says_whether_the_last_step_was_computed_at_once(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, net = MemoryManager(), build_net()
    monkeypatch.setattr("highwater.memory.hosted_component.default_manager", lambda: manager)
    placement = parse_placement("gpu:0&gpu:1", devices=["gpu:0", "gpu:1"], components=["net"])
    hosted = HostedComponent("net", "diffusion", profile=OffloadProfile(), placement=placement)
    hosted.join(net, manager.devices["gpu:0"].torch_device)
    hosted.load(None)

    def said() -> list[str]:
        assert hosted.member is not None
        return [line for line in hosted.member.managed.plan.reasons if line.startswith("micro-batches: ")]

    (expected,) = said()
    assert "gpu:0 and gpu:1 compute at the same time" in expected
    hosted.note_micro_batches("")
    assert said() == [expected]
    for off in ("a step has one conditioning", "another node wraps calc_cond_batch"):
        hosted.note_micro_batches(off)
        assert said() == [f"micro-batches: off: {off}"]
    hosted.note_micro_batches("")
    assert said() == ["micro-batches: its devices compute the halves of a step at the same time"]
    hosted.release()


def test_a_budget_that_the_plan_chose_holds_while_the_run_goes_on(machine: Any) -> None:
    """What the model keeps is there again in the next run: the text encoder streams beside it."""
    nets = {"text_encoder": build_net(), "transformer": build_net()}
    with machine(3.2, h2d_bytes_per_s=1e8) as manager:
        manager.set_watermark("*", 0, 0)
        manager.capacity.note_link(manager.devices["gpu:0"], 1e8, is_pinned=True)
        times = {"gpu:0": BlockTimes(blocks_s=(0.01,) * 8)}
        uses = [
            Use(component=name, kind=guess_kind(name), num_passes=passes, activation_bytes=8192, times=times)
            for name, passes in (("text_encoder", 1), ("transformer", 4))
        ]
        managed = manage(nets, manager=manager, uses=uses)
        assert managed.plan["text_encoder"].streams and not managed.plan["transformer"].streams
        for _ in range(2):
            for use in uses:
                for _ in range(use.num_passes):
                    nets[use.component](torch.ones(1, 256))
                manager.ledger.check()
        whole = managed.plan["transformer"].shares[0].device_bytes
        assert manager.ledger.held("transformer", "gpu:0") == whole
        nets["text_encoder"](torch.ones(1, 256))
        assert manager.ledger.held("transformer", "gpu:0") == whole
