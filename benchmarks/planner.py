"""How good a placement is that the planner chooses: beside the best of all, in the virtual time of a run; and how soon.

Random runs of one to six components of two to six blocks each, on two or three devices, small enough to reckon all
placements: device, cuts, store, budgets, residents and tiles ([Note: what is enumerated] in `placements/search.py`).
The best few of them and the one that the planner chooses are run three times, with what the planner was told of times
and activations; the third run counts, in which everything is where the second left it. Weights and activations really
take the devices' memory there; only the times of blocks are given.

What this does not have: weights in files (RAM is large, and faster than any of them), LoRA, precisions.
"""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

from highwater.headless import simdevice
from highwater.memory.errors import DoesNotFit, InvalidInput
from highwater.memory.options.placement import parse_placement
from highwater.memory.planner.block_groups import gains_of
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.plan import Plan
from highwater.memory.planner.prefetch_schedule import choose_schedule
from highwater.memory.planner.request import PlanRequest, plan_request
from highwater.memory.units import GIB
from highwater.memory.weights.component import Block, Component, TensorSpec
from highwater.memory.weights.module_component import component_from_module

from .case import Result
from .placements.group_cases import GROUP_CASES
from .placements.instance import Instance, Layers, random_instance
from .placements.runs import Placed, run_seconds
from .placements.search import Search

NUM_INSTANCES = 1000
SEED = 5
NUM_MEASURED = 3
NUM_FIRST = 5
MOST_MEAN, MOST_WORST = 0.02, 0.10
MOST_SCALE_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """By what part a chosen placement is slower than the best one that was measured, and both as text."""

    num_parts: int
    slower: float
    chosen: str
    best: str
    num_reckoned: int
    """How many complete placements were reckoned, beside those that bounds ruled out."""


def measure_instance(instance: Instance) -> Found | None:
    """Return how good the chosen placement of an instance is; None: none fits."""
    modules = {part.name: Layers(part) for part in instance.parts}
    components = tuple(
        component_from_module(modules[part.name], name=part.name, kind=part.kind) for part in instance.parts
    )
    try:
        plan = plan_request(PlanRequest(components=components, machine=instance.machine, uses=instance.uses))
    except (DoesNotFit, InvalidInput):
        return None
    assert plan.run is not None
    uses = tuple(each.use for each in plan.run.uses)
    chosen = Placed(placement=plan.placement, profile=plan.profile, uses=uses)
    search = Search(instance, modules, NUM_MEASURED)
    measured: dict[str, float] = {}
    chosen_s = run_seconds(instance, modules, chosen)
    for placed in search.find():
        seconds = run_seconds(instance, modules, placed)
        if seconds is not None:
            measured[placed.text] = seconds
    if chosen_s is None:
        slower, best = float("inf"), min(measured, key=measured.__getitem__, default="")
    else:
        measured[chosen.text] = min(chosen_s, measured.get(chosen.text, chosen_s))
        best = min(measured, key=measured.__getitem__)
        slower = chosen_s / measured[best] - 1
    return Found(
        num_parts=len(instance.parts),
        slower=slower,
        chosen=chosen.text,
        best=best,
        num_reckoned=search.num_tried,
    )


def measure_scale() -> list[dict[str, Any]]:
    """Return what it takes to plan thousands of blocks on eight devices, each case for the first time."""
    rows = []
    for is_even, part in product((True, False), (0.5, 0.9)):
        component = many_blocks(2000, is_even=is_even)
        names = [f"gpu:{index}" for index in range(8)]
        room = int(component.weight_bytes / len(names) * part)
        devices = [DeviceCapacity(name="cpu", total_bytes=64 * GIB, available_bytes=64 * GIB)]
        devices += [
            DeviceCapacity(name=name, total_bytes=24 * GIB, available_bytes=room, link_bytes_per_s=25e9)
            for name in names
        ]
        request = PlanRequest(
            components=(component,),
            machine=Machine(devices=tuple(devices), pinned_bytes=32 * GIB),
            placement=parse_placement("&".join(names), devices=["cpu", *names]),
        )
        plan, seconds = plan_first(request)
        rows.append(
            {
                "blocks": "of one size" if is_even else "of three sizes",
                "fit": f"{part:.0%}",
                "streamed": sum(len(share.streamed) for share in plan.components[0].shares),
                "ms of one core": seconds * 1000,
            }
        )
    return rows


def measure_groups() -> list[dict[str, Any]]:
    """Return what it takes to plan groups in turn for the first time, and the same once more."""
    rows = []
    for case in GROUP_CASES:
        request = case.request(many_blocks(case.num_blocks, is_even=True))
        plan, seconds = plan_first(request)
        begin_s = time.process_time()
        plan_request(request)
        again_s = time.process_time() - begin_s
        rows.append(
            {
                "blocks": case.num_blocks,
                "speeds": ", ".join(f"{speed:g}" for speed in case.speeds),
                "calls": case.num_calls,
                "MiB carried": case.carried_mib,
                "placement": case.placement.replace("ALL", "all of them"),
                "groups": plan.components[0].placement.groups or "-",
                "before, ms": case.before_ms,
                "ms of one core": seconds * 1000,
                "once more, ms": again_s * 1000,
                "limit": f"{case.limit_ms} ms",
            }
        )
    return rows


