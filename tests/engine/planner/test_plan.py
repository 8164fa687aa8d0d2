"""The plan is arithmetic: it never exceeds its budget, wastes no room a block would fit in, and says why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from safetensors.torch import save_file

from highwater.memory.errors import DoesNotFit, InvalidInput
from highwater.memory.options.budget import BudgetItem
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import OffloadProfile, parse_profile
from highwater.memory.planner.capacity import KeptFree
from highwater.memory.planner.form_choice import choose_forms
from highwater.memory.planner.plan import ComponentPlan, DeviceCapacity, Machine, Plan
from highwater.memory.planner.planning import plan_components
from highwater.memory.planner.replanning import confirm_plan, replan
from highwater.memory.planner.sizes import all_resident_bytes, block_bytes, least_bytes, wide_bytes
from highwater.memory.units import KIB, MIB, SLAB_ALIGNMENT, format_bytes
from highwater.memory.weights.component import Block, Component, TensorSpec, component_from_files, group_tensors
from highwater.memory.weights.form_numbers import Forms
from highwater.memory.weights.module_component import component_from_module

DEVICES = ["cpu", "gpu:0", "gpu:1"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileComponent(Component):
    """A component that can be read from its file again."""

    has_file: bool = True


def from_file(part: Component) -> FileComponent:
    return FileComponent(name=part.name, kind=part.kind, blocks=part.blocks, non_block=part.non_block)


def component(sizes: Sequence[int], rest: int = 1000) -> Component:
    def block(name: str, num_bytes: int) -> Block:
        spec = TensorSpec(name=f"{name}.weight", dtype="BF16", shape=(num_bytes // 2, 1), encodable=True)
        return Block(name=name, tensors=(spec,))

    return Component(
        name="transformer",
        kind="diffusion",
        blocks=tuple(block(f"layers.{number}", size) for number, size in enumerate(sizes)),
        non_block=block("", rest),
    )


def machine(first: int = 100 * MIB, second: int = 50 * MIB, pinned: int = 1 << 40) -> Machine:
    return Machine(
        devices=(
            DeviceCapacity(name="cpu", total_bytes=1 << 40, available_bytes=1 << 40),
            DeviceCapacity(name="gpu:0", total_bytes=2 * first, available_bytes=first, kept_free_bytes=MIB),
            DeviceCapacity(name="gpu:1", total_bytes=2 * second, available_bytes=second),
        ),
        pinned_bytes=pinned,
    )


def plan(*parts: Component, placement: str = "gpu:0", profile: str = "auto", on: Machine | None = None,
         precision: Precision | None = None, seconds: Mapping[int, float] | None = None) -> Plan:  # fmt: skip
    names = [part.name for part in parts]
    return plan_components(
        parts,
        on or machine(),
        placement=parse_placement(placement, devices=DEVICES, components=names),
        profile=parse_profile(profile, devices=DEVICES, components=names),
        precision=precision,
        block_seconds=seconds and {part.name: seconds for part in parts},
    )


def linked(on: Machine, pinned: float | None, pageable: float | None = None) -> Machine:
    """Return the machine with links of this speed from page-locked memory, and from other."""
    speeds = {"link_bytes_per_s": pinned, "pageable_bytes_per_s": pageable}
    return replace(on, devices=tuple(replace(device, **speeds) for device in on.devices))


def with_ram(on: Machine, num_bytes: int) -> Machine:
    cpu, *others = on.devices
    return replace(on, devices=(replace(cpu, available_bytes=num_bytes), *others))


sizes_of_blocks = st.lists(st.integers(1, 4000).map(lambda n: n * 512), min_size=1, max_size=60)


@given(sizes_of_blocks, st.integers(1, 200 * MIB), st.sampled_from([Precision.AS_STORED, Precision.ENCODED]))
def test_device_bytes_never_exceed_what_is_available(sizes: list[int], available: int, precision: Precision) -> None:
    part = component(sizes)
    try:
        decided = plan(part, on=machine(first=available), precision=precision)["transformer"]
    except DoesNotFit:
        cast = plan(part, precision=precision, on=machine(first=1 << 40))["transformer"].forms
        least = 1024 + max(block_bytes(block, cast) for block in part.blocks)
        least += max(wide_bytes(block, cast) for block in part.blocks)
        assert least > available
        return
    (share,) = decided.shares
    assert share.device_bytes <= available
    assert share.resident | set(share.streamed) == set(range(len(sizes)))
    assert bool(share.staging_bytes) == bool(share.streamed)
    for here in share.offsets:
        assert here.keys() == set(share.streamed)
        for number, begin in here.items():
            num_bytes = block_bytes(part.blocks[number], decided.forms)
            assert begin >= 0 == begin % SLAB_ALIGNMENT and begin + num_bytes <= share.staging_bytes
    if all_resident_bytes(part, decided.forms) + share.scratch_bytes <= available:
        assert not share.streamed


@given(sizes_of_blocks, st.floats(0.05, 0.95))
def test_a_split_covers_every_block_once_in_order_near_the_ratio(sizes: list[int], ratio: float) -> None:
    assume(len(sizes) > 1)
    decided = plan(component(sizes), placement=f"gpu:0&gpu:1@{ratio:.3f}", on=machine(1 << 40, 1 << 40))["transformer"]
    first, second = decided.shares
    assert first.blocks + second.blocks == tuple(range(len(sizes)))
    assert first.blocks and second.blocks
    asked = ratio * sum(sizes)
    got = sum(sizes[number] for number in second.blocks)
    assert abs(got - asked) <= max(sizes)


def test_a_few_bytes_of_a_device_do_not_decide_whether_a_split_fits() -> None:
    part = component([2 * MIB] * 3 + [MIB] * 4)
    for first in (50 * MIB - 8, 50 * MIB, 50 * MIB + 8):
        decided = plan(part, placement="gpu:0&gpu:1", profile="gpu:0=5MiB,gpu:1=1MiB", on=machine(first, 50 * MIB))
        assert [share.blocks for share in decided["transformer"].shares] == [(0, 1, 2), (3, 4, 5, 6)]


@given(sizes_of_blocks, st.integers(2, 3), st.data())
def test_a_split_without_ratios_fits_where_any_cut_does(
    sizes: list[int], num_devices: int, data: st.DataObject
) -> None:
    part = component(sizes := sizes[:12])
    assume(len(sizes) >= num_devices)
    precision = data.draw(st.sampled_from([Precision.AS_STORED, Precision.ENCODED]))
    cast = choose_forms(part, precision)
    drawn = data.draw(st.permutations(range(1, len(sizes))))
    bounds = [0, *sorted(drawn[: num_devices - 1]), len(sizes)]
    limits = [
        least_bytes(part, range(*run), cast, first=index == 0) - data.draw(st.sampled_from([0, 0, 0, 1]))
        for index, run in enumerate(pairwise(bounds))
    ]
    names = [f"gpu:{number}" for number in range(num_devices)]
    budgets = tuple(BudgetItem(target=name, limit_bytes=limit) for name, limit in zip(names, limits, strict=True))
    cuts = [(0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), num_devices - 1)]
    fits = any(
        all(
            least_bytes(part, range(*run), cast, first=index == 0) <= limit
            for index, (run, limit) in enumerate(zip(pairwise(cut), limits, strict=True))
        )
        for cut in cuts
    )
    roomy = DeviceCapacity(name="gpu", total_bytes=1 << 40, available_bytes=1 << 39)
    on = Machine(devices=tuple(replace(roomy, name=name) for name in ["cpu", *names]), pinned_bytes=1 << 40)
    try:
        decided = plan_components(
            [part],
            on,
            placement=parse_placement("&".join(names), devices=names, components=[part.name]),
            profile=OffloadProfile(budgets=budgets),
            precision=precision,
        )
    except InvalidInput:
        assert not fits
    else:
        shares = decided["transformer"].shares
        assert fits
        assert [number for share in shares for number in share.blocks] == list(range(len(sizes)))
        assert all(share.device_bytes <= limit for share, limit in zip(shares, limits, strict=True))


def test_a_ratio_that_was_asked_for_is_not_moved() -> None:
    with pytest.raises(InvalidInput, match="too small"):
        plan(component([MIB, 2 * MIB, MIB]), placement="gpu:0&gpu:1@0.75", profile="gpu:0=5MiB,gpu:1=1MiB")


def test_the_printed_placement_gives_the_same_plan_again() -> None:
    part = component([MIB] * 40)
    first = plan(part, placement="auto", profile="20MiB")
    again = plan(part, placement=first.placement.replace("transformer=", ""), profile="20MiB")
    assert first["transformer"].shares == again["transformer"].shares


# -- prefetching and measured times


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_prefetch_says_how_many_blocks_there_is_staging_memory_for(depth: int) -> None:
    (share,) = plan(component([MIB] * 20), profile=f"10MiB,prefetch={depth}")["transformer"].shares
    # A MiB goes to what does not stream, and a part of one is left over.
    assert (share.prefetch_blocks, len(share.resident)) == (depth, 8 - depth)
    assert share.device_bytes <= 10 * MIB


def test_a_profiles_budget_rises_to_whole_mebibytes_that_hold_two_blocks() -> None:
    decided = plan(component([700 * MIB + 512] * 8), profile="2", on=machine(first=1 << 40))["transformer"]
    assert decided.shares[0].prefetch_blocks == 1
    assert decided.shares[0].limit_bytes % MIB == 0


def test_prefetch_takes_what_there_is_room_for_and_says_so() -> None:
    decided = plan(component([MIB] * 20), profile="3.5MiB,prefetch=4")["transformer"]
    assert decided.shares[0].prefetch_blocks == 2
    assert "prefetch 4 requested; staging memory is enough for prefetch 2" in decided.reasons


def test_measured_times_choose_the_depth() -> None:
    # Each long compute is followed by short ones: with room for two blocks the copies wait for it.
    part, here = component([MIB] * 24), machine(first=13 * MIB)
    computes = {"even": [0.02] * 24, "bursts": [0.16 if number % 8 == 0 else 0.0 for number in range(24)]}
    ahead = {}
    for name, seconds in computes.items():
        decided = plan(part, on=linked(here, MIB / 0.04), seconds=dict(enumerate(seconds)))["transformer"]
        ahead[name] = decided.shares[0].prefetch_blocks
        assert decided.shares[0].pass_s is not None
    assert ahead["even"] <= 1 < ahead["bursts"]
    for room in range(4, 24):  # without times room for more would be a guess
        (unmeasured,) = plan(part, on=linked(machine(first=room * MIB), MIB / 0.04))["transformer"].shares
        assert (unmeasured.prefetch_blocks, unmeasured.pass_s) == (1, None)


def test_what_is_in_place_stays_while_it_fits_and_is_as_good() -> None:
    part, profile = component([MIB] * 40), parse_profile("auto", devices=DEVICES)
    decided = plan(part, on=machine(first=20 * MIB))["transformer"]
    assert replan(part, decided, machine(first=20 * MIB + 1000), profile).shares == decided.shares
    more = replan(part, decided, machine(first=24 * MIB), profile)
    assert len(more.shares[0].resident) == len(decided.shares[0].resident) + 4
    less = replan(part, decided, machine(first=18 * MIB), profile)
    assert less.device_bytes["gpu:0"] <= 18 * MIB
    here = linked(machine(first=20 * MIB), MIB / 0.1)
    even = replan(part, decided, here, profile, block_seconds=dict.fromkeys(range(40), 0.1))
    assert even.shares[0].resident == decided.shares[0].resident
    # Evenly spread is wrong once the blocks are known to differ.
    moved = replan(part, decided, here, profile, block_seconds=dict(enumerate([0.0] * 20 + [0.1] * 20)))
    assert moved.shares[0].resident != decided.shares[0].resident
    # Free memory is filled, also where computes hide every copy already.
    slow = linked(machine(first=24 * MIB), MIB / 0.1)
    filled = replan(part, decided, slow, profile, block_seconds=dict.fromkeys(range(40), 10.0))
    assert len(filled.shares[0].resident) >= len(decided.shares[0].resident) + 4


def test_copies_are_priced_by_how_their_blocks_rest() -> None:
    part, profile, times = component([MIB] * 16), parse_profile("auto", devices=DEVICES), dict.fromkeys(range(16), 0.1)
    half = sum(part.blocks[0].weight_bytes for _ in range(8)) + 8 * SLAB_ALIGNMENT
    decided = plan(part, on=machine(first=6 * MIB, pinned=half))["transformer"]
    streamed = {f"layers.{number}" for number in decided.shares[0].streamed}
    assert len(decided.pinned & streamed) == 8 < len(streamed)
    took = []
    for pinned, pageable in ((10.0, 10.0), (10.0, 2.5), (None, 2.5), (10.0, None)):
        here = linked(machine(first=6 * MIB), pinned and pinned * MIB, pageable and pageable * MIB)
        (share,) = replan(part, decided, here, profile, block_seconds=times).shares
        num_pageable = sum(f"layers.{number}" not in decided.pinned for number in share.streamed)
        num_pinned = len(share.streamed) - num_pageable
        # A copy from page-locked memory takes as long as a compute; of other memory, half as fast if nobody knows.
        slow, fast = 1 / (pageable or pinned / 2), 1 / (pinned or pageable)
        took.append(share.pass_s)
        bound_s = max(1.6, num_pageable * slow + num_pinned * fast)
        assert bound_s <= share.pass_s <= 1.1 * bound_s
        assert f"at least {num_pageable * slow + num_pinned * fast:.2g} s" in share.reasons[0]
    assert took[0] < took[3] < took[1] < took[2]


def test_residents_are_those_that_are_not_page_locked_once_there_is_no_room_for_all() -> None:
    """All were resident as pages were locked; the blocks that stream now are chosen among those that are locked."""
    part, profile = component([MIB] * 16), parse_profile("auto", devices=DEVICES)
    half = sum(part.blocks[0].weight_bytes for _ in range(8)) + 8 * SLAB_ALIGNMENT
    decided = plan(part, on=machine(pinned=half))["transformer"]
    assert not decided.shares[0].streamed
    (share,) = replan(part, decided, machine(first=12 * MIB), profile).shares
    assert {f"layers.{number}" for number in share.streamed} <= decided.pinned


def test_what_still_fits_and_was_chosen_with_the_same_times_is_not_searched_again(monkeypatch) -> None:
    part, profile = component([MIB] * 40), parse_profile("auto", devices=DEVICES)
    here, times = linked(machine(first=20 * MIB), MIB / 0.1), dict.fromkeys(range(40), 0.1)
    decided = plan(part, on=here)["transformer"]
    learned = replan(part, decided, here, profile, block_seconds=times)
    monkeypatch.setattr("highwater.memory.planner.device_plan.choose_schedule", None)
    a_little_more = linked(machine(first=20 * MIB + 1000), MIB / 0.1)
    assert replan(part, decided, a_little_more, profile).shares == decided.shares
    assert replan(part, learned, a_little_more, profile, block_seconds=times).shares == learned.shares
    with pytest.raises(TypeError):  # with other times it is
        replan(part, learned, a_little_more, profile, block_seconds=dict.fromkeys(range(40), 0.3))


def test_reasons_about_room_are_found_again_and_the_others_stay() -> None:
    part, profile = component([MIB] * 8), parse_profile("auto", devices=DEVICES)
    decided = plan(part, placement="auto", on=machine(first=5 * MIB, second=MIB, pinned=1000))["transformer"]
    roomy = replan(part, decided, machine(pinned=1000), profile)
    assert not any("stream" in reason for reason in roomy.reasons)
    assert roomy.choices == decided.choices and any("pageable" in reason for reason in roomy.reasons)


# -- budgets and reserves


def test_a_budget_below_the_largest_block_is_the_users_error() -> None:
    with pytest.raises(InvalidInput, match=r"budget '1\.5MiB' is too small: transformer needs at least 2\.00MiB"):
        plan(component([MIB, 2 * MIB]), profile="1.5MiB")


@pytest.mark.parametrize("setting", ["{}MiB", "reserve={}MiB"])
def test_what_a_refusal_of_a_budget_or_reserve_allows_is_planned(setting: str) -> None:
    part, tried = component([MIB, 2 * MIB, 5 * MIB + 77]), setting.format(1 if setting[0] == "{" else 100)
    with pytest.raises(InvalidInput, match="; allowed: ") as refused:
        plan(part, profile=tried)
    (allowed,) = re.findall(r"allowed: (\d+)MiB or", str(refused.value))
    assert plan(part, profile=setting.format(allowed))["transformer"].streams
    worse = int(allowed) + (-1 if setting[0] == "{" else 1)
    with pytest.raises(InvalidInput, match=f"allowed: {allowed}MiB or"):
        plan(part, profile=setting.format(worse))


def test_a_device_below_the_least_form_does_not_fit_and_names_the_remedy() -> None:
    with pytest.raises(DoesNotFit, match=r"1\.50MiB for the largest.*; lower the watermark, or place it on gpu:1$"):
        plan(component([MIB, MIB + MIB // 2]), on=machine(first=MIB))


def test_what_helps_is_named_only_where_the_numbers_say_so() -> None:
    """The whole device is too small: neither the watermark is the reason, nor a precision a remedy."""
    with pytest.raises(DoesNotFit, match=r"2\.00MiB for the largest block\) .* 1\.00MiB reserved; place it on gpu:1$"):
        plan(component([MIB, 2 * MIB]), on=machine(first=MIB))
    with pytest.raises(DoesNotFit, match=r"reserved; place it on the CPU$"):
        plan(component([MIB, 2 * MIB]), on=machine(first=MIB, second=MIB))


@pytest.mark.parametrize(("room", "names_form"), [(10, False), (14, True)])
def test_tier_device_names_a_precision_that_fits(room: int, names_form: bool) -> None:
    with pytest.raises(DoesNotFit, match="choose tier 'pinned' or 'host'") as refused:
        plan(component([MIB] * 20), placement="gpu:0:device", on=machine(first=room * MIB))
    assert ("precision 'fp8 scaled'" in str(refused.value)) == names_form


def test_a_reserve_stays_free_and_what_is_kept_free_counts_towards_it() -> None:
    part, here = component([MIB] * 200), machine()  # a MiB is kept free already
    texts = ["auto", "reserve=1MiB", "reserve=9MiB", "90MiB,reserve=9MiB", "reserve:gpu:1=50MiB", "reserve=4.5%"]
    used = {text: plan(part, on=here, profile=text)["transformer"].device_bytes["gpu:0"] for text in texts}
    assert used["auto"] == used["reserve=1MiB"] == used["reserve:gpu:1=50MiB"] > 99 * MIB
    assert 91 * MIB < used["reserve=9MiB"] == used["reserve=4.5%"] <= 92 * MIB
    assert 89 * MIB < used["90MiB,reserve=9MiB"] <= 90 * MIB


def test_a_reserve_that_leaves_too_little_is_the_users_error() -> None:
    with pytest.raises(InvalidInput, match=r"a reserve of 100MiB leaves 1\.00MiB of gpu:0: transformer needs at least"):
        plan(component([MIB] * 8), profile="reserve=100MiB")


def test_fp8_halves_what_streams_and_needs_scratch() -> None:
    stored = plan(component([MIB] * 8))["transformer"]
    cast = plan(component([MIB] * 8), precision=Precision.ENCODED)["transformer"]
    assert cast.shares[0].resident_bytes * 2 == stored.shares[0].resident_bytes
    assert cast.shares[0].scratch_bytes == MIB
    assert stored.shares[0].scratch_bytes == 0


def test_pageable_memory_is_chosen_and_said_when_pinning_is_not_allowed() -> None:
    decided = plan(component([MIB] * 8), on=machine(pinned=1000))["transformer"]
    assert decided.tier == "host"
    assert not decided.pinned
    assert any("pageable" in reason for reason in decided.reasons)


def pinned_bytes_by_name(part: Component, cast: Forms) -> dict[str, int]:
    blocks = {block.name: block_bytes(block, cast) for block in part.blocks}
    return blocks | {"": all_resident_bytes(part, cast) - sum(blocks.values())}


@given(sizes_of_blocks, st.floats(0, 1.1), st.floats(0, 1.1))
def test_streamed_blocks_are_page_locked_first_within_the_limit(sizes: list[int], locked: float, room: float) -> None:
    part, limit = component(sizes), int(locked * sum(sizes))
    decided = plan(part, on=machine(first=int(2048 + max(sizes) + room * sum(sizes)), pinned=limit))["transformer"]
    groups = pinned_bytes_by_name(part, decided.forms)
    assert decided.pinned_bytes == sum(groups[name] for name in decided.pinned) <= limit
    assert decided.host_bytes == sum(groups.values())
    assert decided.tier == ("pinned" if decided.pinned else "host")
    streamed = {part.blocks[number].name for share in decided.shares for number in share.streamed}
    left = limit - sum(groups[name] for name in decided.pinned & streamed)
    assert all(groups[name] > left for name in streamed - decided.pinned)
    if sum(groups.values()) <= limit:
        assert decided.pinned == set(groups)
    elif decided.pinned:
        (reason,) = [reason for reason in decided.reasons if "page-locked" in reason]
        assert (" streamed blocks: " in reason) == bool(streamed)


def test_components_share_what_may_be_page_locked() -> None:
    unet = component([MIB] * 8)
    text = replace(unet, name="text", kind="text")
    # Given in this order, and yet what streams in every step is page-locked first.
    decided = plan(text, unet, on=machine(first=5 * MIB, pinned=10 * MIB), profile="auto")
    assert sum(part.pinned_bytes for part in decided.components) <= 10 * MIB
    assert decided["transformer"].pinned_bytes > decided["text"].pinned_bytes > 0
    streamed = {unet.blocks[number].name for number in decided["transformer"].shares[0].streamed}
    assert streamed <= decided["transformer"].pinned


def test_a_split_components_units_are_page_locked_like_others() -> None:
    decided = plan(component([MIB] * 8), placement="gpu:0&gpu:1")["transformer"]
    assert decided.pinned_bytes == decided.host_bytes
    assert "" in decided.pinned and len(decided.pinned) == 9


def test_what_does_not_fit_into_ram_rests_on_disk_if_it_has_a_file() -> None:
    part, here = component([2 * MIB] * 200, rest=MIB), with_ram(machine(), 9 * MIB // 2)
    on_disk = plan(from_file(part), on=here)["transformer"]
    assert on_disk.tier == "disk" and not on_disk.pinned
    assert (
        on_disk.file_bytes == on_disk.weight_bytes and on_disk.shares[0].read_bytes == on_disk.shares[0].streamed_bytes
    )
    assert on_disk.host_bytes == on_disk.buffer_bytes == 2 * on_disk.shares[0].streamed_block_bytes
    assert any("in its file: what streams of it needs 30" in reason for reason in on_disk.reasons)
    assert str(on_disk.placement) == "transformer=gpu:0", "what was chosen is chosen again"
    asked = plan(from_file(part), on=here, profile="2,quantize=none")["transformer"]
    assert any("kept in its file: it needs 401MiB of RAM" in reason for reason in asked.reasons)
    assert str(asked.placement) == "transformer=gpu:0:disk"
    assert plan(part, on=here)["transformer"].tier == "pinned"  # it is in RAM already
    assert plan(from_file(part), on=machine())["transformer"].tier == "pinned"


def test_what_streams_rests_in_ram_first_and_what_is_resident_in_its_file() -> None:
    """RAM for two thirds of a model of which the device holds a quarter: a pass reads only what neither can hold."""
    part, here = component([MIB] * 400, rest=MIB), with_ram(machine(), 270 * MIB)
    mixed = plan(from_file(part), on=here)["transformer"]
    (share,) = mixed.shares
    in_file = {number for number, block in enumerate(part.blocks) if block.name in mixed.in_file}
    assert mixed.tier == "pinned" and "" in mixed.in_file
    assert share.resident <= in_file and len(in_file) == 400 - 268  # two buffers
    assert share.read_bytes == sum(number in in_file for number in share.streamed) * MIB
    assert mixed.host_bytes == mixed.pinned_bytes == 270 * MIB == mixed.weight_bytes - mixed.file_bytes + 2 * MIB
    assert mixed.buffer_bytes == 2 * MIB
    assert "98.0MiB of it stay in its file: resident while it computes, with no need for a copy in RAM" in mixed.reasons
    assert (
        "35.0MiB of it are kept in its file: what streams of it needs 303MiB of RAM, 270MiB available" in mixed.reasons
    )
    assert "precision 'fp8 scaled' would fit in RAM: 201MiB" in mixed.reasons
    assert any(f"{share.read_bytes // MIB}.0MiB of it read from its file" in reason for reason in mixed.reasons)
    assert "kept in pinned RAM, 133MiB in its file" in mixed.text()
    assert str(mixed.placement) == "transformer=gpu:0", "what was chosen is chosen again"
    # With RAM for all that streams a pass reads nothing.
    enough = plan(from_file(part), on=with_ram(machine(), 330 * MIB))["transformer"]
    assert enough.in_file and not enough.shares[0].read_bytes
    whole = plan(from_file(part), on=with_ram(machine(), 330 * MIB), profile="2,quantize=none")["transformer"]
    assert "73.0MiB of it are kept in its file: it needs 401MiB of RAM, 330MiB available" in whole.reasons
    again = replan(part, enough, here, parse_profile("auto", devices=DEVICES))
    assert again.shares == enough.shares


def test_what_is_resident_while_it_computes_needs_no_copy_in_ram() -> None:
    part = from_file(component([MIB] * 80, rest=MIB))
    resident = plan(part)["transformer"]
    assert not resident.streams and resident.tier == "disk" and resident.file_bytes == resident.weight_bytes
    assert resident.host_bytes == resident.buffer_bytes == 2 * MIB, "two buffers"
    (line, _) = plan(part).reasons
    assert "2.00MiB of the 2.00MiB in RAM, with 2.00MiB of buffers to read files, are page-locked" in line
    assert "stays in its file: resident while it computes, with no need for a copy in RAM" in resident.reasons
    assert str(resident.placement) == "transformer=gpu:0" and not resident.is_on_disk
    streamed = plan(part, on=machine(first=40 * MIB))["transformer"]
    (share,) = streamed.shares
    names = {part.blocks[number].name for number in share.streamed}
    assert streamed.pinned == names and streamed.in_file == {block.name for block in part.blocks} - names | {""}
    assert not share.read_bytes and not share.blocking
    # Not where the user says where it rests, nor where a copy is as small as the buffers of its file.
    for how in ({"placement": "gpu:0:pinned"}, {"placement": "gpu:0:host"}, {"profile": "3,quantize=none"}):
        assert not plan(part, **how)["transformer"].in_file
    assert not plan(from_file(component([MIB] * 4)))["transformer"].in_file
    assert not plan(component([MIB] * 80))["transformer"].in_file, "it is in RAM already, and in no file"


def test_what_no_file_has_as_it_is_has_a_copy_in_ram_and_the_plan_says_so() -> None:
    whole = component([MIB] * 80, rest=MIB)
    unfiled = {"layers.3", "layers.7"}
    part = replace(from_file(whole), lacking=frozenset(f"{name}.weight" for name in unfiled))
    decided = plan(part)["transformer"]
    assert decided.pinned == unfiled and decided.tier == "pinned" and decided.pinned_bytes == 4 * MIB  # buffers
    assert decided.file_bytes == 79 * MIB and "2.00MiB rest in RAM: no file has these as they are" in decided.reasons
    asked = plan(part, profile="auto,disk=all")["transformer"]
    assert (asked.in_file, asked.tier) == (decided.in_file, "pinned")


def test_the_plan_says_why_a_component_has_a_copy_in_ram() -> None:
    whole = component([MIB] * 80, rest=MIB)
    unknown = "has a copy in RAM: no file is known that has its weights as they are"
    assert unknown in plan(whole)["transformer"].reasons
    assert unknown not in plan(whole, on=machine(first=40 * MIB))["transformer"].reasons, "it streams"
    assert unknown not in plan(component([MIB] * 4))["transformer"].reasons, "small"
    assert unknown not in plan(whole, profile="3,quantize=none")["transformer"].reasons
    assert unknown not in plan(whole, placement="gpu:0:pinned")["transformer"].reasons
    encoded = plan(replace(from_file(whole), stays_as_stored=True), precision=Precision.ENCODED)["transformer"]
    assert any(reason.startswith("has a copy in RAM: precision 'fp8 scaled' was") for reason in encoded.reasons)
    as_read = plan(from_file(whole), precision=Precision.ENCODED)["transformer"]
    assert any("has a copy in RAM in eight bits: tier 'disk' makes it" in reason for reason in as_read.reasons)
    by_profile = plan(from_file(whole), profile="auto,quantize=all")["transformer"]
    assert not any("has a copy" in reason for reason in by_profile.reasons)
    lacking = frozenset(block.tensors[0].name for block in whole.blocks)
    mostly = plan(replace(from_file(whole), lacking=lacking))["transformer"]
    assert "80.0MiB rest in RAM: no file has these as they are" in mostly.reasons
    (told,) = [
        reason for reason in plan(whole, profile="disk=all")["transformer"].reasons if "no file is known" in reason
    ]
    assert told.startswith("tier disk is not available")


@pytest.mark.parametrize("tier", ["host", "pinned"])
def test_a_tier_that_exceeds_the_ram_is_told(tier: str) -> None:
    part = from_file(component([MIB] * 80, rest=MIB))
    small = replace(machine(), devices=(DeviceCapacity(name="cpu", total_bytes=64 * MIB, available_bytes=50 * MIB),
                                        *machine().devices[1:]))  # fmt: skip
    reasons = plan(part, placement=f"gpu:0:{tier}", on=small)["transformer"].reasons
    assert any(
        f"tier '{tier}' needs 81.0MiB of RAM, " in reason and "'disk' needs none" in reason for reason in reasons
    )
    assert not any(
        "'disk' needs none" in reason for reason in plan(part, placement=f"gpu:0:{tier}")["transformer"].reasons
    )


def with_norms(part: Component, norm_bytes: int) -> Component:
    """Return a component whose blocks have another weight each, which no file has as it is."""

    def norm(name: str) -> TensorSpec:
        return TensorSpec(name=f"{name}.norm", dtype="F32", shape=(norm_bytes // 4,), encodable=False)

    blocks = tuple(replace(block, tensors=(*block.tensors, norm(block.name))) for block in part.blocks)
    return replace(part, blocks=blocks, lacking=frozenset(norm(block.name).name for block in blocks))


def test_single_weights_that_no_file_has_rest_in_ram_and_their_blocks_in_the_file() -> None:
    part = with_norms(from_file(component([MIB] * 80, rest=MIB)), 64 * KIB)
    for profile in ("auto", "auto,disk=all"):
        resident = plan(part, profile=profile)["transformer"]
        assert resident.in_file == {block.name for block in part.blocks} | {""} and resident.tier == "disk"
        assert resident.file_bytes == resident.weight_bytes - 80 * 64 * KIB
        assert resident.host_bytes == 80 * 64 * KIB + resident.pinned_bytes, "the norms, and page-locked buffers"
        assert "5.00MiB rest in RAM: no file has these as they are" in resident.reasons
        assert not any("page-locks" in reason for reason in resident.reasons)
    streamed = plan(part, on=machine(first=40 * MIB))["transformer"]
    (share,) = streamed.shares
    names = {part.blocks[number].name for number in share.streamed}
    assert streamed.pinned == names and streamed.in_file == {block.name for block in part.blocks} - names | {""}
    buffers = streamed.pinned_bytes - len(names) * (MIB + 64 * KIB)
    assert 0 < buffers <= 3 * MIB and streamed.host_bytes == streamed.pinned_bytes + (80 - len(names)) * 64 * KIB
    with pytest.raises(InvalidInput, match=r"5\.00MiB of transformer are in no file as they are"):
        plan(part, placement="gpu:0:disk!")


def test_a_block_of_which_no_file_has_half_rests_in_ram_as_a_whole() -> None:
    part = with_norms(from_file(component([MIB] * 80, rest=MIB)), 64 * KIB)
    first = replace(
        part.blocks[0], tensors=tuple(replace(each, name=f"{each.name}.own") for each in part.blocks[0].tensors)
    )
    own = frozenset(each.name for each in first.tensors[:1])
    part = replace(part, blocks=(first, *part.blocks[1:]), lacking=part.lacking - {"layers.0.norm"} | own)
    for profile in ("auto", "auto,disk=all"):
        decided = plan(part, profile=profile)["transformer"]
        assert decided.pinned == {"layers.0"} and decided.tier == "pinned"
        assert decided.in_file == {block.name for block in part.blocks[1:]} | {""}
        assert "6.00MiB rest in RAM: no file has these as they are" in decided.reasons


def test_single_weights_that_no_file_has_are_no_more_ram_for_blocks_that_stream_later() -> None:
    part = with_norms(from_file(component([MIB] * 80, rest=MIB)), 64 * KIB)
    profile = parse_profile("auto", devices=DEVICES)
    first = plan(part)["transformer"]
    again = replan(part, first, machine(first=60 * MIB), profile)
    names = {part.blocks[number].name for number in again.shares[0].streamed}
    assert names and names == first.in_file - again.in_file == again.pinned
    assert first.file_bytes - again.file_bytes == len(names) * MIB, "the norms were in RAM"
    assert again.pinned_bytes - first.pinned_bytes == len(names) * (MIB + 64 * KIB)
    assert again.host_bytes - first.host_bytes == len(names) * MIB
    assert all(each.host_bytes - each.buffer_bytes == each.weight_bytes - each.file_bytes for each in (first, again))


def test_blocks_that_stream_later_get_a_copy_in_ram_as_far_as_there_is_room() -> None:
    part, profile = from_file(component([MIB] * 80, rest=MIB)), parse_profile("auto", devices=DEVICES)
    first = plan(part)["transformer"]
    assert replan(part, first, machine(), profile) == first == confirm_plan(part, first, machine(), profile)
    smaller = machine(first=60 * MIB)
    assert confirm_plan(part, first, smaller, profile) is None
    again = replan(part, first, smaller, profile)
    names = {part.blocks[number].name for number in again.shares[0].streamed}
    assert names and names == first.in_file - again.in_file == again.pinned and again.tier == "pinned"
    assert again.pinned_bytes - first.pinned_bytes == len(names) * MIB == first.file_bytes - again.file_bytes
    assert not again.shares[0].read_bytes and confirm_plan(part, again, smaller, profile) == again
    back = replan(part, again, machine(), profile)
    assert not back.streams and back.in_file == again.in_file, "what is in RAM stays there"
    # RAM for five of them, or for three and two buffers: the others are read from the file in each pass.
    short = replan(part, first, with_ram(smaller, 5 * MIB), profile)
    (share,) = short.shares
    assert len(first.in_file - short.in_file) == 3
    assert share.read_bytes == share.streamed_bytes - 3 * MIB
    assert short.is_on_disk


def test_the_diffusion_model_gets_the_ram_first() -> None:
    unet = component([MIB] * 300)
    text = replace(unet, name="text", kind="text")
    decided = plan(from_file(text), from_file(unet), on=with_ram(machine(), 500 * MIB), profile="2,quantize=none")
    assert not decided["transformer"].in_file and not decided["transformer"].shares[0].read_bytes
    assert len(decided["text"].in_file) == 300 - 198 + 1
    assert sum(part.host_bytes for part in decided.components) <= 500 * MIB
    # What computes on the CPU has to be in RAM.
    there = with_ram(machine(), 500 * MIB)
    decided = plan(
        from_file(text), from_file(unet), on=there, profile="2,quantize=none", placement="text=cpu,transformer=gpu:0"
    )
    assert decided["text"].tier == "host" and not decided["text"].in_file
    assert len(decided["transformer"].in_file) == 300 - 198 + 1


def test_ram_goes_to_what_streams_before_what_is_resident() -> None:
    """A text encoder that fits its device is read once, a diffusion model's blocks in every pass."""
    unet, text = component([MIB] * 300), replace(component([MIB] * 60), name="text", kind="text")
    decided = plan(from_file(text), from_file(unet), on=with_ram(machine(), 250 * MIB))
    assert not decided["transformer"].shares[0].read_bytes and not decided["text"].shares[0].streamed
    assert decided["text"].tier == "disk" and decided["transformer"].in_file


