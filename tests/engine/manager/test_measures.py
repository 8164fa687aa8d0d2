"""What is measured of devices, passes, nodes and runs: the allocator's peaks, none lost, at no cost to others."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory import manage
from highwater.memory.manager.event_log import EventLog
from highwater.memory.manager.measures import Measures
from highwater.memory.manager.members import Members
from highwater.memory.manager.observed import Observed, ObservedModel
from highwater.memory.manager.steered import Steered, SteeredComponent
from highwater.memory.runtime.devices.ledger import Kind, Ledger
from highwater.memory.transfer.devices import Device, list_devices
from highwater.memory.units import MIB

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
        members = Members()
        measures = Measures(list_devices(), ledger, Steered(members, log), Observed(members), log, lambda: 0)
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


class Static(SteeredComponent):
    """A component whose host loads it whole, into memory of torch's allocator."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "diffusion")
        self.weights: list[torch.Tensor] = []

    def load(self, num_bytes: int) -> None:
        self.weights.append(torch.empty(num_bytes, dtype=torch.uint8, device="sim:0"))

    def device_bytes(self) -> Mapping[str, int]:
        return {"gpu:0": sum(weight.nbytes for weight in self.weights)}

    def paged_bytes(self, device: str) -> int:
        return 0

    def describe(self) -> Mapping[str, Any]:
        return {"weight_bytes": 5 * MIB, "reasons": []}

    is_computing = is_in_effect = True

    def free_memory(self, device: str, num_bytes: int) -> int:
        return 0

    def leave_first(self, device: str) -> None:
        pass


class StaticHost:
    def __init__(self, *held: Static) -> None:
        self.held = held

    def components(self) -> Iterable[Static]:
        return self.held

    def keep_free(self, num_bytes: int | None) -> None:
        pass

    def pinned_bytes(self) -> int:
        return 0


def held(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="sim:0")


@torch.no_grad()
def test_a_nodes_activations_are_its_own_and_no_weights(toys, machine) -> None:
    """Neither what was there before it, nor what its components, or the host's, hold."""
    net, x = toys.build_net(), torch.ones(1, 100, 64)
    with machine(16) as manager:
        manage({"net": net}, placement="gpu:0", manager=manager)
        net(x)
        manager.hosting.steer(StaticHost(static := Static("flux")))
        earlier = held(MIB)
        manager.begin_run("r", "w")
        manager.begin_node("1", "Idle")
        idle = manager.end_node()
        manager.begin_node("2", "Sample")
        static.load(2 * MIB)
        net(x)
        sampler = manager.end_node()
        manager.begin_node("3", "Decode")
        held(300 * 1024)
        decoder = manager.end_node()
        manager.end_run()
        assert idle["activation_bytes"] == {"gpu:0": 0}
        assert idle["peak_bytes"]["gpu:0"] >= MIB
        assert decoder["activation_bytes"] == {"gpu:0": 300 * 1024}
        assert 100 * 6 * 64 * 4 <= sampler["activation_bytes"]["gpu:0"] < MIB
        (row,) = [row for row in manager.report()["components"] if row["id"] == "flux"]
        assert (row["tiers"], row["total_bytes"], row["staging_bytes"]) == ({"gpu:0": 2 * MIB}, 5 * MIB, {})
        del earlier
        static.weights.clear()


@torch.no_grad()
@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
def test_staging_memory_is_told_for_the_node_and_the_component(toys, machine, precision: str) -> None:
    net, x = toys.build_net(), torch.ones(1, 3, 64)
    profile = "0.6MiB" if precision == "as stored" else "0.3MiB"
    with machine(8) as manager:
        manage({"net": net}, profile, placement="gpu:0", precision=precision, manager=manager)
        manager.begin_node("1", "Sample")
        net(x)
        sampler = manager.end_node()
        manager.begin_node("2", "Other")
        other = manager.end_node()
        (share,) = manager.plans()["net"].shares
        (row,) = manager.report()["components"]
        passing = share.staging_bytes + share.scratch_bytes
        assert share.staging_bytes > 0 and row["staging_bytes"] == sampler["staging_bytes"] == {"gpu:0": passing}
        assert row["total_bytes"] > row["tiers"]["gpu:0"] - passing == share.fixed_bytes + share.resident_bytes
        assert other["staging_bytes"] == {}


