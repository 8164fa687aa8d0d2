"""What a step in groups is predicted to take, beside what it takes in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.planner.capacity import DeviceCapacity, Machine, PeerLink
from highwater.memory.planner.clones import calls_of_each, clone_seconds, plan_clones
from highwater.memory.planner.device_options import choose_for
from highwater.memory.planner.pipeline import LATENCY_S
from highwater.memory.planner.plan import Plan
from highwater.memory.planner.request import PlanRequest, plan_request
from highwater.memory.planner.run import BlockTimes, Use
from highwater.memory.planner.sizes import Sizes
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

    @property
    def machine(self) -> Machine:
        devices = [DeviceCapacity(name="cpu", total_bytes=8 * GIB, available_bytes=8 * GIB)]
        devices += [
            DeviceCapacity(
                name=name, total_bytes=self.room, available_bytes=self.room, link_bytes_per_s=link, speed=speed
            )
            for name, link, speed in zip(self.names, self.links, self.speeds, strict=True)
        ]
        return Machine(devices=tuple(devices), pinned_bytes=4 * GIB)

    def plan(self, module: nn.Module, placement: str, **changed: Any) -> Plan:
        component = component_from_module(module, name="transformer", kind="diffusion")
        return plan_request(
            PlanRequest(
                components=(component,),
                machine=self.machine,
                placement=parse_placement(placement, devices=["cpu", *self.names], components=["transformer"]),
                uses=(self.use(**changed),),
            )
        )

    @contextmanager
    def cluster(self, sim: Any) -> Iterator[tuple[MemoryManager, Callable[[], float]]]:
        """Simulate the devices; gives a manager that knows their links, and what tells the virtual time.

        No copy may be made on the wrong side of a computation.
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
            yield manager, now_s
            assert sim.races() == []

    def measure(self, sim: Any, module: nn.Module, placement: str) -> tuple[Plan, float]:
        """Return the plan of a placement, and the virtual seconds of a step.

        Its results are those of one call after the other.
        """
        with self.cluster(sim) as (manager, now_s):
            managed = manage({"transformer": module}, placement=placement, manager=manager, uses=[self.use()])
            with managed:
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
        return plan, step_s

    def measure_clones(self, sim: Any, counts: Sequence[int]) -> float:
        """Return the virtual seconds of a step in which each device has all of it, and computes so many calls.

        One after the other: each has a thread of its own in ComfyUI, and simulated devices know one host's time.
        """
        longest_s = 0.0
        for index, count in enumerate(counts):
            clone = replace_case(self, kinds=[count * seconds for seconds in self.kinds], rest_s=count * self.rest_s)
            module = clone.build(sim)
            with self.cluster(sim) as (manager, now_s):
                managed = manage({"transformer": module}, placement=f"gpu:{index}", manager=manager)
                given = torch.zeros(64, dtype=torch.uint8, device=f"sim:{index}")
                for _ in range(4):  # measures times, by which is chosen what streams
                    module(given)
                before_s = now_s()
                for _ in range(4):
                    module(given)
                longest_s = max(longest_s, (now_s() - before_s) / 4)
                managed.release()
                del given
        return longest_s


def replace_case(case: Case, **changed: Any) -> Case:
    return Case(**(vars(case) | changed))


EVEN = Case(kinds=[0.004] * 10, speeds=[1.0, 1.0], links=[1e9, 1e9], hidden_bytes=MIB)


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


@settings(max_examples=6, deadline=None)
@given(case=random_cases(), groups=st.sampled_from(["", "/auto", "/4"]))
def test_one_call_at_a_time_takes_what_was_predicted(sim, case: Case, groups: str) -> None:
    """Its hops, too, of which those between two devices that are not the first one go over that."""
    case = replace_case(case, num_calls=1, kinds=[max(seconds, case.hidden_bytes / 5e8) for seconds in case.kinds])
    plan, step_s = case.measure(sim, case.build(sim), "&".join(case.names) + groups)
    assert plan.run is not None
    assert plan.run.uses[0].pass_s == pytest.approx(step_s, rel=0.01)


PEER_BYTES_PER_S = 0.25e9


