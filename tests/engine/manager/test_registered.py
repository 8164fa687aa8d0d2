"""Caches of other code: counted, shown, and asked for their bytes in turn with components."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from highwater.memory import MemoryManager, Registration, manage, register_component
from highwater.memory.errors import InvalidInput, UnsafeState
from highwater.memory.units import MIB

X = torch.ones(1, 3, 64)


class Cache:
    """Frames on a device, as a pack keeps them."""

    def __init__(self, num_frames: int) -> None:
        self.frames = [torch.empty(MIB // 2, dtype=torch.uint8, device="sim:0") for _ in range(num_frames)]
        self.asked: list[tuple[str, int]] = []

    def count(self) -> int:
        return sum(frame.nbytes for frame in self.frames)

    def free(self, device: str, num_bytes: int) -> None:
        self.asked.append((device, num_bytes))
        while self.frames and num_bytes > 0:
            num_bytes -= self.frames.pop(0).nbytes

    def end(self) -> None:
        self.frames.clear()


@pytest.fixture
def manager(machine) -> Iterator[MemoryManager]:
    with machine(8) as manager:
        yield manager


def register(manager: MemoryManager, cache: Cache, name: str = "frames") -> Registration:
    return register_component(name, cache.count, evict=cache.free, manager=manager)


def row(manager: MemoryManager, id: str) -> dict[str, Any]:
    (found,) = [part for part in manager.report()["components"] if part["id"] == id]
    return found


def test_it_is_in_the_report_with_its_bytes_and_its_node(manager: MemoryManager) -> None:
    cache = Cache(4)
    manager.begin_run("p", "a run")
    manager.begin_node("7", "Interpolate", workflow_id="w")
    registered = register(manager, cache)
    manager.end_node()
    part = row(manager, "frames")
    assert (part["node_id"], part["workflow_id"]) == ("7", "w")
    assert part["tiers"] == {"gpu:0": 2 * MIB} and part["engine"] == "registered" and part["in_effect"]
    (device,) = [device for device in manager.report()["devices"] if device["name"] == "gpu:0"]
    assert device["managed_bytes"] == 2 * MIB and device["other_bytes"] == 0
    second = register_component("frames", {"gpu:0": 0, "cpu": 5}, evict=print, manager=manager)
    assert second.id == "frames#2" and row(manager, "frames#2")["tiers"] == {"host": 5}
    second.unregister()
    second.unregister()
    registered.unregister()
    assert not manager.report()["components"]
    manager.end_run()
    cache.end()


@torch.no_grad()
def test_its_bytes_leave_for_a_component_and_not_more_than_needed(toys, manager: MemoryManager) -> None:
    cache = Cache(15)
    registered = register(manager, cache)
    want = toys.build_net()(X)
    with manage(toys.build_net(), manager=manager) as managed:
        assert torch.allclose(managed.members[0].managed.module(X).cpu(), want, atol=1e-5)
        assert 0 < len(cache.frames) < 15
        (event,) = [event for event in manager.report()["events"] if event["component"] == "frames"]
        assert event["kind"] == "evict" and event["reason"].startswith("model needs")
        assert event["bytes"] == (15 - len(cache.frames)) * MIB // 2
    registered.unregister()
    cache.end()


@torch.no_grad()
def test_in_use_it_stays_and_the_component_makes_do(toys, manager: MemoryManager) -> None:
    cache = Cache(14)
    registered = register(manager, cache)
    with registered.in_use(), manage(toys.build_net(), manager=manager) as managed:
        managed.members[0].managed.module(X)
        assert len(cache.frames) == 14 and not cache.asked
        with pytest.raises(UnsafeState):
            manager.commands.release_from(registered.component, reason="asked")
    assert (
        sum(departure.left_bytes for departure in manager.commands.release_from(registered.component, reason="asked"))
        == 7 * MIB
    )
    assert not cache.frames
    registered.unregister()


@torch.no_grad()
@pytest.mark.parametrize("kept", [False, True])
def test_what_was_used_longest_ago_leaves_first_and_what_is_kept_last(toys, manager: MemoryManager, kept: bool) -> None:
    caches = [Cache(7), Cache(8)]
    registered = [register(manager, cache, name) for name, cache in zip(("old", "new"), caches, strict=True)]
    if kept:
        manager.commands.keep([registered[0].component], True)
    with manage(toys.build_net(), manager=manager) as managed:
        managed.members[0].managed.module(X)
    first, second = reversed(caches) if kept else caches
    assert first.asked and not second.asked
    for each, cache in zip(registered, caches, strict=True):
        each.unregister()
        cache.end()


def test_numbers_count_as_gone_once_they_were_asked_for(toys, manager: MemoryManager) -> None:
    frames = [torch.empty(7 * MIB, dtype=torch.uint8, device="sim:0")]
    registered = register_component("frames", 7 * MIB, evict=lambda device, num_bytes: frames.clear(), manager=manager)
    manager.commands.release_from(registered.component, reason="asked")
    assert not frames and not row(manager, "frames")["tiers"]
    registered.resize({"gpu:0": 3})
    assert row(manager, "frames")["tiers"] == {"gpu:0": 3}
    registered.unregister()


@torch.no_grad()
def test_what_its_functions_raise_stops_nothing_and_is_logged_once(toys, manager: MemoryManager, caplog) -> None:
    cache = Cache(2)

    def fail(*_: object) -> int:
        raise ValueError("no idea")

    both = [
        register_component("silent", fail, evict=fail, manager=manager),
        register_component("stubborn", cache.count, evict=fail, manager=manager),
    ]
    with caplog.at_level(logging.ERROR, "highwater"), manage(toys.build_net(), manager=manager) as managed:
        for _ in range(2):
            managed.members[0].managed.module(X)
            manager.commands.release_from(both[1].component, reason="asked")
            manager.report()
    told = [record.getMessage() for record in caplog.records]
    assert sorted(told) == [
        "Highwater: silent did not tell its bytes: ValueError: no idea",
        "Highwater: stubborn did not free its bytes of gpu:0: ValueError: no idea",
    ]
    assert row(manager, "stubborn")["tiers"] == {"gpu:0": MIB}
    for each in both:
        each.unregister()
    cache.end()


@pytest.mark.parametrize(
    ("name", "num_bytes", "said"),
    [
        ("", 1, "name '': allowed"),
        ("frames", -1, "bytes -1: allowed"),
        ("frames", True, "bytes True: allowed"),
        ("frames", {"gpu:0": "1"}, "bytes {'gpu:0': '1'}: allowed"),
        ("frames", {"gpu:5": 1}, "bytes: this machine has no device 'gpu:5'"),
        ("frames", {"cuda:3": 1}, "bytes: this machine has no device 'cuda:3'"),
        ("two\nlines", 1, "name 'two\\nlines': allowed"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(manager: MemoryManager, name: str, num_bytes: Any, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        register_component(name, num_bytes, evict=print, manager=manager)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(InvalidInput, match="evict None: allowed"):
        register_component("frames", 1, evict=None, manager=manager)  # type: ignore[arg-type]
    assert not manager.report()["components"]


def test_devices_may_be_named_as_torch_names_them(manager: MemoryManager) -> None:
    registered = register_component("frames", {torch.device("sim", 0): 3, "cuda": 4}, evict=print, manager=manager)
    assert row(manager, "frames")["tiers"] == {"gpu:0": 7}
    registered.unregister()


def test_what_its_owner_says_never_waits(manager: MemoryManager, wait_until) -> None:
    """Its owner may hold a lock of its own that ``evict`` waits for in another thread."""
    cache = Cache(1)
    registered = register(manager, cache)
    used_before = registered.component.last_use

    def say() -> None:
        with registered.in_use():
            registered.used()

    with manager.exclusive():
        thread = threading.Thread(target=say, daemon=True)
        thread.start()
        wait_until(lambda: not thread.is_alive())
    assert registered.component.last_use > used_before and not registered.component.is_computing
    with manager.exclusive():
        thread = threading.Thread(target=registered.unregister, daemon=True)
        thread.start()
        wait_until(lambda: not thread.is_alive())
    assert not manager.report()["components"]
    cache.end()


@torch.no_grad()
def test_its_functions_may_register_and_unregister(toys, manager: MemoryManager) -> None:
    cache = Cache(14)
    registered: list[Registration] = []

    def free(device: str, num_bytes: int) -> None:
        cache.free(device, num_bytes)
        registered.pop().unregister()
        registered.append(register_component("smaller", cache.count, evict=free, manager=manager))

    registered.append(register_component("frames", cache.count, evict=free, manager=manager))
    with manage(toys.build_net(), manager=manager) as managed:
        managed.members[0].managed.module(X)
        assert [part["id"] for part in manager.report()["components"] if part["engine"] == "registered"] == ["smaller"]
    registered.pop().unregister()
    cache.end()
