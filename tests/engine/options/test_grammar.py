"""Units, the placement grammar and budgets: what is written comes back, what is wrong is located."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.errors import InvalidInput
from highwater.memory.options.budget import BudgetItem, exact_size
from highwater.memory.options.placement import (
    AUTO_GROUPS,
    AUTO_PLACEMENT,
    KINDS,
    TIERS,
    PlacementItem,
    SplitRatio,
    parse_placement,
)
from highwater.memory.options.precision import parse_precision
from highwater.memory.options.profile import parse_profile
from highwater.memory.units import GIB, MIB, format_bytes, parse_bytes, slab_offsets
from highwater.memory.weights.known_forms import FORMS

DEVICES = ["cpu", "gpu:0", "gpu:1", "gpu:2"]
PARTS = ["text_encoder", "text_encoder_2"]


@given(st.integers(0, 1 << 50))
def test_formatted_bytes_parse_back_within_their_three_digits(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    if text.endswith(("MiB", "GiB")):
        assert abs(parse_bytes(text) - num_bytes) <= 0.01 * max(num_bytes, MIB)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("1.5GiB", 3 * GIB // 2), (" 2 MiB ", 2 * MIB), ("1GB", 10**9), ("7MB", 7 * 10**6)]
)
def test_sizes_with_units(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("12", "has no unit"),
        ("1TB", "unknown unit 'TB'; allowed: GiB, MiB, GB, MB, G, M$"),
        ("1KiB", "unknown unit 'KiB'; allowed: GiB"),
        ("-1GiB", "not a size"),
        ("", "not a size"),
    ],
)
def test_bad_sizes_are_named(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        parse_bytes(text)


@given(st.lists(st.integers(0, 10_000)))
def test_slab_offsets_are_aligned_and_disjoint(sizes: list[int]) -> None:
    offsets, total = slab_offsets(sizes)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(offset % 256 == 0 for offset in offsets)
    begins = [*offsets, total][1:]
    assert all(end <= begin for end, begin in zip(ends, begins, strict=True))


splits = st.lists(st.sampled_from(DEVICES[1:]), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.tuples(
        *[
            st.builds(
                SplitRatio,
                device=st.just(name),
                ratio=st.one_of(st.none(), st.sampled_from([0.1, 0.25, 0.3])) if index else st.none(),
            )
            for index, name in enumerate(names)
        ]
    )
)
places = st.one_of(st.just(()), st.just((SplitRatio(device="cpu"),)), splits)
items = st.builds(
    PlacementItem,
    component=st.sampled_from(["*", *KINDS, *PARTS]),
    devices=places,
    tier=st.one_of(st.none(), st.sampled_from([*TIERS, "gpu:2"])),
    groups=st.sampled_from([None, AUTO_GROUPS, 2, 6, 999]),
).map(lambda item: item if len(item.devices) > 1 else replace(item, groups=None))


@given(st.lists(items, min_size=1, max_size=4, unique_by=lambda item: item.component))
def test_a_printed_placement_parses_back_to_itself(wanted: list[PlacementItem]) -> None:
    text = ",".join(map(str, wanted))
    assert list(parse_placement(text, devices=DEVICES, components=PARTS).items) == wanted


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("gpu:9", 1, "no device 'gpu:9'; did you mean"),
        ("foo=gpu:0", 1, "component 'foo' is unknown; allowed: *, diffusion"),
        ("te=cpu, v=gpu:0", 9, "'v' is ambiguous: vae, vision"),
        ("gpu:0&", 7, "a device is missing; allowed: auto, cpu, gpu:0"),
        ("gpu:0&gpu:0", 7, "named twice"),
        ("gpu:0:foo", 7, "tier 'foo' is unknown; allowed: device, pinned, host, disk"),
        ("", 1, "a device is missing"),
        ("gpu:0 gpu:1", 7, "'g' is unexpected"),
        ("auto&gpu:0", 5, "name every device"),
        ("gpu:0&gpu:1@2", 13, "between 0 and 1"),
        ("gpu:0&gpu:1@0.5&gpu:2@0.6", 26, "sum must be below 1"),
        ("vae=gpu:0,vae=gpu:1", 11, "'vae' is placed twice"),
        ("gpu:0&cpu", 7, "'cpu' cannot share a split"),
        ("gpu:0@30%", 6, "only the second device of a split, and later ones, have a ratio: write gpu:0&gpu:1@30%"),
        ("te=gpu:0@200%&gpu:1", 9, "only the second device of a split"),
        ("auto@30%", 5, "only the second device of a split"),
        ("gpu:0&gpu:1@30%%", 16, "'%' is unexpected; allowed: ',', '&', '/', ':' or the end"),
        ("gpu:0&gpu:1 x", 13, "'x' is unexpected; allowed: ',', '&', '@', '/', ':' or the end"),
        ("gpu:0/6", 6, "only a split has groups of blocks in turn: write gpu:0&gpu:1/6"),
        ("auto/6", 5, "only a split has groups"),
        ("gpu:0&gpu:1/", 13, "a number of groups, 2 to 999, or 'auto' must follow '/'"),
        ("gpu:0&gpu:1/1", 13, "a number of groups, 2 to 999"),
        ("gpu:0&gpu:1@30%/ 1000", 18, "a number of groups, 2 to 999"),
        ("gpu:0&gpu:1/6&gpu:2", 14, "'&' is unexpected; allowed: ',', ':' or the end"),
        ("gpu:0&gpu:1:host/6", 17, "'/' is unexpected; allowed: ',' or the end"),
        ("gpu:0&gpu:1:host@30%", 17, "'@' is unexpected; allowed: ',' or the end"),
        ("auto x", 6, "'x' is unexpected; allowed: ',', ':' or the end"),
        (
            "gpu:0=50%",
            6,
            "'=' is unexpected: an amount of a device is a budget and stands in the profile, such as auto,",
        ),
        ("te=50%", 4, "a device is missing: an amount of a device is a budget and stands in the profile"),
        ("=gpu:0", 1, "a component is missing before '='; allowed: *, diffusion, text, vae, control, vision, text_enc"),
        ("te=cpu,=gpu:0", 8, "a component is missing before '='"),
    ],
)
def test_a_wrong_placement_names_column_and_choices(text: str, column: int, words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_placement(text, devices=DEVICES, components=PARTS)
    assert f"column {column}:" in str(error.value)
    assert words in str(error.value)


@given(st.text("agpu:01&@/,=.% vtecdisk", max_size=20))
def test_any_text_is_parsed_or_refused_in_one_line(text: str) -> None:
    for parse in (parse_placement, parse_profile):
        try:
            parse(text, devices=DEVICES)
        except InvalidInput as error:
            assert "\n" not in str(error)


def test_a_placement_without_a_device_keeps_what_does_not_name_it() -> None:
    devices = ["cpu", "gpu:0", "gpu:7"]
    placement = parse_placement("cpu,text=gpu:7,vae=gpu:0&gpu:7,diffusion=gpu:0:gpu:7,vision=gpu:0", devices=devices)
    assert str(placement.without(["gpu:7"])) == "cpu,vision=gpu:0"
    assert placement.without([]) == placement
    assert placement.without(devices) == AUTO_PLACEMENT


def test_blanks_may_stand_before_the_percent_sign() -> None:
    assert parse_placement("gpu:0 & gpu:1 @ 30 %", devices=DEVICES) == parse_placement(
        "gpu:0&gpu:1@0.3", devices=DEVICES
    )


def test_aliases_and_torch_names_mean_the_same() -> None:
    assert (
        str(parse_placement("dit=cuda:1,clip=GPU,first_stage=CPU", devices=DEVICES))
        == "diffusion=gpu:1,text=gpu:0,vae=cpu"
    )


def test_the_most_specific_item_wins() -> None:
    placement = parse_placement("gpu:0,text=gpu:1,text_encoder_2=cpu", devices=DEVICES, components=PARTS)
    devices = [
        placement.item_for(name, kind).devices[0].device
        for name, kind in [("transformer", "diffusion"), ("text_encoder", "text"), ("text_encoder_2", "text")]
    ]
    assert devices == ["gpu:0", "gpu:1", "cpu"]


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("auto", None),
        ("0", 0),
        ("0,prefetch=2", 0),
        ("6 gib", 6 * GIB),
        ("6G", 6 * GIB),
        ("6 gb", 6 * 10**9),
        ("6GiB", 6 * GIB),
        ("50%", 8 * GIB),
        ("-1GiB", 9 * GIB),
        ("-25%", 6 * GIB),
        ("unlimited", 10 * GIB),
        (" 4 ", 1200 * MIB),
        ("LOWRAM_lowvram", 1200 * MIB),
        ("verylow", 400 * MIB),
        ("1", None),
        ("4, 6GiB", 6 * GIB),
        ("4,vae=6GiB", 1200 * MIB),
        ("4, gpu:0=5GiB", 5 * GIB),
        ("4,diffusion=unlimited", 10 * GIB),
        ("auto,3GiB", 3 * GIB),
        ("auto,pinned=none", None),
        ("gpu:1=1GiB", None),
        ("gpu:0=2GiB,vae=unlimited", 2 * GIB),
        ("dit=3GiB,gpu:0=2GiB", 2 * GIB),
        ("dit=2GiB,gpu:0=3GiB,*=1GiB", 2 * GIB),
        ("2GiB,gpu:0=-9GiB", GIB),
        ("gpu:0=unlimited,3GiB", 3 * GIB),
        ("4,gpu:1=1GiB", 1200 * MIB),
    ],
)
def test_every_form_of_budget(text: str, limits: int | None) -> None:
    items = parse_profile(text, devices=DEVICES).budgets_for("gpu:0", "transformer", "diffusion")
    assert min((item.limit(16 * GIB, 10 * GIB) for item in items), default=None) == limits


def test_what_is_kept_free_anyway_counts_towards_what_a_budget_leaves() -> None:
    (item,) = parse_profile("-3GiB", devices=DEVICES).budgets_for("gpu:0", "transformer", "diffusion")
    assert item.limit(16 * GIB, 10 * GIB, kept_free_bytes=2 * GIB) == 9 * GIB
    assert item.limit(16 * GIB, 10 * GIB, kept_free_bytes=4 * GIB) == 10 * GIB


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("4", "name", "4"),
        ("highram_highvram", "name", "1"),
        ("4,pinned=all", "pinned", ("*",)),
        ("auto,pinned=none", "pinned", ()),
        ("pinned=dit&text_encoder_2", "pinned", ("diffusion", "text_encoder_2")),
        ("2,quantize=language&unet", "quantize", ("language", "diffusion")),
        ("disk=te", "on_demand", ("text",)),
        ("prefetch=3", "prefetch_blocks", 3),
        ("prefetch=auto", "prefetch_blocks", None),
        ("compile=on", "compile", True),
        ("reserve=2GiB", "reserve", (BudgetItem(target="*", leave_bytes=2 * GIB),)),
        ("reserve:vae=10%,reserve=1GiB", "reserve", (BudgetItem(target="vae", leave_share=0.1),
                                                    BudgetItem(target="*", leave_bytes=GIB))),
    ],
)  # fmt: skip
def test_every_setting_of_a_profile(text: str, field: str, value: object) -> None:
    assert getattr(parse_profile(text, devices=DEVICES, components=PARTS), field) == value


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("12", 1, "'12' is not a profile and has no unit; allowed: 1 to 5, auto, or a size such as 6GiB"),
        ("4,12", 3, "'12' has no unit"),
        ("", 1, "it is empty; allowed: auto, 1 to 5, HighRAM_HighVRAM"),
        ("  ", 3, "it is empty; allowed: auto, 1 to 5"),
        ("4;vae=1GiB", 2, "';' is unexpected after profile 4; allowed: ','"),
        (
            "4,pinned=yes",
            10,
            "'yes' is unknown; allowed: *, diffusion, text, vae, control, vision, all, none",
        ),
        ("4,quantize=yes", 12, "vision, all, none, language"),
        ("4,4", 3, "'4' has no unit"),
        ("fast", 1, "'fast' is unknown; allowed: auto, 1 to 5, HighRAM_HighVRAM"),
        ("high", 1, "'high' is ambiguous: HighRAM_HighVRAM, HighRAM_LowVRAM"),
        ("4 vae=1GiB", 1, "unknown unit 'vae'"),
        ("auto vae=1GiB", 6, "'v' is unexpected; allowed: ','"),
        ("4,", 3, "a size is missing"),
        ("4,auto", 7, "'=' and a size must follow"),
        ("4,prefetsh=2", 3, "component 'prefetsh' is unknown; did you mean 'prefetch'? allowed: *, diffusion"),
        ("6GiB,7GiB", 6, "'*' has a budget already"),
        ("gpu:9=1GiB", 1, "this machine has no device 'gpu:9'"),
        ("120%", 1, "more than 0% to 100%"),
        ("-100%", 1, "more than 0% and less than 100%"),
        ("=1GiB", 1, "a device or a component is missing; allowed: *, diffusion, text, vae, control, vision, cpu"),
        ("4,=50%", 3, "a device or a component is missing; allowed: *, diffusion"),
        ("vae=", 5, "a size is missing"),
        ("vae:1GiB", 4, "'=' and a size must follow"),
        ("4,prefetch=-1", 12, "prefetch '-1' is unknown; did you mean '1'? allowed: auto, 1, 2, 3, 4"),
        ("vae=10TiB", 5, "'10TiB' has the unknown unit 'TiB'; allowed: GiB, MiB, GB, MB, G, M or %"),
        ("1e400GiB", 1, "'1e400GiB' is not a size; allowed: 6GiB"),
        ("vae=-1_0GiB", 5, "'-1_0GiB' is not a size; allowed: 6GiB"),
        ("vae=1.2.3GiB", 5, "'1.2.3GiB' is not a size; allowed: 6GiB"),
        ("prefetch=5", 10, "prefetch '5' is unknown; allowed: auto, 1, 2, 3, 4"),
        ("prefetch=1,prefetch=2", 12, "'prefetch_blocks' is set twice"),
        ("compile=yes", 9, "compile 'yes' is unknown; allowed: on, off"),
        ("pinned", 1, "'pinned' is unknown"),
        ("pinned=", 8, "a component is missing; allowed: all, none"),
        ("pinned=vae&fast", 12, "component 'fast' is unknown"),
        ("pinned=language", 8, "component 'language' is unknown"),
        ("reserve=much", 9, "a size is missing"),
        ("reserve=100%", 9, "allowed: more than 0% and less than 100%"),
        ("reserve=1GiB,reserve=2GiB", 14, "'*' has a reserve already"),
        ("reserve:=1GiB", 9, "a device or a component is missing; allowed: *, diffusion"),
    ],
)
def test_a_wrong_profile_names_column_and_choices(text: str, column: int, words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_profile(text, devices=DEVICES)
    assert f"column {column}:" in str(error.value)
    assert words in str(error.value)


def test_what_may_be_named_is_listed_once() -> None:
    """Components of a pipeline may be called as a kind is."""
    for parse, text in ((parse_profile, "pinned=yes"), (parse_placement, "yes=gpu:0")):
        with pytest.raises(InvalidInput) as error:
            parse(text, devices=DEVICES, components=["vae", "transformer"])
        allowed = str(error.value).partition("allowed: ")[2].split(", ")
        assert "vae" in allowed and "transformer" in allowed and len(allowed) == len(set(allowed))
    assert "\n" not in str(error.value)


@given(st.text("14auto,=&:%-GiBpinedrsvlgu0 ", max_size=16))
def test_any_profile_is_parsed_or_refused_with_a_column(text: str) -> None:
    try:
        profile = parse_profile(text, devices=DEVICES)
    except InvalidInput as error:
        assert "column" in str(error) and "\n" not in str(error)
    else:
        assert parse_profile(str(profile), devices=DEVICES) == profile


@given(st.integers(0, 1 << 50))
def test_an_exact_size_parses_back_to_the_byte(num_bytes: int) -> None:
    assert parse_bytes(exact_size(num_bytes)) == num_bytes


def test_unknown_precision_lists_the_known() -> None:
    with pytest.raises(InvalidInput, match="allowed: as stored, fp8 scaled"):
        parse_precision("fp4", forms=FORMS)
