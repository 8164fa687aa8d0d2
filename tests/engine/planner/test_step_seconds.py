"""What a step in groups is predicted to take, beside what it takes in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.options.placement import parse_placement
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.plan import Plan
from highwater.memory.planner.request import PlanRequest, plan_request
from highwater.memory.planner.run import BlockTimes, Use
from highwater.memory.units import GIB, KIB, MIB
from highwater.memory.weights.module_component import component_from_module

BLOCK_BYTES = 64 * KIB


class TimedBlock(nn.Module):
    """Computes for a given time on each device, and returns other hidden states."""

    def __init__(self, advance: Callable[[torch.device, float], None], seconds: Sequence[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(BLOCK_BYTES // 2, dtype=torch.bfloat16), requires_grad=False)
        self.advance, self.seconds = advance, seconds

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.advance(hidden.device, self.seconds[hidden.device.index])
        return hidden + 1


class Timed(nn.Module):
    def __init__(
        self, advance: Callable[[torch.device, float], None], blocks: Sequence[Sequence[float]], rest_s: float
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TimedBlock(advance, seconds) for seconds in blocks)
        self.advance, self.rest_s = advance, rest_s

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.advance(hidden.device, self.rest_s / 2)
        for block in self.blocks:
            hidden = block(hidden)
        self.advance(hidden.device, self.rest_s / 2)
        return hidden


class Case:
    """A module, the devices on which it computes, and what a run of it is."""

    def __init__(
        self,
        *,
        kinds: Sequence[float],
        speeds: Sequence[float],
        links: Sequence[float],
        hidden_bytes: int,
        rest_s: float = 0.0,
        num_calls: int = 2,
        room: int = 512 * MIB,
    ) -> None:
        self.kinds, self.speeds, self.links = kinds, speeds, links
        self.hidden_bytes, self.rest_s, self.num_calls, self.room = hidden_bytes, rest_s, num_calls, room

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"Case({given})"

    def build(self, sim: Any) -> Timed:
        blocks = [[seconds / speed for speed in self.speeds] for seconds in self.kinds]
        return Timed(sim.advance, blocks, self.rest_s)

    @property
    def names(self) -> list[str]:
        return [f"gpu:{index}" for index in range(len(self.speeds))]

    def use(self, **changed: Any) -> Use:
        times = {
            name: BlockTimes(blocks_s=tuple(seconds / speed for seconds in self.kinds), other_s=self.rest_s)
            for name, speed in zip(self.names, self.speeds, strict=True)
        }
        given = {"num_passes": 4, "num_calls": self.num_calls, "carried_bytes": self.hidden_bytes, "times": times}
        return Use(component="transformer", kind="diffusion", activation_bytes=0, **(given | changed))

    def plan(self, module: nn.Module, placement: str, **changed: Any) -> Plan:
        devices = [DeviceCapacity(name="cpu", total_bytes=8 * GIB, available_bytes=8 * GIB)]
        devices += [
            DeviceCapacity(
                name=name, total_bytes=self.room, available_bytes=self.room, link_bytes_per_s=link, speed=speed
            )
            for name, link, speed in zip(self.names, self.links, self.speeds, strict=True)
        ]
        component = component_from_module(module, name="transformer", kind="diffusion")
        return plan_request(
            PlanRequest(
                components=(component,),
                machine=Machine(devices=tuple(devices), pinned_bytes=4 * GIB),
                placement=parse_placement(placement, devices=["cpu", *self.names], components=["transformer"]),
                uses=(self.use(**changed),),
            )
        )

    def measure(self, sim: Any, module: nn.Module, placement: str) -> tuple[Plan, float]:
        """Return the plan of a placement, and the virtual seconds of a step.

        Its results are those of one call after the other.
        """
        specs = [
            sim.SimDeviceSpec(
                total_bytes=self.room, h2d_bytes_per_s=link, d2h_bytes_per_s=link, peer_bytes_per_s=link, launch_s=0,
                flops_per_s=1e30, memory_bytes_per_s=1e12,
            )
            for link in self.links
        ]  # fmt: skip

        def now_s() -> float:
            for index in range(len(specs)):
                torch.accelerator.synchronize(index)
            return float(sim.clock_s())

        with sim.cluster(specs), torch.no_grad():
            manager = MemoryManager()
            manager.set_watermark("*", 0, 0)
            manager.set_watermark("host", 0, 0)
            for device, link in zip(self.names, self.links, strict=True):
                manager.capacity.note_link(manager.capacity.devices[device], link, is_pinned=True)
            with manage({"transformer": module}, placement=placement, manager=manager, uses=[self.use()]) as managed:
                home = managed.members[0].managed.primary.torch_device
                inputs = [
                    torch.full((self.hidden_bytes,), number, dtype=torch.uint8, device=home)
                    for number in range(self.num_calls)
                ]
                calls = [partial(module, each) for each in inputs]
                want = [call() for call in calls]
                got = managed.run_micro_batches(calls)
                assert all(map(torch.equal, got, want))
                before_s = now_s()
                managed.run_micro_batches(calls)
                step_s = now_s() - before_s
                for each in (want, got, inputs, calls):
                    each.clear()
                plan = managed.plan
            assert sim.races() == []
        return plan, step_s


def random_cases(num_devices: int = 3) -> st.SearchStrategy[Case]:
    @st.composite
    def build(draw: Any) -> Case:
        count = draw(st.integers(2, num_devices))
        kinds = draw(st.lists(st.floats(1e-3, 8e-3), min_size=count, max_size=12))
        return Case(
            kinds=kinds,
            speeds=[1.0, *(draw(st.sampled_from([0.4, 0.5, 1.0, 1.5])) for _ in range(count - 1))],
            links=[draw(st.sampled_from([0.5e9, 1.25e9, 6e9])) for _ in range(count)],
            hidden_bytes=draw(st.sampled_from([4 * KIB, 256 * KIB, MIB])),
            rest_s=draw(st.sampled_from([0.0, 1e-3])),
            num_calls=draw(st.integers(2, 4)),
        )

    return build()


@settings(max_examples=6, deadline=None)
@given(case=random_cases(), groups=st.sampled_from(["", "/auto", "/2", "/4", "/9"]))
def test_a_step_takes_what_was_predicted(sim, case: Case, groups: str) -> None:
    plan, step_s = case.measure(sim, case.build(sim), "&".join(case.names) + groups)
    assert plan.run is not None
    assert plan.run.uses[0].pass_s == pytest.approx(step_s, rel=0.05)


# --- What `auto` chooses


def resident_options(case: Case, module: nn.Module) -> dict[str, float]:
    """Return what a run takes by the plan of each explicit placement: on each device alone, and in groups."""
    texts = [*case.names, *(f"{one}&{other}/auto" for one, other in permutations(case.names, 2))]
    plans = {text: case.plan(module, text) for text in texts}
    return {text: plan.run.seconds for text, plan in plans.items() if plan.run is not None and plan.run.seconds}


@settings(max_examples=6, deadline=None)
@given(case=random_cases(num_devices=2))
def test_auto_takes_groups_where_they_are_predicted_to_be_faster_and_only_there(sim, case: Case) -> None:
    module = case.build(sim)
    found = case.plan(module, "auto")
    assert found.run is not None and found.run.seconds is not None
    options = resident_options(case, module)
    alone_s = min(seconds for text, seconds in options.items() if "&" not in text)
    groups_s = min(seconds for text, seconds in options.items() if "&" in text)
    has_groups = found["transformer"].placement.groups is not None
    if groups_s < 0.95 * alone_s:
        assert has_groups
    if groups_s > alone_s:
        assert not has_groups
    assert found.run.seconds <= 1.05 * min(alone_s, groups_s)


@settings(max_examples=4, deadline=None)
@given(case=random_cases(num_devices=2))
def test_what_auto_chose_is_as_fast_as_it_said(sim, case: Case) -> None:
    plan, step_s = case.measure(sim, case.build(sim), "auto")
    assert plan.run is not None
    assert plan.run.uses[0].pass_s == pytest.approx(step_s, rel=0.05)


@settings(max_examples=5, deadline=None)
@given(case=random_cases())
def test_one_call_at_a_time_is_never_split_where_a_device_holds_it(sim, case: Case) -> None:
    found = case.plan(case.build(sim), "auto", num_calls=1)
    assert len(found["transformer"].shares) == 1
