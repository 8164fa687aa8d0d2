"""What a forward takes that streams, on paper: whose time it is, the host's, the device's or the link's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.planner.device_plan import DevicePlan
from highwater.memory.planner.launched_passes import launched_pass_seconds
from highwater.memory.planner.run import BlockTimes, Stretch
from highwater.memory.planner.workload import COPY_LATENCY_S

MIB = 1 << 20
LINK = 1e9
COPY_S = COPY_LATENCY_S + MIB / LINK


def share(num_blocks: int, num_slots: int) -> DevicePlan:
    offsets = {number: number % num_slots * MIB for number in range(num_blocks)}
    return DevicePlan(
        device="gpu:0",
        blocks=tuple(range(num_blocks)),
        resident=frozenset(),
        fixed_bytes=0,
        resident_bytes=0,
        staging_bytes=num_slots * MIB,
        offsets=(offsets,),
        streamed_bytes=num_blocks * MIB,
        streamed_block_bytes=MIB,
    )


def times(num_blocks: int, *, launch_s: float, busy_s: float, **more: object) -> BlockTimes:
    """Return blocks of ten equal kernels."""
    end_s = max(launch_s + busy_s / 10, launch_s / 10 + busy_s)
    one = Stretch(block=0, launch_s=launch_s, busy_s=busy_s, end_s=end_s)
    stretches = tuple(replace(one, block=number) for number in range(num_blocks))
    return BlockTimes(blocks_s=(end_s,) * num_blocks, stretches=stretches, **more)


def told(num_blocks: int, num_slots: int, taken: BlockTimes) -> float:
    found = launched_pass_seconds(share(num_blocks, num_slots), taken, [MIB] * num_blocks, LINK)
    assert found is not None
    return found


@given(num_blocks=st.sampled_from([4, 6, 8]), launch_s=st.floats(0, 2 * COPY_S), busy_s=st.floats(0, 2 * COPY_S))
def test_a_forward_takes_no_less_than_each_of_the_three(num_blocks: int, launch_s: float, busy_s: float) -> None:
    found = told(num_blocks, 2, times(num_blocks, launch_s=launch_s, busy_s=busy_s))
    kernel_s = (launch_s + busy_s) / 10  # the host may be so far ahead as a forward begins
    assert found + kernel_s >= max(num_blocks * launch_s, num_blocks * busy_s, (num_blocks - 2) * COPY_S) * (1 - 1e-9)
    assert found <= num_blocks * (launch_s + busy_s + COPY_S) * (1 + 1e-9)


def test_kernels_are_launched_while_their_weights_are_copied() -> None:
    """Two blocks of ten in memory: the link never rests, whatever the host takes for a block meanwhile."""
    assert told(8, 2, times(8, launch_s=0.9 * COPY_S, busy_s=0.0)) == pytest.approx(8 * COPY_S, rel=0.1)


def test_copies_go_on_while_the_caller_computes() -> None:
    gap = Stretch(block=None, launch_s=COPY_S, busy_s=0.0, end_s=COPY_S)
    alone = told(8, 2, times(8, launch_s=0.0, busy_s=COPY_S / 10))
    assert told(8, 2, times(8, launch_s=0.0, busy_s=COPY_S / 10, following=(gap,))) < alone - COPY_S / 2


def test_the_host_launches_copies_too() -> None:
    one = times(8, launch_s=2 * COPY_S, busy_s=0.0)
    more_s = told(8, 2, replace(one, copy_launch_s=COPY_S)) - told(8, 2, one)
    assert more_s == pytest.approx(8 * COPY_S)


def test_nothing_is_told_where_nothing_is_known_of_launches() -> None:
    assert launched_pass_seconds(share(4, 2), BlockTimes(blocks_s=(1.0,) * 4), [MIB] * 4, LINK) is None