@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.booleans()), min_size=1, max_size=5),
    ram=st.integers(0, 200),
    kept=st.integers(0, 120),
    lockable=st.integers(0, 200),
)
def test_weights_leave_free_what_the_rams_watermark_says(
    sizes: list[tuple[int, bool]], ram: int, kept: int, lockable: int
) -> None:
    """Weights in files take no more than what is left; those in RAM are there, and pageable where too little is."""
    parts = [replace(component([MIB] * size), name=f"part{number}") for number, (size, _) in enumerate(sizes)]
    parts = [from_file(part) if has_file else part for part, (_, has_file) in zip(parts, sizes, strict=True)]
    in_ram = sum(size * MIB + 1024 for size, has_file in sizes if not has_file)
    here = replace(with_ram(machine(pinned=lockable * MIB), ram * MIB), host_kept_bytes=kept * MIB, freed_bytes=in_ram)
    decided = plan(*parts, on=here)
    left = max(0, ram - kept) * MIB
    buffers = sum(part.host_bytes for part in decided.components if part.tier == "disk")
    taken = sum(
        part.host_bytes
        for part, (_, has_file) in zip(decided.components, sizes, strict=True)
        if has_file and part.tier != "disk"
    )
    assert taken + buffers <= left or not taken
    locked = sum(part.pinned_bytes for part in decided.components)
    assert locked <= min(lockable * MIB, max(0, ram * MIB + in_ram - kept * MIB) if kept else lockable * MIB)
    for part in decided.components:
        if part.is_on_disk:
            (reason,) = [reason for reason in part.reasons if "kept in its file" in reason]
            assert bool(kept) == reason.endswith(" reserved")


