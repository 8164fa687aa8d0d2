"""A plan is made again only where something has changed: one that holds is the one that planning again would give."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from highwater.memory.errors import DoesNotFit, InvalidInput
from highwater.memory.options.precision import Precision
from highwater.memory.planner.capacity import KeptFree
from highwater.memory.planner.plan import ComponentPlan, Machine
from highwater.memory.planner.replanning import confirm_plan, fresh_plan_holds, replan
from highwater.memory.units import MIB
from highwater.memory.weights.component import Component
from highwater.tests.engine.planner.test_plan import component, machine, plan, with_ram

PROFILES = ("auto", "4", "5", "20MiB", "-3MiB", "40%", "1,reserve=2MiB", "4,pinned=none", "auto,prefetch=2")
# What the numbers of a device come to be, with what was there before.
CHANGES = {
    "available_bytes": st.integers(0, 100 * MIB) | st.integers(0, 4 * MIB),
    "ceiling_bytes": st.none() | st.integers(0, 100 * MIB),
    "kept_free_bytes": st.integers(0, 4 * MIB),
    "lasting_bytes": st.integers(0, 20 * MIB),
    "unlearned_bytes": st.integers(0, 20 * MIB),
    "link_bytes_per_s": st.none() | st.floats(1e9, 1e11),
}
changes = st.dictionaries(st.sampled_from(sorted(CHANGES)), st.none(), max_size=2).flatmap(
    lambda chosen: st.fixed_dictionaries({name: CHANGES[name] for name in chosen})
)
kept = st.none() | st.builds(
    KeptFree,
    num_bytes=st.integers(0, 60 * MIB),
    why=st.just("an earlier run needed it"),
    futile_bytes=st.integers(0, 30 * MIB),
    is_known=st.booleans(),
)
sizes_of_blocks = st.lists(st.integers(1, 4000).map(lambda n: n * 512), min_size=3, max_size=30)


def on_first(on: Machine, changed: dict[str, object], needs: KeptFree | None) -> Machine:
    """Return the machine with other numbers of its first GPU, and other needs."""
    devices = tuple(replace(d, **changed) if d.name == "gpu:0" else d for d in on.devices)
    return replace(on, devices=devices, needs=lambda component, device: needs)


def everything(plan: ComponentPlan) -> list[Any]:
    """Return all fields of a plan, also those that do not count when two are compared."""
    values = [getattr(plan, field.name) for field in fields(plan)]
    return values + [getattr(share, field.name) for share in plan.shares for field in fields(share)]


def planned(part: Component, on: Machine, profile: str, precision: Precision | None = None) -> ComponentPlan | None:
    try:
        return plan(part, on=on, profile=profile, precision=precision)["transformer"]
    except (DoesNotFit, InvalidInput):
        return None


@example(
    sizes=[512 * 1000] * 19,
    part_of_it=0.8,
    profile="40%",
    precision=Precision.ENCODED,
    pinned=434,  # none of the blocks, which is known only when all of them are planned
    first_needs=None,
    needs="the same",
    changed={},
)
@given(
    sizes_of_blocks,
    st.floats(0.3, 1.5),
    st.sampled_from(PROFILES),
    st.none() | st.sampled_from([Precision.AS_STORED, Precision.ENCODED]),
    st.integers(0, 60 * MIB) | st.just(1 << 40),
    kept,
    kept | st.just("the same"),
    changes,
)
def test_a_plan_that_holds_is_the_one_that_would_be_made(
    sizes: list[int],
    part_of_it: float,
    profile: str,
    precision: Precision | None,
    pinned: int,
    first_needs: KeptFree | None,
    needs: KeptFree | str | None,
    changed: dict[str, object],
) -> None:
    part = component(sizes)
    before = on_first(machine(first=int(sum(sizes) * part_of_it), pinned=pinned), {}, first_needs)
    first = planned(part, before, profile, precision)
    if first is None:
        return
    chosen = plan(part, on=before, profile=profile, precision=precision).profile
    now = on_first(before, changed, first_needs if needs == "the same" else needs)  # type: ignore[arg-type]
    confirmed = confirm_plan(part, first, now, chosen)
    if confirmed is not None:
        assert everything(replan(part, first, now, chosen)) == everything(confirmed)
        assert confirmed == first
    if fresh_plan_holds(part, first, now, chosen):
        again = planned(part, now, profile, precision)
        assert again is not None and everything(again) == everything(first)


def is_made_again(part: Component, timed: ComponentPlan, *how: Any) -> bool:
    """Whether a plan that leaves the bytes of its smallest block unused, and is not confirmed, is found again."""
    return everything(replan(part, timed, *how)) == everything(timed)


@given(sizes_of_blocks, st.integers(MIB, 60 * MIB), st.sampled_from(PROFILES), kept)
def test_a_plan_holds_where_nothing_has_changed(
    sizes: list[int], available: int, profile: str, needs: KeptFree | None
) -> None:
    part, on = component(sizes), on_first(machine(first=available), {}, needs)
    first = planned(part, on, profile)
    if first is not None:
        chosen = plan(part, on=on, profile=profile).profile
        assert confirm_plan(part, first, on, chosen) is first
        assert fresh_plan_holds(part, first, on, chosen) == (first.tier == "pinned")


@given(
    sizes_of_blocks,
    st.floats(0.3, 1.5),
    st.sampled_from(PROFILES),
    st.integers(0, 60 * MIB) | st.just(1 << 40),
    st.lists(st.integers(1, 9), min_size=30, max_size=30),
    st.none() | st.lists(st.integers(1, 9), min_size=30, max_size=30),
    kept,
    changes,
)
def test_a_plan_with_measured_times_is_confirmed_while_they_are_the_same(
    sizes: list[int],
    part_of_it: float,
    profile: str,
    pinned: int,
    times: list[int],
    new_times: list[int] | None,
    needs: KeptFree | None,
    changed: dict[str, object],
) -> None:
    part, on = component(sizes), machine(first=int(sum(sizes) * part_of_it), pinned=pinned)
    first = planned(part, on, profile)
    if first is None:
        return
    chosen = plan(part, on=on, profile=profile).profile
    seconds, new = ({n: (given or times)[n] / 1e4 for n in range(len(sizes))} for given in (times, new_times))
    timed = replan(part, first, on, chosen, seconds)
    assert confirm_plan(part, timed, on, chosen, seconds) is timed or is_made_again(part, timed, on, chosen, seconds)
    now = on_first(on, changed, needs)
    confirmed = confirm_plan(part, timed, now, chosen, new)
    if confirmed is not None:
        assert everything(replan(part, timed, now, chosen, new)) == everything(confirmed)
        assert confirmed == timed


@given(sizes_of_blocks, st.integers(MIB, 60 * MIB), st.integers(0, 60 * MIB), st.sampled_from(PROFILES))
def test_a_plan_holds_however_much_could_be_page_locked(
    sizes: list[int], available: int, pinned: int, profile: str
) -> None:
    part, on = component(sizes), machine(first=available, pinned=pinned)
    first = planned(part, on, profile)
    if first is not None:
        assert confirm_plan(part, first, on, plan(part, on=on, profile=profile).profile) is first


@given(sizes_of_blocks, st.integers(0, 50 * MIB))
def test_a_resident_plan_holds_whatever_else_comes_and_goes_beside_it(sizes: list[int], taken: int) -> None:
    """Inputs of a forward take some of what was free when its weights were planned."""
    part, on = component(sizes), machine(first=150 * MIB)
    first = planned(part, on, "auto")
    assert first is not None and not first.streams
    now = with_ram(on_first(on, {"available_bytes": 150 * MIB - taken}, None), 1 << 30)
    assert confirm_plan(part, first, now, plan(part, on=on).profile) is first
