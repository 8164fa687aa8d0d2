"""What the engine is compared with: its cost model is the simulated device's, and every schedule in it is feasible."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from highwater.benchmarks.schedules import (
    Part,
    Work,
    held_bytes,
    least_seconds,
    run_comfyui,
    run_diffusers,
    run_mmgp,
    run_slots,
)
from highwater.benchmarks.search import evaluate, find_best, find_good

UNIT = 1 << 18
NUM_STEPS = 3
OTHERS = {
    "mmgp": run_mmgp,
    "diffusers": lambda work, budget_bytes, num_steps: run_diffusers(work, num_steps),
    "ComfyUI": run_comfyui,
    "ComfyUI without streams": lambda *args: run_comfyui(*args, num_streams=0),
}


def make_work(seed: int, num_blocks: int = 9) -> Work:
    """Return unequal blocks in two stacks, parts of the rest between them; copies take about as long as computes."""
    dice = random.Random(seed)
    parts = []
    for number in range(num_blocks):
        stack = "early" if number < num_blocks // 2 else "late"
        size = dice.choice((1, 2, 2, 3, 5)) * UNIT
        parts.append(Part(weight_bytes=size, compute_s=dice.uniform(0.5, 3.0), name=f"{stack}.{number}"))
        if dice.random() < 0.3:
            parts.append(Part(weight_bytes=0, compute_s=dice.uniform(0.0, 1.0)))
    return Work(parts=tuple(parts), rest_bytes=UNIT, link_bytes_per_s=dice.uniform(0.5, 2.0) * UNIT)


@pytest.mark.parametrize("share", [0.4, 0.55, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_engine_takes_the_time_that_the_model_says(sim, seed: int, share: float) -> None:
    from highwater.benchmarks.streaming import NUM_STEPS, measure_engine

    work = make_work(seed)
    names = [part.name for part in work.parts if part.weight_bytes]
    engine = measure_engine(work, names, int(share * work.weight_bytes))
    modelled = run_slots(work, engine.resident, engine.num_slots, NUM_STEPS)
    assert engine.seconds == pytest.approx(modelled.seconds, rel=1e-9)
    assert modelled.peak_bytes <= int(share * work.weight_bytes)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_copies_is_faster_than_the_order_of_use(seed: int, num_slots: int) -> None:
    work = make_work(seed, num_blocks=6)
    resident = set(work.movable[1::4])
    in_order = run_slots(work, resident, num_slots, 1).seconds
    streamed = [index for index in work.movable if index not in resident]
    any_order = [seconds_in_order(work, resident, num_slots, order) for order in itertools.permutations(streamed)]
    assert min(any_order) == pytest.approx(in_order)


def seconds_in_order(work: Work, resident: set[int], num_slots: int, order: tuple[int, ...]) -> float:
    """Return the seconds of one step whose copies go in this order; infinite if a block's turn comes and no slot's."""
    ready: dict[int, float] = {}
    free = [0.0] * num_slots
    coming = list(order)
    copied = now = 0.0
    for index, part in enumerate(work.parts):
        is_streamed = bool(part.weight_bytes) and index not in resident
        while coming and free:
            copied = max(copied, free.pop(0)) + work.copy_s(work.parts[coming[0]].weight_bytes)
            ready[coming.pop(0)] = copied
        if is_streamed and index not in ready:
            return math.inf
        now = max(now, ready[index] if is_streamed else 0.0) + part.compute_s
        if is_streamed:
            free.append(now)
    return now


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("seed", range(4))
def test_others_are_no_faster_than_their_bytes_allow(seed: int, name: str, share: float) -> None:
    work = make_work(seed, num_blocks=16)
    budget_bytes = int(share * work.weight_bytes)
    outcome = OTHERS[name](work, budget_bytes, NUM_STEPS)
    assert outcome.seconds >= least_seconds(work, outcome.peak_bytes, NUM_STEPS) * (1 - 1e-9)
    assert outcome.seconds <= NUM_STEPS * (work.compute_s + work.copy_s(work.weight_bytes)) * (1 + 1e-9)
    assert name == "diffusers" or outcome.peak_bytes <= budget_bytes


@pytest.mark.parametrize("share", [0.5, 0.7])
@pytest.mark.parametrize("seed", range(4))
def test_no_choice_is_faster_than_the_best_found(seed: int, share: float) -> None:
    work = make_work(seed, num_blocks=8)
    budget_bytes = int(share * work.weight_bytes)
    best = find_best(work, budget_bytes, NUM_STEPS, (1, 2, 3))
    good = find_good(work, budget_bytes, NUM_STEPS, (1, 2, 3))
    assert held_bytes(work, best.resident, best.num_slots) <= budget_bytes
    assert held_bytes(work, good.resident, good.num_slots) <= budget_bytes
    choices = [
        evaluate(work, frozenset(resident), num_slots, NUM_STEPS).seconds
        for size in range(len(work.movable))
        for resident in itertools.combinations(work.movable, size)
        for num_slots in (1, 2, 3)
        if held_bytes(work, resident, num_slots) <= budget_bytes
    ]
    assert best.seconds == pytest.approx(min(choices)) and good.seconds >= best.seconds * (1 - 1e-9)
    assert best.seconds >= least_seconds(work, budget_bytes, NUM_STEPS) * (1 - 1e-9)
