"""The schedule: residents fit their room, passes take what they are predicted to take, and no search makes it worse."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from highwater.memory.schedule import DEPTHS, balanced_seconds, choose_schedule, pass_seconds, spread_residents
from highwater.memory.units import MIB
from hypothesis import assume, given, settings
from hypothesis import strategies as st

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


seconds_of_blocks = st.integers(2, 30).flatmap(
    lambda count: st.tuples(
        *[st.lists(st.sampled_from([0.3, 1.0, 2.5, 7.0]), min_size=count, max_size=count) for _ in range(2)],
        st.sets(st.integers(0, count - 1), max_size=count),
    )
)


def slow_pass_seconds(
    compute: Sequence[float], copy: Sequence[float], resident: set[int], num_slots: int, idle: float
) -> float:
    """Play many passes one event at a time, and return the mean of the later ones."""
    streamed = [block for block in range(len(compute)) if block not in resident]
    freed: list[float] = []
    copied = now = middle = 0.0
    num_passes = 40
    for number in range(num_passes):
        if number == num_passes // 2:
            middle = now
        for block, seconds in enumerate(compute):
            if block in streamed and len(streamed) > num_slots:
                copied = max(copied, freed[-num_slots] if len(freed) >= num_slots else 0.0) + copy[block]
                now = max(now, copied)
                freed.append(now + seconds)
            now += seconds
        now += idle
    return (now - middle) / (num_passes - num_passes // 2)


@given(seconds_of_blocks, st.integers(1, 5), st.sampled_from([0.0, 4.0]))
def test_predicted_passes_are_those_of_a_run_played_out(case, num_slots: int, idle: float) -> None:
    compute, copy, resident = case
    predicted = pass_seconds(compute, copy, resident, num_slots, idle_s=idle)
    assert predicted == pytest.approx(slow_pass_seconds(compute, copy, resident, num_slots, idle))
    assert predicted >= (sum(compute) + idle) * (1 - 1e-9)
    streamed = [copy[block] for block in range(len(copy)) if block not in resident]
    if len(streamed) > num_slots:
        assert predicted >= sum(streamed) * (1 - 1e-9)
    assert pass_seconds(compute, copy, resident, num_slots + 1, idle_s=idle) <= predicted * (1 + 1e-9)


@settings(deadline=None)  # a search may take its time on a busy machine
@given(sizes_of_blocks, st.floats(0.0, 1.0), st.data())
def test_a_schedule_fits_its_room_and_is_no_slower_than_even_spreading(sizes: list[int], part: float, data) -> None:
    assume(len(sizes) > 1)
    room = max(sizes) + int(part * (sum(sizes) - max(sizes) - 1))
    seconds = balanced_seconds(sizes, room)
    if data.draw(st.booleans()):
        speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=len(sizes), max_size=len(sizes)))
        seconds = tuple(size * speed for size, speed in zip(sizes, speeds, strict=True)), seconds[1]
    chosen = choose_schedule(tuple(sizes), room, seconds=seconds)
    streamed = [size for position, size in enumerate(sizes) if position not in chosen.resident]
    staging = min(chosen.num_slots, len(streamed)) * max(streamed)
    assert sum(sizes[position] for position in chosen.resident) + staging <= room
    assert 1 <= chosen.num_slots <= max(DEPTHS) + 1
    if chosen.num_slots > 1:
        spread = spread_residents(sizes, room - 2 * max(sizes))
        assert chosen.pass_s <= pass_seconds(*seconds, spread, 2) * (1 + 1e-9)
    assert chosen == choose_schedule.__wrapped__(tuple(sizes), room, seconds=seconds)


def test_unequal_blocks_run_faster_than_evenly_spread() -> None:
    # Few large blocks in the middle, as in a UNet: evenly spread, their copies follow each other.
    sizes = (2,) * 3 + (10,) * 6 + (43,) * 10 + (3,) * 6 + (22,) * 9
    room = int(0.6 * sum(sizes))
    seconds = balanced_seconds(sizes, room)
    spread = pass_seconds(*seconds, spread_residents(sizes, room - 2 * max(sizes)), 2)
    assert choose_schedule(sizes, room, seconds=seconds, depths=(1,)).pass_s < 0.97 * spread


def test_another_device_computing_gives_copies_time() -> None:
    sizes, seconds = (MIB,) * 12, (tuple([0.1] * 12), tuple([1.0] * 12))
    alone = choose_schedule(sizes, 6 * MIB, seconds=seconds)
    beside = choose_schedule(sizes, 6 * MIB, seconds=seconds, idle_s=5.0)
    assert beside.pass_s < alone.pass_s + 5.0
