"""Components that a host moves itself, beside components of ours, on one simulated device."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

from highwater.memory import MemoryManager, manage
from highwater.memory.manager.steered import SteeredComponent
from highwater.memory.units import MIB

X = torch.ones(1, 3, 64)
NET_BYTES = int(1.1 * MIB)
PAGE = MIB // 4


class Paged(SteeredComponent):
    """A component whose host keeps it in pages of a device; the pages are real tensors of a simulated one."""

    PAGE_BYTES = PAGE

    def __init__(self, name: str, num_pages: int = 0, **fields: Any) -> None:
        super().__init__(name, "diffusion", **fields)
        self.pages = [torch.empty(self.PAGE_BYTES, dtype=torch.uint8, device="sim:0") for _ in range(num_pages)]
        self.computes = False
        self.told_first: list[str] = []

    @property
    def is_computing(self) -> bool:
        return self.computes

    @property
    def is_in_effect(self) -> bool:
        return True

    def device_bytes(self) -> Mapping[str, int]:
        return {"gpu:0": len(self.pages) * self.PAGE_BYTES}

    def paged_bytes(self, device: str) -> int:
        return 0

    def describe(self) -> Mapping[str, Any]:
        return {"reasons": ["engine dynamic"]}

    def free_memory(self, device: str, num_bytes: int) -> int:
        count = min(len(self.pages), -(-num_bytes // self.PAGE_BYTES))
        del self.pages[len(self.pages) - count :]
        return count * self.PAGE_BYTES

    def leave_first(self, device: str) -> None:
        self.told_first.append(device)


class Host:
    def __init__(self, *components: Paged) -> None:
        self.held = list(components)
        self.kept: list[int | None] = []
        self.pinned = 0
        self.order: list[str] = []
        for component in components:
            component.leave_first = lambda device, name=component.name: self.order.append(name)

    def components(self) -> Iterable[SteeredComponent]:
        return self.held

    def keep_free(self, num_bytes: int | None) -> None:
        self.kept.append(num_bytes)

    def pinned_bytes(self) -> int:
        return self.pinned


def resident_bytes(manager: MemoryManager, name: str) -> int:
    return manager.ledger.held(name, "gpu:0")


def evictions(manager: MemoryManager) -> list[str]:
    return [event["component"] for event in manager.report()["events"] if event["kind"] == "evict"]


@torch.no_grad()
def test_the_report_reads_its_bytes_as_they_are_now(toys, machine) -> None:
    with machine(8) as manager:
        manager.hosting.steer(Host(other := Paged("flux", 6, node_id="7")))
        for num_pages in (6, 2):
            del other.pages[num_pages:]
            report = manager.report()
            (row,) = report["components"]
            assert (row["id"], row["engine"], row["node_id"]) == ("flux", "dynamic", "7")
            assert row["tiers"] == {"gpu:0": num_pages * PAGE}
            device = next(device for device in report["devices"] if device["name"] == "gpu:0")
            assert (device["managed_bytes"], device["other_bytes"]) == (num_pages * PAGE, 0)
        manager.ledger.check()  # which knows nothing of it
        other.pages.clear()


@torch.no_grad()
def test_its_idle_pages_are_room_for_ours(toys, machine) -> None:
    """5 MiB, of which 4 are pages that no forward uses: without them a net of 1.1 would stream."""
    with machine(5) as manager:
        manager.hosting.steer(Host(other := Paged("flux", 16)))
        net = toys.build_net()
        managed = manage({"ours": net}, placement="gpu:0", manager=manager)
        net(X)
        plan = manager.plans()["ours"]
        assert len(plan.shares[0].resident) == plan.num_blocks
        assert evictions(manager) == ["flux"]
        assert 0 < len(other.pages) < 16, "only what was needed leaves"
        other.pages.clear()
        managed.release()


@torch.no_grad()
def test_what_computes_keeps_its_pages(toys, machine) -> None:
    with machine(5) as manager:
        manager.hosting.steer(Host(other := Paged("flux", 16)))
        other.computes = True
        net = toys.build_net()
        managed = manage({"ours": net}, placement="gpu:0", manager=manager)
        net(X)
        assert len(other.pages) == 16
        plan = manager.plans()["ours"]
        assert len(plan.shares[0].resident) < plan.num_blocks
        other.pages.clear()
        managed.release()


@torch.no_grad()
@pytest.mark.parametrize("last", ["ours", "flux"])
@pytest.mark.parametrize("kept", [False, True])
def test_both_kinds_leave_in_one_order(toys, machine, last: str, kept: bool) -> None:
    with machine(8) as manager:
        manager.hosting.steer(Host(other := Paged("flux", 6)))
        nets = {"ours": toys.build_net()}
        managed = manage(nets, placement="gpu:0", manager=manager)
        nets["ours"](X)
        manager.hosting.note_use(other)
        if last == "ours":
            nets["ours"](X)
        other.keep(kept)
        manager.free_memory("gpu:0", PAGE, "asked for")
        first_out = "flux" if last == "ours" and not kept else "ours"
        assert evictions(manager) == [first_out]
        other.pages.clear()
        managed.release()


@torch.no_grad()
def test_the_order_holds_from_the_first_question_on(machine) -> None:
    with machine(8) as manager:
        newest, noted, oldest = (Paged(name, 1) for name in ("newest", "noted", "oldest"))
        manager.hosting.note_use(noted)
        manager.hosting.steer(Host(newest, noted, oldest))
        manager.free_memory("gpu:0", 1, "asked for")
        assert [len(component.pages) for component in (newest, noted, oldest)] == [1, 1, 0]
        for component in (newest, noted):
            component.pages.clear()


@torch.no_grad()
def test_one_whose_use_was_not_noted_is_as_old_as_the_host_says(toys, machine) -> None:
    """The host's list is in the order of use; of three one was noted, and ours before it."""
    with machine(8) as manager:
        newest, noted, oldest = (Paged(name, 1) for name in ("newest", "noted", "oldest"))
        manager.hosting.steer(Host(newest, noted, oldest))
        nets = {"ours": toys.build_net()}
        managed = manage(nets, placement="gpu:0", manager=manager)
        nets["ours"](X)
        manager.hosting.note_use(noted)
        order = []
        for _ in range(4):
            manager.free_memory("gpu:0", 1, "asked for")
            order.append(evictions(manager)[-1])
            if order[-1] == "ours":
                managed.release()
        assert order[:2] == ["oldest", "ours"]
        assert set(order[2:]) == {"noted", "newest"}


