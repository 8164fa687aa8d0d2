"""Processes that load the same file have its pages once, and what fits its device costs no RAM of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from highwater.memory.units import MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which tells what processes share")

NUM_LAYERS, WIDTH = 4, 2048
WEIGHT_BYTES = 4 * NUM_LAYERS * WIDTH * WIDTH  # 64 MiB
LOADER = f"""
import gc, json, sys, torch
from pathlib import Path
from safetensors.torch import load_file
from torch import nn
from highwater.headless import simdevice
from highwater.memory import load_model, manage

def read_rollup():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {{line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}}
    return {{"pss": found["Pss"], "private": found["Private_Dirty"]}}

def make():
    return nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({NUM_LAYERS})))

path, place, how, profile = sys.argv[1:]
torch.set_num_threads(1)
if place != "cpu":
    simdevice.install(num_devices=1)
warm = manage({{"warm": nn.Sequential(nn.Linear(64, 64))}}, placement=place)  # what is imported late
with torch.no_grad():
    warm.members[0].managed.module(torch.ones(1, 64))
warm.release()
if how == "mapped by another library":
    with torch.device("meta"):
        model = make()
    model.load_state_dict(load_file(path), assign=True)
else:
    model = load_model(path, make)
gc.collect()
before = read_rollup()
with torch.no_grad(), manage({{"net": model}}, profile, placement=place) as managed:
    total = float(model(torch.ones(1, {WIDTH})).double().sum().cpu())
    gc.collect()
    print(json.dumps({{"total": total, "device": managed.plan["net"].device_bytes}}), flush=True)
    for line in sys.stdin:
        now = read_rollup()
        print(json.dumps({{name: now[name] - before[name] for name in now}}), flush=True)
"""


class Process:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.loaded = json.loads(self.read_line())

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it ended"
        return line

    def measure(self) -> dict[str, int]:
        """Return what its memory has grown by since before it managed the model."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.read_line())


@contextmanager
def loading(path: Path, place: str, how: str, profile: str = "auto") -> Iterator[Process]:
    arguments = [sys.executable, "-c", LOADER, str(path), place, how, profile]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Process(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "net.safetensors"
    generator = torch.Generator().manual_seed(0)
    weights = {f"{n}.weight": torch.rand(WIDTH, WIDTH, generator=generator) / WIDTH for n in range(NUM_LAYERS)}
    save_file(weights, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())  # until then its pages count as dirty, and as private to who maps them alone
    return path


@pytest.mark.parametrize("how", ["load_model", "mapped by another library"])
@pytest.mark.parametrize(
    ("place", "profile"), [("cpu", "auto"), ("gpu:0", "40MiB,pinned=none")], ids=["on the CPU", "streamed"]
)
def test_four_processes_have_the_weights_once(path: Path, how: str, place: str, profile: str) -> None:
    """Where nothing is page-locked. What a process has of a simulated device is no RAM."""

    def measure(process: Process) -> int:
        return process.measure()["pss"] - process.loaded["device"].get("gpu:0", 0)

    with ExitStack() as stack:
        processes = [stack.enter_context(loading(path, place, how, profile))]
        alone = measure(processes[0])
        processes += [stack.enter_context(loading(path, place, how, profile)) for _ in range(3)]
        assert len({process.loaded["total"] for process in processes}) == 1
        together = sum(map(measure, processes))
    assert alone > 0.9 * WEIGHT_BYTES, "it has all of them"
    assert together <= 1.2 * alone


@pytest.mark.parametrize("how", ["load_model", "mapped by another library"])
def test_what_streams_without_page_locked_memory_has_no_copy_of_its_own(path: Path, how: str) -> None:
    """What it reads at first goes through two buffers, each of a layer here, and comes from a mapping after that."""
    with loading(path, "gpu:0", how, "40MiB,pinned=none") as process:
        on_device = process.loaded["device"]["gpu:0"]
        assert on_device <= 40 * MIB
        assert process.measure()["private"] - on_device <= 2 * WEIGHT_BYTES // NUM_LAYERS + 16 * MIB


@pytest.mark.parametrize("how", ["load_model", "mapped by another library"])
def test_a_model_that_fits_its_device_has_no_private_ram_beside_that(path: Path, how: str) -> None:
    """The simulated device's memory is private RAM of its process."""
    with loading(path, "gpu:0", how) as process:
        on_device = process.loaded["device"]["gpu:0"]
        assert on_device >= WEIGHT_BYTES
        assert process.measure()["private"] - on_device <= 16 * MIB
