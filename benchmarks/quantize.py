"""A quantized file from a checkpoint, and loading it: seconds and private RAM, beside a plain copy and mmgp.

A checkpoint of random weights in bf16 has blocks of two matrices of 32 MiB. Each row is a process of its own. Private
RAM is what the process has for itself and has written to, beyond what it had before: its pages of files are shared and
not counted. It is sampled every 10 ms. All files are in the system's cache, since they were just written.

Loading is from the file to weights at rest in RAM, ready to be copied to a device: ``load_model``, and ``manage`` for a
simulated device. On the fly means that the same weights are encoded as the plain checkpoint is loaded. Plain is a model
of as many bytes as the quantized file has, loaded in the same way.

``QUANTIZE_SIZE`` names another size, such as 256MiB, and ``TMPDIR`` the folder of the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from .case import Result
from .precision.models import measure_models

__all__ = ["measure"]

MIB = 1 << 20
WIDTH = 4096
BLOCK_BYTES = 2 * WIDTH * WIDTH * 2
FORMS = ("fp8-scaled", "int8", "qint8", "qint4")
ALLOWED_BYTES = 256 * MIB
LOAD_TARGET = 1.1
NUM_LOADS = 3


def measure() -> Result:
    """Measure all of it; some ten minutes."""
    from highwater.memory.units import parse_bytes

    num_blocks = max(2, parse_bytes(os.environ.get("QUANTIZE_SIZE", "2GiB")) // BLOCK_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source.safetensors")
        work("make", source, num_blocks)
        rows = [{"made by": "a plain copy", **written(work("copy", source, Path(folder, "copy")), source)}]
        Path(folder, "copy").unlink()
        loads = []
        worst_ram = worst_load = 0.0
        for form in FORMS:
            target = Path(folder, f"{form}.safetensors")
            found = work("quantize", source, target, form)
            worst_ram = max(worst_ram, found["private_bytes"] / (BLOCK_BYTES / 2 + ALLOWED_BYTES))
            rows.append({"made by": f"highwater quantize --to {form}", **written(found, target)})
            row, ratio = measure_loads(form, source, target, Path(folder, "plain.safetensors"), num_blocks)
            loads.append(row)
            worst_load = max(worst_load, ratio)
            target.unlink()
        rows.append(measure_mmgp(source, Path(folder, "mmgp.safetensors")))
    errors, _ = measure_models("int8", ("fp8 scaled", "int8", "qint8", "qint4"))
    return Result(
        question=(
            f"A checkpoint of {num_blocks * BLOCK_BYTES / 2**30:.2f} GiB in bf16, its largest tensor "
            f"{BLOCK_BYTES // 2 // MIB} MiB: seconds to write a file from it, the most private RAM, the file's size."
        ),
        rows=rows,
        ratio=max(worst_ram, worst_load / LOAD_TARGET),
        meaning=(
            f"the worst of private RAM over the largest tensor and 256 MiB ({worst_ram:.3f}), and of the seconds to "
            f"load a made file over {LOAD_TARGET} of those of a plain one of as many bytes "
            f"({worst_load / LOAD_TARGET:.3f}); target at most 1"
        ),
        more={
            "Seconds to load: the made file, a plain model of as many bytes, and the checkpoint with its weights "
            f"encoded on the fly; each the median of {NUM_LOADS}.": loads,
            "Whole tiny models with random weights, by their standard deviation: the error of their outputs in each "
            "form, relative to their size.": errors,
        },
    )


def written(found: dict[str, Any], target: Path) -> dict[str, Any]:
    return {
        "seconds": found["seconds"],
        "private MiB": f"{found['private_bytes'] / MIB:.0f}",
        "file MiB": f"{target.stat().st_size / MIB:.0f}",
    }


def measure_loads(form: str, source: Path, target: Path, plain: Path, num_blocks: int) -> tuple[dict[str, Any], float]:
    """Return a row, and the seconds of the made file over those of a plain one, which take turns."""
    share = target.stat().st_size / source.stat().st_size
    num_plain = max(2, round(num_blocks * share))
    work("make", plain, num_plain)
    seconds: dict[str, list[float]] = {"made": [], "plain": [], "on the fly": []}
    for _ in range(NUM_LOADS):
        seconds["plain"].append(work("load", plain, num_plain, "")["seconds"])
        seconds["made"].append(work("load", target, num_blocks, "")["seconds"])
        seconds["on the fly"].append(work("load", source, num_blocks, form.replace("-", " "))["seconds"])
    plain_rate = plain.stat().st_size / median(seconds["plain"])
    ratio = median(seconds["made"]) * plain_rate / target.stat().st_size
    plain.unlink()
    return {"form": form, **{name: median(each) for name, each in seconds.items()}, "made over plain": ratio}, ratio


def measure_mmgp(source: Path, target: Path) -> dict[str, Any]:
    """Return a row of mmgp's own way to the same file; one that says so where it is not installed or fails."""
    name = "mmgp: load, quantize to qint8, save"
    if find_spec("mmgp") is None:
        return {"made by": f"{name} (not run: pip install mmgp)", "seconds": "", "private MiB": "", "file MiB": ""}
    try:
        return {"made by": name, **written(work("mmgp", source, target), target)}
    except SystemExit as error:
        return {"made by": f"{name} (failed: {error})", "seconds": "", "private MiB": "", "file MiB": ""}


