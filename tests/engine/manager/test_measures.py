"""What is measured of devices, passes, nodes and runs: the allocator's peaks, none lost, at no cost to others."""

from __future__ import annotations

import gc
import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory import manage
from highwater.memory.manager.event_log import EventLog
from highwater.memory.manager.measures import Measures
from highwater.memory.manager.member import Members
from highwater.memory.manager.steered import Steered
from highwater.memory.runtime.devices.ledger import Kind, Ledger
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
        log = EventLog()
        measures = Measures(list_devices(), ledger, Steered(Members(), log), log, lambda: 0)
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
                measures.sample(["gpu:0"])
                samples = log.timeline.samples()
                if len(samples) > before:
                    assert samples[-1].peak_bytes == since
                    since = now
                    assert samples[-1].allocated_bytes == now
                assert samples[-1].component_bytes == ledger.by_component("gpu:0")
                assert measures.peaks["gpu:0"] == peak == max(sample.peak_bytes for sample in samples)
        samples = log.timeline.samples()
        for one, other in itertools.pairwise(samples):
            assert one.component_bytes != other.component_bytes or other.peak_bytes > one.peak_bytes
            assert one.component_bytes is other.component_bytes or one.component_bytes != other.component_bytes
        del kept


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
