"""What the engine is compared with: its cost model is the simulated device's, and every schedule in it is feasible."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest

from highwater.benchmarks.schedules import (
    Part,
    Work,
    held_bytes,
    least_seconds,
    run_comfyui,
    run_diffusers,
    run_mmgp,
    run_offsets,
)
from highwater.benchmarks.search import find_best, find_good

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
@pytest.mark.parametrize("pinned", ["all", "half", "none"])
def test_the_engine_takes_the_time_that_the_model_says(sim, monkeypatch, seed: int, share: float, pinned: str) -> None:
    """Copies that hold the host take no longer: it has launched all that can compute meanwhile."""
    from highwater.benchmarks.streaming import NUM_STEPS, SCALE, measure_engine

    work = make_work(seed)
    if pinned == "half":
        half = int(share * work.weight_bytes / SCALE / 2)
        monkeypatch.setattr("highwater.memory.manager.live_capacity.pin_limit_bytes", lambda *args, **choices: half)
    names = [part.name for part in work.parts if part.weight_bytes]
    engine = measure_engine(work, names, int(share * work.weight_bytes), pinned="none" if pinned == "none" else "all")
    modelled = run_offsets(work, engine.resident, engine.staging_bytes, engine.offsets, NUM_STEPS)
    # Events that time waits take some microseconds of these minutes.
    assert engine.seconds == pytest.approx(modelled.seconds, rel=1e-6)
    assert modelled.peak_bytes <= int(share * work.weight_bytes)


@pytest.mark.parametrize("compute_per_copy", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("tier", ["pinned", "pageable", "disk"])
def test_copies_run_beside_computes_wherever_the_weights_rest(sim, tier: str, compute_per_copy: float) -> None:
    from highwater.benchmarks import overlap

    num_streamed, compute_s = 36, compute_per_copy * overlap.COPY_S
    seconds = overlap.measure_engine(num_streamed, compute_s, tier)
    longer_s = max(overlap.NUM_BLOCKS * compute_s, num_streamed * overlap.COPY_S)
    assert seconds <= 1.002 * (overlap.NUM_STEPS * longer_s + overlap.COPY_S)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
@pytest.mark.parametrize("seed", range(6))
def test_the_simplest_offsets_take_the_time_that_they_should(seed: int, share: float) -> None:
    work = make_work(seed)
    budget_bytes = int(share * work.weight_bytes)
    found = find_good(work, budget_bytes, NUM_STEPS)
    sizes = {index: work.parts[index].weight_bytes for index in work.movable if index not in found.resident}
    # The simplest offsets there are: all at the beginning, where nothing is copied ahead.
    one_by_one = run_offsets(work, found.resident, max(sizes.values()), [dict.fromkeys(sizes, 0)], NUM_STEPS)
    waits_s = NUM_STEPS * (work.copy_s(sum(sizes.values())) + sum(work.parts[index].compute_s for index in sizes))
    assert found.seconds <= one_by_one.seconds <= waits_s + NUM_STEPS * work.compute_s
    # Where each has a range of its own, all is copied once.
    begins = dict(zip(sizes, itertools.accumulate([0, *sizes.values()]), strict=False))
    alone = run_offsets(work, found.resident, sum(sizes.values()), [begins], NUM_STEPS)
    assert alone.seconds <= NUM_STEPS * work.compute_s + work.copy_s(sum(sizes.values())) * (1 + 1e-9)


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
    best = find_best(work, budget_bytes, NUM_STEPS)
    good = find_good(work, budget_bytes, NUM_STEPS)
    for found in (best, good):
        assert held_bytes(work, found.resident) + found.staging_bytes <= budget_bytes
    assert best.seconds <= good.seconds
    assert best.seconds >= least_seconds(work, budget_bytes, NUM_STEPS) * (1 - 1e-9)


def test_what_a_split_is_said_to_cost_is_what_was_measured() -> None:
    root = Path(__file__).parents[3]
    lines = (root / "benchmarks/results/hops.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    costs = {link: (cut, split) for card, link, *_, cut, split, _ in rows if card == "RTX 4090"}
    for page in ("README.md", "docs/limits.md"):
        text = " ".join((root / page).read_text(encoding="utf-8").split())
        said = re.search(
            r"\[(\d+) % longer\]\([./]*benchmarks/results/hops.md\).*? 25 GB/s.*?, (\d+) % at 8 GB/s", text
        )
        assert said is not None, page
        assert [f"{float(costs[link][1].rstrip('%')):.0f}" for link in ("25 GB/s", "8 GB/s")] == list(said.groups())
    cuts = [costs[link][0].rstrip("%") for link in ("25 GB/s", "8 GB/s")]
    assert "with the cut alone {} and {} %".format(*cuts) in text