@given(
    models=st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from(["diffusion", "text", "vae"])), min_size=1, max_size=4
    ),
    ram=st.integers(0, 150),
    card=st.integers(4, 40),
)
def test_a_pass_reads_nothing_that_ram_could_hold(models: list[tuple[int, str]], ram: int, card: int) -> None:
    parts = [
        from_file(replace(component([MIB] * size), name=f"part{number}", kind=kind))
        for number, (size, kind) in enumerate(models)
    ]
    decided = plan(*parts, on=with_ram(machine(first=card * MIB), ram * MIB)).components
    left = ram * MIB - sum(part.host_bytes for part in decided)
    assert left >= 0 or all(part.tier == "disk" for part in decided)
    for part, whole in zip(decided, parts, strict=True):
        in_ram = {number for number, block in enumerate(whole.blocks) if block.name not in part.in_file}
        (share,) = part.shares
        assert share.read_bytes == sum(number not in in_ram for number in share.streamed) * MIB
        if share.read_bytes:
            assert left < MIB
            # Another block may have become resident since, where that hides more copies.
            assert len(in_ram - set(share.streamed)) <= 1, "what is read once has RAM"
        if share.read_bytes and part.kind == "diffusion":
            others = [other for other in decided if other.kind != "diffusion" and other.tier != "disk"]
            assert all(other.host_bytes <= 2 * MIB + 1024 for other in others), "what makes one pass has RAM"


