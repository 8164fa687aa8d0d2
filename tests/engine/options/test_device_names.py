"""Names of devices: every program's word for one means the same, and none means another device than it says."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.errors import InvalidInput
from highwater.memory.options.budget import BudgetItem
from highwater.memory.options.marks import parse_watermarks
from highwater.memory.options.placement import (
    ACCELERATORS,
    canonical_device,
    find_device_name,
    names_device,
    parse_device,
    parse_placement,
)
from highwater.memory.options.profile import parse_profile
from highwater.nodes.described_hardware import parse_hardware

words = st.sampled_from(sorted(ACCELERATORS)).flatmap(lambda word: st.sampled_from([word, word.upper(), word.title()]))
machines = st.sets(st.integers(0, 24), min_size=1, max_size=6).map(
    lambda numbers: ["cpu", *(f"gpu:{number}" for number in sorted(numbers))]
)
FIRST = ["cuda", "cuda:0", "CUDA:0", "gpu", "gpu:0", "GPU", " gpu:00 ", "xpu:0"]


@pytest.mark.parametrize("written", FIRST)
def test_every_way_to_write_the_first_device_is_read_everywhere(written: str) -> None:
    devices = ["cpu", "gpu:0", "gpu:1"]
    assert parse_device(written, devices) == "gpu:0"
    placement = parse_placement(f"text={written}&gpu:1,vae=gpu:1:{written}", devices=devices)
    assert str(placement) == "text=gpu:0&gpu:1,vae=gpu:1:gpu:0"
    (budget,) = parse_profile(f"auto,{written}=1GiB", devices=devices).budgets
    assert isinstance(budget, BudgetItem) and budget.target == "gpu:0"
    assert [*parse_watermarks(f"{written}=1GiB:2GiB")] == ["gpu:0"]
    assert parse_hardware(f"{written}=1GiB,gpu:1=2GiB").device_names == devices


@given(words, st.integers(0, 30), st.sampled_from(["", "0", "00"]), machines)
def test_a_name_with_a_number_is_that_device_or_none(word: str, number: int, zeros: str, devices: list[str]) -> None:
    """Not another one whose name begins so: gpu:1 is not gpu:10."""
    meant = f"gpu:{number}"
    written = f"{word}:{zeros}{number}"
    assert canonical_device(written) == meant and names_device(written)
    assert find_device_name(written, devices) == (meant if meant in devices else None)


@given(words, machines)
def test_a_word_without_a_number_is_the_first_device(word: str, devices: list[str]) -> None:
    if "gpu:0" in devices:
        assert find_device_name(word, devices) == "gpu:0"
    else:
        assert find_device_name(word, devices) in (None, *devices)


@given(st.text("cpugad:10h", min_size=1, max_size=6), machines)
def test_the_beginning_of_a_name_is_read_if_it_is_that_of_one_device_only(word: str, devices: list[str]) -> None:
    begun = {name for name in devices if name.startswith(word) or ("cuda".startswith(word) and name != "cpu")}
    is_full = names_device(word) or word in devices
    found = find_device_name(word, devices)
    if not is_full and len(begun) == 1:
        assert {found} == begun
    elif not is_full:
        assert found is None
    if found is None:
        with pytest.raises(InvalidInput) as error:
            parse_device(word, devices)
        assert ("is ambiguous" in str(error.value)) == (len(begun) > 1 and not is_full)
        assert not (len(begun) > 1 and not is_full) or all(name in str(error.value) for name in begun)


def test_an_ambiguous_beginning_lists_what_it_may_mean() -> None:
    devices = ["cpu", "gpu:0", "gpu:1"]
    with pytest.raises(InvalidInput, match="column 5: device 'g' is ambiguous: gpu:0, gpu:1"):
        parse_placement("vae=g", devices=devices)
    with pytest.raises(InvalidInput, match="device 'c' is ambiguous: cpu, gpu:0, gpu:1"):
        parse_device("c", devices)
    with pytest.raises(InvalidInput, match="component or device 'c' is ambiguous: control, cpu, gpu:0, gpu:1, text"):
        parse_profile("auto,c=1GiB", devices=devices)
    assert str(parse_placement("vae=g,text=gpu:0:cp", devices=devices[:2])) == "vae=gpu:0,text=gpu:0:cpu"


@pytest.mark.parametrize("text", ["", "gpu:", "gpu:x", "gpu:-1", "gpu:٣", "gpu:1.0", "cuda:0:1", "cpu:"])
def test_what_is_no_name_is_refused(text: str) -> None:
    assert not names_device(text)
    with pytest.raises(InvalidInput):
        parse_device(text, ["cpu", "gpu:0", "gpu:1", "gpu:3"])


@pytest.mark.parametrize("text", ["gpu:=1GiB", "=1GiB", "cpu=1GiB", "gpux=1GiB", "gpu:1=1GiB,cuda:1=2GiB"])
def test_hardware_names_each_accelerator_once(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_hardware(text)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("gpu:0=1e400GiB", "column 7: '1e400GiB' is not a size; write a number and a unit"),
        ("gpu:0=-1GiB", "column 7: '-1GiB' is not a size"),
        ("gpu:0=1_0GiB", "column 7: '1_0GiB' is not a size"),
        ("gpu:0=1GiB@1e3GB/s", "column 12: '1e3GB' is not a size"),
        (f"gpu:0={'9' * 40}GiB", "is too large; allowed: up to 8589934591GiB"),
        (f"gpu:0=1GiB@{'9' * 400}TFLOPS", "is too much; allowed: up to 1000000000TFLOPS"),
        ("gpu:0=1GiB,host=8GiB@10GB/s", "column 22: the host has no speed: that of copies stands at each device"),
        ("gpu:0=1GiB,host=8GiB@8TFLOPS", "column 22: the host has no TFLOPS: only devices compute"),
    ],
)
def test_odd_numbers_of_devices_are_named_as_they_were_written(written: str, told: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(told)):
        parse_hardware(written)
