"""Marks of devices and of the RAM: in bytes and percent, set by a node or by default, and what they move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory import MemoryManager, manage
from highwater.memory.errors import InvalidInput
from highwater.memory.manager.watermark import Watermark, Watermarks, default_host_watermark, in_bytes
from highwater.memory.options.marks import Mark, Marks, parse_watermarks, read_mark
from highwater.memory.transfer.devices import HostMemory

MIB = 1 << 20
X = torch.ones(1, 64)
X2 = torch.ones(1, 128)


def marks(low: object, high: object) -> Marks:
    return Marks(low=read_mark(low, what="low"), high=read_mark(high, what="high"))


amounts = st.one_of(
    st.integers(0, 1 << 36).map(lambda num_bytes: Mark(num_bytes=num_bytes)),
    st.floats(0, 1).map(lambda share: Mark(share=share)),
)


@given(low=amounts, high=amounts, total=st.integers(0, 1 << 36))
def test_marks_of_both_kinds_are_compared_on_the_device(low: Mark, high: Mark, total: int) -> None:
    try:
        asked = Marks(low=low, high=high)
        found = in_bytes(asked, "gpu:0", total)
    except InvalidInput:
        assert low.of(total) > high.of(total) or high.of(total) > total or (low.share or 0) > (high.share or 0)
    else:
        assert found.low_bytes == low.of(total) <= found.high_bytes == high.of(total) <= total


def test_a_percentage_is_a_part_of_each_device(machine) -> None:
    with machine(4, 8) as manager:
        manager.set_watermark("*", "25%", "50%")
        found = {device.name: device.watermark for device in manager.device_reports() if device.name != "cpu"}
        assert found == {
            "gpu:0": {"low_bytes": MIB, "high_bytes": 2 * MIB},
            "gpu:1": {"low_bytes": 2 * MIB, "high_bytes": 4 * MIB},
        }


def test_marks_that_do_not_fit_one_of_the_devices_set_nothing(machine) -> None:
    with machine(4, 8) as manager:
        with pytest.raises(
            InvalidInput, match=r"watermark low=50% \(4.00MiB\) high=3.00MiB of gpu:1; allowed: low <= hi"
        ):
            manager.set_watermark("*", "50%", "3MiB")
        with pytest.raises(InvalidInput, match=r"watermark high=6.00MiB exceeds gpu:0; allowed: up to 4.00MiB"):
            manager.set_watermark("*", "50%", "6MiB")
        with pytest.raises(InvalidInput, match=r"no device 'gpu:2'; did you mean"):
            manager.commands.set_default_watermarks(parse_watermarks("1MiB:2MiB,gpu:2=1MiB:2MiB"))
        assert (
            manager.capacity.watermarks.of("gpu:0")
            == manager.capacity.watermarks.of("gpu:1")
            == Watermark(low_bytes=0, high_bytes=0)
        )


def test_what_a_node_sets_counts_before_what_is_set_by_default(sim) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=4 * MIB), sim.SimDeviceSpec(total_bytes=8 * MIB)]):
        manager = MemoryManager()
        found = manager.capacity.watermarks
        unset = found.of("gpu:1")
        manager.commands.set_default_watermarks(parse_watermarks("25%:50%,gpu:1=1MiB:3MiB"))
        assert found.of("gpu:0") == Watermark(low_bytes=MIB, high_bytes=2 * MIB)
        assert found.of("gpu:1") == Watermark(low_bytes=MIB, high_bytes=3 * MIB)
        assert found.is_set("gpu:1")
        manager.set_watermark("gpu:1", 0, MIB)
        manager.commands.set_default_watermarks(parse_watermarks("50%:75%"))
        assert found.of("gpu:0") == Watermark(low_bytes=2 * MIB, high_bytes=3 * MIB)
        assert found.of("gpu:1") == Watermark(low_bytes=0, high_bytes=MIB)
        told = [(event.device, event.bytes) for event in manager.event_log.events if event.kind == "watermark"]
        assert told == [("gpu:0", MIB), ("gpu:1", MIB), ("gpu:1", 0), ("gpu:0", 2 * MIB)]
        manager.commands.set_default_watermarks({})
        assert found.of("gpu:0") != unset and not found.is_set("gpu:0") and found.is_set("gpu:1")


def test_marks_are_reported_as_they_were_written(sim) -> None:
    def told(manager: MemoryManager) -> dict[str, tuple[str, str, str]]:
        reports = {device.name: device.own_watermark for device in manager.device_reports()}
        return {name: (found["low_text"], found["high_text"], found["source"]) for name, found in reports.items()}

    with sim.cluster([sim.SimDeviceSpec(total_bytes=4 * MIB), sim.SimDeviceSpec(total_bytes=8 * MIB)]):
        manager = MemoryManager()
        assert set(told(manager).values()) == {("", "", "default")}
        asked = parse_watermarks("10 % : 1.5 MB,gpu:1=25%:50%,host=1g:5%")
        answer = manager.commands.set_default_watermarks(asked)
        assert told(manager) == {
            "gpu:0": ("10%", "1.5MB", "setting"),
            "gpu:1": ("25%", "50%", "setting"),
            "cpu": ("1g", "5%", "setting"),
        }
        assert answer["gpu:0"]["high_text"] == "1.5MB" and answer["host"]["low_text"] == "1g"
        manager.set_watermark("gpu:1", "2MiB", "50%")  # as much as before, in other words
        manager.set_watermark("gpu:0", 0, MIB)
        assert told(manager)["gpu:0"] == ("", "", "set") and told(manager)["gpu:1"] == ("2MiB", "50%", "set")
        manager.set_watermark("gpu:1", "25%", "4MiB")
        assert told(manager)["gpu:1"] == ("25%", "4MiB", "set")
        manager.set_watermark("gpu:1", "0.00000000000000000001%", "4MiB")
        assert told(manager)["gpu:1"] == ("", "4MiB", "set"), "nobody wants to read that"


def test_the_rams_percentage_follows_the_limit_of_a_container() -> None:
    found = Watermarks({})
    found.set_defaults({"host": marks("10%", "20%")})
    assert found.of_host(100 * MIB) == Watermark(low_bytes=10 * MIB, high_bytes=20 * MIB)
    assert found.of_host(50 * MIB) == Watermark(low_bytes=5 * MIB, high_bytes=10 * MIB)
    total = HostMemory.now().total_bytes
    assert found.set("host", "50%", total) == ["host"]
    assert found.of_host(MIB) == Watermark(low_bytes=MIB // 2, high_bytes=MIB)  # smaller than what was asked for
    assert found.set_defaults({}) == []  # what was set counts
    assert found.of_host(MIB).low_bytes == MIB // 2
    assert Watermarks({}).of_host(total) == default_host_watermark(total)


@torch.no_grad()
def test_marks_that_are_set_by_default_move_idle_components_at_once_but_not_in_a_run(toys, machine) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        manage({"a": net}, manager=manager)
        net(X)
        held = manager.ledger.used("gpu:0")
        assert held
        manager.set_watermark("gpu:0", 0, 0)
        manager.capacity.watermarks.marks.clear()
        manager.begin_run("r", "test")
        manager.commands.set_default_watermarks(parse_watermarks("8MiB:8MiB"))
        assert manager.ledger.used("gpu:0") == held
        manager.end_run()
        assert manager.ledger.used("gpu:0") == 0  # the run's end keeps the marks
        manager.commands.set_default_watermarks({"*": marks("0%", "0%")})
        net(X)
        assert manager.ledger.used("gpu:0") == held
        manager.commands.set_default_watermarks(parse_watermarks("100%:100%"))
        assert manager.ledger.used("gpu:0") == 0
        manager.commands.set_default_watermarks({})


@settings(max_examples=8)
@given(free=st.lists(st.integers(0, 100), min_size=2, max_size=6), looks_again=st.booleans())
@torch.no_grad()
def test_a_wobble_between_the_marks_moves_nothing(toys, machine, sim, free: list[int], looks_again: bool) -> None:
    """Another program takes and gives back memory while two resident components take turns."""
    low, high = 2 * MIB, 4 * MIB
    with machine(16, low=low, high=high) as manager:
        nets = {name: toys.build_net() for name in "ab"}
        for name, net in nets.items():
            manage({name: net}, manager=manager)
        for net in [*nets.values()] * 2:
            net(X)
        held, moved = manager.ledger.used("gpu:0"), manager.bytes_moved()
        most = manager.devices["gpu:0"].free_bytes() - low - MIB  # what passes need stays free
        for part in free:
            sim.occupy(0, most * part // 100)
            manager.begin_run("r", "run")
            if looks_again:
                manager.capacity.outdate_plans()
            for net in nets.values():
                net(X)
            manager.end_run()
            assert (manager.ledger.used("gpu:0"), manager.bytes_moved()) == (held, moved)
        sim.occupy(0, 0)


@torch.no_grad()
def test_a_component_that_streams_gives_way_once_and_does_not_grow_for_a_wobble(toys, machine, sim) -> None:
    low, high = MIB // 4, MIB // 2
    with machine(2, low=low, high=high) as manager:
        net = toys.build_net(singles=14)
        with manage({"net": net}, manager=manager) as managed:

            def run(part: float) -> tuple[int, int]:
                """Return what is held and what a second pass moves, while others hold a part of the marks' distance."""
                sim.occupy(0, int((high - low) * part))
                manager.begin_run("r", "run")
                manager.capacity.outdate_plans()
                net(X)
                before = manager.bytes_moved()
                net(X)
                moved = manager.bytes_moved() - before
                manager.end_run()
                return manager.ledger.used("gpu:0"), moved

            warm = [run(0) for _ in range(3)]
            assert managed.members[0].managed.plan.streams and warm[1] == warm[2]
            first = [run(part) for part in (0.1, 0, 0.5, 0.2, 1, 0)]
            assert all(now[0] <= before[0] for before, now in zip([warm[-1], *first], first, strict=False))
            moved = manager.bytes_moved()
            again = [run(part) for part in (0.1, 0, 0.5, 0.2, 1, 0)]
            assert set(again) == {first[-1]} and first[-1][0] < warm[-1][0]
            assert manager.bytes_moved() - moved == pytest.approx(12 * first[-1][1], rel=0.2), "only what streams"

            sim.occupy(0, 400 << 10)
            manager.begin_run("r", "run")  # below the low mark: it gives way until the high mark is free
            assert manager.devices["gpu:0"].free_bytes() >= high
            manager.end_run()
            assert run(0)[0] > first[-1][0]  # and all that is free is much more than a wobble
        sim.occupy(0, 0)
