"""The marks of a watermark as text: sizes, percentages, and lists of them by device."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.errors import InvalidInput
from highwater.memory.options.marks import Mark, Marks, parse_watermarks, read_mark
from highwater.memory.units import GIB, LARGEST_SIZE, MIB

totals = st.integers(0, 1 << 42)
shares = st.integers(0, 1_000_000).map(lambda millionths: Decimal(millionths).scaleb(-4))
"""Percentages from 0 to 100."""
blanks = st.sampled_from(["", " ", "  "])


@given(share=shares, total=totals, blank=blanks)
def test_a_percentage_is_that_part_of_the_total(share: Decimal, total: int, blank: str) -> None:
    mark = read_mark(f"{blank}{share:f}{blank}%{blank}", what="low")
    assert abs(mark.of(total) - total * share / 100) <= 1
    assert 0 <= mark.of(total) <= total
    assert read_mark(mark.setting, what="low") == mark


@given(low=shares, high=shares, total=totals)
def test_a_larger_percentage_is_never_fewer_bytes(low: Decimal, high: Decimal, total: int) -> None:
    low, high = sorted((low, high))
    assert read_mark(f"{low:f}%", what="low").of(total) <= read_mark(f"{high:f}%", what="high").of(total)


@given(num_bytes=st.integers(0, LARGEST_SIZE), total=totals)
def test_a_size_is_the_same_on_every_device(num_bytes: int, total: int) -> None:
    mark = read_mark(num_bytes, what="low")
    assert mark.of(total) == num_bytes and mark.setting == num_bytes


units = st.sampled_from(["GiB", "MiB", "gb", "MB", "g", "M"])
amounts = st.one_of(
    st.tuples(st.integers(0, 512), units).map(lambda size: f"{size[0]}{size[1]}"), shares.map("{:f}%".format)
)
names = st.sampled_from(["*", "gpu:0", "gpu:1", "gpu:12", "host"])


@given(asked=st.dictionaries(names, st.tuples(amounts, amounts)), blank=blanks)
def test_a_list_is_read_as_its_items_are_one_by_one(asked: dict[str, tuple[str, str]], blank: str) -> None:
    expected = {}
    for name, (low, high) in asked.items():
        try:
            expected[name] = Marks(low=read_mark(low, what="low"), high=read_mark(high, what="high"))
        except InvalidInput:
            expected = None
            break
    text = ",".join(
        f"{blank}{name}{blank}={blank}{low}{blank}:{blank}{high}{blank}" for name, (low, high) in asked.items()
    )
    if expected is None:
        with pytest.raises(InvalidInput, match=r"column \d+: low .* is above high .*; allowed: low <= high"):
            parse_watermarks(text)
    else:
        assert parse_watermarks(text) == expected


@given(text=st.text(max_size=40))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    for read in (lambda: parse_watermarks(text), lambda: read_mark(text, what="low")):
        try:
            read()
        except InvalidInput as error:
            assert str(error).isprintable()


def pair(low: Mark, high: Mark) -> Marks:
    return Marks(low=low, high=high)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("  ", {}),
        ("1GiB:2GiB", {"*": pair(Mark(num_bytes=GIB), Mark(num_bytes=2 * GIB))}),
        ("5%:10%", {"*": pair(Mark(share=0.05), Mark(share=0.1))}),
        ("gpu=0:5 %", {"gpu:0": pair(Mark(num_bytes=0), Mark(share=0.05))}),
        (
            "cuda:01 = 512 MiB : 1GiB , HOST=10%:4GiB",
            {
                "gpu:1": pair(Mark(num_bytes=512 * MIB), Mark(num_bytes=GIB)),
                "host": pair(Mark(share=0.1), Mark(num_bytes=4 * GIB)),
            },
        ),
    ],
)
def test_what_may_be_written(text: str, expected: dict[str, Marks]) -> None:
    assert parse_watermarks(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu:0", "column 6: '=' and two marks must follow, such as gpu:0=1GiB:2GiB"),
        (
            "gpu:0=",
            "column 7: the low mark is missing; write a number and a unit, such as 1GiB, or a part of the total",
        ),
        ("gpu:0=1GiB", "column 11: ':' and the high mark must follow, such as 1GiB:2GiB"),
        ("gpu:0=1GiB:", "column 12: the high mark is missing"),
        ("gpu:0=1GiB:2GiB:3GiB", "column 16: ':' is unexpected; allowed: ',' or the end"),
        ("1GiB:2GiB,", "column 11: the low mark is missing"),
        ("1:2", "column 1: low '1' has no unit; allowed: GiB, MiB, GB, MB, G, M, or a part of the total, such as 10%"),
        ("1GiB:2kg", "column 6: high '2kg' has the unknown unit 'kg'"),
        ("1e3GiB:2GiB", "column 1: low '1e3GiB' is not a size; write a number and a unit"),
        ("1GiB:101%", "column 6: high '101%' is more than all; allowed: 0% to 100%"),
        ("-1GiB:2GiB", "column 1: the low mark is missing"),
        ("2GiB:1GiB", "column 1: low 2.00GiB is above high 1.00GiB; allowed: low <= high"),
        ("host=9%:8%", "column 1: low 9% is above high 8%; allowed: low <= high"),
        ("*=0:1%,*=0:2%", "column 8: '*' has marks already; allowed: one pair"),
        ("gpu=0:1%,cuda:0=0:2%", "column 10: 'gpu:0' has marks already; allowed: one pair"),
        ("moon=1%:2%", "column 1: device 'moon' is unknown; allowed: gpu:0, gpu:1, ..., *, host"),
        ("cpu=1%:2%", "column 1: device 'cpu' is unknown; allowed: gpu:0, gpu:1, ..., *, host"),
        ("gpu:x=1%:2%", "column 1: device 'gpu:' is unknown"),
    ],
)
def test_what_is_wrong_is_told_with_its_column(text: str, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_watermarks(text, what="--watermark")
    assert str(caught.value).startswith(f"--watermark {text!r}, column ") and said in str(caught.value)


@pytest.mark.parametrize(
    "value", [None, True, 1.5, b"1GiB", [], -1, 1 << 63, "", "%", "1%%", "-1%", "100.0001%", "nan%"]
)
def test_what_is_no_mark_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match=r"^low .*allowed|^low .* is not a size"):
        read_mark(value, what="low")
