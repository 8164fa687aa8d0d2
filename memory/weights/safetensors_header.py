"""The headers of safetensors files, checked in full.

The header is checked before any tensor is touched, because its numbers become the plan: a file that lies about its
size would fail only when half of it was loaded. Format: eight bytes little-endian header length, a JSON object, then
the data (https://huggingface.co/docs/safetensors/index#format).

safetensors' own reader serves where only metadata or names are asked of a checked file; it has no call for the byte
offsets that reads and plans need, and does not say which tensor is at fault.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InvalidInput, quoted

__all__ = [
    "DTYPE_BITS",
    "TORCH_NAMES",
    "FileVersion",
    "TensorHeader",
    "WeightsHeader",
    "open_at_once",
    "open_regular",
    "parse_integer",
    "read_header",
]

# The limit of the reference reader; a longer header is a damaged or hostile file.
MAX_HEADER_BYTES = 100_000_000
# Of brackets, braces and commas, each of which may become an object of 60 bytes; a tensor has about ten.
MAX_HEADER_MARKS = 4_000_000
MAX_TENSORS = MAX_HEADER_MARKS // 10
# What torch can hold: more dimensions, or elements and bytes beyond, are a damaged or hostile file.
MAX_DIMENSIONS = 64
MAX_NUMBER = (1 << 63) - 1
MAX_DIGITS = len(str(MAX_NUMBER))
MAX_NAME_LENGTH = 1024

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

# What torch calls them; it has no tensor with an element of its own for each number of four or six bits.
TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip

# The clock that stamps a file ticks every 1 to 10 ms on Linux before 6.13: two writes in one tick look like one.
CLOCK_TICK_NS = 10_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class FileVersion:
    """Which file a path named, and when it was last written: what has the same version has the same bytes.

    Its ctime says less: a chmod changes it, too, and on Windows it is the time of creation, which no write changes.
    """

    file_bytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> FileVersion:
        return cls.read(os.fstat(descriptor))

    @classmethod
    def at(cls, path: Path) -> FileVersion:
        """Return what the path names now. Raises `OSError`."""
        return cls.read(os.stat(path))

    @classmethod
    def read(cls, stat: os.stat_result) -> FileVersion:
        return cls(file_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, inode=stat.st_ino)

    def describe_change(self, now: FileVersion) -> str:
        """Return in words how two versions differ."""
        if self.file_bytes != now.file_bytes:
            return f"was planned with {self.file_bytes} bytes, now has {now.file_bytes}"
        if self.inode != now.inode:
            return f"was replaced by another file of {now.file_bytes} bytes since it was planned"
        seconds = (now.mtime_ns - self.mtime_ns) / 1e9
        return f"was written to since it was planned: its time stamp moved by {seconds:+.6g} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """One tensor of a file: where its bytes lie, counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def weight_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsHeader:
    """What a safetensors file holds, without its data; tensors are in the order of their offsets."""

    path: Path
    tensors: tuple[TensorHeader, ...]
    metadata: dict[str, str]
    version: FileVersion
    """The version of the file that this header is from; the path may name another file by now."""

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.weight_bytes for tensor in self.tensors)


def read_header(path: str | Path) -> WeightsHeader:
    """Read and check the header of a safetensors file; costs one small read, touches no tensor.

    Waits up to 10 ms for a file that was written just now, so that a later change shows in its version.

    Raises:
        InvalidInput: no such file, a pickle, or a header that is truncated, malformed, overlapping, has gaps,
            or claims another size than the file has.
    """
    path = Path(path)
    with open_regular(path, "a .safetensors file") as file:
        version = settled_version(file.fileno())
        file_bytes = version.file_bytes
        prefix = file.read(9)
        reject_other_formats(path, prefix)
        if len(prefix) < 8:
            raise InvalidInput(f"{path}: {file_bytes} bytes is too short for a safetensors file; download it again")
        header_bytes = int.from_bytes(prefix[:8], "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise InvalidInput(
                f"{path}: claims a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} are allowed; "
                "not a safetensors file, or damaged"
            )
        if 8 + header_bytes > file_bytes:
            raise InvalidInput(
                f"{path}: truncated: the header ends at byte {8 + header_bytes}, the file at {file_bytes}; "
                "download it again"
            )
        file.seek(8)
        raw = file.read(header_bytes)
    entries = parse_header(path, raw)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise InvalidInput(f"{path}: __metadata__ is a {type(metadata).__name__}, expected an object of strings")
    if not all(isinstance(value, str) for value in metadata.values()):
        raise InvalidInput(f"{path}: __metadata__ holds something other than strings")
    data_begin = 8 + header_bytes
    tensors = sorted(
        (parse_entry(path, name, entry, data_begin) for name, entry in entries.items()),
        key=lambda tensor: (tensor.begin, tensor.end),
    )
    check_coverage(path, tensors, data_begin, file_bytes)
    return WeightsHeader(path=path, tensors=tuple(tensors), metadata=metadata, version=version)


