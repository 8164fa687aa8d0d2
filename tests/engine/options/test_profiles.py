"""Profiles 1 to 5 and auto: mmgp's values and budget forms, and a plan that holds for every class of machine."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from highwater.memory.errors import DoesNotFit, InvalidInput
from highwater.memory.options.budget import BudgetItem, read_mmgp_budgets
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import LANGUAGE, PROFILES, TITLES, OffloadProfile, parse_profile
from highwater.memory.options.profile_arguments import build_profile
from highwater.memory.planner.plan import ComponentPlan, DeviceCapacity, Machine, Plan
from highwater.memory.planner.planning import plan_components
from highwater.memory.units import GIB, MIB, format_bytes
from highwater.memory.weights.component import Block, Component, TensorSpec

DEVICES = ["cpu", "gpu:0", "gpu:1"]
SIZES = ["1GiB", "50%", "-1GiB", "-25%", "unlimited", "0"]
VRAM = (6, 8, 10, 12, 16, 24, 48, 80)
RAM = (8, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileComponent(Component):
    """A component that can be read from its file again."""

    has_file: bool = True


def block(name: str, mebibytes: float, layer: str = "w") -> Block:
    spec = TensorSpec(name=f"{name}.{layer}.weight", dtype="BF16", shape=(int(mebibytes * MIB) // 2, 1), encodable=True)
    return Block(name=name, tensors=(spec,))


def part(name: str, kind: str, stacks: list[tuple[str, int, float]], rest: float, layer: str = "w") -> Component:
    blocks = [block(f"{stack}.{number}", size, layer) for stack, count, size in stacks for number in range(count)]
    outside = TensorSpec(name="embed.weight", dtype="BF16", shape=(int(rest * MIB) // 2, 1))
    return FileComponent(name=name, kind=kind, blocks=tuple(blocks), non_block=Block(name="", tensors=(outside,)))


T5_LAYER = "layer.0.SelfAttention.q"
CLIP = part("text_encoder", "text", [("layers", 12, 13.5)], 75, "self_attn.q_proj")
VAE = part("vae", "vae", [], 160)
PIPELINES = {
    "flux": [
        part("transformer", "diffusion", [("double", 19, 648), ("single", 38, 270)], 580),
        CLIP,
        part("text_encoder_2", "text", [("block", 24, 370)], 251, T5_LAYER),
        VAE,
    ],
    "wan": [
        part("transformer", "diffusion", [("blocks", 40, 670)], 380),
        part("text_encoder", "text", [("block", 24, 370)], 2000, T5_LAYER),
        VAE,
    ],
    "sdxl": [
        part("unet", "diffusion", [("down", 3, 20), ("down_t", 12, 130), ("mid", 3, 190), ("up_t", 13, 150)], 90),
        CLIP,
        part("text_encoder_2", "text", [("layers", 32, 39)], 130, "self_attn.q_proj"),
        VAE,
    ],
}


def machine(vram: float, ram: float, link: float | None = 25e9) -> Machine:
    """Return a machine with one GPU, a watermark of 512 MiB, and half of the RAM to page-lock."""
    total, host = int(vram * GIB), int(ram * GIB)
    return Machine(
        devices=(
            DeviceCapacity(name="cpu", total_bytes=host, available_bytes=host),
            DeviceCapacity(
                name="gpu:0",
                total_bytes=total,
                available_bytes=total - 512 * MIB - 12345,
                kept_free_bytes=512 * MIB,
                link_bytes_per_s=link,
            ),
        ),
        pinned_bytes=host // 2,
    )


def plan(
    parts: list[Component],
    on: Machine,
    profile: str | OffloadProfile = "auto",
    *,
    placement: str = "auto",
    precision: Precision | None = None,
) -> Plan:
    names = [component.name for component in parts]
    if isinstance(profile, str):
        profile = parse_profile(profile, devices=DEVICES, components=names)
    asked = parse_placement(placement, devices=DEVICES, components=names)
    return plan_components(parts, on, placement=asked, profile=profile, precision=precision)


def flux(profile: str | OffloadProfile, vram: float = 24, ram: float = 64, **options: object) -> ComponentPlan:
    return plan(PIPELINES["flux"], machine(vram, ram), profile, **options)["transformer"]  # type: ignore[arg-type]


# -- every class of machine


@pytest.mark.parametrize("vram", VRAM)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_profile_gives_a_plan_that_holds_on_every_class_of_machine(pipeline: str, vram: int) -> None:
    for ram in RAM:
        here = machine(vram, ram)
        for name in PROFILES:
            plans = plan(PIPELINES[pipeline], here, name).components
            assert all(used <= here.device("gpu:0").available_bytes for p in plans for used in p.device_bytes.values())
            assert sum(p.pinned_bytes for p in plans) <= here.pinned_bytes, (name, ram)
            assert sum(p.host_bytes for p in plans) <= here.host_bytes, (name, ram)
            for decided in plans:
                assert bool(decided.pinned) == (decided.tier == "pinned")


@pytest.mark.parametrize("vram", VRAM)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_auto_fills_what_is_free_and_never_quantizes(pipeline: str, vram: int) -> None:
    here = machine(vram, 64)
    for component, decided in zip(PIPELINES[pipeline], plan(PIPELINES[pipeline], here).components, strict=True):
        assert decided.precision == Precision.AS_STORED
        left = here.device("gpu:0").available_bytes - sum(decided.device_bytes.values())
        if decided.streams:
            assert left < max(block.weight_bytes for block in component.blocks) + MIB


@pytest.mark.parametrize(
    ("vram", "ram", "row"), [(48, 128, "3"), (12, 128, "2"), (48, 48, "3"), (12, 16, "4"), (12, 8, "5")]
)
def test_auto_says_which_profile_the_machine_is_like(vram: int, ram: int, row: str) -> None:
    decided = plan(PIPELINES["flux"], machine(vram, ram))
    assert decided.like == row
    assert f"like profile {row} ({TITLES[row]})" in decided.text()
    assert decided.to_json()["profile"]["like"] == row


@pytest.mark.parametrize("vram", VRAM)
@pytest.mark.parametrize("ram", [8, 32, 128])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_the_text_that_auto_prints_gives_the_same_plan_again(pipeline: str, vram: int, ram: int) -> None:
    first = plan(PIPELINES[pipeline], machine(vram, ram))
    assert f"equivalent profile: {first.explicit_profile}" in first.text()
    assert "." not in first.explicit_profile  # whole MiB
    again = plan(PIPELINES[pipeline], machine(vram, ram), first.explicit_profile)
    for one, other in zip(first.components, again.components, strict=True):
        assert (one.shares, one.tier, one.pinned) == (other.shares, other.tier, other.pinned)


@pytest.mark.parametrize(
    ("stacks", "rest", "oversize"),
    [([], 5000, 5000), ([("layers", 28, 450)], 2200, 2200), ([("layers", 3, 2048)], 9, 6144)],
)
@pytest.mark.parametrize("ram", [256, 16])
def test_a_piece_that_no_page_locked_slab_holds_is_pageable_by_itself_and_the_plan_says_so(
    stacks: list[tuple[str, int, float]], rest: float, oversize: int, ram: int
) -> None:
    component = replace(part("text_encoder", "text", stacks, rest, "self_attn.q_proj"), has_file=False)
    decided = plan([component], machine(24, ram))
    encoder = decided["text_encoder"]
    whole, lockable = encoder.host_bytes, encoder.host_bytes - oversize * MIB
    told = [reason for reason in encoder.reasons if "pageable copies" in reason]
    assert told[0] == (
        f"{format_bytes(oversize * MIB)} in pieces of 2 GiB or more are kept in pageable RAM: "
        "page-locked slabs are smaller; pageable copies are synchronous and cannot be prefetched"
    )
    if ram == 256 or lockable < 8 * GIB:
        assert encoder.pinned_bytes == lockable and len(told) == 1
        assert decided.like == "1"
    else:
        assert 7 * GIB < encoder.pinned_bytes < lockable
        assert told[1].startswith(f"page-locks {format_bytes(encoder.pinned_bytes)} of {format_bytes(whole)}")
        assert decided.like == "3"


def test_a_profile_without_auto_is_not_explained_by_another() -> None:
    decided = plan(PIPELINES["flux"], machine(12, 32), "4")
    assert "like profile" not in decided.text()
    assert "profile: 4 (LowRAM_LowVRAM)" in decided.text().splitlines()


def test_the_link_speed_is_told_where_it_is_known() -> None:
    for link, words in ((25e9, " s at 25 GB/s"), (6e9, " s at 6 GB/s"), (None, "per pass")):
        (reason,) = plan(PIPELINES["wan"], machine(12, 64, link))["transformer"].shares[0].reasons
        assert reason.endswith(words)


# -- mmgp's five rows


@pytest.mark.parametrize(
    ("name", "diffusion", "others", "pinned", "quantize"),
    [
        ("1", None, None, ("*",), ("diffusion",)),
        ("2", 1200, 3000, ("*",), ("diffusion",)),
        ("3", None, None, ("diffusion",), ("diffusion", LANGUAGE)),
        ("4", 1200, 3000, ("diffusion",), ("diffusion", LANGUAGE)),
        ("5", 400, 3000, (), ("diffusion", LANGUAGE)),
    ],
)
def test_profiles_have_mmgps_values(
    name: str, diffusion: int | None, others: int | None, pinned: tuple[str, ...], quantize: tuple[str, ...]
) -> None:
    profile = PROFILES[name]
    for kind, megabytes in (("diffusion", diffusion), ("text", others), ("vae", others)):
        items = profile.budgets_for("gpu:0", "part", kind)
        assert [item.limit(GIB << 10, GIB << 10) for item in items] == ([megabytes * MIB] if megabytes else [])
    assert (profile.pinned, profile.quantize) == (pinned, quantize)
    assert (profile.prefetch_blocks, profile.on_demand, profile.reserve, profile.compile) == (None, (), (), False)


@pytest.mark.parametrize(
    ("profile", "cast"),
    [
        ("auto", set()),
        ("1", {"transformer"}),
        ("2", {"transformer"}),
        ("3", {"transformer", "text_encoder_2"}),
        ("4", {"transformer", "text_encoder_2"}),
        ("5", {"transformer", "text_encoder_2"}),
        ("4,quantize=none", set()),
        ("auto,quantize=text", {"text_encoder", "text_encoder_2"}),
        ("1,quantize=text_encoder&diffusion", {"transformer", "text_encoder"}),
    ],
)
def test_a_profile_quantizes_the_diffusion_model_and_language_models_but_not_clip(profile: str, cast: set[str]) -> None:
    decided = plan(PIPELINES["flux"], machine(24, 64), profile)
    assert {p.component for p in decided.components if p.precision == Precision.ENCODED} == cast
    for p in decided.components:
        assert any("kept in eight bits: profile" in reason for reason in p.reasons) == (p.component in cast)


@pytest.mark.parametrize("precision", [Precision.AS_STORED, Precision.ENCODED])
def test_a_precision_that_was_asked_for_beats_the_profile(precision: Precision) -> None:
    for profile in ("auto", "4"):
        assert flux(profile, precision=precision).precision is precision


def test_what_a_profile_pins_is_pinned_and_nothing_else() -> None:
    for profile, pinned in (("4", {"transformer"}), ("5", set()), ("5,pinned=vae", {"vae"})):
        decided = plan(PIPELINES["flux"], machine(12, 128), profile)
        assert {p.component for p in decided.components if p.pinned} == pinned


def test_a_profiles_budget_rises_to_what_the_model_needs_and_says_so() -> None:
    decided = flux("5")
    share = decided.shares[0]
    assert share.device_bytes > 400 * MIB and share.prefetch_blocks == 1
    assert share.device_bytes <= share.fixed_bytes + share.scratch_bytes + 2 * share.streamed_block_bytes
    assert any("profile 5's budget diffusion=400MiB is too small for transformer" in r for r in decided.reasons)


def test_a_component_without_blocks_is_whole_under_a_profiles_smaller_budget() -> None:
    huge = [part("vae", "vae", [], 5000)]
    decided = plan(huge, machine(12, 64), "4")["vae"]
    assert decided.device_bytes["gpu:0"] == 5000 * MIB
    assert any("raised to" in reason for reason in decided.reasons)


def test_a_budget_of_the_users_own_does_not_rise() -> None:
    with pytest.raises(InvalidInput, match="budget 'diffusion=400MiB' is too small"):
        flux("5,diffusion=400MiB")
    with pytest.raises(
        InvalidInput, match=r"budget '0MiB' is too small: .* needs at least .*; allowed: \d+MiB or more"
    ):
        flux("0")


def test_a_raised_budget_never_exceeds_the_device() -> None:
    with pytest.raises(DoesNotFit, match="lower the watermark"):
        plan([part("unet", "diffusion", [("blocks", 2, 2000)], 10)], machine(2, 64), "5,quantize=none")


# -- defects of mmgp 3.8.2 that ours must not have


def test_mmgp_defect_1_a_single_number_is_a_budget_for_every_model() -> None:
    profile = build_profile("2", devices=DEVICES, budgets=1000)
    for decided in plan(PIPELINES["sdxl"], machine(24, 64), profile).components:
        assert decided.device_bytes["gpu:0"] <= 1000 * MIB
    assert plan(PIPELINES["sdxl"], machine(24, 64), profile)["unet"].streams


def test_mmgp_defect_2_percent_budgets_are_parts_of_the_card() -> None:
    for budgets in ("30%", {"transformer": "30%"}, {"*": "30%"}):
        profile = build_profile("1", devices=DEVICES, components=["transformer"], budgets=budgets)
        share = flux(profile, vram=24).shares[0]
        assert 0.25 * 24 * GIB < share.device_bytes <= 0.3 * 24 * GIB


def test_mmgp_defect_3_a_part_of_the_card_can_be_kept_for_the_data() -> None:
    for reserve in ("50%", 12 * 1024, {"*": "50%"}, {"transformer": 12 * 1024, "*": "10%"}, {"gpu:0": "50%"}):
        profile = build_profile("auto", devices=DEVICES, components=["transformer"], reserve=reserve)
        share = flux(profile, vram=24).shares[0]
        assert 11 * GIB < share.device_bytes <= 12 * GIB


@pytest.mark.parametrize("level", [logging.DEBUG, logging.CRITICAL])
def test_mmgp_defect_4_a_model_too_large_is_clamped_whatever_is_logged(level: int, caplog) -> None:
    caplog.set_level(level)
    for profile in ("1", "auto,unlimited", "auto,100GiB"):
        decided = flux(profile, vram=8)
        assert decided.streams and decided.device_bytes["gpu:0"] <= 8 * GIB - 512 * MIB


# -- mmgp's budget forms, in Python


@pytest.mark.parametrize(
    ("budgets", "transformer", "others"),
    [
        (1000, 1000 * MIB, 1000 * MIB),
        (0, 20 * GIB, 20 * GIB),
        (1.5, 3 * MIB // 2, 3 * MIB // 2),
        ("30%", int(0.3 * 24 * GIB), int(0.3 * 24 * GIB)),
        ("6GiB", 6 * GIB, 6 * GIB),
        ("unlimited", 20 * GIB, 20 * GIB),
        ("-4GiB", 16 * GIB, 16 * GIB),
        ({"transformer": 1200, "*": 3000}, 1200 * MIB, 3000 * MIB),
        ({"transformer": "50%", "*": 0}, 12 * GIB, 20 * GIB),
        ({"transformer": 1200}, 1200 * MIB, None),
        ({"dit": "2GB", "text": 1}, 2 * 10**9, MIB),
        ("transformer=2GiB,*=10%", 2 * GIB, int(0.1 * 24 * GIB)),
    ],
)
def test_every_form_of_mmgps_budgets(budgets: object, transformer: int, others: int | None) -> None:
    profile = build_profile("2", devices=DEVICES, components=["transformer", "t5"], budgets=budgets)
    for name, kind, expected in (("transformer", "diffusion", transformer), ("t5", "text", others)):
        items = profile.budgets_for("gpu:0", name, kind)
        assert [item.limit(24 * GIB, 20 * GIB) for item in items] == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("budgets", "words"),
    [
        (-1, "allowed: a number of MB from 0"),
        (True, "allowed: a number of MB"),
        (float("nan"), "allowed: a number of MB"),
        (float("inf"), "allowed: a number of MB"),
        ([1000], "allowed: a number of MB"),
        ("1000", "column 1: '1000' has no unit"),
        ("30%%", "column 4"),
        ({"fast": 1}, "component 'fast' is unknown"),
        ({"dit": 1, "transformer": 2}, "'diffusion' has a budget already; allowed: one"),
        ({"transformer": "1200"}, "'1200' has no unit"),
        ({"transformer": {"a": 1}}, "allowed: a number of MB"),
        ({"gpu:7": 1}, "this machine has no device 'gpu:7'"),
        ("vae=1GiB,vae=2GiB", "'vae' has a budget already; allowed: one"),
    ],
)
def test_a_wrong_budget_in_python_is_one_line(budgets: object, words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        read_mmgp_budgets(budgets, devices=DEVICES)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_python_replaces_any_field() -> None:
    components = ["transformer", "text_encoder"]
    profile = build_profile(
        4,
        devices=DEVICES,
        components=components,
        pinned=["transformer", "vae"],
        prefetch_blocks=3,
        quantize=False,
        on_demand="text",
        reserve="1GiB",
        compile=True,
        budgets=None,
    )
    assert profile == replace(
        PROFILES["4"],
        pinned=("transformer", "vae"),
        prefetch_blocks=3,
        quantize=(),
        on_demand=("text",),
        reserve=(BudgetItem(target="*", leave_bytes=GIB),),
        compile=True,
    )
    assert build_profile(profile, devices=DEVICES, pinned=True, quantize="language").quantize == (LANGUAGE,)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"pined": True}, "field 'pined' is unknown; did you mean 'pinned'"),
        ({"pinned": 3}, "pinned 3; allowed: True, False"),
        ({"pinned": "fast"}, "component 'fast' is unknown"),
        ({"quantize": [1]}, "quantize [1]; allowed: True"),
        ({"prefetch_blocks": 5}, "allowed: 1 to 4"),
        ({"prefetch_blocks": True}, "allowed: 1 to 4"),
        ({"compile": "yes"}, "allowed: True or False"),
        ({"reserve": "much"}, "reserve 'much'"),
    ],
)
def test_a_wrong_override_names_what_is_allowed(overrides: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        build_profile("auto", devices=DEVICES, **overrides)
    assert words in str(error.value)


def test_the_caller_keeps_what_it_passed() -> None:
    names, budgets = ["transformer"], {"*": 100}
    build_profile("3", devices=DEVICES, components=names, quantize=names, budgets=budgets)
    assert (names, budgets) == (["transformer"], {"*": 100})


# -- the text of a profile

sizes = st.one_of(
    st.integers(1, 1 << 45).map(lambda n: {"limit_bytes": n}),
    st.integers(1, 1 << 45).map(lambda n: {"leave_bytes": n}),
    st.one_of(st.integers(1, 100).map(lambda n: n / 100), st.floats(1e-9, 1)).map(lambda n: {"share": n}),
    st.one_of(st.integers(1, 99).map(lambda n: n / 100), st.floats(1e-9, 0.999)).map(lambda n: {"leave_share": n}),
    st.just({}),
)
targets = st.sampled_from(["*", "diffusion", "vae", "gpu:1", "text_encoder"])
budget_items = st.lists(
    st.builds(lambda target, size: BudgetItem(target=target, **size), targets, sizes),
    max_size=3,
    unique_by=lambda item: item.target,
)
reserves = st.lists(
    st.builds(lambda target, number: BudgetItem(target=target, leave_bytes=number), targets, st.integers(1, 1 << 45)),
    max_size=2,
    unique_by=lambda item: item.target,
)
names = st.one_of(st.just(()), st.just(("*",)), st.lists(st.sampled_from(["vae", "text_encoder"]), max_size=2).map(set))


def meaning(profile: OffloadProfile) -> list[object]:
    """Return what plans ask a profile: bytes for every device and part, and the other fields as they are."""
    asked = itertools.product(
        DEVICES, [("transformer", "diffusion"), ("text_encoder", "text"), ("te", "text"), ("vae", "vae")]
    )
    total, available = 1 << 44, (1 << 44) - 12345
    limits = [
        (
            min((item.limit(total, available) for item in profile.budgets_for(device, *part)), default=available),
            profile.left_free(device, *part, total),
        )
        for device, part in asked
    ]
    others = [getattr(profile, field.name) for field in fields(profile) if field.name not in ("budgets", "reserve")]
    return [*limits, *others]


@given(
    st.sampled_from(list(PROFILES)),
    budget_items,
    st.sampled_from(["as text", "replaced", "another's"]),
    reserves,
    names,
    names,
    st.sampled_from([None, 1, 4]),
    st.booleans(),
)
def test_a_printed_profile_parses_back_to_the_same(
    name, budgets, form, reserve, pinned, quantize, prefetch, compile
) -> None:
    """Also where Python replaced a numbered profile's budgets, by other or by none."""
    base = PROFILES[name]
    own = {item.target for item in budgets}
    assume(form != "another's" or "gpu:1" not in own)  # no text leaves out what a profile brings for one device
    kept = (
        base.budgets if form == "as text" and "*" not in own else PROFILES["5"].budgets if form == "another's" else ()
    )
    profile = replace(
        base,
        budgets=(*budgets, *(item for item in kept if item.target not in own)),
        reserve=tuple(reserve),
        pinned=tuple(sorted(pinned)),
        quantize=tuple(sorted(quantize)),
        prefetch_blocks=prefetch,
        compile=compile,
    )
    again = parse_profile(str(profile), devices=DEVICES, components=["text_encoder"])
    assert meaning(again) == meaning(profile)
    assert str(again) == str(profile)
    if form == "as text":
        assert again == profile


