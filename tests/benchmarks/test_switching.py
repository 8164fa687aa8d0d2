"""What the case of switching compares every engine with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from highwater.benchmarks.switching.measured import LINK_BYTES_PER_S, Engine, Run, until_steady
from highwater.benchmarks.switching.room import Room


def test_a_room_lacks_what_others_took_since() -> None:
    room = Room(100)
    assert [room.use("text", 40), room.use("A", 80)] == [40, 80]
    assert room.held == {"text": 20, "A": 80}
    assert [room.use("text", 40), room.use("A", 80)] == [20, 20]
    assert room.use("A", 80) == 0


def test_a_room_takes_from_what_was_used_longest_ago() -> None:
    room = Room(100)
    for part in ("first", "second", "third"):
        room.use(part, 45)
    assert room.held == {"first": 10, "second": 45, "third": 45}


def test_what_was_forgotten_is_missing_again() -> None:
    room = Room(100)
    room.use("A", 60)
    room.forget("A")
    assert room.use("B", 50) == 50
    assert room.use("A", 60) == 60


def test_a_part_fits_alone() -> None:
    with pytest.raises(ValueError, match="A has 101 bytes, more than the room of 100"):
        Room(100).use("A", 101)


def run(seconds: float, missing_bytes: int | None) -> Run:
    return Run(
        name="B",
        seconds=seconds,
        steady_s=1.0,
        disk_bytes=0,
        to_device_bytes=0,
        to_host_bytes=0,
        missing_bytes=missing_bytes,
        least_bytes=int(LINK_BYTES_PER_S),
    )


def test_a_switch_is_what_a_prompt_takes_beyond_the_steady_one() -> None:
    switch = run(3.0, int(2 * LINK_BYTES_PER_S))
    assert switch.switch_s == 2.0
    assert switch.over_missing == pytest.approx(1.0) and switch.over_least == pytest.approx(2.0)
    assert run(3.0, None).over_missing is None


def test_the_slowest_of_equal_runs_is_shown() -> None:
    engine = Engine(name="ours", runs=[run(2.0, 1), run(4.0, 1), run(3.0, 1)], ram={})
    assert [each.seconds for each in engine.worst()] == [4.0]


def test_steady_is_the_first_run_that_copies_no_weights() -> None:
    copied = iter([500 << 20, 100 << 20, 1 << 20, 0])
    steady = until_steady(lambda: replace(run(1.0, None), to_device_bytes=next(copied)))
    assert steady.to_device_bytes == 1 << 20
    with pytest.raises(RuntimeError, match="copies 524288000 bytes each time"):
        until_steady(lambda: replace(run(1.0, None), to_device_bytes=500 << 20))
