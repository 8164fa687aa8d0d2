"""From disk into the engine's slabs, with the page cache cold and warm, and the RAM that it takes beside them.

A file of random bytes has its tensors in the order of their names, as the official writer has them within a dtype; the
slabs, one for each block, have them in another. Cold means that the system was told to forget the file's pages; how
many it still had is counted before each run. The raw rate is that of the plainest loop there is, one large buffer
filled again and again with the next bytes, with the advice that ours gives, too; the two take turns. ``load_file`` maps
the file, so its bytes are copied to the slabs as any host does that wants them in memory of its own; it comes last,
because on the machine of the kept table all that read after it from the disk was slower for minutes. No device takes
part.

``LOADING_SIZE`` names another size of the file, such as 1GiB, and ``TMPDIR`` the folder that it is written to and
deleted from again.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import psutil
import torch
from highwater.memory.errors import InvalidInput
from highwater.memory.reading import WeightsFile
from highwater.memory.units import GIB, MIB, format_bytes, parse_bytes, slab_offsets
from highwater.memory.weights import read_header
from safetensors.torch import load_file

from .case import Result

NUM_RUNS = 6
TARGET_RATIO = 0.9
TARGET_BYTES = 512 * MIB
RAW_BUFFER_BYTES = 16 * MIB
PIECE_BYTES = 64 * MIB
# A block of a large transformer in bf16; the names come in another order than the layers.
BLOCK_SHAPES = {
    "norm": (3072,), "attention.qkv": (9216, 3072), "attention.scale": (128,), "attention.out": (3072, 3072),
    "up": (12288, 3072), "up_bias": (12288,), "down": (3072, 12288), "bias": (3072,),
}  # fmt: skip
BLOCK_BYTES = 2 * sum(math.prod(shape) for shape in BLOCK_SHAPES.values())


def stop(problem: str) -> SystemExit:
    return SystemExit(f"benchmarks loading: {problem}")


def write_file(path: Path, size_bytes: int) -> None:
    """Write a file of this size on disk: as many blocks as fit, and a tensor of bytes for the rest."""
    names = [f"blocks.{block}.{name}" for block in range(size_bytes // BLOCK_BYTES) for name in BLOCK_SHAPES]
    header, end = {}, 0
    for name in sorted(names):
        shape = BLOCK_SHAPES[name.split(".", 2)[2]]
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header["rest"] = {"dtype": "U8", "shape": [size_bytes - end], "data_offsets": [end, size_bytes]}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for begin in range(0, size_bytes, PIECE_BYTES):
            file.write(os.urandom(min(PIECE_BYTES, size_bytes - begin)))
        file.flush()
        os.fsync(file.fileno())


def allocate_targets(path: Path) -> dict[str, torch.Tensor]:
    """Return memory for each tensor, a slab for each block, all of it in RAM; page-locked where there is a device."""
    blocks = defaultdict(dict)
    for tensor in read_header(path).tensors:
        *block, name = tensor.name.split(".", 2)
        blocks[tuple(block)][name] = tensor
    targets = {}
    for tensors in blocks.values():
        ordered = [tensors[name] for name in [*BLOCK_SHAPES, "rest"] if name in tensors]
        offsets, slab_bytes = slab_offsets(tensor.weight_bytes for tensor in ordered)
        slab = torch.empty(slab_bytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available()).zero_()
        for tensor, offset in zip(ordered, offsets, strict=True):
            targets[tensor.name] = slab[offset : offset + tensor.weight_bytes]
    return targets


def read_raw(path: Path, _: dict[str, torch.Tensor]) -> None:
    buffer = bytearray(RAW_BUFFER_BYTES)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while os.readv(file.fileno(), [buffer]):
            pass


def read_ours(path: Path, targets: dict[str, torch.Tensor]) -> None:
    WeightsFile(read_header(path)).read_into(targets.items())


def read_official(path: Path, targets: dict[str, torch.Tensor]) -> None:
    for name, tensor in load_file(path).items():
        targets[name].copy_(tensor.reshape(-1).view(torch.uint8))


METHODS: dict[str, Callable[[Path, dict[str, torch.Tensor]], None]] = {
    "raw, one buffer": read_raw,
    "Highwater": read_ours,
    "load_file and copy": read_official,
}


def drop_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(path: Path) -> float:
    """Return the share of a file's pages that are in RAM, by mincore."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        pages = ctypes.create_string_buffer(-(-len(mapping) // mmap.PAGESIZE))
        failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(len(mapping)), pages)
        del first  # the mapping cannot be closed before
    if failed:
        raise stop(f"mincore: {os.strerror(ctypes.get_errno())}")
    return sum(page & 1 for page in pages.raw[: len(pages)]) / len(pages)


