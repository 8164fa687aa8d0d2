"""What another device stores: no more than it has free, nothing that is resident, and always something to copy from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.errors import DoesNotFit, InvalidInput
from highwater.memory.options.profile import parse_profile
from highwater.memory.planner.capacity import EVERYTHING, KeptFree, Machine, PeerLink
from highwater.memory.planner.device_store import store_room
from highwater.memory.planner.replanning import confirm_plan, replan
from highwater.memory.units import MIB
from highwater.tests.engine.planner.test_plan import DEVICES, component, from_file, linked, machine, plan
from highwater.tests.engine.planner.test_plan_holds import everything

STORED = "gpu:0:gpu:1"
sizes_of_blocks = st.lists(st.integers(1, 4000).map(lambda n: n * 512), min_size=2, max_size=40)


def with_peer(on: Machine, speed: float | None = 2e10, *, is_direct: bool = True) -> Machine:
    link = PeerLink(device="gpu:1", is_direct=is_direct, bytes_per_s=speed)
    return replace(on, devices=tuple(replace(d, peers=(link,)) if d.name == "gpu:0" else d for d in on.devices))


def of_second(on: Machine, **numbers: int) -> Machine:
    return replace(on, devices=tuple(replace(d, **numbers) if d.name == "gpu:1" else d for d in on.devices))


@given(sizes_of_blocks, st.floats(0.2, 1.2), st.integers(0, 60 * MIB), st.integers(0, 20 * MIB), st.booleans())
def test_it_stores_what_streams_as_far_as_memory_is_free(
    sizes: list[int], part_of_it: float, second: int, idle: int, has_file: bool
) -> None:
    part = from_file(component(sizes)) if has_file else component(sizes)
    idle = min(idle, second)
    on = of_second(with_peer(machine(int(sum(sizes) * part_of_it), second)), idle_bytes=idle)
    try:
        found = plan(part, placement=STORED, on=on)["transformer"]
    except DoesNotFit:
        return
    (share,) = found.shares
    assert share.stored <= set(share.streamed)
    assert found.stored_bytes == sum(share.stored_bytes for share in found.shares) <= second - idle
    missing = [sizes[number] for number in share.streamed if number not in share.stored]
    assert all(size > second - idle - share.stored_bytes for size in missing), "a block more would have fitted"
    assert found.tier == ("disk" if has_file else "host"), "the origin that nothing is lost from"
    assert bool(share.read_bytes) == (has_file and bool(missing))
    assert found.placement.tier == "gpu:1" == found.store
    again = plan(part, placement=str(found.placement), on=on)["transformer"]
    assert everything(again) == everything(found)


@given(
    sizes_of_blocks,
    st.floats(0.2, 0.9),
    st.integers(0, 60 * MIB),
    st.integers(0, 60 * MIB),
    st.sampled_from([None, 1e9, 2e10]),
    st.booleans(),
)
def test_a_plan_that_holds_is_the_one_that_planning_again_would_give(
    sizes: list[int], part_of_it: float, before: int, after: int, speed: float | None, has_file: bool
) -> None:
    part = from_file(component(sizes)) if has_file else component(sizes)
    first = int(sum(sizes) * part_of_it)
    try:
        current = plan(part, placement=STORED, on=with_peer(machine(first, before)))["transformer"]
    except DoesNotFit:
        return
    now, profile = with_peer(machine(first, after), speed), parse_profile("auto", devices=DEVICES, components=[])
    confirmed = confirm_plan(part, current, now, profile)
    found = replan(part, current, now, profile)
    assert found.stored_bytes <= after
    if confirmed is not None:
        assert everything(confirmed) == everything(found)
    if confirm_plan(part, found, now, profile) is not found:
        twice = replan(part, found, now, profile)
        assert confirm_plan(part, twice, now, profile) is twice, "it never comes to rest"


@pytest.mark.parametrize(
    ("on", "words"),
    [
        (with_peer(machine(20 * MIB, 100 * MIB), 2.1e10), "peer copies at 21 GB/s"),
        (with_peer(machine(20 * MIB, 100 * MIB), None), "peer copies, speed not measured yet"),
        (with_peer(machine(20 * MIB, 100 * MIB), 9e9, is_direct=False), "through page-locked RAM, 9 GB/s measured"),
        (with_peer(machine(20 * MIB, 6 * MIB)), "4.00MiB stored on gpu:1: peer copies at 20 GB/s; "),
        (with_peer(machine(20 * MIB, MIB)), "nothing is stored on gpu:1: 1.00MiB free on gpu:1"),
    ],
)
def test_the_plan_says_what_is_stored_and_how_it_comes(on: Machine, words: str) -> None:
    found = plan(from_file(component([4 * MIB] * 10)), placement=STORED, on=on)["transformer"]
    assert words in found.text()
    assert "stored on gpu:1" in found.text().splitlines()[0] or not found.stored_bytes


def test_the_speed_of_the_way_counts_not_that_of_the_link() -> None:
    part, seconds = from_file(component([4 * MIB] * 10)), dict.fromkeys(range(10), 1e-3)
    on = linked(machine(20 * MIB, 100 * MIB), 1e9)
    found = plan(part, placement=STORED, on=with_peer(on, 4e10), seconds=seconds)["transformer"]
    near = plan(part, placement="gpu:0:pinned", on=on, seconds=seconds)["transformer"]
    assert found.shares[0].pass_s is not None and near.shares[0].pass_s is not None
    assert found.shares[0].pass_s < near.shares[0].pass_s


def test_two_components_do_not_get_the_same_memory_twice() -> None:
    parts = [from_file(component([4 * MIB] * 10)) for _ in range(2)]
    parts[1] = replace(parts[1], name="text_encoder", kind="text")
    found = plan(*parts, placement=STORED, on=with_peer(machine(20 * MIB, 30 * MIB)))
    assert sum(each.stored_bytes for each in found.components) <= 30 * MIB
    assert found["transformer"].stored_bytes


def test_what_is_known_of_a_device_bounds_what_it_stores() -> None:
    on = of_second(with_peer(machine(20 * MIB, 100 * MIB)), idle_bytes=30 * MIB, unlearned_bytes=10 * MIB)
    room = store_room(None, on, "gpu:0", "gpu:1")
    assert (room.num_bytes, room.bytes_per_s) == (60 * MIB, 2e10)
    short = replace(on, needs=lambda part, device: KeptFree(num_bytes=EVERYTHING, why="it ran out of memory there"))
    found = plan(from_file(component([4 * MIB] * 10)), placement=STORED, on=replace(short, needs=short_on_second))
    assert not found["transformer"].stored_bytes
    assert "nothing is stored on gpu:1: it ran out of memory there" in found.text()


def short_on_second(part: object, device: str) -> KeptFree | None:
    return KeptFree(num_bytes=EVERYTHING, why="it ran out of memory there") if device == "gpu:1" else None


@pytest.mark.parametrize(
    ("placement", "why"),
    [
        ("gpu:1:gpu:1", "gpu:1 cannot store transformer: it computes there"),
        ("cpu:gpu:1", "gpu:1 cannot store transformer: it computes on the CPU"),
        ("gpu:0:cpu", "cpu cannot store transformer: the CPU's memory is tier 'host'"),
        ("gpu:0&gpu:1:gpu:1", "a split over several devices"),
    ],
)
def test_what_cannot_store_is_refused_in_one_line(placement: str, why: str) -> None:
    with pytest.raises(InvalidInput, match="allowed: ") as caught:
        plan(component([4 * MIB] * 10), placement=placement)
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_auto_computes_beside_the_store() -> None:
    found = plan(component([4 * MIB] * 10), placement="auto:gpu:1", on=with_peer(machine(20 * MIB, 100 * MIB)))
    assert str(found["transformer"].placement) == "transformer=gpu:0:gpu:1"


def test_a_budget_of_the_profile_is_kept_and_nothing_is_stored_where_all_is_resident() -> None:
    found = plan(component([4 * MIB] * 4), placement=STORED, on=with_peer(machine(40 * MIB)))["transformer"]
    assert (found.stored_bytes, found.shares[0].streamed) == (0, ())
    tight = plan(component([4 * MIB] * 4), placement=STORED, profile="gpu:0=10MiB", on=with_peer(machine(40 * MIB)))
    assert tight["transformer"].stored_bytes
