"""Groups in turn are chosen in a fraction of the time of a plain search, and are as good as what that chooses."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory.options.placement import SplitRatio, parse_placement
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.planner.block_groups import (
    GROWTHS,
    LATE,
    MOST_GROUPS,
    OTHER_HOPS,
    WORTH_MORE,
    balance,
    cut_in_turn,
    devices_in_turn,
    gains_of,
)
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.layer_split import Cutter
from highwater.memory.planner.pipeline import Pipeline, pipeline_of
from highwater.memory.planner.request import PlanRequest, plan_request
from highwater.memory.planner.run import BlockTimes, Use
from highwater.memory.planner.sizes import Sizes
from highwater.memory.planner.step_seconds import StepClock
from highwater.memory.units import GIB, KIB, MIB
from highwater.memory.weights.component import Block, Component, TensorSpec

# --- The plain ways


class PlainEngine:
    """Does one work after the other, each in the time that those before left, found anew for each."""

    def __init__(self) -> None:
        self.begins, self.untils = [0.0], [math.inf]

    def run(self, ready_s: float, seconds: float) -> float:
        if not seconds:
            return ready_s
        index = bisect_right(self.untils, ready_s)
        left_s, end_s = seconds, ready_s
        while left_s > seconds * 1e-9:
            begin_s, until_s = self.begins[index], self.untils[index]
            start_s = max(begin_s, ready_s)
            end_s = min(start_s + left_s, until_s)
            if end_s == start_s:
                break
            left_s -= end_s - start_s
            kept = [gap for gap in ((begin_s, start_s), (end_s, until_s)) if gap[1] > gap[0]]
            self.begins[index : index + 1] = [gap[0] for gap in kept]
            self.untils[index : index + 1] = [gap[1] for gap in kept]
            index += start_s > begin_s
        return end_s


def plain_seconds(pipeline: Pipeline, device_of: Sequence[int], *, late: float = 0.0) -> float:
    """Return what all calls take, block by block."""
    engines, link = [PlainEngine() for _ in pipeline.block_s], PlainEngine()
    copies = pipeline.copy_s or (0.0,) * pipeline.num_devices
    outputs = pipeline.outputs or (1,) * len(device_of)
    part_s = pipeline.launch_s / max(1, len(device_of))
    begun_s = ended_s = 0.0
    behind = [0.0] * len(device_of)
    for call in range(pipeline.num_calls):
        slower, launched_s = 1 + late * call, call * pipeline.launch_s
        rest_s = slower * pipeline.rest_on(0) / 2
        home_s = now_s = begun_s = engines[0].run(max(begun_s, launched_s), rest_s)
        before = 0
        for number, device in enumerate(device_of):
            now_s = max(now_s, behind[number], launched_s + number * part_s)
            if device != before:
                now_s = max(now_s, home_s)
                if device:
                    now_s = link.run(now_s, slower * pipeline.hop_s[device])
                before = device
            now_s = behind[number] = engines[device].run(now_s, slower * pipeline.block_s[device][number])
            if device:
                now_s = engines[device].run(now_s, slower * outputs[number] * copies[device])
                home_s = link.run(max(home_s, now_s), slower * outputs[number] * pipeline.hop_s[device])
            else:
                home_s = now_s
        ended_s = engines[0].run(max(home_s, ended_s, launched_s + pipeline.launch_s), rest_s)
    return ended_s


def plain_cut(times: Sequence[float], ratios: Sequence[float], num_groups: int, growth: float) -> list[int]:
    """Return the lengths of steady groups, by halving the interval in which the longest one is."""

    def fill(most_s: float) -> list[int] | None:
        lengths, left = [0] * num_groups, len(times)
        for index in range(num_groups - 1, -1, -1):
            room_s = most_s * parts[index]
            while left > index and (not lengths[index] or times[left - 1] <= room_s):
                left -= 1
                lengths[index] += 1
                room_s -= times[left]
        return None if left else lengths

    parts = [ratios[index % len(ratios)] * (1 + growth * index / num_groups) for index in range(num_groups)]
    low, high = 0.0, sum(times) / min(parts)
    found = fill(high)
    assert found is not None
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        lengths = fill(middle)
        low, high, found = (middle, high, found) if lengths is None else (low, middle, lengths)
    return found


def plain_search(cutter: Cutter, pipeline: Pipeline) -> list[int]:
    """Return the lengths of the groups that an exhaustive search chooses."""
    known: dict[tuple[float, tuple[int, ...]], float] = {}

    def gain(lengths: Sequence[int], factor: float = 1.0) -> float:
        key = factor, tuple(lengths)
        if key not in known:
            hops = replace(pipeline, hop_s=tuple(factor * hop_s for hop_s in pipeline.hop_s))
            known[key] = pipeline.alone_s / plain_seconds(hops, owners(lengths, pipeline), late=LATE)
        return known[key]

    cuts: list[list[int]] = []
    count = pipeline.num_devices
    for number in sorted({min(number, len(cutter.units)) for number in range(count, MOST_GROUPS + 1)}):
        for growth in GROWTHS:
            lengths = plain_cut(cutter.times, cutter.ratios, number, growth)
            if lengths not in cuts and cutter.fits(lengths):
                cuts.append(lengths)
    tried = sorted(((gain(lengths), number) for number, lengths in enumerate(cuts)), reverse=True)[:24]
    means = {
        number: (first + sum(gain(cuts[number], factor) for factor in OTHER_HOPS)) / (1 + len(OTHER_HOPS))
        for first, number in tried
    }
    enough = max(means.values()) * (1 - WORTH_MORE)
    best = cuts[min((len(cuts[number]), -mean, number) for number, mean in means.items() if mean >= enough)[-1]]
    moves = [(a, b) for a, b in product(range(len(best)), repeat=2) if 0 < abs(a - b) <= 2]
    is_better = True
    while is_better:
        is_better = False
        for source, target in moves:
            if best[source] > 1:
                moved = list(best)
                moved[source] -= 1
                moved[target] += 1
                if gain(moved) > gain(best) * (1 + 1e-9) and cutter.fits(moved):
                    best, is_better = moved, True
    return best


def owners(lengths: Sequence[int], pipeline: Pipeline) -> list[int]:
    devices = devices_in_turn(len(lengths), pipeline.num_devices)
    return [device for device, count in zip(devices, lengths, strict=True) for _ in range(count)]


# --- Random ones


@st.composite
def pipelines(draw: Any, *, most_blocks: int = 30) -> Pipeline:
    """Return a random one: any speeds, hops, copies, launches, and blocks that take no time."""
    num_devices = draw(st.integers(1, 5))
    count = draw(st.integers(1, most_blocks))
    random = Random(draw(st.integers(0, 1 << 30)))
    kinds = draw(st.sampled_from([(1.0,), (1.0, 2.4), (0.5, 1.0, 3.0), (0.0, 0.01, 1.0)]))
    hop_s = draw(st.sampled_from([0.0, 0.01, 0.2, 1.0]))
    return Pipeline(
        block_s=tuple(
            tuple(random.choice(kinds) / speed for _ in range(count))
            for speed in (draw(st.sampled_from([0.3, 0.5, 1.0, 1.5])) for _ in range(num_devices))
        ),
        hop_s=tuple(hop_s * random.choice([0.5, 1.0]) for _ in range(num_devices)),
        copy_s=draw(st.sampled_from([(), (0.02,) * num_devices])),
        rest_s=draw(st.sampled_from([(), (0.5,) * num_devices])),
        launch_s=count * draw(st.sampled_from([0.0, 0.1, 1.0, 2.0])),
        num_calls=draw(st.integers(1, 6)),
        outputs=tuple(random.randint(1, 4) for _ in range(count)) if draw(st.booleans()) else (),
    )


@given(pipelines(), st.integers(0, 1 << 30), st.sampled_from([0.0, LATE]))
@settings(max_examples=300, deadline=None)
def test_groups_take_what_their_blocks_take_one_by_one(pipeline: Pipeline, seed: int, late: float) -> None:
    random = Random(seed)
    count = len(pipeline.block_s[0])
    stay = random.random()
    device_of = [random.randrange(pipeline.num_devices)]
    while len(device_of) < count:
        device_of.append(device_of[-1] if random.random() < stay else random.randrange(pipeline.num_devices))
    groups = [(device, len([*blocks])) for device, blocks in groupby(device_of)]
    plain_s = plain_seconds(pipeline, device_of, late=late)
    assert StepClock(pipeline, late=late).seconds(groups) == pytest.approx(plain_s, rel=1e-9)


@given(
    st.lists(st.sampled_from([0.25, 1.0, 1.0, 2.4]), min_size=4, max_size=96),
    st.lists(st.sampled_from([0.3, 0.5, 1.0]), min_size=2, max_size=4),
    st.integers(2, MOST_GROUPS),
    st.sampled_from(GROWTHS),
)
def test_steady_groups_are_those_that_halving_finds(
    times: list[float], speeds: list[float], num_groups: int, growth: float
) -> None:
    ratios = [speed / sum(speeds) for speed in speeds]
    num_groups = max(len(speeds), min(num_groups, len(times)))
    assert cut_in_turn(times, ratios, num_groups, growth) == plain_cut(times, ratios, num_groups, growth)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A component on some devices, and what its run is."""

    times: tuple[float, ...]
    speeds: tuple[float, ...]
    carried_bytes: int
    num_calls: int
    room: float

    @property
    def names(self) -> list[str]:
        return [f"gpu:{index}" for index in range(len(self.speeds))]

    @property
    def component(self) -> Component:
        blocks = tuple(
            Block(
                name=f"layers.{number}",
                tensors=(TensorSpec(name=f"layers.{number}.weight", dtype="BF16", shape=(32, 1024)),),
            )
            for number in range(len(self.times))
        )
        return Component(name="transformer", kind="diffusion", blocks=blocks, non_block=Block(name="", tensors=()))

    @property
    def machine(self) -> Machine:
        whole = 64 * KIB * len(self.times)
        parts = balance(self.speeds, (1.0,) * len(self.speeds))
        devices = [
            DeviceCapacity(
                name=name, total_bytes=GIB, available_bytes=int(self.room * part * whole), link_bytes_per_s=25e9
            )
            for name, part in zip(self.names, parts, strict=True)
        ]
        cpu = DeviceCapacity(name="cpu", total_bytes=GIB, available_bytes=GIB)
        return Machine(devices=(cpu, *devices), pinned_bytes=GIB)

    @property
    def use(self) -> Use:
        times = {
            name: BlockTimes(blocks_s=tuple(seconds / speed for seconds in self.times), other_s=0.002 / speed)
            for name, speed in zip(self.names, self.speeds, strict=True)
        }
        return Use(
            component="transformer", kind="diffusion", num_passes=20, num_calls=self.num_calls,
            carried_bytes=self.carried_bytes, activation_bytes=0, times=times,
        )  # fmt: skip

    def request(self, placement: str) -> PlanRequest:
        return PlanRequest(
            components=(self.component,), machine=self.machine, uses=(self.use,),
            placement=parse_placement(placement, devices=["cpu", *self.names], components=["transformer"]),
        )  # fmt: skip


