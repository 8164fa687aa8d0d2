"""Groups of blocks in turn: every block on one device, in balance, and as many groups as gain most."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.planner.block_groups import (
    GROWTHS,
    MOST_GROUPS,
    Gains,
    balance,
    best_cut,
    cut_in_turn,
    devices_in_turn,
    improve,
    of_devices,
    runs_of,
)
from highwater.memory.planner.layer_split import count_groups
from highwater.memory.planner.pipeline import Pipeline
from highwater.memory.planner.plan import ComponentPlan, DeviceCapacity, Machine
from highwater.memory.planner.planning import plan_components
from highwater.memory.units import MIB
from highwater.memory.weights.component import Block, Component, TensorSpec

DEVICES = ["cpu", "gpu:0", "gpu:1", "gpu:2"]


def component(sizes: Sequence[int]) -> Component:
    def block(name: str, num_bytes: int) -> Block:
        spec = TensorSpec(name=f"{name}.weight", dtype="BF16", shape=(num_bytes // 2, 1), encodable=True)
        return Block(name=name, tensors=(spec,))

    blocks = tuple(block(f"layers.{number}", size) for number, size in enumerate(sizes))
    return Component(name="transformer", kind="other", blocks=blocks, non_block=block("", 1000))


def machine(*available: int, speeds: Sequence[float | None] = (None, None, None)) -> Machine:
    devices = [
        DeviceCapacity(name=f"gpu:{index}", total_bytes=2 * num_bytes, available_bytes=num_bytes, speed=speed)
        for index, (num_bytes, speed) in enumerate(zip(available, speeds, strict=False))
    ]
    cpu = DeviceCapacity(name="cpu", total_bytes=1 << 40, available_bytes=1 << 40)
    return Machine(devices=(cpu, *devices), pinned_bytes=1 << 40)


def plan(sizes: Sequence[int], placement: str, on: Machine, **given: object) -> ComponentPlan:
    parsed = parse_placement(placement, devices=DEVICES, components=["transformer"])
    profile = parse_profile("auto", devices=DEVICES)
    return plan_components([component(sizes)], on, placement=parsed, profile=profile, **given).components[0]  # type: ignore[arg-type]


LARGE = 1 << 33
times = st.lists(st.integers(1, 1000), min_size=2, max_size=60)


@given(times, st.lists(st.integers(1, 10), min_size=2, max_size=4), st.integers(2, MOST_GROUPS))
def test_groups_alternate_and_each_block_is_on_one_device(times: list[int], speeds: list[int], num_groups: int) -> None:
    times += [1] * (len(speeds) - len(times))
    num_groups = max(len(speeds), min(num_groups, len(times)))
    runs = runs_of(cut_in_turn(times, [speed / sum(speeds) for speed in speeds], num_groups))
    assert [number for run in runs for number in run] == [*range(len(times))]
    assert len(runs) == num_groups and all(runs)
    groups = of_devices(runs, len(speeds))
    assert sorted(number for blocks in groups for number in blocks) == [*range(len(times))]
    assert count_groups(groups) == num_groups
    assert devices_in_turn(num_groups, len(speeds))[: len(speeds)] == [*range(len(speeds))]


@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1)), min_size=1, max_size=5),
)
def test_parts_are_all_of_it_by_speed_as_far_as_there_is_room(devices: list[tuple[int, float]]) -> None:
    speeds, most = zip(*devices, strict=True)
    parts = balance(speeds, most)
    assert sum(parts) == pytest.approx(1)
    if sum(most) >= 1:
        assert all(part <= limit + 1e-9 for part, limit in zip(parts, most, strict=True))
        free = [index for index in range(len(parts)) if parts[index] < most[index] - 1e-9]
        rates = [parts[index] / speeds[index] for index in free]
        assert rates == pytest.approx([max(rates)] * len(rates)) if rates else True
        # Who is full has no more than its speed would give it.
        assert all(parts[n] / speeds[n] <= max(rates) + 1e-9 for n in range(len(parts))) if rates else True


def test_moving_single_blocks_only_gains() -> None:
    pipeline = Pipeline.alike(block_s=(1.0,) * 57, speeds=(1.0, 1.0), hop_s=0.1)
    before = cut_in_turn(pipeline.block_s[0], (1.0, 0.5), 9)
    gains = Gains(pipeline)
    after = improve(gains, before, lambda lengths: True)
    assert sum(after) == 57 and len(after) == 9 and min(after) > 0
    assert gains.of(after) > gains.of(before)
    assert improve(gains, before, lambda lengths: False) == before


def test_groups_of_a_slower_device_take_as_long() -> None:
    sizes = cut_in_turn([1.0] * 57, [2 / 3, 1 / 3], 20)
    assert sizes[2:] == [4, 2] * 9 and sum(sizes) == 57


@pytest.mark.parametrize(("num_groups", "gain"), [(2, 4 / 3), (6, 12 / 7), (10, 20 / 11)])
def test_equal_devices_gain_most_of_what_the_number_of_groups_says(num_groups: int, gain: float) -> None:
    pipeline = Pipeline.alike(block_s=(1.0,) * 60, speeds=(1.0, 1.0), hop_s=0.0)
    cuts = [cut_in_turn(pipeline.block_s[0], [0.5, 0.5], num_groups, growth) for growth in GROWTHS]
    gains = [*map(Gains(pipeline).of, cuts)]
    assert 0.8 * gain < max(gains) < gain


def test_a_device_half_as_fast_gains_a_third() -> None:
    pipeline = Pipeline.alike(block_s=(1.0,) * 57, speeds=(1.0, 0.5), hop_s=0.1)
    cuts = [
        cut_in_turn(pipeline.block_s[0], (1.0, 0.5), number, growth) for number in range(2, 20) for growth in GROWTHS
    ]
    gains = Gains(pipeline)
    best = improve(gains, best_cut(gains, cuts), lambda lengths: True)
    assert 1.33 < gains.of(best) < 1.5


@given(
    times,
    st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=4),
    st.floats(0, 0.2),
    st.integers(2, 6),
)
def test_no_prediction_beats_all_devices_together(
    times: list[int], speeds: list[float], hop_part: float, num_calls: int
) -> None:
    times += [1] * (len(speeds) - len(times))
    pipeline = Pipeline.alike(
        block_s=tuple(times), speeds=tuple(speeds), hop_s=hop_part * sum(times), num_calls=num_calls
    )
    ratios = [speed / sum(speeds) for speed in speeds]
    for number in range(len(speeds), min(len(times), 8) + 1):
        gain = Gains(pipeline).of(cut_in_turn(times, ratios, number))
        assert 0 < gain <= sum(speeds) / max(speeds) + 1e-9
        assert gain <= num_calls * sum(speeds) / max(speeds)


@given(st.integers(2, 80), st.integers(2, MOST_GROUPS))
def test_groups_of_equal_devices_never_get_shorter(num_blocks: int, num_groups: int) -> None:
    num_groups = min(num_blocks, num_groups)
    sizes = cut_in_turn([1.0] * num_blocks, [0.5, 0.5], num_groups)
    assert sizes == sorted(sizes) and sizes[-1] == -(-num_blocks // num_groups)


def test_each_device_has_its_part_of_every_kind() -> None:
    blocks = of_devices(runs_of(cut_in_turn([1.0] * 57, [0.5, 0.5], 12)), 2)[0]
    doubles, singles = (sum(low <= number < high for number in blocks) for low, high in ((0, 19), (19, 57)))
    assert abs(doubles - 19 / 2) <= 1.5 and abs(singles - 38 / 2) <= 1.5


def test_slow_hops_make_fewer_groups() -> None:
    def chosen(hop_part: float) -> int:
        pipeline = Pipeline.alike(block_s=(1.0,) * 60, speeds=(1.0, 1.0), hop_s=60 * hop_part)
        cuts = [cut_in_turn(pipeline.block_s[0], [0.5, 0.5], number) for number in range(2, MOST_GROUPS + 1)]
        return len(best_cut(Gains(pipeline), cuts))

    numbers = [chosen(part) for part in (0.002, 0.02, 0.1)]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[-1]


# --- In plans


@given(st.lists(st.integers(512, MIB), min_size=1, max_size=40), st.sampled_from(["auto", "2", "3", "6", "40"]))
def test_a_plan_in_turn_covers_all_blocks_and_can_be_pasted_back(sizes: list[int], number: str) -> None:
    on = machine(LARGE, LARGE, LARGE)
    found = plan(sizes, f"gpu:0&gpu:1&gpu:2/{number}", on)
    groups = [share.blocks for share in found.shares]
    assert sorted(block for blocks in groups for block in blocks) == [*range(len(sizes))]
    used = {share.device for share in found.shares}
    for device in {"gpu:0", "gpu:1", "gpu:2"} - used:
        assert any(device in reason and "gets nothing" in reason for reason in found.reasons)
    again = plan(sizes, str(found.placement), on)
    assert [share.blocks for share in again.shares] == groups
    assert str(again.placement) == str(found.placement)
    if len(found.shares) > 1:
        assert found.placement.groups == count_groups(groups)
        assert any(reason.startswith("micro-batches: gpu:0 and gpu:1") for reason in found.reasons)
    else:
        assert found.placement.groups is None
    if number not in ("auto", "2") and len(found.shares) > 1:
        assert count_groups(groups) == max(len(found.shares), min(int(number), len(sizes)))


def test_a_faster_device_gets_more_blocks() -> None:
    found = plan([MIB] * 60, "gpu:0&gpu:1/10", machine(LARGE, LARGE, speeds=(2e9, 1e9)))
    first, second = (len(share.blocks) for share in found.shares)
    assert 1.7 < first / second < 2.7
    gain = next(float(told[1]) for reason in found.reasons if (told := re.search(r"take 1/([\d.]+) of", reason)))
    assert 1.2 < gain < 1.5


def test_a_device_with_little_memory_gets_what_fits() -> None:
    found = plan([MIB] * 60, "gpu:0&gpu:1/auto", machine(LARGE, 21 * MIB))
    assert 15 <= len(found.shares[1].blocks) <= 21
    assert not found.streams


def test_measured_times_count_where_all_are_known() -> None:
    seconds = {number: 3.0 if number < 20 else 1.0 for number in range(40)}
    found = plan([MIB] * 40, "gpu:0&gpu:1/4", machine(LARGE, LARGE), block_seconds={"transformer": seconds})
    spent = [sum(seconds[number] for number in share.blocks) for share in found.shares]
    assert abs(spent[0] - spent[1]) <= 4 * max(seconds.values()) / 2, "half a block at each border"
    assert any("by measured times" in reason for reason in found.reasons)


@pytest.mark.parametrize("number", ["auto", "6"])
def test_blocks_that_stream_compute_one_micro_batch_after_the_other(number: str) -> None:
    found = plan([MIB] * 60, f"gpu:0&gpu:1/{number}", machine(10 * MIB, 10 * MIB))
    assert found.streams
    assert any(reason.startswith("micro-batches: off: blocks stream") for reason in found.reasons)
    assert count_groups([share.blocks for share in found.shares]) == 2
    assert found.placement.groups == 2


def test_without_groups_nothing_is_said_of_micro_batches() -> None:
    found = plan([MIB] * 6, "gpu:0&gpu:1", machine(LARGE, LARGE))
    assert found.placement.groups is None
    assert not any("micro-batches" in reason for reason in found.reasons)
    assert [share.blocks for share in found.shares] == [(0, 1, 2), (3, 4, 5)]