def open_at_once(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a file, and a pipe without waiting for its writer; returns the descriptor. An ``opener`` of `open`."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))


def open_regular(path: Path, expected: str) -> BinaryIO:
    """Open a regular file for reading; a pipe or a device, at which a read may wait for ever, is never read.

    Raises:
        InvalidInput: there is none, or it cannot be opened.
    """
    try:
        descriptor = open_at_once(path)
    except FileNotFoundError:
        raise InvalidInput(f"{path}: no such file; expected {expected}") from None
    except OSError as error:
        raise InvalidInput(f"{path if str(path).isprintable() else quoted(str(path))}: {error.strerror}") from None
    except ValueError as error:  # a null byte
        raise InvalidInput(f"{quoted(str(path))}: cannot be a path: {error}; expected {expected}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise InvalidInput(f"{path}: is a folder; name a file in it, expected {expected}")
        raise InvalidInput(f"{path}: is no regular file; expected {expected}")
    return open(descriptor, "rb")


def parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a header; refuses names that stand there twice.

    The cost is bounded by its length: numbers that no tensor can have are refused before they are converted.
    """
    if raw.count(b"[") + raw.count(b"{") + raw.count(b",") > MAX_HEADER_MARKS:
        raise InvalidInput(
            f"{path}: its header of {len(raw)} bytes has more than {MAX_HEADER_MARKS} brackets, braces and commas, "
            f"the limit; allowed: about {MAX_TENSORS} tensors in one file"
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path}: header is not UTF-8 ({error.reason} at byte {error.start} of it); the file is damaged"
        ) from None
    try:
        entries = json.loads(text, parse_int=parse_integer, object_pairs_hook=reject_duplicates)
    except (ValueError, RecursionError) as error:  # nesting that is too deep, too
        raise InvalidInput(f"{path}: header is not valid JSON ({error}); the file is damaged") from None
    if not isinstance(entries, dict):
        raise InvalidInput(f"{path}: header is a JSON {type(entries).__name__}, expected an object of tensors")
    return entries


def parse_integer(digits: str) -> int:
    """Return a number of JSON; refuses more digits than a size may have, which would take quadratic time."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, at most {MAX_DIGITS} are allowed")
    return int(digits)


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse two equal names: some readers keep the first and some the last, so plan and tensors could differ."""
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{quoted(twice)} stands twice in one object")
    return content


def settled_version(descriptor: int) -> FileVersion:
    """Return the version of an open file; waits until no later write can have the same time."""
    age_ns = time.time_ns() - FileVersion.of(descriptor).mtime_ns
    if 0 <= age_ns < CLOCK_TICK_NS:
        time.sleep((CLOCK_TICK_NS - age_ns) / 1e9)
    return FileVersion.of(descriptor)


def reject_other_formats(path: Path, prefix: bytes) -> None:
    """Refuse GGUF files, and what would have to be unpickled: loading it may run any code.

    A header of 640 bytes begins like a pickle, too, with its length; but then comes its brace.
    """
    if prefix[:4] == b"GGUF":
        raise InvalidInput(f"{path}: is a GGUF file, which is not read; convert it to .safetensors")
    if prefix[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") and prefix[8:] != b"{":
        raise InvalidInput(f"{path}: is a pickle, which may run code when loaded; convert it to .safetensors")


def parse_entry(path: Path, name: str, entry: Any, data_begin: int) -> TensorHeader:
    """Return one checked tensor entry, its offsets counted from the start of the file."""
    if len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidInput(
            f"{path}: {quoted(name)} cannot be the name of a tensor; "
            f"allowed: up to {MAX_NAME_LENGTH} printable characters"
        )
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise InvalidInput(f"{path}: tensor {quoted(name)} lacks dtype, shape or data_offsets") from None
    if not isinstance(shape, list):
        raise InvalidInput(f"{path}: tensor {quoted(name)} has a shape that is no list: {quoted(shape)}")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise InvalidInput(
            f"{path}: tensor {quoted(name)} has the unknown dtype {quoted(dtype)}; allowed: {', '.join(DTYPE_BITS)}"
        )
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidInput(
            f"{path}: tensor {quoted(name)} has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are allowed"
        )
    if not all(type(number) is int and 0 <= number <= MAX_NUMBER for number in (*shape, begin, end)):
        raise InvalidInput(
            f"{path}: tensor {quoted(name)} has a shape or offset that is not a natural number below 2^63: "
            f"{quoted(entry)}"
        )
    expected = -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)
    if expected > MAX_NUMBER:
        raise InvalidInput(f"{path}: tensor {quoted(name)} of {dtype} {quoted(shape)} needs 2^63 bytes or more")
    if end - begin != expected:
        raise InvalidInput(
            f"{path}: tensor {quoted(name)} spans {end - begin} bytes, {dtype} {quoted(shape)} needs {expected}"
        )
    return TensorHeader(name=name, dtype=dtype, shape=tuple(shape), begin=data_begin + begin, end=data_begin + end)


def check_coverage(path: Path, tensors: list[TensorHeader], data_begin: int, file_bytes: int) -> None:
    """Require that the tensors tile the data exactly: no overlap, no gap, and the file is that long."""
    position, previous = data_begin, "the header"
    for tensor in tensors:
        if tensor.begin < position:
            raise InvalidInput(
                f"{path}: tensor {quoted(tensor.name)} overlaps {quoted(previous)} at byte {tensor.begin}"
            )
        if tensor.begin > position:
            raise InvalidInput(
                f"{path}: {tensor.begin - position} bytes before tensor {quoted(tensor.name)} belong to no tensor"
            )
        position, previous = tensor.end, tensor.name
    if position > file_bytes:
        raise InvalidInput(
            f"{path}: truncated: header claims {position} bytes, the file has {file_bytes}; download it again"
        )
    if position < file_bytes:
        raise InvalidInput(f"{path}: {file_bytes - position} bytes after the last tensor belong to no tensor")