def test_the_host_is_told_the_order_in_which_they_leave(machine) -> None:
    """The last one told is the first to leave."""
    with machine(8) as manager:
        a, b, c = (Paged(name, 1) for name in "abc")
        manager.hosting.steer(host := Host(a, b, c))
        for used in (a, b, c, a):
            host.order.clear()
            manager.hosting.note_use(used)
        assert host.order == ["a", "c", "b"]
        for kept, order in ((True, ["b", "a", "c"]), (False, ["a", "c", "b"])):
            host.order.clear()
            manager.commands.keep([b], kept)
            assert host.order == order
        for component in (a, b, c):
            component.pages.clear()


def test_the_host_keeps_free_the_largest_mark_that_was_set(machine) -> None:
    with machine(8, 8) as manager:
        manager.hosting.steer(host := Host())
        manager.set_watermark("gpu:0", MIB, 2 * MIB)
        manager.set_watermark("gpu:1", 3 * MIB, 4 * MIB)
        assert host.kept[-1] == 3 * MIB
        manager.set_watermark("gpu:1", 0, 0)
        assert host.kept[-1] == MIB
        manager.set_watermark("*", 0, 0)
        assert host.kept[-1] is None


def test_a_mark_that_was_set_before_the_host_came_counts(machine) -> None:
    with machine(8) as manager:
        manager.set_watermark("gpu:0", MIB, 2 * MIB)
        manager.hosting.steer(host := Host())
        assert host.kept == [MIB]


@torch.no_grad()
def test_names_differ_in_either_order(toys, machine) -> None:
    with machine(8) as manager:
        manager.hosting.steer(host := Host(Paged("flux", 1)))
        assert [row["id"] for row in manager.report()["components"]] == ["flux"]
        managed = manage({"flux": toys.build_net()}, placement="gpu:0", manager=manager)
        assert {row["id"] for row in manager.report()["components"]} == {"flux", "flux#2"}
        host.held[0].pages.clear()
        host.held.clear()
        gc.collect()
        host.held.append(Paged("flux#2"))
        assert {row["id"] for row in manager.report()["components"]} == {"flux#2", "flux#2#2"}
        managed.release()


def test_a_component_that_the_host_unloads_leaves_an_event(machine) -> None:
    with machine(8) as manager:
        manager.hosting.steer(Host(other := Paged("flux")))
        manager.hosting.note_use(other)
        manager.hosting.note_unload(other, {"gpu:0": PAGE})
        (event,) = [event for event in manager.report()["events"] if event["kind"] == "evict"]
        assert (event["component"], event["bytes"], event["reason"]) == ("flux", PAGE, "ComfyUI unloaded it")


@torch.no_grad()
def test_what_the_host_has_page_locked_counts_towards_our_limit(toys, machine) -> None:
    with machine(8) as manager:
        manager.hosting.steer(host := Host())
        before = manager.machine().pinned_bytes
        host.pinned = before // 2
        assert manager.machine().pinned_bytes <= before - host.pinned + MIB * 64  # RAM changes meanwhile
        host.pinned = 2 * before
        assert manager.machine().pinned_bytes == 0


@torch.no_grad()
def test_a_node_reports_what_it_used(toys, machine) -> None:
    with machine(8) as manager:
        manager.hosting.steer(Host(other := Paged("flux", 3, node_id="4")))
        manager.begin_run("run", "run")
        manager.begin_node("9", "KSampler")
        manager.hosting.note_use(other)
        sampler = manager.end_node()
        manager.begin_node("4", "Manage Model")
        loader = manager.end_node()
        manager.end_run()
        assert sampler["weights_bytes"] == {"gpu:0": 3 * PAGE}
        assert sampler["tiers"] == {}
        assert loader["weights_bytes"] == {}
        assert loader["tiers"] == {"gpu:0": 3 * PAGE}
        points = [sample for sample in manager.report()["samples"] if sample["device"] == "gpu:0"]
        assert points[-1]["component_bytes"] == {"flux": 3 * PAGE}
        other.pages.clear()


@torch.no_grad()
def test_two_hosts_are_seen_as_one(toys, machine) -> None:
    with machine(8) as manager:
        one, other = Host(a := Paged("a", 2)), Host(b := Paged("b", 3))
        one.pinned, other.pinned = 5, 7
        for host in (one, other, one):
            manager.hosting.steer(host)
        assert [row["id"] for row in manager.report()["components"]] == ["a", "b"]
        assert manager.steered.pinned_bytes() == 12
        manager.set_watermark("gpu:0", MIB, 2 * MIB)
        assert one.kept[-1] == other.kept[-1] == MIB
        manager.free_memory("gpu:0", 5 * PAGE, "test")
        assert not a.pages and not b.pages
        manager.set_watermark("gpu:0", 0, 0)
