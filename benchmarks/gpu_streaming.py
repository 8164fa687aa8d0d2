"""A streamed 12 B transformer on a real GPU, beside the offloading of others at equal measured peak memory.

Random weights in the shape of Flux, bf16, 1024x1024. Every method runs in a process of its own (`gpu_worker.py`): some
replace functions of torch and of other libraries when they are imported. Ours comes last and is run once more for
each of the others, within such a budget that the device holds no more at its peak than it held for them.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from highwater.tests.comfyui.host_process import bytecode_directory, find_host

from .case import Result
from .gpu.record import cell
from .gpu_worker import MARK, SIZES, Request, Row

OURS = "Highwater"
BUDGETS = (0.10, 0.30, 0.60, 1.00)
# All of it takes less than eight minutes; what has not begun when ours has to begin is not run.
TOTAL_S = 450
OURS_S = 160
WORKER = Path(__file__).with_name("gpu_worker.py")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One method as it is run: under which Python, within which part of the weights; None if it knows no budget."""

    label: str
    name: str
    budget: float | None = None
    missing: str = ""
    python: str = sys.executable
    comfyui: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.label if self.budget is None else f"{self.label}, {self.budget:.0%}"

    def request(self, size: str, device: str, weight_bytes: int) -> Request:
        budget_bytes = None if self.budget in (None, 1.0) else int(self.budget * weight_bytes)
        on_cpu = self.comfyui and not device.startswith("cuda")  # it knows no other device here
        return Request(
            method=self.name,
            size=size,
            device=device,
            budgets=[budget_bytes],
            comfyui=self.comfyui,
            arguments=[*self.arguments, *(["--cpu"] if on_cpu else [])],
        )


def list_methods() -> list[Method]:
    """Return what ours is compared with, the most telling first: the time may not do for all."""
    host = find_host()
    mmgp = of_package("mmgp")
    dynamic = Method(label="ComfyUI, dynamic VRAM", name="ComfyUI", missing="not run: no checkout at COMFYUI_DIR")
    static = Method(label="ComfyUI, static", name="ComfyUI", missing="not run: no checkout at COMFYUI_DIR")
    if host is not None:
        (number,) = re.findall(r'__version__ = "(.*)"', (host.directory / "comfyui_version.py").read_text())
        core = {"name": "ComfyUI", "python": str(host.python), "comfyui": str(host.directory)}
        dynamic = Method(label=f"ComfyUI {number}, dynamic VRAM", **core)
        static = Method(label=f"ComfyUI {number}, static", arguments=("--disable-dynamic-vram",), **core)
    with_budget = {share: [within(method, share) for method in (mmgp, dynamic, static)] for share in BUDGETS[:3]}
    return [
        of_package("diffusers", "groups, stream", needs=("accelerate",)),
        *with_budget[0.30],
        of_package("accelerate", "CPU offload"),
        Method(label="all on the device", name="on the device"),
        *with_budget[0.60],
        *with_budget[0.10],
    ]


def within(method: Method, budget: float) -> Method:
    return Method(**{**asdict(method), "budget": budget})


def of_package(package: str, way: str = "", needs: Sequence[str] = ()) -> Method:
    """Return the method of a package that may be missing, as may what this way ``needs`` beside it."""
    missing = next((f"not run: {name} is not installed" for name in (package, *needs) if find_spec(name) is None), "")
    label = package if find_spec(package) is None else f"{package} {version(package)}"
    return Method(label=f"{label}, {way}" if way else label, name=package, missing=missing)


def run_worker(request: Request, timeout_s: float, python: str = sys.executable) -> tuple[list[Row], str]:
    """Run one process to its end; returns its rows, and in one line why there are not more."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPYCACHEPREFIX": str(bytecode_directory())}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [python, str(WORKER), json.dumps(asdict(request))]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout_s, check=False)
        output, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, errors, code = late.stdout or b"", f"stopped after {timeout_s:.0f} s".encode(), 1
    lines = output.decode(errors="replace").splitlines()
    rows = [Row(**json.loads(line.removeprefix(MARK))) for line in lines if line.startswith(MARK)]
    last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
    killed = f"killed by signal {-code}, as if memory had run out" if code < 0 else ""
    return rows, killed or (last[:160] if code else "")


def run_method(method: Method, size: str, device: str, weight_bytes: int, left_s: float) -> Row:
    """Return one method's row, measured or with the reason why not."""
    if method.missing:
        return Row(error=method.missing)
    if left_s < 20:
        return Row(error="not run: the time is up")
    rows, problem = run_worker(method.request(size, device, weight_bytes), left_s, method.python)
    return rows[0] if rows else Row(error=problem or "no result")


def run_ours(size: str, device: str, weight_bytes: int, peaks: Sequence[int], left_s: float) -> list[Row]:
    """Return our rows: one per budget, then one per peak to match."""
    budgets = [None if share == 1.0 else int(share * weight_bytes) for share in BUDGETS]
    request = Request(method="Highwater", size=size, device=device, budgets=budgets, peaks=list(peaks))
    rows, problem = run_worker(request, left_s)
    wanted = len(budgets) + len(peaks)
    return [*rows, *(Row(error=problem or "no result") for _ in range(wanted))][:wanted]


