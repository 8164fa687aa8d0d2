"""From disk into the engine's slabs and to a device, with the page cache cold and warm, and the RAM that it takes.

A file of random bytes has its tensors in the order of their names, as the official writer has them within a dtype; the
slabs, one for each block, have them in another. Cold means that the system was told to forget the file's pages; how
many it still had is counted before each run. The raw rate is that of the plainest loop there is, one large buffer
filled again and again with the next bytes, with the advice that ours gives, too; it and ours take turns.

To the device goes a model that rests at tier ``disk``, by its first forward; streamed is a later forward, under a
budget of three blocks, which allocates nothing. A first forward also computes a tag of each block on the device, by
which writes are seen later: it reads all bytes twice, at the speed of a card's memory, or of the host's where the
device is simulated and its kernels run on the CPU. So one row leaves the tags out. CPU time is that of all threads.

Where there is no accelerator the device is a simulated one, whose memory is RAM of this process. Three things are as
on a card there, for all rows alike:

- A copy is a memcpy by a thread of its own, beside the host. It costs more than on a card: the thread takes a core.
- What is copied from pageable memory, as what ``load_file`` maps, first passes through two page-locked buffers, as in
  the driver. Else it were a single memcpy by all cores, straight from the page cache to the device, which no card has.
- The device's memory is there: all of it was touched before, as the slabs were. Else each row would pay for the pages
  that it touches for the first time. In a virtual machine a page that its host has to provide costs up to 2 s of CPU
  time per GiB, one that was freed just now 0.5 or less, so each row was as fast as what had run before it let it be.

``load_file`` maps the file, so its bytes are copied to the slabs or to the device as any host does that wants them
there. With a warm page cache all take turns. With a cold one it comes last, because on the machine of the kept table
all that read after it from the disk was slower for minutes.

``LOADING_SIZE`` names another size of the file, such as 1GiB, and ``TMPDIR`` the folder that it is written to and
deleted from again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import math
import mmap
import os
import shutil
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

import psutil
import torch
from safetensors.torch import load_file
from torch import nn

from highwater.headless import simdevice
from highwater.memory import MemoryManager, load_model, manage
from highwater.memory.errors import InvalidInput
from highwater.memory.runtime.devices.loading_tags import LoadingTags
from highwater.memory.units import GIB, MIB, format_bytes, parse_bytes, slab_offsets
from highwater.memory.weights.file_reader import WeightsFile
from highwater.memory.weights.safetensors_header import read_header

from .case import Result

NUM_RUNS = 6
RAW, OURS = "raw, one buffer", "Highwater, disk to device"
UNTAGGED = "Highwater, disk to device, no tags"
STREAMED = "Highwater, disk to device, streamed"
OFFICIAL = "load_file, to device"
TARGET_RATIO = 0.9
TARGET_WARM_RATIO = 1.0
TARGET_BYTES = 512 * MIB
RAW_BUFFER_BYTES = 16 * MIB
PIECE_BYTES = 64 * MIB
# What a simulated device needs beside the weights: alignment, tags.
BESIDE_BYTES = 256 * MIB
# A block of a large transformer in bf16; the names come in another order than the layers.
BLOCK_SHAPES = {
    "norm": (3072,), "attention_qkv": (9216, 3072), "attention_scale": (128,), "attention_out": (3072, 3072),
    "up": (12288, 3072), "up_bias": (12288,), "down": (3072, 12288), "bias": (3072,),
}  # fmt: skip
BLOCK_BYTES = 2 * sum(math.prod(shape) for shape in BLOCK_SHAPES.values())
NUM_STREAMED = 3  # two take turns in staging memory, and the rest of the file is smaller than one


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in BLOCK_SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm[:1]


class Model(nn.Module):
    """The model of the file, with next to nothing to compute."""

    def __init__(self, num_blocks: int, rest_bytes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.rest = nn.Parameter(torch.empty(rest_bytes, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


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
        slab = torch.empty(slab_bytes, dtype=torch.uint8, pin_memory=not simdevice.installed()).zero_()
        for tensor, offset in zip(ordered, offsets, strict=True):
            targets[tensor.name] = slab[offset : offset + tensor.weight_bytes]
    return targets


# -- ways to read: each makes ready what does not count, and yields what does, which returns bytes by name


Read = Callable[[], dict[str, torch.Tensor]]


@contextlib.contextmanager
def raw(path: Path) -> Iterator[Read]:
    buffer = bytearray(RAW_BUFFER_BYTES)

    def read() -> dict[str, torch.Tensor]:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while os.readv(file.fileno(), [buffer]):
                pass
        return {}

    yield read


@contextlib.contextmanager
def ours_to_slabs(path: Path) -> Iterator[Read]:
    targets = allocate_targets(path)

    def read() -> dict[str, torch.Tensor]:
        WeightsFile(read_header(path)).read_into(targets.items())
        return targets

    yield read


def ours_to_device(path: Path) -> AbstractContextManager[Read]:
    return managed_at_disk(path, profile="auto")


@contextlib.contextmanager
def ours_untagged(path: Path) -> Iterator[Read]:
    def wait(tags: LoadingTags) -> None:
        tags.copies.finish()

    with (
        patch.object(LoadingTags, "follow", lambda *_: None),
        patch.object(LoadingTags, "finish", wait),
        managed_at_disk(path, profile="auto") as read,
    ):
        yield read


@contextlib.contextmanager
def ours_streamed(path: Path) -> Iterator[Read]:
    with managed_at_disk(path, profile=f"{NUM_STREAMED * BLOCK_BYTES // MIB}MiB") as read:

        def read_again() -> dict[str, torch.Tensor]:
            read()
            return {}  # what streams does not stay

        read_again()
        yield read_again


@contextlib.contextmanager
def managed_at_disk(path: Path, *, profile: str) -> Iterator[Read]:
    header = read_header(path)
    sizes = {tensor.name: tensor.weight_bytes for tensor in header.tensors}
    config = {"num_blocks": (len(sizes) - 1) // len(BLOCK_SHAPES), "rest_bytes": sizes["rest"]}
    model = load_model(path, Model, config=config)
    manager = MemoryManager()
    manager.set_watermark("*", 0, 0)
    managed = manage(model, placement="gpu:0:disk", profile=profile, manager=manager)
    x = torch.zeros(1, dtype=torch.bfloat16, device=managed.device)

    def read() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            model(x)
        torch.accelerator.synchronize()
        return dict(model.named_parameters())

    try:
        yield read
    finally:
        managed.discard()


@contextlib.contextmanager
def official_to_slabs(path: Path) -> Iterator[Read]:
    targets = allocate_targets(path)

    def read() -> dict[str, torch.Tensor]:
        for name, tensor in load_file(path).items():
            targets[name].copy_(tensor.reshape(-1).view(torch.uint8))
        return targets

    yield read


@contextlib.contextmanager
def official_to_device(path: Path) -> Iterator[Read]:
    device = torch.accelerator.current_accelerator()

    def read() -> dict[str, torch.Tensor]:
        if simdevice.installed():  # a device that the official reader has never heard of
            tensors = {name: tensor.to(device) for name, tensor in load_file(path).items()}
        else:
            tensors = load_file(path, device=str(device))
        torch.accelerator.synchronize()
        return tensors

    yield read


METHODS: dict[str, Callable[[Path], AbstractContextManager[Read]]] = {
    RAW: raw,
    "Highwater, disk to slabs": ours_to_slabs,
    OURS: ours_to_device,
    UNTAGGED: ours_untagged,
    STREAMED: ours_streamed,
    "load_file, copied to slabs": official_to_slabs,
    OFFICIAL: official_to_device,
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    seconds: float
    cpu_s: float
    extra_bytes: int
    """By how much RAM grew at most, without the page cache; what a simulated device holds was there before."""


def run_once(method: str, path: Path, prepare: Callable[[], object] = lambda: None) -> Run:
    """Read the file once, after ``prepare`` brought it into the page cache or out of it."""
    with METHODS[method](path) as read:
        prepare()
        Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the peak
        before, cpu_before, begin = status_bytes("VmRSS"), time.process_time(), time.perf_counter()
        tensors = read()
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_before
        grown = status_bytes("VmHWM") - before
        del tensors
    return Run(seconds=seconds, cpu_s=cpu_s, extra_bytes=grown)


def measure_rows(path: Path, *, cold: bool) -> list[dict[str, str | float | int]]:
    runs: dict[str, list[Run]] = defaultdict(list)
    residents: list[float] = []

    def prepare() -> None:
        if cold:
            drop_pages(path)
        else:  # what read a cold file took out of the page cache
            run_once(RAW, path)
        residents.append(resident_share(path))

    last = [method for method in METHODS if cold and method.startswith("load_file")]
    turns = [method for method in METHODS if method not in last]
    for method in [*(turns + turns[::-1]) * (NUM_RUNS // 2), *last * NUM_RUNS]:
        runs[method].append(run_once(method, path, prepare))
        gc.collect()
    file_gb = path.stat().st_size / 1e9
    rates = {method: [file_gb / run.seconds for run in runs[method]] for method in METHODS}
    return [
        {
            "page cache": "cold" if cold else "warm",
            "in it before": f"{max(residents) if cold else min(residents):.1%}",
            "read": method,
            "GB/s": median(rates[method]),
            "slowest": min(rates[method]),
            "fastest": max(rates[method]),
            "over raw": median(rates[method]) / median(rates[RAW]),
            "CPU s per GB": min(run.cpu_s for run in runs[method]) / file_gb,
            "extra RAM, MiB": max(0, *(run.extra_bytes for run in runs[method])) // MIB,
        }
        for method in METHODS
    ]


def check_bytes(path: Path) -> None:
    """Read the file once in each of our ways, and compare with the official reader."""
    for way in (ours_to_slabs, ours_to_device):
        with way(path) as read:
            tensors = read()
            for name, tensor in load_file(path).items():
                actual, expected = (flat.reshape(-1).view(torch.uint8) for flat in (tensors[name].cpu(), tensor))
                if not torch.equal(actual, expected):
                    raise stop(f"{name} has other bytes than the official reader's")


def needed_ram_bytes(size_bytes: int) -> int:
    """For slabs, page cache, and a simulated device."""
    return (2 if torch.accelerator.is_available() else 3) * size_bytes + GIB


def check_room(directory: Path, size_bytes: int) -> None:
    if not Path("/proc/self/clear_refs").exists():
        raise stop("needs Linux, which tells what is in the page cache and how much RAM was used at most")
    on_disk, in_ram = shutil.disk_usage(directory).free, psutil.virtual_memory().available
    if on_disk < size_bytes + GIB:
        raise stop(
            f"{directory} has {format_bytes(on_disk)} free, {format_bytes(size_bytes + GIB)} are needed; "
            "name another folder in TMPDIR or a smaller size in LOADING_SIZE"
        )
    if in_ram < needed_ram_bytes(size_bytes):
        raise stop(
            f"{format_bytes(in_ram)} of RAM are available, {format_bytes(needed_ram_bytes(size_bytes))} are needed for "
            "slabs, page cache, and a device if it is simulated; name a smaller size in LOADING_SIZE"
        )


@contextlib.contextmanager
def any_device(size_bytes: int) -> Iterator[str]:
    """Have a device that holds so many bytes, and yield what it is: a simulated one where there is no other."""
    if torch.accelerator.is_available():
        yield str(torch.accelerator.current_accelerator())
        return
    simdevice.install(num_devices=1)
    spec = simdevice.SimDeviceSpec(total_bytes=2 * size_bytes)
    with (
        simdevice.cluster([spec], defer_copies=False, check_races=False),
        simdevice.copy_engine(),
        simdevice.backed_memory(size_bytes + BESIDE_BYTES),
    ):
        yield "a simulated one: RAM that was there before, written by a thread as a card's copy engine would"


def measure() -> Result:
    """Write the file and read it 42 times cold and as often warm; about a quarter of an hour for 6 GiB.

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
        with any_device(size_bytes) as device:
            check_bytes(path)
            warm = measure_rows(path, cold=False)
            cold = measure_rows(path, cold=True)
    over_raw = {row["read"]: float(row["over raw"]) for row in cold}
    rates = {row["read"]: float(row["GB/s"]) for row in warm}
    extra = max(int(row["extra RAM, MiB"]) for row in [*cold, *warm] if str(row["read"]).startswith("Highwater"))
    slabs = "pageable" if simdevice.installed() else "pinned"
    return Result(
        question=(
            f"Rate of reading a file of {format_bytes(size_bytes)} into {slabs} slabs, one for each block, and to a "
            f"device, which is {device}; medians of {NUM_RUNS} runs. `in it before`: the file's pages in RAM by "
            "mincore, the most of the cold runs, the least of the warm ones. CPU time: the least of a run. "
            "`no tags`: without the tags by which writes on the device are seen. "
            "Extra RAM: the peak beyond slabs and device, without the page cache; what is mapped counts."
        ),
        rows=[*cold, *warm],
        ratio=over_raw[OURS],
        meaning=(
            f"cold, {OURS}, over raw, target at least {TARGET_RATIO}; streamed {over_raw[STREAMED]:.3f}; "
            f"warm, over {OFFICIAL}, target at least {TARGET_WARM_RATIO}: {rates[OURS] / rates[OFFICIAL]:.3f}, "
            f"no tags {rates[UNTAGGED] / rates[OFFICIAL]:.3f}, streamed {rates[STREAMED] / rates[OFFICIAL]:.3f}; "
            f"extra RAM {extra} MiB, target at most {TARGET_BYTES // MIB} MiB"
        ),
    )
