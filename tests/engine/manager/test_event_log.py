"""The timeline has a point for each change and no other, and its peaks are those of the allocator."""

from __future__ import annotations

import gc
import itertools
import json
import threading
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory import manage
from highwater.memory.manager.event_log import EventLog
from highwater.memory.manager.timeline import Timeline
from highwater.memory.planner.plan import ComponentPlan
from highwater.memory.runtime.ledger import Kind, Ledger
from highwater.memory.transfer.devices import Device, list_devices

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(1, 4)),
        st.tuples(st.just("free"), st.integers(0, 3)),
        st.tuples(st.just("passing"), st.integers(1, 4)),
        st.tuples(st.just("load"), st.integers(0, 2)),
        st.tuples(st.just("evict"), st.integers(0, 2)),
        st.tuples(st.just("sample"), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(steps=STEPS)
def test_points_are_changes_and_lose_no_peak(sim, steps: list[tuple[str, int]]) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=1 << 20)] * 2):
        ledger = Ledger()
        log = EventLog(list_devices(), ledger, lambda: 0)
        kept: list[torch.Tensor] = []
        now = peak = since = 0  # as counted here: allocated, the most, and the most since the last point
        for what, number in steps:
            if what == "allocate":
                kept.append(torch.empty(256 * number, dtype=torch.uint8, device="sim:0"))
            elif what == "free" and number < len(kept):
                del kept[number]
            elif what == "passing":
                since = max(since, now + 256 * number)
                torch.empty(256 * number, dtype=torch.uint8, device="sim:0")
            elif what == "load":
                ledger.charge("gpu:0", str(number), Kind.WEIGHTS, 1)
            elif what == "evict":
                ledger.settle("gpu:0", str(number), Kind.WEIGHTS, 0)
            now = sum(tensor.numel() for tensor in kept)
            since, peak = max(since, now), max(peak, since, now)
            if what == "sample":
                before = len(log.timeline.points)
                log.sample(["gpu:0"])
                samples = log.timeline.samples()
                if len(samples) > before:
                    assert samples[-1].peak_bytes == since
                    since = now
                    assert samples[-1].allocated_bytes == now
                assert samples[-1].component_bytes == ledger.by_component("gpu:0")
                assert log.peaks["gpu:0"] == peak == max(sample.peak_bytes for sample in samples)
        samples = log.timeline.samples()
        for one, other in itertools.pairwise(samples):
            assert one.component_bytes != other.component_bytes or other.peak_bytes > one.peak_bytes
            assert one.component_bytes is other.component_bytes or one.component_bytes != other.component_bytes
        del kept


BYTES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3))
POINTS = st.lists(st.tuples(st.sampled_from(["x", "y"]), BYTES, st.booleans()), max_size=20)


@given(points=POINTS, most=st.integers(1, 6))
def test_points_in_full_are_what_was_entered(points: list[tuple[str, dict[str, int], bool]], most: int) -> None:
    timeline, want = Timeline(most), []
    for number, (device, held, always) in enumerate(points):
        before = next((sample for sample in reversed(want) if sample[0] == device), None)
        timeline.add(float(number), device, dict(held), 0, 0, always=always)
        if always or before is None or before[1] != held:
            want.append((device, held, float(number)))
    for view in (timeline, timeline.copy()):
        assert [(s.device, s.component_bytes, s.t_s) for s in view.samples()] == want[-most:]


def test_a_point_costs_what_changes_however_many_components_there_are() -> None:
    timeline, held = Timeline(100), {str(number): 1 for number in range(2000)}
    for number in range(1000):
        held = held | {str(number): number + 2}
        timeline.add(float(number), "gpu:0", held, 0, 0)
    assert len(timeline.points) == 100
    assert max(len(point.changes) for point in timeline.points) == 1


