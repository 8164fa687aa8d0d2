"""Budgets that a plan chooses itself: a run gets shorter by them, and never longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory.options.budget import BudgetItem
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import OffloadProfile, parse_profile
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.plan import Plan
from highwater.memory.planner.request import PlanRequest, plan_request
from highwater.memory.planner.run import BlockTimes, Use
from highwater.memory.units import GIB, MIB
from highwater.memory.weights.component import Block, Component, TensorSpec

LINK = 10e9


def part(name: str, kind: str, num_blocks: int, block_bytes: int) -> Component:
    def block(path: str) -> Block:
        spec = TensorSpec(name=f"{path}.weight", dtype="BF16", shape=(block_bytes // 2, 1))
        return Block(name=path, tensors=(spec,))

    blocks = tuple(block(f"layers.{number}") for number in range(num_blocks))
    return Component(name=name, kind=kind, blocks=blocks, non_block=Block(name="", tensors=()), has_file=True)


def use(component: Component, passes: int, block_s: float) -> Use:
    times = BlockTimes(blocks_s=(block_s,) * len(component.blocks))
    return Use(
        component=component.name,
        kind=component.kind,
        num_passes=passes,
        activation_bytes=0,
        times={"gpu:0": times, "gpu:1": times},
    )


def request(parts: list[Component], uses: list[Use], *rooms: int) -> PlanRequest:
    devices = [DeviceCapacity(name="cpu", total_bytes=256 * GIB, available_bytes=256 * GIB)]
    devices += [
        DeviceCapacity(name=f"gpu:{index}", total_bytes=room, available_bytes=room, link_bytes_per_s=LINK)
        for index, room in enumerate(rooms)
    ]
    machine = Machine(devices=tuple(devices), pinned_bytes=128 * GIB)
    return PlanRequest(components=tuple(parts), machine=machine, uses=tuple(uses))


def seconds(plan: Plan) -> float:
    assert plan.run is not None and plan.run.seconds is not None
    return plan.run.seconds


UNLIMITED = OffloadProfile(budgets=(BudgetItem(target="*"),))
TEXT, MODEL = part("text_encoder", "text", 10, 100 * MIB), part("transformer", "diffusion", 20, 100 * MIB)


def test_a_text_encoder_streams_beside_a_model_that_would_have_to_come_back() -> None:
    asked = request([TEXT, MODEL], [use(TEXT, 1, 0.01), use(MODEL, 20, 0.001)], 2500 * MIB)
    plan, whole = plan_request(asked), plan_request(replace(asked, profile=UNLIMITED))
    assert whole.run is not None and any(each.loaded["gpu:0"] for each in whole.run.uses)
    assert plan.run is not None and not any(each.loaded["gpu:0"] for each in plan.run.uses)
    assert plan["text_encoder"].streams and not plan["transformer"].streams
    # All that it copies hides behind its computing.
    assert seconds(plan) == pytest.approx(10 * 0.01 + 20 * 20 * 0.001, rel=0.01) and seconds(plan) < seconds(whole)
    assert "what stays beside it needs no reload" in plan.text()
    # Pasted back, both texts give the same plan.
    names = [TEXT.name, MODEL.name]
    pasted = replace(
        asked,
        placement=parse_placement(plan.placement, devices=["cpu", "gpu:0"], components=names),
        profile=parse_profile(str(plan.profile), devices=["cpu", "gpu:0"], components=names),
    )
    assert [each.shares for each in plan_request(pasted).components] == [each.shares for each in plan.components]


def test_no_budget_is_chosen_beside_one_of_the_user() -> None:
    profile = OffloadProfile(budgets=(BudgetItem(target="transformer", limit_bytes=2 * GIB),))
    asked = request([TEXT, MODEL], [use(TEXT, 1, 0.01), use(MODEL, 20, 0.001)], 2500 * MIB)
    assert plan_request(replace(asked, profile=profile)).profile == profile


@settings(max_examples=25)
@given(
    rooms=st.lists(st.integers(400, 3000), min_size=1, max_size=2),
    blocks=st.lists(st.tuples(st.integers(1, 6), st.integers(20, 300), st.integers(1, 30)), min_size=2, max_size=3),
)
def test_budgets_never_make_a_run_longer(rooms: list[int], blocks: list[tuple[int, int, int]]) -> None:
    kinds = ("text", "diffusion", "vae")
    parts = [part(f"{kinds[n]}_{n}", kinds[n], count, size * MIB) for n, (count, size, _) in enumerate(blocks)]
    uses = [use(each, 8 if each.kind == "diffusion" else 1, blocks[n][2] / 1000) for n, each in enumerate(parts)]
    asked = request(parts, uses, *(room * MIB for room in rooms))
    plan, whole = plan_request(asked), plan_request(replace(asked, profile=UNLIMITED))
    assert seconds(plan) <= seconds(whole) * (1 + 1e-9)