def status_bytes(word: str) -> int:
    """Return what the system says of this process's memory, such as its VmRSS now and its VmHWM, the peak of it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word)]
    return int(line.split()[1]) * 1024


def run_once(method: str, path: Path, targets: dict[str, torch.Tensor]) -> tuple[float, int]:
    """Return the seconds of one run, and by how many bytes RAM grew meanwhile at most, without the page cache."""
    Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the peak
    before, begin = status_bytes("VmRSS"), time.perf_counter()
    METHODS[method](path, targets)
    return time.perf_counter() - begin, status_bytes("VmHWM") - before


def measure_rows(path: Path, targets: dict[str, torch.Tensor], *, cold: bool) -> list[dict[str, str | float | int]]:
    runs, residents = defaultdict(list), []
    *in_turns, last = METHODS
    for method in [*(in_turns + in_turns[::-1]) * (NUM_RUNS // 2), *[last] * NUM_RUNS]:
        if cold:
            drop_pages(path)
        residents.append(resident_share(path))
        runs[method].append(run_once(method, path, targets))
    file_bytes = path.stat().st_size
    rates = {method: [file_bytes / 1e9 / seconds for seconds, _ in runs[method]] for method in METHODS}
    return [
        {
            "page cache": "cold" if cold else "warm",
            "in it before": f"{max(residents) if cold else min(residents):.1%}",
            "read": method,
            "GB/s": median(rates[method]),
            "slowest": min(rates[method]),
            "fastest": max(rates[method]),
            "over raw": median(rates[method]) / median(rates["raw, one buffer"]),
            "extra RAM, MiB": max(extra_bytes for _, extra_bytes in runs[method]) // MIB,
        }
        for method in METHODS
    ]


def check_bytes(path: Path, targets: dict[str, torch.Tensor]) -> None:
    """Read the file once, and compare with the official reader."""
    read_ours(path, targets)
    for name, tensor in load_file(path).items():
        if not torch.equal(targets[name], tensor.reshape(-1).view(torch.uint8)):
            raise stop(f"{name} has other bytes than the official reader's")


def check_room(directory: Path, size_bytes: int) -> None:
    if not Path("/proc/self/clear_refs").exists():
        raise stop("needs Linux, which tells what is in the page cache and how much RAM was used at most")
    on_disk, in_ram = shutil.disk_usage(directory).free, psutil.virtual_memory().available
    if on_disk < size_bytes + GIB:
        raise stop(
            f"{directory} has {format_bytes(on_disk)} free, {format_bytes(size_bytes + GIB)} are needed; "
            "name another folder in TMPDIR or a smaller size in LOADING_SIZE"
        )
    if in_ram < 2 * size_bytes + GIB:
        raise stop(
            f"{format_bytes(in_ram)} of RAM are available, {format_bytes(2 * size_bytes + GIB)} are needed for slabs "
            "and page cache; name a smaller size in LOADING_SIZE"
        )


def measure() -> Result:
    """Write the file and read it 18 times cold and as often warm; about four minutes for 6 GiB.

    Raises:
        SystemExit: too little disk or RAM, a folder that is in memory itself, or a system other than Linux.
    """
    try:
        size_bytes = parse_bytes(os.environ.get("LOADING_SIZE", "6GiB"), what="LOADING_SIZE")
    except InvalidInput as error:
        raise stop(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="highwater-loading-") as directory:
        check_room(Path(directory), size_bytes)
        path = Path(directory) / "model.safetensors"
        write_file(path, size_bytes)
        drop_pages(path)
        if resident_share(path) > 0.01:
            raise stop(f"{path.parent} keeps its files in memory; name a folder on a disk in TMPDIR")
        targets = allocate_targets(path)
        check_bytes(path, targets)  # from here on it is warm
        warm = measure_rows(path, targets, cold=False)
        cold = measure_rows(path, targets, cold=True)
        is_pinned = targets["rest"].is_pinned()
    ours = [row for row in [*cold, *warm] if row["read"] == "Highwater"]
    extra = max(int(row["extra RAM, MiB"]) for row in ours)
    return Result(
        question=(
            f"Rate from disk into {'pinned' if is_pinned else 'pageable'} slabs, one for each block, of a file of "
            f"{format_bytes(size_bytes)}; medians of {NUM_RUNS} runs. `in it before`: the file's pages in "
            "RAM by mincore, the most of the cold runs, the least of the warm ones. Extra RAM: the peak beyond the "
            "slabs, without the page cache; what is mapped counts. No device takes part."
        ),
        rows=[*cold, *warm],
        ratio=float(ours[0]["over raw"]),
        meaning=(
            f"cold, Highwater over raw, target at least {TARGET_RATIO}; extra RAM {extra} MiB, target at most "
            f"{TARGET_BYTES // MIB} MiB"
        ),
    )