@torch.no_grad()
def test_the_node_that_runs_is_reported_with_its_numbers_so_far(toys, machine) -> None:
    net, x = toys.build_net(), torch.ones(1, 100, 64)
    with machine(8) as manager:
        manage({"net": net}, "0.6MiB", placement="gpu:0", manager=manager)
        assert manager.report()["open_nodes"] == []
        manager.begin_node("5:7", "Sample", workflow_id="w")
        net(x)
        report = manager.report({"open_nodes", "components"})
        (node,) = report["open_nodes"]
        ended = manager.end_node()
        assert (node["node_id"], node["workflow_id"], node["components"]) == ("5:7", "w", ["net"])
        assert node["activation_bytes"] == ended["activation_bytes"] and node["activation_bytes"]["gpu:0"] > 0
        assert node["staging_bytes"] == ended["staging_bytes"] and node["staging_bytes"]["gpu:0"] > 0
        assert node["seconds"] <= ended["seconds"] and node["begin_s"] == ended["begin_s"] > 0
        whole = manager.report()
        assert ended["begin_s"] + ended["seconds"] <= whole["now_s"]
        assert report["nodes"] == report["devices"] == report["samples"] == whole["open_nodes"] == []
        assert [row["id"] for row in report["components"]] == ["net"]
        for part in ("devices", "nodes", "runs", "events", "samples"):
            assert len(manager.report({part})[part]) == len(whole[part])


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", "0.6MiB"])
def test_waits_for_copies_are_told_for_the_node_and_the_component(toys, machine, profile: str) -> None:
    """Over a slow link each pass waits for nearly all that it copies; what is resident waits for nothing."""
    net, x = toys.build_net(), torch.ones(1, 3, 64)
    rate = 1e8
    with machine(8, h2d_bytes_per_s=rate) as manager:
        manage({"net": net}, profile, placement="gpu:0", manager=manager)
        net(x)
        torch.accelerator.synchronize(0)
        told, num_passes = [], 20
        for node_id in "12":
            manager.begin_node(node_id, "Sample")
            for _ in range(num_passes if node_id == "1" else 0):
                net(x)
            torch.accelerator.synchronize(0)
            told.append(manager.end_node())
        (row,) = manager.report()["components"]
        (share,) = manager.plans()["net"].shares
        copies_s = share.streamed_bytes / rate
        if profile == "auto":
            assert told[0]["waited_s"] == row["waited_s"] == 0
        else:
            assert 0.5 * num_passes * copies_s < told[0]["waited_s"] < 1.2 * (num_passes + 1) * copies_s
            assert row["waited_s"] >= told[0]["waited_s"]
        assert told[1]["waited_s"] == 0
        row_before = row["waited_s"]
        manager.release_all()
        assert manager.seconds_waited() == pytest.approx(row_before, abs=1e-5)


class Counted(ObservedModel):
    """A model of a host's that nobody asked for."""

    kind = "text"

    def __init__(self, name: str) -> None:
        self.name = name
        self.weights: list[torch.Tensor] = []
        self.load: object = None

    def find_load(self) -> object:
        return self.load

    def device_bytes(self) -> Mapping[str, int]:
        return {"gpu:0": sum(weight.nbytes for weight in self.weights)}

    def host_bytes(self) -> Mapping[str, int]:
        return {"host": 3 * MIB - self.device_bytes()["gpu:0"]}

    def describe(self) -> Mapping[str, Any]:
        return {"weight_bytes": 3 * MIB, "reasons": ["not managed"]}


@torch.no_grad()
def test_what_a_host_loads_by_itself_is_shown_and_is_no_activation(toys, machine) -> None:
    with machine(16) as manager:
        manage({"clip": toys.build_net()}, placement="gpu:0", manager=manager)
        models = [Counted("clip"), Counted("clip")]
        for _ in range(2):
            manager.hosting.observe(models.copy)  # the same once
        manager.begin_node("1", "CLIPTextEncode")
        models[0].weights.append(held(2 * MIB))
        held(MIB // 2)
        node = manager.end_node()
        assert node["activation_bytes"] == {"gpu:0": MIB // 2}
        rows = {row["id"]: row for row in manager.report({"components"})["components"]}
        assert rows.keys() == {"clip", "clip#2", "clip#3"}
        assert (rows["clip#2"]["engine"], rows["clip#2"]["tiers"]) == ("core", {"gpu:0": 2 * MIB, "host": MIB})
        assert rows["clip#3"]["tiers"] == {"host": 3 * MIB}
        assert [part.id for part in manager.known_components()] == ["clip"]
        assert [part.id for part in manager.shown_components()] == ["clip", "clip#2", "clip#3"]
        assert manager.members.free_name("clip#2") == "clip#2", "it takes no name"
        models.clear()


def test_a_model_that_a_host_loaded_was_used_in_the_node_in_which_it_was_loaded(machine) -> None:
    with machine(16) as manager:
        early, late = models = [Counted("clip"), Counted("vae")]
        manager.hosting.observe(models.copy)

        def uses() -> dict[str, float | None]:
            return {row["id"]: row["last_use_s"] for row in manager.report({"components"})["components"]}

        early.load = object()  # before the first node: nobody saw when
        manager.begin_node("1", "VAEDecode")
        late.load = object()
        manager.end_node()
        first = uses()
        assert first["clip"] is None and first["vae"] is not None
        manager.begin_node("2", "VAEDecode")
        manager.end_node()
        assert uses() == first, "nothing was used"
        manager.begin_node("3", "CLIPTextEncode")
        early.load = object()
        manager.end_node()
        assert uses()["clip"] > first["vae"] == uses()["vae"]
        early.load = None  # it is unloaded
        manager.begin_node("4", "KSampler")
        manager.end_node()
        assert uses()["clip"] > first["vae"]