@pytest.mark.parametrize("one_by_one", ["", "another node wraps the calls"])
def test_hops_take_what_was_measured_between_the_devices(sim, one_by_one: str) -> None:
    """At once or in turn, in a plan as where ways to compute are compared: by the link between, with its latency."""
    case = replace_case(EVEN, num_calls=2, hidden_bytes=256 * KIB)
    cpu, first, second = case.machine.devices
    peer = PeerLink(device="gpu:1", is_direct=True, bytes_per_s=PEER_BYTES_PER_S)
    machine = Machine(devices=(cpu, replace(first, peers=(peer,)), second), pinned_bytes=4 * GIB)
    component = component_from_module(case.build(sim), name="transformer", kind="diffusion")
    hop_s = LATENCY_S + case.hidden_bytes / PEER_BYTES_PER_S
    use = case.use(one_by_one=one_by_one)
    request = PlanRequest(
        components=(component,), machine=machine, uses=(use,),
        placement=parse_placement("gpu:0&gpu:1", devices=["cpu", *case.names], components=["transformer"]),
    )  # fmt: skip
    plan = plan_request(request)
    assert plan.run is not None
    computing_s = sum(case.kinds)
    if one_by_one:
        assert plan.run.uses[0].pass_s == pytest.approx(2 * (computing_s + 2 * hop_s))
    else:
        assert plan.run.uses[0].pass_s == pytest.approx(1.5 * computing_s + 2 * hop_s, rel=0.02)
    choice = choose_for(Sizes(component, {}), plan["transformer"].placement.devices, machine, OffloadProfile(), [use])
    assert choice is not None and choice.hop_s(use, machine) == pytest.approx(2 * hop_s)


# --- What `auto` chooses


def resident_options(case: Case, module: nn.Module) -> dict[str, float]:
    """Return what a run takes by the plan of each explicit placement: on each device alone, and in groups."""
    texts = [*case.names, *(f"{one}&{other}/auto" for one, other in permutations(case.names, 2))]
    plans = {text: case.plan(module, text) for text in texts}
    return {text: plan.run.seconds for text, plan in plans.items() if plan.run is not None and plan.run.seconds}


@settings(max_examples=4, deadline=None)
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


# --- Clones on each device


@settings(max_examples=5, deadline=None)
@given(
    case=random_cases(),
    links=st.lists(st.sampled_from([2e7, 5e7, 1e9]), min_size=3, max_size=3),
    room=st.sampled_from([6, 8, 1000]),
)
def test_clones_take_what_is_predicted(sim, case: Case, links: list[float], room: int) -> None:
    """Each holds all of it or streams, whatever a split would do."""
    case = replace_case(case, links=links[: len(case.speeds)], room=room * BLOCK_BYTES)
    module = case.build(sim)
    component = component_from_module(module, name="transformer", kind="diffusion")
    counts = calls_of_each(case.num_calls, len(case.names))
    if not all(counts):
        return
    plan = case.plan(module, "gpu:0", may_clone=True)["transformer"]
    clones = plan_clones(component, plan, case.names, case.use(), case.machine, OffloadProfile())
    predicted_s = clone_seconds(clones, case.use())
    assert predicted_s == pytest.approx(case.measure_clones(sim, counts), rel=0.05)
    (line,) = [reason for reason in plan.reasons if reason.startswith("instead: ")]
    assert "MultiGPU CFG Split" in line and "one copy in RAM" in line
    assert ("streams" in line) <= any(clone.streamed for clone in clones)


# --- What a plan says


@pytest.mark.parametrize("placement", ["gpu:0&gpu:1", "gpu:0&gpu:1/auto", "gpu:0&gpu:1/4"])
@pytest.mark.parametrize(
    ("changed", "room", "why"),
    [
        ({"num_calls": 1}, 512 * MIB, "a forward is one call: a split buys memory, not speed"),
        ({"one_by_one": "another node wraps the calls"}, 512 * MIB, "another node wraps the calls"),
        ({}, 4 * BLOCK_BYTES, "blocks stream, and a second call would fetch them once more"),
    ],
)
def test_a_plan_says_why_devices_compute_in_turn(
    sim, placement: str, changed: dict[str, Any], room: int, why: str
) -> None:
    case = replace_case(EVEN, room=room)
    found = case.plan(case.build(sim), placement, **changed)
    assert [reason for reason in found["transformer"].reasons if reason.startswith("micro-batches")] == [
        f"micro-batches: off: {why}"
    ]
    assert found.run is not None
    if room > MIB:
        num_calls = changed.get("num_calls", 2)
        home = found["transformer"].shares[0]
        num_hops = sum(
            (one in home.blocks) != (other in home.blocks) for one, other in pairwise([0, *range(len(case.kinds)), 0])
        )
        assert found.run.uses[0].pass_s == pytest.approx(
            num_calls * (sum(case.kinds) + num_hops * (LATENCY_S + case.hidden_bytes / 1e9))
        )