@pytest.mark.parametrize(
    ("number", "budgets", "text"),
    [
        (4, {"vae": 1024}, "4,vae=1GiB,unlimited"),
        (2, "0.5MiB", "2, 0.5MiB"),
        (2, 0, "2,unlimited"),
        (1, {"vae": 1024}, "1,vae=1GiB"),
        (5, {"gpu:0": "50%"}, "5,gpu:0=50%,unlimited"),
    ],
)
def test_the_override_budgets_replaces_all_of_a_profiles(number: int, budgets: object, text: str) -> None:
    assert str(build_profile(number, devices=DEVICES, budgets=budgets)) == text


def test_the_text_of_a_profile_keeps_its_other_budgets() -> None:
    for text in ("4,vae=1GiB", "4,diffusion=2GiB", "4,gpu:0=8GiB"):
        profile = parse_profile(text, devices=DEVICES)
        assert str(profile) == text
        (brought,) = profile.budgets_for("gpu:1", "te", "text")
        assert brought.from_profile and brought.limit_bytes == 3000 * MIB
    assert parse_profile("4, 8GiB", devices=DEVICES).budgets == (BudgetItem(target="*", limit_bytes=8 * GIB),)


@given(
    base=st.sampled_from(["", *PROFILES]),
    sizes=st.dictionaries(
        st.sampled_from(["*", "diffusion", "vae", "gpu:0", "gpu:1"]), st.sampled_from(SIZES), min_size=1
    ),
    reserve=st.sampled_from(["", ",reserve=1GiB", ",reserve:gpu:1=2GiB"]),
    left_out=st.sets(st.sampled_from(["*", "diffusion", "vae", "gpu:0", "gpu:1"])),
)
def test_what_is_left_out_of_a_profile_is_as_if_it_had_not_been_written(
    base: str, sizes: dict[str, str], reserve: str, left_out: set[str]
) -> None:
    def written(targets: Iterable[str], reserve: str) -> str:
        items = [
            base or "auto",
            *(f"{target}={sizes[target]}" if target != "*" else sizes[target] for target in targets),
        ]
        return ", ".join(items) + reserve

    profile = parse_profile(written(sizes, reserve), devices=DEVICES)
    kept = [target for target in sizes if target not in left_out]
    of_reserve = "gpu:1" if ":gpu:1" in reserve else "*"
    expected = parse_profile(written(kept, "" if of_reserve in left_out else reserve), devices=DEVICES)
    assert profile.without(lambda item: item.target in left_out) == expected


