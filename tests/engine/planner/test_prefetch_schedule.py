"""The schedule: residents fit their room, passes take what they are predicted to take, and no search makes it worse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from highwater.memory.planner import prefetch_schedule, staging_layout
from highwater.memory.planner.prefetch_schedule import (
    choose_schedule,
    place_streamed,
    spread_residents,
)
from highwater.memory.planner.staging_layout import pass_seconds
from highwater.memory.planner.workload import Workload, balanced_workload
from highwater.memory.units import MIB

sizes_of_blocks = st.lists(st.integers(1, 4000).map(lambda n: n * 512), min_size=1, max_size=60)


@given(sizes_of_blocks, st.integers(0, 60 * 4000 * 512))
def test_residents_fit_the_budget_and_no_other_block_would(sizes: list[int], budget: int) -> None:
    resident = spread_residents(sizes, budget)
    left = budget - sum(sizes[position] for position in resident)
    assert left >= 0
    assert all(sizes[position] > left for position in range(len(sizes)) if position not in resident)


@given(st.integers(2, 80), st.data())
def test_equal_blocks_are_spread_evenly(count: int, data) -> None:
    kept = data.draw(st.integers(0, count))
    streamed = sorted(set(range(count)) - spread_residents([10] * count, 10 * kept))
    assert len(streamed) == count - kept
    if streamed:
        gaps = [after - before for before, after in zip(streamed, [*streamed[1:], streamed[0] + count], strict=True)]
        assert max(gaps) - min(gaps) <= 1


@settings(max_examples=50)
@given(sizes_of_blocks, st.floats(0.0, 1.0), st.data())
def test_a_schedule_fits_its_room_and_is_no_slower_than_even_spreading(sizes: list[int], part: float, data) -> None:
    assume(len(sizes) > 1)
    room = max(sizes) + int(part * (sum(sizes) - max(sizes) - 1))
    work = balanced_workload(sizes, room)
    if data.draw(st.booleans()):
        speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=len(sizes), max_size=len(sizes)))
        work = replace(work, compute_s=tuple(size * speed for size, speed in zip(sizes, speeds, strict=True)))
    chosen = choose_schedule(work, room)
    streamed = [position for position in range(len(sizes)) if position not in chosen.resident]
    assert sum(sizes[position] for position in chosen.resident) + chosen.staging_bytes <= room
    for here in chosen.offsets:
        assert list(here) == streamed
        assert all(0 <= begin <= chosen.staging_bytes - sizes[position] for position, begin in here.items())
    played = pass_seconds(work, chosen.resident, chosen.staging_bytes, chosen.offsets)
    assert chosen.pass_s == played
    if room >= 2 * max(sizes):
        spread = frozenset(spread_residents(sizes, room - 2 * max(sizes)))
        even = place_streamed(work, spread, room - sum(sizes[position] for position in spread))
        assert chosen.pass_s <= even.pass_s * 1.01
    assert chosen == choose_schedule.__wrapped__(work, room)


@settings(max_examples=50)
@given(sizes_of_blocks, st.integers(1, 4), st.floats(0.0, 1.0))
def test_what_is_asked_to_be_copied_ahead_has_staging_memory(sizes: list[int], ahead: int, part: float) -> None:
    assume(len(sizes) > 1)
    room = max(sizes) + int(part * (sum(sizes) - max(sizes) - 1))
    chosen = choose_schedule(balanced_workload(sizes, room), room, prefetch_blocks=ahead)
    largest = max(size for position, size in enumerate(sizes) if position not in chosen.resident)
    assert chosen.staging_bytes >= largest * min(ahead + 1, room // max(sizes))


@pytest.mark.parametrize("room", range(4, 12))
@pytest.mark.parametrize("known", [False, True])
def test_as_few_copies_hold_the_host_as_can_be(room: int, known: bool) -> None:
    sizes, blocking = (MIB,) * 14, frozenset({0, 1, 2, 5, 7, 8})
    work = balanced_workload(sizes, room * MIB, blocking=blocking)
    if known:  # where computes hide all copies, too
        work = replace(work, compute_s=(2.0,) * 14, copy_s=(1.0,) * 14)
    chosen = choose_schedule(work, room * MIB, prefetch_blocks=1)
    assert len(chosen.resident & blocking) == min(len(chosen.resident), len(blocking))


def test_unequal_blocks_run_faster_than_evenly_spread() -> None:
    # As in a UNet: few bytes that compute long, then large blocks whose copies follow each other.
    sizes = (2,) * 3 + (10,) * 6 + (43,) * 10 + (3,) * 6 + (22,) * 9
    computes = (40.0,) * 3 + (20.0,) * 6 + (10.0,) * 10 + (40.0,) * 6 + (20.0,) * 9
    work = Workload(sizes, computes, tuple(float(size) for size in sizes))
    room = int(0.3 * sum(sizes))
    spread = frozenset(spread_residents(sizes, room - 2 * max(sizes)))
    even = place_streamed(work, spread, 2 * max(sizes)).pass_s
    assert choose_schedule(work, room).pass_s < 0.97 * even


def test_another_device_computing_gives_copies_time() -> None:
    work = Workload((MIB,) * 12, (0.1,) * 12, (1.0,) * 12)
    alone = choose_schedule(work, 6 * MIB)
    beside = choose_schedule(replace(work, idle_s=5.0), 6 * MIB)
    assert beside.pass_s < alone.pass_s + 5.0


@given(st.lists(st.sampled_from([0, 512, 3072, 9216]), min_size=2, max_size=20), st.floats(0.0, 1.0))
def test_what_has_no_bytes_stays(sizes: list[int], part: float) -> None:
    assume(sum(sizes) > max(sizes))
    room = max(sizes) + int(part * (sum(sizes) - max(sizes) - 1))
    chosen = choose_schedule(balanced_workload(sizes, room), room)
    assert chosen.resident >= {position for position, size in enumerate(sizes) if not size}
    assert chosen.pass_s > 0


MANY_BLOCKS = {
    "a large one": [1 << 28, *(Random(1).choices(range(512, 32768, 512), k=1000))],
    "experts": ([40 * MIB] + [9 * MIB] * 25) * 30,
    "unequal": Random(2).choices(range(512, 20 * MIB, 512), k=1500),
}


@pytest.mark.parametrize("part", [0.3, 0.8])
@pytest.mark.parametrize("name", MANY_BLOCKS)
def test_the_work_of_a_search_grows_no_faster_than_blocks(monkeypatch, name: str, part: float) -> None:
    calls = []

    def counted(module, name: str):
        function = getattr(module, name)

        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    counted(staging_layout, "free_pieces")
    counted(prefetch_schedule, "window_seconds")
    sizes = tuple(MANY_BLOCKS[name])
    room = max(max(sizes), int(part * sum(sizes)))
    choose_schedule.__wrapped__(balanced_workload(sizes, room), room)
    assert calls.count("free_pieces") <= 20 * len(sizes)
    assert calls.count("window_seconds") <= 20


def test_spreading_goes_through_unequal_blocks_a_few_times() -> None:
    class Counted(list):
        num_times = 0

        def __iter__(self) -> Iterator[int]:
            self.num_times += 1
            return super().__iter__()

    sizes = Counted(MANY_BLOCKS["a large one"])
    for budget in range(0, sum(sizes), sum(sizes) // 7):
        sizes.num_times = 0
        spread_residents(sizes, budget)
        assert sizes.num_times <= 50