def test_longer_hops_make_fewer_groups_and_at_last_no_split(sim) -> None:
    even = replace_case(EVEN, kinds=[0.002] * 16)
    module, seconds = even.build(sim), []
    groups, devices = [], []
    for hidden_bytes in (KIB, MIB, 64 * MIB):
        case = replace_case(even, hidden_bytes=hidden_bytes)
        split = case.plan(module, "gpu:0&gpu:1/auto")["transformer"]
        (reason,) = (line for line in split.reasons if "micro-batches" in line)
        assert reason.endswith("by predicted times of blocks and hops")
        groups.append(split.placement.groups)
        chosen = case.plan(module, "auto")
        devices.append(len(chosen["transformer"].shares))
        assert chosen.run is not None and chosen.run.seconds is not None
        seconds.append(chosen.run.seconds)
    assert groups[0] > groups[-1]
    assert devices[0] == 2 and devices[-1] == 1
    assert seconds == sorted(seconds)


def test_auto_leaves_alone_what_another_one_wraps(sim) -> None:
    module = EVEN.build(sim)
    assert len(EVEN.plan(module, "auto")["transformer"].shares) == 2
    assert len(EVEN.plan(module, "auto", one_by_one="another node wraps it")["transformer"].shares) == 1


def test_a_device_without_room_gets_no_groups(sim) -> None:
    devices = EVEN.machine.devices
    full = replace(devices[2], available_bytes=BLOCK_BYTES // 2)
    machine = replace(EVEN.machine, devices=(*devices[:2], full))
    component = component_from_module(EVEN.build(sim), name="transformer", kind="diffusion")
    request = PlanRequest(
        components=(component,), machine=machine, uses=(EVEN.use(),),
        placement=parse_placement("auto", devices=["cpu", *EVEN.names], components=["transformer"]),
    )  # fmt: skip
    found = plan_request(request)
    assert [share.device for share in found["transformer"].shares] == ["gpu:0"]
    assert found.run is not None and "gpu:1: nothing computes there" in found.run.text()


# --- What streams


@settings(max_examples=4, deadline=None)
@given(
    room=st.integers(3, 12), placement=st.sampled_from(["gpu:0&gpu:1", "gpu:0&gpu:1/auto", "gpu:0&gpu:1/4", "gpu:0"])
)
def test_a_call_copies_each_streamed_block_once_and_calls_at_once_copy_none(sim, room: int, placement: str) -> None:
    case = replace_case(EVEN, room=room * BLOCK_BYTES + 4 * KIB, hidden_bytes=64)
    module = case.build(sim)
    with case.cluster(sim) as (manager, now_s):
        manager.set_watermark("*", 4 * KIB, 4 * KIB)  # for what the calls take
        managed = manage(module, placement=placement, manager=manager)
        call = partial(module, torch.zeros(64, dtype=torch.uint8, device="sim:0"))

        def copied_by(step: Callable[[], Any]) -> int:
            before = sum(sim.stats(index).h2d_bytes for index in range(2))
            step()
            now_s()
            return int(sum(sim.stats(index).h2d_bytes for index in range(2)) - before) // 512 * 512  # of weights

        for _ in range(5):
            call()
        now_s()
        streams = [share for share in managed.plan.components[0].shares if share.streamed]
        copied_bytes = copied_by(call)
        # Staging memory that lacks less than a block for all of them keeps most of them from call to call.
        if not any(share.staging_bytes > share.streamed_bytes - BLOCK_BYTES for share in streams):
            assert copied_bytes == sum(share.streamed_bytes for share in streams)
        assert copied_bytes <= sum(share.streamed_bytes for share in streams)
        assert copied_by(partial(managed.run_micro_batches, [call, call])) == 2 * copied_bytes
        assert managed.members[0].managed.why_one_by_one() or not streams
        managed.release()
        del call