# -- a profile made in Python


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"name": 4}, "profile 4 is unknown; did you mean '4'? allowed: auto, 1"),
        ({"name": "LowRAM_LowVRAM"}, "profile 'LowRAM_LowVRAM' is unknown"),
        ({"pinned": "diffusion"}, "pinned 'diffusion'; allowed: a tuple of names, such as ('diffusion',)"),
        ({"quantize": ["diffusion"]}, "quantize ['diffusion']; allowed: a tuple of names"),
        ({"on_demand": (1,)}, "on_demand (1,); allowed: a tuple of names"),
        ({"pinned": None}, "pinned None; allowed: a tuple"),
        ({"prefetch_blocks": "2"}, "prefetch_blocks '2'; allowed: 1 to 4, or None"),
        ({"prefetch_blocks": 2.5}, "prefetch_blocks 2.5; allowed: 1 to 4"),
        ({"prefetch_blocks": True}, "prefetch_blocks True; allowed: 1 to 4"),
        ({"prefetch_blocks": 0}, "prefetch_blocks 0; allowed: 1 to 4"),
        ({"compile": "no"}, "compile 'no'; allowed: True or False"),
        ({"compile": 1}, "compile 1; allowed: True or False"),
        ({"budgets": {"*": 1}}, "budgets {'*': 1}; allowed: a tuple of BudgetItem"),
        ({"budgets": ("1GiB",)}, "budgets ('1GiB',); allowed: a tuple of BudgetItem"),
        ({"budgets": (BudgetItem(target="vae"), BudgetItem(target="vae"))}, "budgets: 'vae' has a budget already"),
        (
            {"reserve": (BudgetItem(target="*", limit_bytes=1),)},
            "reserve of '*' has limit_bytes or share; allowed: leave_bytes or leave_share",
        ),
    ],
)
def test_a_wrong_field_of_a_profile_is_one_line(choices: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        OffloadProfile(**choices)  # type: ignore[arg-type]
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"target": 3}, "budget target 3; allowed: a device, a component or '*'"),
        ({"target": ""}, "budget target ''"),
        ({"limit_bytes": -5}, "budget of '*': limit_bytes -5; allowed: a whole number from 0"),
        ({"limit_bytes": 1.5}, "limit_bytes 1.5"),
        ({"limit_bytes": True}, "limit_bytes True"),
        ({"leave_bytes": "1GiB"}, "leave_bytes '1GiB'"),
        ({"share": 0.0}, "share 0.0; allowed: more than 0 to 1"),
        ({"share": 30}, "share 30; allowed: more than 0 to 1"),
        ({"share": float("nan")}, "share nan"),
        ({"leave_share": 1.0}, "leave_share 1.0; allowed: more than 0 and less than 1"),
        ({"limit_bytes": 1, "share": 0.5}, "limit_bytes and share are set; allowed: one of them"),
    ],
)
def test_a_wrong_budget_item_is_one_line(choices: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        BudgetItem(**({"target": "*"} | choices))  # type: ignore[arg-type]
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (OffloadProfile(on_demand=("nonsense",)), "on_demand 'nonsense', column 1: component 'nonsense' is unknown"),
        (OffloadProfile(pinned=("language",)), "component 'language' is unknown"),
        (
            OffloadProfile(budgets=(BudgetItem(target="gpu:9"),)),
            "budgets 'gpu:9', column 1: this machine has no device 'gpu:9'",
        ),
        (
            OffloadProfile(reserve=(BudgetItem(target="vea", leave_bytes=1),)),
            "reserve 'vea', column 1: component 'vea'",
        ),
        (
            OffloadProfile(budgets=(BudgetItem(target="dit"), BudgetItem(target="diffusion"))),
            "budgets: 'diffusion' has a budget already",
        ),
    ],
)
def test_names_that_are_not_here_are_refused_in_a_profile_made_in_python(profile: OffloadProfile, words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        build_profile(profile, devices=DEVICES, components=["vae"])
    assert words in str(error.value)


def test_a_profile_made_in_python_means_what_the_text_means() -> None:
    made = OffloadProfile(
        budgets=(BudgetItem(target="dit", limit_bytes=GIB), BudgetItem(target="cuda:1", share=0.5)),
        pinned=("te",),
        quantize=("unet", "language"),
    )
    asked = parse_profile("dit=1GiB,gpu:1=50%,pinned=te,quantize=unet&language", devices=DEVICES)
    assert build_profile(made, devices=DEVICES) == asked


def test_a_profile_can_be_made_from_the_public_names() -> None:
    import highwater
    from highwater import memory

    assert highwater.OffloadProfile is memory.OffloadProfile is OffloadProfile
    assert highwater.BudgetItem is memory.BudgetItem is BudgetItem


def test_a_reserve_of_everything_is_refused() -> None:
    for amount in ("unlimited", "100%"):
        with pytest.raises(InvalidInput, match=r"column 14: nothing would be left for weights; allowed: "):
            parse_profile(f"auto,reserve={amount}", devices=["gpu:0"])


@pytest.mark.parametrize(
    ("text", "together"),
    [
        ("auto", {}),
        ("8GiB", {"gpu:0": "8GiB", "gpu:1": "8GiB"}),
        ("8GiB,vae=1GiB", {"vae": "1GiB", "gpu:0": "8GiB", "gpu:1": "8GiB"}),
        ("8GiB,gpu:1=2GiB", {"gpu:0": "8GiB", "gpu:1": "2GiB"}),
        ("diffusion=2GiB", {"diffusion": "2GiB"}),
    ],
)
def test_an_amount_may_be_for_all_components_together(text: str, together: dict[str, str]) -> None:
    found = parse_profile(text, devices=DEVICES).for_all_together(["gpu:0", "gpu:1"])
    assert {item.target: item.size for item in found.budgets} == together
    assert found.is_for_all_together("gpu:0") == ("gpu:0" in together)


@pytest.mark.parametrize("name", TITLES)
def test_what_a_profile_brings_itself_is_for_each_component(name: str) -> None:
    profile = parse_profile(name, devices=DEVICES)
    assert profile.for_all_together(["gpu:0"]) == profile


@pytest.mark.parametrize("text", ["4,5GiB", " 1,5 GiB", "2,50%"])
def test_a_decimal_comma_is_not_taken_for_a_profile_and_a_budget(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"can be read in two ways; write .\.5.*, or '., 5") as error:
        parse_profile(text, devices=DEVICES)
    assert "\n" not in str(error.value)
    assert parse_profile(text.replace(",", ", "), devices=DEVICES).name == text.strip()[0]
