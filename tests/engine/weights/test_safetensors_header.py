"""The header reader: every file that the official writer makes is read, every damaged one is one clear line."""

from __future__ import annotations

import json
import os
import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from highwater.memory.errors import InvalidInput
from highwater.memory.weights.safetensors_header import CLOCK_TICK_NS, MAX_HEADER_MARKS, read_header

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def write_raw(path: Path, header: object, data: bytes = b"", *, claim: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if claim is None else claim) + raw + data)
    return path


def entry(begin: int, end: int, *, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@settings(max_examples=40)
@given(tensors=st.dictionaries(st.text("abc.xyz", min_size=1), st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6))
def test_header_agrees_with_the_official_reader(tmp_path: Path, tensors: dict) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in tensors.items()}, path)
    header = read_header(path)
    assert header.weight_bytes == sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in tensors.values())
    with safe_open(path, framework="pt") as file:
        official = {
            name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()))
            for name in file.keys()  # noqa: SIM118
        }
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == official


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_file_is_refused_whenever_the_official_reader_refuses_it(tmp_path: Path, data) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.int8)}, path)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="cut"):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        raw[data.draw(st.integers(0, len(raw) - 28))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                file.get_tensor(name)
    except (SafetensorError, OSError):
        with pytest.raises(InvalidInput) as error:
            read_header(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("header", "data", "claim", "words"),
    [
        (b"", b"", 100, "truncated: the header ends at byte 108"),
        (b"", b"", 1 << 62, "at most 100000000 are allowed"),
        (b"{nonsense", b"", None, "not valid JSON"),
        ('{"a":1}'.encode("utf-16"), b"", None, "header is not UTF-8 (invalid start byte at byte 0 of it)"),
        ('{"a":1}'.encode("utf-32-le"), b"", None, "not valid JSON"),
        (b"\xef\xbb\xbf{}", b"", None, "not valid JSON"),
        (b'{"\xed\xa0\x80": 1}', b"", None, "header is not UTF-8"),
        (b"[1]", b"", None, "expected an object"),
        ({"a": entry(0, 8)}, b"1234", None, "truncated: header claims"),
        ({"a": entry(0, 4)}, b"12345", None, "1 bytes after the last tensor"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", None, "'b' overlaps 'a'"),
        ({"a": entry(0, 2), "b": entry(4, 6)}, b"123456", None, "2 bytes before tensor 'b'"),
        ({"a": entry(0, 4, dtype="X9")}, b"1234", None, "unknown dtype 'X9'; allowed: BOOL"),
        ({"a": entry(0, 4, shape=[3])}, b"1234", None, "spans 4 bytes"),
        ({"a": entry(-4, 0, shape=[4])}, b"1234", None, "not a natural number"),
        ({"a": {"dtype": "U8"}}, b"", None, "lacks dtype, shape or data_offsets"),
        ({"__metadata__": 3}, b"", None, "__metadata__"),
        ({"__metadata__": {"a": 3}}, b"", None, "__metadata__ holds something other than strings"),
        ({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}, b"1", None, "unknown dtype"),
        ({"a": {"dtype": "U8", "shape": {}, "data_offsets": [0, 1]}}, b"1", None, "shape that is no list"),
        (b"[" * 200_000, b"", None, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", None, "not valid JSON"),
    ],
)
def test_each_kind_of_damage_is_named(tmp_path: Path, header, data: bytes, claim: int | None, words: str) -> None:
    path = write_raw(tmp_path / "bad.safetensors", header, data, claim=claim)
    with pytest.raises(InvalidInput, match=r"bad\.safetensors") as error:
        read_header(path)
    assert words in str(error.value)


def test_missing_file_and_pickles_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        read_header(tmp_path / "none.safetensors")
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.ckpt")
    with pytest.raises(InvalidInput, match="pickle"):
        read_header(tmp_path / "weights.ckpt")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    with pytest.raises(InvalidInput, match="pickle"):
        read_header(tmp_path / "old.ckpt")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\0" * 16)
    with pytest.raises(InvalidInput, match=r"is a GGUF file, which is not read; convert it to \.safetensors"):
        read_header(tmp_path / "weights.gguf")


@pytest.mark.parametrize("start", [b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"])
def test_a_header_whose_length_looks_like_a_pickle_is_read(tmp_path: Path, start: bytes) -> None:
    header = json.dumps({"a": entry(0, 2)}).encode().ljust(int.from_bytes(start, "little"))
    path = write_raw(tmp_path / "m.safetensors", header, b"12")
    assert path.read_bytes().startswith(start)
    assert [tensor.name for tensor in read_header(path).tensors] == ["a"]


def test_tensors_come_in_the_order_of_their_offsets(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m.safetensors", {"late": entry(4, 6), "early": entry(0, 4)}, b"123456")
    assert [tensor.name for tensor in read_header(path).tensors] == ["early", "late"]


def test_a_write_after_the_header_was_read_cannot_have_the_time_of_the_one_before(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m.safetensors", {"a": entry(0, 1)}, b"1")
    before = read_header(path).version
    assert time.time_ns() - before.mtime_ns >= CLOCK_TICK_NS
    assert read_header(path).version == before
    write_raw(path, {"a": entry(0, 1)}, b"2")
    assert read_header(path).version != before


# Headers that are meant to harm ---------------------------------------------------------------------------

BIG = 1 << 63


def many_long_numbers() -> bytes:
    """2.3 MiB of dimensions: multiplied, or only read, they keep a processor busy for minutes."""
    shape = ",".join(["9" * 4000] * 600)
    return f'{{"a": {{"dtype": "U8", "shape": [{shape}], "data_offsets": [0, 1]}}}}'.encode()


HOSTILE = {
    "thousands of long numbers": (many_long_numbers(), b"1", "a number of 4000 digits, at most 19 are allowed"),
    "a number past any tensor": ({"a": entry(0, 1, shape=[BIG])}, b"1", "not a natural number below 2^63"),
    "an offset past any file": ({"a": entry(BIG, BIG + 1)}, b"1", "not a natural number below 2^63"),
    "too many dimensions": ({"a": entry(0, 1, shape=[1] * 65)}, b"1", "has 65 dimensions, at most 64"),
    "a product past any file": ({"a": entry(0, 1, shape=[BIG - 1] * 64)}, b"1", "needs 2^63 bytes or more"),
    "a number as a power of ten": (
        b'{"a": {"dtype": "U8", "shape": [1e4], "data_offsets": [0, 10000]}}',
        b"1",
        "not a natural number",
    ),
    "not a number": (b'{"a": {"dtype": "U8", "shape": [NaN], "data_offsets": [0, 1]}}', b"1", "not a natural number"),
    "true for one": ({"a": entry(0, 1) | {"shape": [True]}}, b"1", "not a natural number"),
    "one tensor twice": (
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
        b' "a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}',
        b"1",
        "'a' stands twice in one object",
    ),
    "one key twice": (b'{"a": {"dtype": "U8", "dtype": "I8"}}', b"", "'dtype' stands twice"),
    "metadata twice": (b'{"__metadata__": {}, "__metadata__": {"a": "b"}}', b"", "'__metadata__' stands twice"),
    "a name of lines": ({"a\nb\x1b[2J": entry(0, 1)}, b"1", "cannot be the name of a tensor"),
    "half a character": (b'{"\\ud800": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"1", "be the name of"),
    "a name of a page": ({"a" * 5000: entry(0, 1)}, b"1", "up to 1024 printable characters"),
    "nested shape": ({"a": entry(0, 1) | {"shape": json.loads("[" * 99 + "]" * 99)}}, b"1", "not a natural number"),
    "a dtype of a page": ({"a": entry(0, 1, dtype="F" * 10_000)}, b"1", "unknown dtype"),
    "nothing but brackets": (b"[" + b"[]," * MAX_HEADER_MARKS + b"[]]", b"", "allowed: about 400000 tensors in one"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_one_short_line(tmp_path: Path, kind: str) -> None:
    header, data, words = HOSTILE[kind]
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(InvalidInput, match=r"bad\.safetensors") as error:
        read_header(path)
    told = str(error.value)
    assert words in told
    assert told.isprintable() and len(told) < 600 + len(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_a_read_would_wait_for_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.safetensors", tmp_path / "zero.safetensors"):
        with pytest.raises(InvalidInput, match="is no regular file"):
            read_header(path)
    with pytest.raises(InvalidInput, match=r"is a folder; name a file in it, expected a \.safetensors file"):
        read_header(tmp_path)


def test_a_path_that_no_system_takes_is_one_line(tmp_path: Path) -> None:
    for name in ("nul\0l.safetensors", "long" * 2000):
        with pytest.raises(InvalidInput, match=r"cannot be a path|File name too long") as error:
            read_header(tmp_path / name)
        assert "\n" not in str(error.value) and "\0" not in str(error.value)


@settings(max_examples=100)
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]) | st.text(max_size=2), inner
            )
        ),
        max_leaves=12,
    ),
    data=st.binary(max_size=4),
)
def test_any_header_is_read_or_refused(tmp_path: Path, header: object, data: bytes) -> None:
    path = write_raw(tmp_path / "any.safetensors", header, data)
    try:
        read_header(path)
    except InvalidInput as error:
        assert str(error).isprintable()


WRONG = [None, True, -1, 1.5, "x" * 500, [], {}, [[1]], 2**63, 10**400, float("nan"), "U8", "\ud800", {"dtype": "U8"}]


def mutated(chance: random.Random) -> bytes:
    """Return a file whose header was right before some of its values, names, bytes or lengths were changed."""
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt"},
        "a": entry(0, 8, dtype="F32", shape=[2]),
        "b.weight": entry(8, 24, dtype="I8", shape=[4, 4]),
        "c": entry(24, 24, shape=[0]),
    }
    for _ in range(chance.randrange(1, 4)):
        name = chance.choice(list(header))
        match chance.randrange(5):
            case 0:
                header[name] = chance.choice(WRONG)
            case 1 if isinstance(header[name], dict) and header[name]:
                header[name] = {**header[name], chance.choice(list(header[name])): chance.choice(WRONG)}
            case 2:
                header[chance.choice(["", "a", "x" * 300, "\n", "__metadata__"])] = header.pop(name)
            case 3 if isinstance(header[name], dict):
                header[name] = {
                    **header[name],
                    "data_offsets": [chance.randrange(-9, 99), chance.choice([0, 8, 2**63])],
                }
            case _:
                header.pop(name)
        if not header:
            break
    raw = bytearray(json.dumps(header).encode())
    for _ in range(chance.choice([0, 0, 1, 3])):
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    claim = len(raw) + chance.choice([0, 0, 0, 1, -1, 2**40, 2**63 - len(raw)])
    return struct.pack("<Q", max(0, claim)) + bytes(raw) + bytes(chance.choice([24, 24, 0, 23, 1000]))


def refuse_or_read(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    os.utime(path, (0, 0))  # long ago: no write is waited for
    try:
        read_header(path)
    except InvalidInput as error:
        line = str(error)
        assert line.isprintable() and len(line) <= 700, line


def test_mutated_headers_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(500):
        refuse_or_read(tmp_path / "model.safetensors", mutated(chance))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_fifty_thousand_mutated_headers(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(5000):
        refuse_or_read(tmp_path / "model.safetensors", mutated(chance))
