"""GGUF files in numbers, as far as their headers tell."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory.errors import InvalidInput
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.planning import plan_components
from highwater.memory.weights.component import component_from_files
from highwater.memory.weights.gguf_header import component_from_gguf, is_gguf

gguf = pytest.importorskip("gguf", reason="NOT TESTED: GGUF files; run: pip install gguf")
TYPES = gguf.GGMLQuantizationType
GIB = 1 << 30
# Elements and bytes of one group of numbers, from the description of the format.
GROUPS = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210)}


def write(path: Path, *, architecture: str = "flux", form: str = "Q4_K", num_blocks: int = 4, width: int = 256) -> Path:
    """Write a model of equal blocks: a matrix in a form, a bias and a norm in 32 bits, and an embedder in 16."""
    writer = gguf.GGUFWriter(path, architecture)
    elements, group_bytes = GROUPS[form]
    for block in range(num_blocks):
        rows = np.zeros((2 * width, width // elements * group_bytes), np.uint8)
        writer.add_tensor(f"double_blocks.{block}.proj.weight", rows, raw_dtype=TYPES[form])
        writer.add_tensor(f"double_blocks.{block}.proj.bias", np.zeros(2 * width, np.float32))
        writer.add_tensor(f"double_blocks.{block}.norm.scale", np.zeros(width, np.float32))
    writer.add_tensor("img_in.weight", np.zeros((width, 64), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("form", sorted(GROUPS))
def test_blocks_and_bytes_are_those_of_the_file(tmp_path: Path, form: str) -> None:
    elements, group_bytes = GROUPS[form]
    found = component_from_gguf(write(tmp_path / "flux.gguf", form=form))
    assert [block.name for block in found.blocks] == [f"double_blocks.{place}" for place in range(4)]
    packed = 512 * 256 // elements * group_bytes
    assert {block.weight_bytes for block in found.blocks} == {packed + 4 * 512 + 4 * 256}
    assert found.non_block.weight_bytes == 256 * 64 * 2
    (weight,) = [tensor for tensor in found.blocks[0].tensors if tensor.name.endswith("proj.weight")]
    assert (weight.shape, weight.leaves, weight.encodable) == ((512, 256), (packed,), False)
    assert found.non_block.tensors[0].encodable and not found.non_block.tensors[0].leaves


def test_the_same_model_has_the_same_blocks_in_either_format(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tensors = {}
    for block in range(6):
        tensors[f"blocks.{block}.attn.weight"] = np.zeros((64, 64), np.float16)
        tensors[f"blocks.{block}.norm.weight"] = np.zeros(64, np.float32)
    tensors["head.weight"] = np.zeros((64, 64), np.float16)
    save_file(tensors, tmp_path / "model.safetensors")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "wan")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = component_from_gguf(tmp_path / "model.gguf"), component_from_files([tmp_path / "model.safetensors"])
    assert [block.name for block in ours.blocks] == [block.name for block in theirs.blocks]
    assert [set(block.tensors) for block in ours.blocks] == [set(block.tensors) for block in theirs.blocks]
    assert set(ours.non_block.tensors) == set(theirs.non_block.tensors)


def test_a_flattened_shape_is_the_one_that_its_converter_noted(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "wan.gguf", "wan")
    writer.add_tensor("patch.weight", np.zeros((64, 32), np.float16))
    writer.add_array("comfy.gguf.orig_shape.patch.weight", [64, 8, 1, 2, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert component_from_gguf(tmp_path / "wan.gguf").non_block.tensors[0].shape == (64, 8, 1, 2, 2)


@pytest.mark.parametrize(("architecture", "kind"), [("flux", "diffusion"), ("t5encoder", "text"), ("qwen2vl", "text")])
def test_the_kind_is_that_of_the_architecture(tmp_path: Path, architecture: str, kind: str) -> None:
    path = write(tmp_path / "model-Q4_K.gguf", architecture=architecture)
    assert component_from_gguf(path).kind == kind
    assert component_from_gguf(path, kind="vae", name="other").kind == "vae"


def test_a_file_of_which_only_the_header_is_there_is_planned(tmp_path: Path) -> None:
    """Its weights are a hole of 4 GiB in the file: they are not read."""
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "flux")
    rows, columns, num_blocks = 1 << 14, 1 << 14, 14
    for block in range(num_blocks):
        num_bytes = rows * columns * 34 // 32
        writer.add_tensor_info(
            f"blocks.{block}.w.weight", (rows, columns * 34 // 32), np.dtype(np.uint8), num_bytes, raw_dtype=TYPES.Q8_0
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + num_blocks * (rows * columns * 34 // 32 + 32))
    found = component_from_gguf(path)
    assert found.weight_bytes == num_blocks * rows * columns * 34 // 32
    gpu = DeviceCapacity(name="gpu:0", total_bytes=4 * GIB, available_bytes=2 * GIB)
    cpu = DeviceCapacity(name="cpu", total_bytes=32 * GIB, available_bytes=32 * GIB)
    names = [device.name for device in (cpu, gpu)]
    plan = plan_components(
        [found],
        Machine(devices=(cpu, gpu)),
        placement=parse_placement("auto", devices=names),
        profile=parse_profile("auto", devices=names),
    )
    (planned,) = plan.components
    assert 0 < sum(planned.device_bytes.values()) <= 2 * GIB < found.weight_bytes


@pytest.mark.parametrize("size", [0, 3, 4, 20, 100, 400, 900])
def test_a_truncated_file_is_one_line(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(InvalidInput, match="GGUF file") as caught:
        component_from_gguf(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf", num_blocks=2).read_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_any_damage_is_one_line_or_no_more_bytes_than_the_file_has(
    tmp_path_factory: pytest.TempPathFactory, good: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(4, 900))
        change = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8]))
        damaged[place : place + len(change)] = change
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        found = component_from_gguf(path)
    except InvalidInput as error:
        assert "\n" not in str(error)
    else:
        assert found.weight_bytes <= len(damaged)


def test_a_list_that_claims_more_entries_than_the_file_has_bytes_ends(tmp_path: Path) -> None:
    """The reader of the package itself goes on for as long as the header says."""
    path = tmp_path / "model.gguf"
    count = (1 << 60).to_bytes(8, "little")
    key = b"tokenizer.ggml.tokens"
    array = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + count  # a list of bytes
    head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    path.write_bytes(head + len(key).to_bytes(8, "little") + key + array + b"\1" * 100)
    with pytest.raises(InvalidInput, match="damaged GGUF file"):
        component_from_gguf(path)


def test_another_file_is_told_from_one_of_this_format(tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(b"not one")
    assert not is_gguf(tmp_path / "other.gguf") and not is_gguf(tmp_path / "none.gguf")
    assert is_gguf(write(tmp_path / "odd name"))
    for name in ("other.gguf", "none.gguf"):
        with pytest.raises(InvalidInput, match=f"{name}: is not a GGUF file, or cannot be read"):
            component_from_gguf(tmp_path / name)


def test_without_the_package_the_message_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InvalidInput, match=r"reading a GGUF file takes the package gguf; run: pip install gguf"):
        component_from_gguf(tmp_path / "x.gguf")