@torch.no_grad()
def test_the_report_is_built_while_others_go_on(toys, machine, monkeypatch) -> None:
    """Only copying holds the lock."""
    net, x, free = toys.build_net(), torch.ones(1, 3, 64), []
    build = ComponentPlan.to_json

    def look(plan: ComponentPlan) -> dict:
        def try_lock() -> None:
            free.append(manager.lock.rlock.acquire(timeout=10))
            manager.lock.rlock.release()

        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return build(plan)

    with machine(8) as manager:
        manage({"net": net}, placement="gpu:0", manager=manager)
        net(x)
        monkeypatch.setattr(ComponentPlan, "to_json", look)
        before = manager.report()
        assert free == [True]
        assert json.loads(json.dumps(before)) == before
        before["samples"][0]["component_bytes"].clear()
        before["components"][0]["tiers"].clear()
        assert manager.report()["samples"][-1]["component_bytes"] == manager.ledger.by_component("gpu:0")


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", "0.6MiB"])
def test_steady_passes_add_no_points(toys, machine, profile: str) -> None:
    net, x = toys.build_net(), torch.ones(1, 3, 64)
    with machine(8) as manager:
        manage({"net": net}, profile, placement="gpu:0", manager=manager)
        for _ in range(5):
            net(x)
        before = len(manager.event_log.timeline.points)
        for _ in range(20):
            net(x)
        assert len(manager.event_log.timeline.points) == before


@torch.no_grad()
def test_a_pass_looks_at_its_own_devices_only(toys, machine, monkeypatch) -> None:
    """However many the machine has; a run looks at all of them."""
    net, split, x = toys.build_net(), toys.build_net(1), torch.ones(1, 3, 64)
    looked: Counter[str] = Counter()
    read, read_driver = Device.allocator_bytes, Device.memory

    def count(device: Device) -> object:
        looked[device.name] += 1
        return read(device)

    def count_driver(device: Device) -> object:
        looked[device.name] += 1
        return read_driver(device)

    with machine(*[8] * 4) as manager:
        manage({"net": net}, placement="gpu:1", manager=manager)
        manage({"split": split}, placement="gpu:0&gpu:2", manager=manager)
        for _ in range(4):
            net(x), split(x)
        monkeypatch.setattr(Device, "allocator_bytes", count)
        monkeypatch.setattr(Device, "memory", count_driver)
        net(x)
        assert looked == {"gpu:1": 2}
        looked.clear()
        split(x)
        assert looked == {"gpu:0": 2, "gpu:2": 2}
        manager.begin_run("1", "")
        assert looked.keys() == {"gpu:0", "gpu:1", "gpu:2", "gpu:3"}
        manager.end_run()


@torch.no_grad()
def test_measuring_leaves_no_garbage(toys, machine) -> None:
    net, x = toys.build_net(), torch.ones(1, 3, 64)
    with machine(8) as manager:
        manage({"net": net}, placement="gpu:0", manager=manager)
        for _ in range(4):
            net(x)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            net(x)
            gc.collect()
            assert not gc.garbage
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.parametrize("number", [0, 1, 3, 100])
def test_a_recent_report_is_the_end_of_the_whole_one(toys, machine, number: int) -> None:
    net = toys.build_net()
    with machine(8, 8) as manager, manage(net, manager=manager):
        for run in range(3):
            manager.begin_run(str(run), "run")
            for node in range(3):
                manager.begin_node(str(node), "node")
                net(torch.randn(2, 3, 64))
                manager.end_node()
            manager.end_run()
        whole, recent = manager.report(), manager.recent_report(number)
        for part in ("nodes", "runs", "events"):
            assert recent[part] == whole[part][len(whole[part]) - min(number, len(whole[part])) :]
        assert recent["samples"] == [] and whole["samples"]
        assert recent.keys() == whole.keys()
        # Free RAM changes at any time.
        assert recent["devices"][1:] == whole["devices"][1:] and whole["devices"][0]["name"] == "cpu"
        assert json.dumps(recent["components"]) == json.dumps(whole["components"])