def plan_first(request: PlanRequest) -> tuple[Plan, float]:
    """Return a plan and the least time of several first ones: nothing is remembered of those before."""
    taken = []
    for _ in range(NUM_FIRST):
        choose_schedule.cache_clear()
        gains_of.cache_clear()
        fresh = replace(request, components=tuple(map(copy.deepcopy, request.components)))
        gc.collect()
        begin_s = time.process_time()
        plan = plan_request(fresh)
        taken.append(time.process_time() - begin_s)
    return plan, min(taken)


def many_blocks(count: int, *, is_even: bool) -> Component:
    random = Random(1)
    sizes = [1024 if is_even else random.choice([512, 1024, 3000]) for _ in range(count)]
    blocks = tuple(
        Block(
            name=f"layers.{number}",
            tensors=(TensorSpec(name=f"layers.{number}.weight", dtype="BF16", shape=(1024, size)),),
        )
        for number, size in enumerate(sizes)
    )
    return Component(name="model", kind="diffusion", blocks=blocks, non_block=Block(name="", tensors=()), has_file=True)


def by_size(found: list[Found]) -> list[dict[str, Any]]:
    groups: dict[int, list[Found]] = defaultdict(list)
    for each in found:
        groups[each.num_parts].append(each)
    return [
        {
            "components": count,
            "instances": len(group),
            "slower on average": f"{sum(each.slower for each in group) / len(group):.2%}",
            "at worst": f"{max(each.slower for each in group):.2%}",
            "above 10 %": sum(each.slower > MOST_WORST for each in group),
        }
        for count, group in sorted(groups.items())
    ]


def drawn_instances() -> Iterator[tuple[int, Instance]]:
    """Yield all random instances with their numbers."""
    random = Random(SEED)
    for number in itertools.count():
        yield number, random_instance(random)


def measure(num_instances: int | None = None, only: Collection[int] = ()) -> Result:
    """Measure so many instances, a second or two of one core each; by default 1,000.

    An interrupt ends it with what was measured until then.

    Args:
        only: the numbers of some instances, counted from 0: no others are measured.
    """
    scale, groups = measure_scale(), measure_groups()
    simdevice.install("sim", num_devices=3)
    found: list[Found] = []
    num_refused = 0
    numbers: Iterable[int] = sorted(only) if only else itertools.count()
    ended, instances = "; interrupted then", drawn_instances()
    try:
        for number in numbers:
            if not only and len(found) == (num_instances or NUM_INSTANCES):
                break
            one = measure_instance(next(each for at, each in instances if at == number))
            if one is None:
                num_refused += 1
                continue
            found.append(one)
            told = f"{number}: {one.slower:.2%} slower"
            print(told if one.slower <= MOST_MEAN else f"{told}: {one.chosen}; best {one.best}", file=sys.stderr)
        ended = ""
    except KeyboardInterrupt:
        if not found:
            raise
    mean, worst = sum(each.slower for each in found) / len(found), max(found, key=lambda each: each.slower)
    slowest_s = max(row["ms of one core"] for row in scale) / 1000
    within = sum(each.slower <= MOST_WORST for each in found)
    rows = [
        {"what": "slower than the best, on average", "found": f"{mean:.2%}", "limit": f"{MOST_MEAN:.0%}"},
        {"what": "slower than the best, at worst", "found": f"{worst.slower:.2%}", "limit": f"{MOST_WORST:.0%}"},
        {"what": "within 10 % of the best", "found": f"{within} of {len(found)}", "limit": "all"},
        {
            "what": "the best itself, or within 0.1 %",
            "found": f"{sum(each.slower <= 1e-3 for each in found)} of {len(found)}",
            "limit": "-",
        },
        {"what": "2,000 blocks on 8 devices", "found": f"{slowest_s * 1000:.0f} ms", "limit": "100 ms"},
    ]
    return Result(
        question=(
            f"How much slower than the best placement is the one that is chosen? {len(found)} random instances "
            f"({num_refused} more do not fit{ended}), {sum(each.num_reckoned for each in found)} placements reckoned "
            f"beside those that bounds rule out, the best {NUM_MEASURED} of each measured. The worst: "
            f"chosen {worst.chosen}; best {worst.best}"
        ),
        rows=rows,
        ratio=max(mean / MOST_MEAN, worst.slower / MOST_WORST, slowest_s / MOST_SCALE_S),
        meaning="the worst of these over its limit; at most 1",
        more={
            "By the number of components:": by_size(found),
            "Planning a split of 2,000 blocks over 8 devices for the first time, the least of five:": scale,
            "Planning groups in turn, as before and since groups are played as one work each:": groups,
        },
    )