def test_a_plan_says_what_the_rams_watermark_costs() -> None:
    part, here = component([MIB] * 100), replace(with_ram(machine(), 150 * MIB), host_kept_bytes=60 * MIB)
    on_disk = plan(from_file(part), on=here, profile="2,quantize=none")["transformer"]
    told = "12.0MiB of it are kept in its file: it needs 100MiB of RAM, 90.0MiB available, 60.0MiB reserved"
    assert on_disk.reasons[0] == told
    half = plan(part, on=here)["transformer"]  # in RAM, and nothing is given back for what is page-locked
    assert (half.tier, half.pinned_bytes) == ("pinned", 90 * MIB)
    assert any(
        "page-locked memory for all components is 90.0MiB, with 60.0MiB of RAM reserved" in r for r in half.reasons
    )
    full = replace(here, host_kept_bytes=150 * MIB)
    assert plan(part, on=full)["transformer"].tier == "host"
    assert plan(part, on=replace(full, freed_bytes=200 * MIB))["transformer"].pinned_bytes > 100 * MIB
    assert plan(part, on=replace(here, host_kept_bytes=0))["transformer"].tier == "pinned"


@given(
    sizes=st.lists(st.integers(1, 8), min_size=4, max_size=12),
    band=st.integers(1, 12),
    wobbles=st.lists(st.integers(-12, 12), min_size=1, max_size=8),
)
@example(sizes=[8, 7, 7, 1, 5], band=1, wobbles=[1, 0])
def test_a_share_in_place_keeps_its_size_while_free_memory_wobbles(
    sizes: list[int], band: int, wobbles: list[int]
) -> None:
    part = component([size * MIB for size in sizes])
    room = max(3 * max(sizes), sum(sizes) * 2 // 3) * MIB
    here = machine(first=room + MIB)
    assume(room < sum(sizes) * MIB)
    decided = plan(part, on=here)["transformer"]
    for wobble in wobbles:
        (share,) = decided.shares
        available = max((max(sizes) + 1) * MIB, room + wobble * band * MIB // 12)
        devices = (
            here.devices[0],
            replace(
                here.devices[1],
                available_bytes=available,
                held_bytes=share.device_bytes,
                band_bytes=band * MIB,
            ),
            here.devices[2],
        )
        decided = replan(part, decided, replace(here, devices=devices), OffloadProfile())
        (now,) = decided.shares
        assert now.device_bytes <= available
        if share.device_bytes <= available <= share.device_bytes + (band + max(sizes)) * MIB:
            assert (now.resident, now.device_bytes) == (share.resident, share.device_bytes)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_streams_leaves_room_for_what_a_pipeline_holds_once_steps_have_run(is_known: bool) -> None:
    """A 16th of what forwards need, which else is in what the low mark keeps free: the share in place stays then."""
    part, need = component([7 * MIB] * 20), MIB // 2
    here = replace(
        machine(first=50 * MIB), needs=lambda *_: KeptFree(num_bytes=need, why="predicted", is_known=is_known)
    )
    decided = plan(part, on=here)["transformer"]
    (share,) = decided.shares
    left = 50 * MIB - share.limit_bytes
    assert left == (need // 16 if is_known else 0)
    if not is_known:
        return
    held = replace(
        here.devices[1],
        available_bytes=share.limit_bytes,
        held_bytes=share.device_bytes,
        band_bytes=MIB,
    )
    later = replan(part, decided, replace(here, devices=(here.devices[0], held, here.devices[2])), OffloadProfile())
    assert later.shares[0].device_bytes == share.device_bytes


def test_the_buffers_through_which_files_are_read_have_their_part_of_what_may_be_page_locked() -> None:
    text = replace(component([MIB] * 8), name="text", kind="text")
    here, parts = machine(first=5 * MIB, pinned=10 * MIB), (from_file(component([MIB] * 200)), text)
    decided = plan(*parts, on=here, profile="auto,disk=diffusion")
    assert decided["transformer"].host_bytes == 2 * MIB
    assert 6 * MIB < decided["text"].pinned_bytes <= 8 * MIB


WIDEST = 24 * MIB


@pytest.mark.parametrize(
    ("sizes", "rest", "width"),
    [([MIB] * 8, 1000, MIB), ([MIB] * 8, 3 * MIB, 3 * MIB), ([MIB, 90 * MIB], 1000, WIDEST), ([MIB], 90 * MIB, WIDEST)],
)
def test_two_buffers_as_wide_as_the_largest_unit_but_24_mib_at_most_are_read_through(sizes, rest, width) -> None:
    here = machine(first=200 * MIB, pinned=2 * width)
    decided = plan(from_file(component(sizes, rest)), on=here, placement="gpu:0:disk")["transformer"]
    assert decided.host_bytes == decided.pinned_bytes == 2 * width
    for profile, limit, words in (("auto,pinned=none", 2 * width, "auto page-locks no component"),
                                  ("auto", 2 * width - 1, "page-locked memory for all components is")):  # fmt: skip
        part = from_file(component(sizes, rest))
        on_disk = plan(part, on=machine(first=200 * MIB, pinned=limit), placement="gpu:0:disk", profile=profile)
        assert on_disk["transformer"].host_bytes == 2 * width
        assert on_disk["transformer"].pinned_bytes == 0
        (reason,) = [reason for reason in on_disk["transformer"].reasons if "pageable" in reason]
        assert words in reason and "read through" in reason


def test_each_device_of_a_split_reads_through_two_buffers_of_its_own() -> None:
    part = from_file(component([MIB] * 4 + [5 * MIB] * 4, 2 * MIB))
    decided = plan(part, placement="gpu:0&gpu:1@80%:disk")["transformer"]
    assert [max(share.blocks) for share in decided.shares] == [3, 7]
    assert decided.pinned_bytes == 2 * (2 + 5) * MIB


def test_what_files_are_read_through_is_page_locked_before_all_else() -> None:
    text = replace(component([MIB] * 8), name="text", kind="text")
    parts = text, from_file(component([MIB] * 200))
    decided = plan(*parts, on=machine(first=5 * MIB, pinned=2 * MIB), profile="auto,disk=diffusion")
    assert decided["transformer"].pinned_bytes == 2 * MIB
    assert decided["text"].pinned_bytes == 0
    again = plan(*parts, on=machine(first=5 * MIB, pinned=2 * MIB), profile=decided.explicit_profile)
    assert again["transformer"].pinned_bytes == 2 * MIB


def test_on_demand_rests_on_disk_where_there_is_a_file_and_says_so_where_not() -> None:
    part = component([MIB] * 8)
    assert plan(from_file(part), profile="auto,disk=diffusion")["transformer"].tier == "disk"
    assert plan(from_file(part), profile="1,quantize=none,disk=text")["transformer"].tier == "pinned"
    kept = plan(part, profile="auto,disk=diffusion")["transformer"]
    assert kept.tier == "pinned"
    assert any(reason.startswith("tier disk is not available: no file is known") for reason in kept.reasons)


def test_tier_disk_can_be_asked_for_where_there_is_a_file() -> None:
    part = component([MIB] * 8)
    assert plan(from_file(part), placement="gpu:0:disk")["transformer"].tier == "disk"
    assert plan(from_file(part), placement="gpu:0:disk", precision=Precision.ENCODED)["transformer"].tier == "disk"
    hosted = replace(from_file(part), stays_as_stored=True)
    with pytest.raises(InvalidInput, match="files are used only as stored; allowed: device, pinned, host"):
        plan(hosted, placement="gpu:0:disk", precision=Precision.ENCODED)
    with pytest.raises(InvalidInput, match="allowed: host"):
        plan(from_file(part), placement="cpu:disk")


def test_a_profiles_eight_bits_give_way_to_the_disk_and_the_users_do_not() -> None:
    part, here = from_file(component([MIB] * 300)), with_ram(machine(), 140 * MIB)
    by_profile = plan(part, on=here, profile="1")["transformer"]
    assert by_profile.in_file and by_profile.precision == Precision.AS_STORED
    assert "stays as stored: profile 1 quantizes only weights that are kept in RAM" in by_profile.reasons
    by_user = plan(part, on=here, precision=Precision.ENCODED)["transformer"]
    assert (by_user.tier, by_user.precision) == ("pinned", Precision.ENCODED)
    hosted = plan(replace(part, stays_as_stored=True), on=with_ram(here, 100 * MIB), precision=Precision.ENCODED)
    assert not hosted["transformer"].in_file


@pytest.mark.parametrize("precision", [Precision.AS_STORED, Precision.ENCODED])
@pytest.mark.parametrize("stored", ["BF16", "F32", "F8_E4M3"])
@pytest.mark.parametrize("placement", ["gpu:0:disk", "gpu:0"])
def test_what_a_pass_reads_is_what_the_file_has(precision: Precision, stored: str, placement: str) -> None:
    """Also where the device gets other bytes, and RAM holds what it can of these."""
    part = from_file(component([MIB] * 8))
    names = [block.tensors[0].name for block in part.blocks]
    part = replace(part, stored_as=frozenset((name, stored) for name in names if stored != "BF16"))
    here = with_ram(machine(first=5 * MIB), 6 * MIB if precision == Precision.AS_STORED else 3 * MIB)
    decided = plan(part, on=here, placement=placement, precision=precision)["transformer"]
    (share,) = decided.shares
    read = [number for number in share.streamed if part.blocks[number].name in decided.in_file]
    stored_bytes = {"BF16": MIB, "F32": 2 * MIB, "F8_E4M3": MIB // 2}[stored]
    assert read and share.read_bytes == len(read) * stored_bytes
    in_file = len([block for block in part.blocks if block.name in decided.in_file]) * stored_bytes
    told = "\n".join(decided.reasons)
    assert (f"{format_bytes(in_file)} in its file are cast from {stored} to BF16 as they are read" in told) == (
        stored != "BF16"
    )
    assert (f"{format_bytes(in_file)} in its file are encoded as they are read: " in told) == bool(decided.forms)
    differs = stored_bytes != block_bytes(part.blocks[0], decided.forms)
    assert (f"for which {format_bytes(share.read_bytes)} are read from its file" in told) == differs


def test_a_link_does_not_tell_how_fast_a_file_is_read() -> None:
    part, here = from_file(component([MIB] * 8)), linked(machine(first=5 * MIB), 25e9)
    even = dict.fromkeys(range(8), 1.0)
    told = {
        tier: plan(part, on=here, placement=f"gpu:0:{tier}", seconds=even)["transformer"] for tier in ("disk", "pinned")
    }
    again = replan(part, told["disk"], here, parse_profile("auto", devices=DEVICES), block_seconds=even)
    assert told["pinned"].shares[0].pass_s is not None
    for on_disk in (told["disk"], again):
        assert on_disk.shares[0].pass_s is None
        assert not any("GB/s" in reason for reason in on_disk.reasons)


@pytest.mark.parametrize("placement", ["cpu:pinned", "gpu:0:disk"])
def test_a_tier_that_cannot_be_had_is_refused(placement: str) -> None:
    with pytest.raises(InvalidInput, match="is not available for transformer"):
        plan(component([MIB] * 8), placement=placement)


def test_tier_device_refuses_to_stream() -> None:
    with pytest.raises(DoesNotFit, match="tier 'device'"):
        plan(component([MIB] * 8), placement="gpu:0:device", profile="5MiB")


def test_blocks_are_found_alike_in_a_module_and_in_its_file(toys, tmp_path) -> None:
    net = toys.build_net()
    from_module = component_from_module(net, name="net")
    save_file(
        {name: tensor for name, tensor in net.state_dict().items() if name != "out.weight"},
        tmp_path / "net.safetensors",
    )
    from_file = component_from_files([tmp_path / "net.safetensors"])
    names = [f"doubles.{n}" for n in range(3)] + [f"singles.{n}" for n in range(5)]
    assert [block.name for block in from_module.blocks] == names
    assert [block.name for block in from_file.blocks] == names
    # A file cannot tell buffers from weights: it has the blocks' gains besides.
    gains = 8 * 64 * 4
    assert from_file.weight_bytes == from_module.weight_bytes + gains


@pytest.mark.parametrize("shuffled", [False, True])
def test_blocks_stand_in_the_order_in_which_they_run(shuffled: bool) -> None:
    names = [
        "down_blocks.0",
        "down_blocks.1",
        "mid_block.resnets.0",
        "mid_block.resnets.1",
        "up_blocks.0",
        "up_blocks.1",
    ]
    tensors = [TensorSpec(name=f"{name}.w.weight", dtype="F32", shape=(100, 100)) for name in names]
    if shuffled:  # as a file sorted by name, or a UNet that defines its middle last
        tensors = [tensors[index] for index in (4, 0, 1, 5, 2, 3)]
    part = group_tensors("unet", "diffusion", tensors, lambda path: True)
    assert [block.name for block in part.blocks] == names


def test_tied_weights_count_once(toys) -> None:
    net = toys.build_net()
    part = component_from_module(net, name="net")
    assert part.weight_bytes == sum(parameter.nbytes for parameter in net.parameters())


def test_lists_that_cannot_be_called_are_not_blocks() -> None:
    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = torch.nn.ModuleList(
                torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2)) for _ in range(3)
            )

    part = component_from_module(Nested(), name="nested")
    assert [block.name for block in part.blocks] == [f"stages.{i}.{j}" for i in range(3) for j in range(2)]


def test_what_no_call_can_lock_is_not_planned_as_page_locked() -> None:
    """The driver takes less than 2 GiB at once, and a group is never cut."""
    part = Component(
        name="model",
        kind="diffusion",
        blocks=(),
        non_block=Block(name="", tensors=(TensorSpec(name="w", dtype="U8", shape=(3 << 30,)),)),
    )
    on = Machine(
        devices=tuple(DeviceCapacity(name=n, total_bytes=8 << 30, available_bytes=8 << 30) for n in ("cpu", "gpu:0")),
        pinned_bytes=16 << 30,
    )
    decided = plan(part, on=on)["model"]
    assert decided.tier == "host" and not decided.pinned


def test_what_rests_wholly_in_its_file_is_planned_as_read_from_there() -> None:
    """Also where the profile page-locks nothing of it, and so nothing else differs from the first look."""
    text = from_file(replace(component([2 * MIB] * 40), name="text", kind="text"))
    here = linked(with_ram(machine(first=20 * MIB), 4 * MIB), 1e9)  # RAM for the two buffers only
    decided = plan(text, on=here, profile="4")["text"]
    (share,) = decided.shares
    assert decided.tier == "disk" and share.streamed
    assert share.read_bytes == share.streamed_bytes
    assert not any("GB/s" in reason for reason in decided.reasons)


def test_buffers_of_a_file_are_page_locked_only_as_planned() -> None:
    part = from_file(component([24 * MIB] * 30, rest=MIB))
    here = replace(with_ram(machine(first=192 * MIB), 20 * 24 * MIB), pinned_bytes=40 * MIB)
    mixed = plan(part, on=here)["transformer"]
    assert is_mixed(mixed) and mixed.pinned_bytes == 24 * MIB
    assert not mixed.locks_buffers and any("pageable buffers of 48.0MiB" in reason for reason in mixed.reasons)
    enough = plan(part, on=replace(here, pinned_bytes=1 << 40))["transformer"]
    assert enough.locks_buffers and enough.pinned_bytes == enough.host_bytes


def is_mixed(decided: ComponentPlan) -> bool:
    return bool(decided.in_file) and decided.tier != "disk"


def test_there_are_no_buffers_where_ram_holds_all_without_them() -> None:
    unet, text = component([64 * MIB] * 30, rest=MIB), replace(component([64 * MIB] * 30), name="text", kind="text")
    on = with_ram(machine(first=4096 * MIB), 33 * 64 * MIB + MIB)
    decided = plan(from_file(unet), from_file(text), on=on, profile="1,quantize=none")
    assert not decided["transformer"].in_file


@pytest.mark.parametrize("rest", [0, 1000])
def test_what_is_in_its_file_with_all_of_its_weights_is_at_tier_disk(rest: int) -> None:
    part = from_file(component([2 * MIB] * 40, rest=rest))
    decided = plan(part, on=with_ram(machine(first=20 * MIB), 4 * MIB))["transformer"]
    assert decided.file_bytes == decided.weight_bytes and decided.tier == "disk", decided.text()
    assert "" in decided.in_file