@st.composite
def cases(draw: Any) -> Case:
    kinds = draw(st.sampled_from([(0.01,), (0.01, 0.024), (0.004, 0.009, 0.013)]))
    count = draw(st.integers(6, 40))
    random = Random(draw(st.integers(0, 1 << 30)))
    return Case(
        times=tuple(random.choice(kinds) for _ in range(count)),
        speeds=(1.0, *draw(st.lists(st.sampled_from([0.4, 0.5, 1.0, 1.5]), min_size=1, max_size=2))),
        carried_bytes=draw(st.sampled_from([MIB, 28 * MIB, 100 * MIB])),
        num_calls=draw(st.integers(2, 3)),
        room=draw(st.sampled_from([1.1, 1.3, 4.0])),
    )


@given(cases())
@settings(max_examples=8, deadline=None)
def test_what_is_chosen_is_as_fast_as_what_a_plain_search_chooses(case: Case) -> None:
    pipeline = pipeline_of(case.use, case.names, case.machine)
    assert pipeline is not None
    devices = [SplitRatio(device=name) for name in case.names]
    cutter = Cutter(Sizes(case.component, {}), devices, case.machine, OffloadProfile(), pipeline)
    found = cutter.best(range(len(devices), MOST_GROUPS + 1), GROWTHS)
    if found is None:
        return
    want_s = plain_seconds(pipeline, owners(plain_search(cutter, pipeline), pipeline), late=LATE)
    found_s = plain_seconds(pipeline, owners([*map(len, found)], pipeline), late=LATE)
    assert found_s <= 1.005 * want_s


# --- Plans


@pytest.mark.parametrize("placement", ["auto", "gpu:0&gpu:1/auto"])
def test_a_second_plan_plays_hardly_any_step_again(monkeypatch: pytest.MonkeyPatch, placement: str) -> None:
    case = Case(times=(0.01,) * 57, speeds=(1.0, 0.5), carried_bytes=28 * MIB, num_calls=2, room=64.0)
    played, plain = [], StepClock.seconds

    def seconds(clock: StepClock, groups: Sequence[tuple[int, int]]) -> float:
        played.append(groups)
        return plain(clock, groups)

    monkeypatch.setattr(StepClock, "seconds", seconds)
    gains_of.cache_clear()
    first = plan_request(case.request(placement))
    num_first, num_before = len(played), len(played)
    second = plan_request(case.request(placement))
    assert second["transformer"].placement == first["transformer"].placement
    assert len(first["transformer"].shares) == 2
    assert len(played) - num_before < num_first / 10
