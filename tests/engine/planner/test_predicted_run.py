"""What each use of a component is predicted to take, where one that streams computes several times in a run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory.options.placement import parse_placement
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.request import PlanRequest, plan_request
from highwater.memory.planner.run import BlockTimes, Stretch, Use
from highwater.memory.planner.run_plan import RunPlan
from highwater.memory.units import GIB, MIB
from highwater.memory.weights.component import Block, Component, TensorSpec

LINK = 10e9
NUM_BLOCKS = 20
BLOCK_BYTES = 100 * MIB
COPIES_S = NUM_BLOCKS * BLOCK_BYTES / LINK


def block(name: str, num_bytes: int) -> Block:
    return Block(name=name, tensors=(TensorSpec(name=f"{name}.weight", dtype="BF16", shape=(num_bytes // 2, 1)),))


MODEL = Component(
    name="transformer",
    kind="diffusion",
    blocks=tuple(block(f"layers.{number}", BLOCK_BYTES) for number in range(NUM_BLOCKS)),
    non_block=block("", MIB),
)


def computes(seconds: float, *, is_launched: bool = False) -> BlockTimes:
    """Return the times of a forward that computes so long in equal blocks; as the host launches them, if asked."""
    each_s = seconds / NUM_BLOCKS
    launched = tuple(Stretch(block=n, launch_s=0.0, busy_s=each_s, end_s=each_s) for n in range(NUM_BLOCKS))
    return BlockTimes(blocks_s=(each_s,) * NUM_BLOCKS, stretches=launched if is_launched else ())


def run_of(times: Sequence[BlockTimes], *, room: int, num_passes: int = 20, num_devices: int = 1) -> RunPlan:
    """Return a run in which the model computes once with each of these times, on each device alike."""
    names = [f"gpu:{index}" for index in range(num_devices)]
    devices = [DeviceCapacity(name="cpu", total_bytes=64 * GIB, available_bytes=64 * GIB)]
    devices += [
        DeviceCapacity(name=name, total_bytes=room, available_bytes=room, link_bytes_per_s=LINK) for name in names
    ]
    plan = plan_request(
        PlanRequest(
            components=(MODEL,),
            machine=Machine(devices=tuple(devices), pinned_bytes=32 * GIB),
            placement=parse_placement("&".join(names), devices=["cpu", *names], components=[MODEL.name]),
            uses=tuple(
                Use(
                    component=MODEL.name,
                    kind=MODEL.kind,
                    num_passes=num_passes,
                    activation_bytes=0,
                    times=dict.fromkeys(names, each),
                )
                for each in times
            ),
        )
    )
    assert plan.run is not None and plan[MODEL.name].streams
    return plan.run


def forwards_of(run: RunPlan) -> list[float]:
    found = [use.pass_s for use in run.uses]
    assert None not in found
    return [seconds for seconds in found if seconds is not None]


@pytest.mark.parametrize("is_launched", [False, True])
@pytest.mark.parametrize("num_passes", [1, 20])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_smaller_use_takes_its_own_time(is_launched: bool, num_passes: int, num_devices: int) -> None:
    """As a second pass, a detailer, or a shorter prompt: the blocks that stay are those of the first use."""
    room = 8 * BLOCK_BYTES
    long, short = (computes(seconds, is_launched=is_launched) for seconds in (0.5, 0.02))
    first_s, second_s = forwards_of(run_of([long, short], room=room, num_passes=num_passes, num_devices=num_devices))
    assert 0.5 <= first_s < 0.6
    assert 0.02 < second_s < 0.02 + COPIES_S
    # Less than half of the first one's: copies are what it waits for.
    assert second_s < first_s / 2


def test_equal_uses_take_equally_long() -> None:
    first_s, second_s, third_s = forwards_of(run_of([computes(0.5), computes(0.02), computes(0.5)], room=GIB))
    assert first_s == third_s > second_s


@settings(max_examples=15, deadline=None)
@given(
    first_s=st.floats(0.01, 1.0),
    second_s=st.floats(0.01, 1.0),
    room=st.sampled_from([3, 6, 10, 15]),
    num_devices=st.sampled_from([1, 2]),
)
def test_no_use_takes_less_than_it_computes_or_more_than_computing_and_copying(
    first_s: float, second_s: float, room: int, num_devices: int
) -> None:
    room = room * BLOCK_BYTES // num_devices
    if room < 2 * BLOCK_BYTES:
        return
    found = forwards_of(run_of([computes(first_s), computes(second_s)], room=room, num_devices=num_devices))
    for taken_s, computing_s in zip(found, (first_s, second_s), strict=True):
        assert computing_s * (1 - 1e-9) <= taken_s <= computing_s + 1.01 * COPIES_S
