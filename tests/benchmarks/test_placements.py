"""The search for the best placement finds what trying all of them finds, and residents that are no worse."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.benchmarks.placements.instance import Instance, Layers, random_instance
from highwater.benchmarks.placements.runs import Placed, run_seconds
from highwater.benchmarks.placements.schedule import fastest_schedule
from highwater.benchmarks.placements.search import Search
from highwater.benchmarks.planner import SEED
from highwater.memory.planner.prefetch_schedule import choose_schedule
from highwater.memory.planner.request import PlanRequest, plan_request
from highwater.memory.planner.workload import Workload
from highwater.memory.weights.module_component import component_from_module


@pytest.mark.parametrize("seed", [1, 8, 13])
def test_bounds_rule_out_none_of_the_best(seed: int) -> None:
    random = Random(seed)
    instance = random_instance(random)
    while not 2 <= len(instance.parts) <= 3:
        instance = random_instance(random)
    modules = {part.name: Layers(part) for part in instance.parts}
    bounded, all_tried = Search(instance, modules, 3), Search(instance, modules, 3)
    # Few enough to try every combination, of all kinds of options.
    few = [found[:: max(1, len(found) // 12)] for found in bounded.options]
    bounded.options, all_tried.options = few, few
    bounded.find()
    for chosen in product(*few):
        all_tried.take(chosen)
    assert sorted(-seconds for seconds, *_ in bounded.best) == pytest.approx(
        sorted(-seconds for seconds, *_ in all_tried.best)
    )
    assert bounded.num_tried <= all_tried.num_tried


@settings(max_examples=20)
@given(
    blocks=st.lists(st.tuples(st.sampled_from([512, 1024, 1536]), st.integers(1, 9)), min_size=2, max_size=6),
    part=st.floats(0.0, 0.99),
)
def test_no_search_for_residents_beats_trying_all(blocks: list[tuple[int, int]], part: float) -> None:
    sizes = tuple(size for size, _ in blocks)
    work = Workload(sizes, tuple(float(seconds) for _, seconds in blocks), tuple(size / 256 for size in sizes))
    room = max(max(sizes), int(part * sum(sizes)) // 512 * 512)
    if room >= sum(sizes):
        return
    assert fastest_schedule(work, room).pass_s <= choose_schedule(work, room).pass_s * (1 + 1e-9)


def nth_instance(number: int) -> Instance:
    random = Random(SEED)
    return [random_instance(random) for _ in range(number + 1)][-1]


# Of tiles chosen by what was left, each was smaller than the one before; one piece was cut, as the VAE had grown; what
# streamed past the VAE left no room for its own forwards.
@pytest.mark.parametrize("number", [121, 350, 244])
def test_a_planned_decode_takes_as_long_as_predicted(sim: Any, number: int) -> None:
    instance = nth_instance(number)
    modules = {part.name: Layers(part) for part in instance.parts}
    components = tuple(
        component_from_module(modules[part.name], name=part.name, kind=part.kind) for part in instance.parts
    )
    plan = plan_request(PlanRequest(components=components, machine=instance.machine, uses=instance.uses))
    assert plan.run is not None
    uses = tuple(each.use for each in plan.run.uses)
    seconds = run_seconds(instance, modules, Placed(placement=plan.placement, profile=plan.profile, uses=uses))
    assert seconds == pytest.approx(plan.run.seconds, rel=0.05)