# -- in a process of its own


def work(what: str, *arguments: object) -> dict[str, Any]:
    """Do one thing in a new process; returns what it measured."""
    command = [sys.executable, "-m", "highwater.benchmarks.quantize", what, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit((done.stderr.strip().splitlines() or ["no reason"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(call: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds of a call, and the most private RAM beyond what there was before."""
    before, seen, is_over = private_bytes(), [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.01):
            seen.append(private_bytes())

    watcher = threading.Thread(target=look)
    watcher.start()
    begin_s = time.perf_counter()
    try:
        call()
    finally:
        seconds = time.perf_counter() - begin_s
        is_over.set()
        watcher.join()
    return {"seconds": seconds, "private_bytes": max(0, max(seen) - before)}


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}["Private_Dirty"]


def make(path: str, num_blocks: str) -> dict[str, Any]:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    piece = (torch.randn(WIDTH, WIDTH, generator=generator) * 0.02).bfloat16()
    state = {}
    for number in range(int(num_blocks)):
        for name in ("up", "down"):
            state[f"blocks.{number}.{name}.weight"] = piece.roll(number, 0).clone()
            state[f"blocks.{number}.{name}.bias"] = torch.zeros(WIDTH, dtype=torch.bfloat16)
    save_file(state, path)
    return {}


def copy(source: str, target: str) -> dict[str, Any]:
    def run() -> None:
        with open(source, "rb") as read, open(target, "wb") as write:
            while piece := read.read(16 * MIB):
                write.write(piece)
            write.flush()
            os.fsync(write.fileno())

    return measured(run)


def quantize(source: str, target: str, form: str) -> dict[str, Any]:
    from highwater.memory.quantizing import quantize_file

    return measured(lambda: quantize_file(source, target, form))


def build(num_blocks: int) -> Any:
    """Return the model of such a checkpoint."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    return Model()


def load(path: str, num_blocks: str, form: str) -> dict[str, Any]:
    import functools

    from highwater.headless import simdevice
    from highwater.memory import MemoryManager, load_model, manage

    simdevice.install("sim", num_devices=1)
    with simdevice.cluster([simdevice.SimDeviceSpec(total_bytes=1 << 30)]):
        manager = MemoryManager()

        def run() -> None:
            model = load_model(path, functools.partial(build, int(num_blocks)))
            asked = {"precision": form} if form else {}
            with manage({"diffusion": model}, placement="gpu:0:host", manager=manager, **asked):
                measured_s.append(time.perf_counter() - begin_s)

        measured_s: list[float] = []
        begin_s = time.perf_counter()
        run()
    return {"seconds": measured_s[0]}


def mmgp(source: str, target: str) -> dict[str, Any]:
    """Do what its users do: read a checkpoint into a model, and save that quantized."""
    import torch
    from mmgp import offload
    from optimum.quanto import qint8
    from safetensors import safe_open

    with safe_open(source, "pt") as file:
        num_blocks = len({name.split(".")[1] for name in file.keys()})  # noqa: SIM118 (no dict)

    def run() -> None:
        with torch.device("meta"):
            model = build(num_blocks)
        offload.load_model_data(model, source)
        offload.save_model(model, target, do_quantize=True, quantizationType=qint8)

    return measured(run)


WORKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "make": make, "copy": copy, "quantize": quantize, "load": load, "mmgp": mmgp,
}  # fmt: skip

if __name__ == "__main__":
    if not Path("/proc/self/smaps_rollup").exists():
        sys.exit("this needs Linux, which tells how much memory a process has for itself")
    print(json.dumps(WORKERS[sys.argv[1]](*sys.argv[2:])))