def in_s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def in_gb(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.2f}"


def describe(label: str, budget: float | None, row: Row, ours: Row | None) -> dict[str, str | float]:
    """Return a row of the table; ``ours`` is our run at the same peak. Whole errors are in the JSON."""
    return {
        "method": label,
        "budget": "-" if budget is None else f"{budget:.0%}",
        "s/step": cell(row.error, 40) or in_s(row.s_per_step),
        "ours at that peak": "-" if ours is None else cell(ours.error, 40) or in_s(ours.s_per_step),
        "to device, GB/step": in_gb(row.moved_bytes),
        "overlap": "-" if row.overlap is None else f"{row.overlap:.0%}",
        "peak device, GB": in_gb(row.peak_bytes),
        "pinned, GB": in_gb(row.pinned_bytes),
        "host, GB": in_gb(row.host_bytes),
    }


def count_weight_bytes(size: str) -> int:
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel(**SIZES[size]["config"])
    return 2 * sum(weight.numel() for weight in model.parameters())


def budget_key(share: float) -> str:
    return f"{OURS}, {share:.0%}"


def peak_key(peak_bytes: int) -> str:
    return f"{OURS}, peak {peak_bytes}"


def tabulate(rows: Mapping[str, Row], size: str, card: Mapping[str, Any]) -> Result:
    """Return the table of the rows that are there, ours first: of a run that was interrupted, too."""
    weight_bytes = count_weight_bytes(size)
    table = [describe(OURS, share, rows[budget_key(share)], None) for share in BUDGETS if budget_key(share) in rows]
    ratios = []
    for key, row in rows.items():
        if key.startswith(f"{OURS}, "):
            continue
        at_peak = None if row.peak_bytes is None else rows.get(peak_key(row.peak_bytes))
        label, budget = key, None
        if found := re.fullmatch(r"(.*), (\d+)%", key):
            label, budget = found[1], int(found[2]) / 100
        table.append(describe(label, budget, row, at_peak))
        if at_peak and at_peak.s_per_step and row.s_per_step:
            ratios.append(at_peak.s_per_step / row.s_per_step)
    return Result(
        question=(
            f"Seconds per step of a {size} Flux transformer in bf16 with random weights ({weight_bytes / 1e9:.1f} GB) "
            f"on {card['name']}, {card['total_bytes'] / 2**30:.0f} GiB, which pinned memory reaches at "
            f"{card['link_bytes_per_s'] / 1e9:.1f} GB/s; budgets are parts of the weights. Overlap is the part of the "
            "copies' time in which kernels ran. Peaks are the driver's, less what was used before the method began."
        ),
        rows=table,
        ratio=max(ratios, default=math.nan),
        meaning="ours over the others at equal peak, worst of them; below 1 is faster",
    )


def measure(
    size: str = "12B",
    device: str = "cuda:0",
    *,
    folder: Path = RESULTS,
    known: Mapping[str, Row] | None = None,
    note: Callable[[str, Row], None] | None = None,
) -> Result:
    """Measure everything that is here; less than eight minutes.

    Args:
        folder: where `gpu_streaming.json` goes.
        known: rows of an earlier run by key: what they tell of others is not measured again.
        note: takes each row as soon as it is there, with its key.

    Raises:
        SystemExit: no GPU here, nothing is measured.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("benchmarks gpu_streaming: no GPU that torch can use; nothing was measured")
    end_s = time.monotonic() + TOTAL_S

    def left_s() -> float:
        return end_s - time.monotonic()

    machine, problem = run_worker(Request(method="machine", size=size, device=device), 60)
    if not machine or machine[0].error:
        raise SystemExit(f"benchmarks gpu_streaming: {device} does not answer: {problem}")
    card = machine[0].notes
    weight_bytes = count_weight_bytes(size)
    methods = list_methods()
    rows: dict[str, Row] = {}

    def take(key: str, row: Row) -> None:
        rows[key] = row
        if note is not None:
            note(key, row)

    for method in methods:
        if known and method.key in known:
            rows[method.key] = known[method.key]
        else:
            take(method.key, run_method(method, size, device, weight_bytes, left_s() - OURS_S))
    peaks = [*dict.fromkeys(row.peak_bytes for row in rows.values() if row.peak_bytes is not None)]
    ours = run_ours(size, device, weight_bytes, peaks, max(30.0, left_s()))
    for key, row in zip([*map(budget_key, BUDGETS), *map(peak_key, peaks)], ours, strict=True):
        take(key, row)
    record = {
        "machine": card,
        "weight_bytes": weight_bytes,
        OURS: [asdict(row) for row in ours],
        "others": [{"method": method.label, "budget": method.budget, **asdict(rows[method.key])} for method in methods],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_streaming.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return tabulate(rows, size, card)
