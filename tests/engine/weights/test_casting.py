"""Weights that a file has in another floating dtype: read in theirs, bit for bit what ``to()`` gives."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from highwater.memory.weights import casting
from highwater.memory.weights.casting import can_cast, cast_into, convert_in_place, stored_begin
from highwater.memory.weights.component import TensorSpec
from highwater.memory.weights.fp8 import ScaledFp8
from highwater.memory.weights.safetensors_header import DTYPE_BITS, TORCH_NAMES
from highwater.memory.weights.source import WeightsSource

WIDE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
CASTS = [(stored, wanted) for stored, wanted in product((*WIDE, *EIGHT_BITS), WIDE) if stored is not wanted]


def values(dtype: torch.dtype, num_elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(num_elements, generator=generator) * 3).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_only_floats_are_cast_and_none_to_eight_bits() -> None:
    dtypes = {getattr(torch, name) for name in TORCH_NAMES.values() if hasattr(torch, name)}
    assert {pair for pair in product(dtypes, dtypes) if can_cast(*pair)} == set(CASTS)
    assert not can_cast(None, torch.float32) and len(DTYPE_BITS) > len(dtypes) - 1


@pytest.mark.parametrize("wanted", WIDE)
@pytest.mark.parametrize("stored", EIGHT_BITS)
def test_every_code_of_eight_bits_is_cast_as_torch_does(stored: torch.dtype, wanted: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).repeat(128).view(stored)
    own, theirs = torch.empty(codes.shape, dtype=wanted), codes.to(wanted)
    cast_into(codes, own)
    assert torch.equal(own.isnan(), theirs.isnan())
    numbers = codes[~theirs.isnan()]
    own = torch.empty(numbers.shape, dtype=wanted)
    cast_into(numbers, own)
    assert torch.equal(bits(own), bits(numbers.to(wanted)))


@pytest.mark.parametrize("num_elements", [0, 1, 7, 50])
@pytest.mark.parametrize(("stored", "wanted"), CASTS)
def test_elements_are_cast_in_the_memory_that_they_were_read_into(
    monkeypatch, stored: torch.dtype, wanted: torch.dtype, num_elements: int
) -> None:
    monkeypatch.setattr(casting, "NUM_AT_A_TIME", 7)
    monkeypatch.setattr(casting, "NUM_BESIDE", 3)
    read = values(stored, num_elements)
    memory = torch.full((num_elements * max(stored.itemsize, wanted.itemsize),), 7, dtype=torch.uint8)
    begin = stored_begin(num_elements, stored, wanted)
    memory[begin : begin + read.nbytes] = bits(read)
    convert_in_place(memory, num_elements, stored, wanted)
    assert torch.equal(memory[: num_elements * wanted.itemsize], bits(read.to(wanted)))


@pytest.mark.parametrize("wanted", WIDE)
def test_a_file_is_read_in_the_dtypes_of_its_targets(tmp_path: Path, wanted: torch.dtype) -> None:
    """Narrower ones one by one; bytes and integers come as they are stored."""
    stored = {str(dtype): values(dtype, 40).view(5, 8) for dtype in (*WIDE, *EIGHT_BITS)}
    stored["integers"] = torch.arange(12).to(torch.int16)
    save_file(stored, tmp_path / "weights.safetensors")
    targets = {name: torch.zeros(5, 8, dtype=wanted) for name in stored if name != "integers"}
    targets["integers"] = torch.zeros(12, dtype=torch.int16)
    told: list[int] = []
    source = WeightsSource([tmp_path / "weights.safetensors"])
    source.read_into(targets.items(), progress=told.append)
    for name, target in targets.items():
        assert torch.equal(bits(target), bits(stored[name].to(target.dtype))), name
    assert told == sorted(told) and told[-1] == sum(target.nbytes for target in targets.values())
    assert source.read_bytes == sum(tensor.nbytes for tensor in stored.values()), "what the disk brought"
    as_bytes = torch.zeros(80, dtype=torch.uint8)
    source.read_into([("torch.bfloat16", as_bytes)])
    assert torch.equal(as_bytes, bits(stored["torch.bfloat16"]))


def test_what_a_file_holds_as_it_is_and_to_be_cast(tmp_path: Path) -> None:
    def spec(name: str, dtype: str, shape: tuple[int, ...] = (4,)) -> TensorSpec:
        return TensorSpec(name=name, dtype=dtype, shape=shape)

    path = tmp_path / "weights.safetensors"
    eight = values(torch.float8_e4m3fn, 4)
    plain = {"plain.weight": values(torch.bfloat16, 4), "plain.ids": torch.arange(4)}
    save_file(
        {
            **plain,
            "cast.weight": eight.clone(),
            "norm.scale": eight.clone(),
            "scaled.weight": eight.clone(),
            "scaled.weight_scale": torch.ones(1),
            "quantized.weight": eight.clone(),
            "quantized.weight_quantizer._AMAX": torch.ones(1),
        },
        path,
    )
    source = WeightsSource([path])
    assert not source.holds(spec("plain.weight", "F32")), "of a weight in memory the module may have another value"
    source.note_bare(source.files)
    assert (
        source.holds_as_it_is(spec("plain.weight", "BF16"))
        and source.stored_dtype(spec("plain.weight", "BF16")) is None
    )
    assert source.stored_dtype(spec("plain.weight", "F32")) == "BF16"
    assert source.holds(spec("plain.weight", "F32")) and not source.holds_as_it_is(spec("plain.weight", "F32"))
    assert not source.holds(spec("plain.weight", "F32", (2, 2)))
    assert not source.holds(spec("plain.ids", "F32"))
    assert source.stored_dtype(spec("cast.weight", "BF16")) == "F8_E4M3"
    assert source.stored_dtype(spec("norm.scale", "BF16")) == "F8_E4M3", "a scale of its own is a weight"
    assert not source.holds(spec("quantized.weight", "BF16"))
    assert not source.holds(spec("scaled.weight", "BF16")) and source.holds(spec("scaled.weight", "F8_E4M3"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_form_is_measured_and_encoded_alike_in_parts(dtype: torch.dtype) -> None:
    weight = (torch.randn(1001, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    parts = weight.split(17)
    whole = ScaledFp8.measure(weight, name="weight")
    assert ScaledFp8.measure_parts(parts, name="weight") == whole
    encoded = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for part, leaf in zip(weight.clone().split(17), encoded.split(17), strict=True):
        whole.encode_part(part, leaf)
    assert torch.equal(bits(encoded), bits(whole.encode(weight)[0]))
