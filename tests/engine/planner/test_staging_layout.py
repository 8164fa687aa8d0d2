"""Staging memory on paper: nothing is overwritten before its use, and passes take what a run byte by byte takes."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.planner import staging_layout as offsets
from highwater.memory.planner.staging_layout import (
    Occupancy,
    Offsets,
    choose_offsets,
    pass_seconds,
    window_seconds,
)
from highwater.memory.planner.workload import Workload

ranges = st.tuples(st.integers(0, 19), st.integers(1, 20)).map(lambda pair: (pair[0], min(20, sum(pair))))


@given(st.lists(st.tuples(ranges, st.integers(0, 2)), max_size=12), ranges)
def test_an_occupancy_is_what_a_list_of_bytes_would_be(
    taken: list[tuple[tuple[int, int], int]], asked: tuple[int, int]
) -> None:
    occupancy, owners = Occupancy[int](20), [None] * 20
    for (begin, end), owner in taken:
        occupancy.take(begin, end, owner)
        owners[begin:end] = [owner] * (end - begin)
    found = [owner for begin, end, owner in occupancy.within(*asked) for _ in range(begin, end)]
    assert found == owners[slice(*asked)]
    begins = [begin for begin, _, _ in occupancy.pieces]
    assert begins == [0, *(end for _, end, _ in occupancy.pieces[:-1])]
    assert all(before[2] != after[2] for before, after in itertools.pairwise(occupancy.pieces))
    for count in range(1, len(begins) + 2):
        behind = [begin for begin, _, _ in occupancy.following(asked[0], count)]
        turned = [begin for begin in begins if begin >= asked[0]] + [begin for begin in begins if begin < asked[0]]
        assert behind == turned[:count]


def test_an_interrupt_leaves_an_occupancy_as_it_was_or_is_to_be() -> None:
    def build() -> Occupancy[int]:
        occupancy = Occupancy[int](20)
        for begin, owner in ((0, 0), (5, 1), (10, 2), (15, 0)):
            occupancy.take(begin, begin + 5, owner)
        return occupancy

    done, num_interrupts = build(), 0
    done.take(3, 17, 3)
    for nth in itertools.count():
        occupancy, left = build(), nth

        def trace(frame, event, arg):
            nonlocal left
            if event == "line" and frame.f_code.co_filename == offsets.__file__:
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            occupancy.take(3, 17, 3)
        except KeyboardInterrupt:
            num_interrupts += 1
        finally:
            sys.settrace(before)
        if left >= 0:
            break
        assert occupancy.within(0, 20) in (build().within(0, 20), done.within(0, 20))
        like = done if occupancy.within(0, 20) == done.within(0, 20) else build()
        for begin, end in itertools.combinations(range(21), 2):
            assert occupancy.within(begin, end) == like.within(begin, end)
    assert num_interrupts > 5


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, frozenset[int], int]:
    sizes = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=10)))
    seconds = [
        tuple(draw(st.lists(st.sampled_from([0.5, 1.0, 3.0, 8.0]), min_size=len(sizes), max_size=len(sizes))))
        for _ in range(2)
    ]
    resident = draw(st.sets(st.integers(0, len(sizes) - 1), max_size=len(sizes) - 1))
    streamed = [size for position, size in enumerate(sizes) if position not in resident]
    staging_bytes = draw(st.integers(max(streamed), sum(streamed) + 2))
    return Workload(sizes, *seconds, idle_s=draw(st.sampled_from([0.0, 4.0]))), frozenset(resident), staging_bytes


def slow_pass_seconds(work: Workload, resident: frozenset[int], staging_bytes: int, offsets: Offsets) -> float:
    """Copy many passes byte by byte, and return the mean of the later ones: of 120 turns are mostly whole."""
    content: list[tuple[int, int] | None] = [None] * staging_bytes  # whose bytes, and from where to where they lie
    free_s = [0.0] * staging_bytes
    copied = now = middle = 0.0
    num_passes = 160
    for number in range(num_passes):
        if number == 40:
            middle = now
        for position, size in enumerate(work.sizes):
            if position not in resident:
                begins = [offsets[(number + turn) % len(offsets)][position] for turn in range(len(offsets))]
                begin = next((b for b in begins if content[b : b + size] == [(position, b)] * size), begins[0])
                lacking = [byte for byte in range(begin, begin + size) if content[byte] != (position, begin)]
                for byte in sorted(lacking, key=lambda byte: free_s[byte]):
                    copied = max(copied, free_s[byte]) + work.copy_s[position] / size
                    content[byte] = position, begin
                if lacking:
                    now = max(now, copied)
                free_s[begin : begin + size] = [now + work.compute_s[position]] * size
            now += work.compute_s[position]
        now += work.idle_s
    return (now - middle) / (num_passes - 40)


@given(cases(), st.integers(1, 2))
def test_predicted_passes_are_those_of_a_run_byte_by_byte(case, num_rounds: int) -> None:
    work, resident, staging_bytes = case
    offsets, predicted = choose_offsets(work, resident, staging_bytes, num_rounds=num_rounds)
    streamed = {position for position in range(len(work.sizes)) if position not in resident}
    for here in offsets:
        assert here.keys() == streamed
        assert all(0 <= begin <= staging_bytes - work.sizes[position] for position, begin in here.items())
    assert predicted == pytest.approx(pass_seconds(work, resident, staging_bytes, offsets), abs=1e-9)
    assert predicted == pytest.approx(slow_pass_seconds(*case, offsets), rel=0.01)
    assert predicted >= work.least_s * (1 - 1e-9)


@given(cases())
def test_a_window_takes_no_longer_with_more_memory_and_bounds_the_run(case) -> None:
    work, resident, staging_bytes = case
    takes = window_seconds(work, resident, staging_bytes)
    assert takes >= work.least_s * (1 - 1e-9)
    assert window_seconds(work, resident, staging_bytes + 1) <= takes * (1 + 1e-9)
    if sum(work.streamed_sizes(resident)) > staging_bytes:
        copies_s = sum(seconds for position, seconds in enumerate(work.copy_s) if position not in resident)
        assert copies_s * (1 - 1e-9) <= takes <= work.least_s + copies_s * (1 + 1e-9)


def test_a_block_and_a_half_lets_half_of_each_copy_run_beside_the_compute_before() -> None:
    work = Workload((4,) * 12, (1.0,) * 12, (1.0,) * 12)
    takes = {staging_bytes: choose_offsets(work, frozenset(), staging_bytes)[1] for staging_bytes in (4, 6, 8)}
    assert takes == pytest.approx({4: 24.0, 6: 18.0, 8: 12.0})


def test_an_odd_number_of_blocks_takes_turns_in_two_rounds() -> None:
    work = Workload((4,) * 7, (1.0,) * 7, (1.0,) * 7)
    takes = [choose_offsets(work, frozenset(), 8, num_rounds=rounds)[1] for rounds in (1, 2)]
    assert takes == pytest.approx([8.0, 7.0])


def test_what_nobody_overwrites_is_not_copied_again() -> None:
    work = Workload((4, 4), (0.1, 0.1), (1.0, 1.0))
    _, takes = choose_offsets(work, frozenset(), 6)
    # Two blocks of four bytes in six: they share two, and only those are copied in every pass.
    assert takes == pytest.approx(1.2)
