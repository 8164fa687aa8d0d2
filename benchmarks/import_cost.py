"""What starting the pack costs: from its first line to the last of its node definitions, in processes of their own.

The pack is imported from its folder, as ComfyUI does it; then come ``comfy_entrypoint``, ``on_load``, the list of nodes
and every schema. The clock starts when everything is there that a host has loaded by then, torch above all. Only the
first row starts from the bare interpreter; it counts the stand-ins of the headless host, too, which does not list the
nodes for ComfyUI's models: their schemas name the devices, and that takes torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from highwater.tests.comfyui.host_process import HostFiles, bytecode_directory, find_host

from .case import Result

TARGET_MS = 100.0
NUM_RUNS = 7
REPOSITORY = Path(__file__).resolve().parents[1]
PHASES = ("import", "entry point", "on_load", "schemas")
HEAVY = (
    "accelerate", "aiohttp", "comfy", "diffusers", "matplotlib", "numpy", "optimum", "PIL", "psutil", "rich",
    "safetensors", "torch", "transformers",
)  # fmt: skip

STAND_INS = """
from highwater.headless.comfy_stub import comfy_api
comfy_api.install()
"""

# As much of ComfyUI as the pack looks at when it starts, and of what ComfyUI has loaded by then.
STAND_IN_HOST = f"""
import aiohttp.web, psutil, torch, types
{STAND_INS}
comfy = sys.modules["comfy"] = types.ModuleType("comfy")
comfy.__spec__ = importlib.util.spec_from_loader("comfy", loader=None)
server = sys.modules["server"] = types.ModuleType("server")
instance = types.SimpleNamespace(routes=aiohttp.web.RouteTableDef(), add_on_prompt_handler=lambda handler: None)
server.PromptServer = types.SimpleNamespace(instance=instance)
"""

# What ComfyUI's main.py does before it comes to custom nodes.
COMFYUI = """
import asyncio, logging
import comfy.options
comfy.options.enable_args_parsing()
import execution, nodes, server
logging.disable(logging.WARNING)
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
server.PromptServer(loop)
loop.run_until_complete(nodes.init_builtin_extra_nodes())
"""

# The command line is "--base-directory PATH --cpu": see `Start.run`.
NO_BYTECODE = "sys.pycache_prefix = os.path.join(sys.argv[2], 'bytecode')"

PROBE = """
import importlib.util, json, os, sys, time
{before_the_clock}

def finish(coroutine):
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the pack waits for something while it starts")

known = set(sys.modules)
marks = [time.perf_counter()]
{on_the_clock}
name = {folder!r}.replace(".", "_x_")
spec = importlib.util.spec_from_file_location(name, os.path.join({folder!r}, "__init__.py"))
pack = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
marks.append(time.perf_counter())
extension = finish(pack.comfy_entrypoint())
marks.append(time.perf_counter())
if "server" in sys.modules:
    finish(extension.on_load())
marks.append(time.perf_counter())
num_nodes = len([node.GET_SCHEMA() for node in finish(extension.get_node_list())])
marks.append(time.perf_counter())
loaded = set(sys.modules) - known
heavy = {{module.partition(".")[0] for module in loaded}} & {heavy}
phases_ms = [1e3 * (end - begin) for begin, end in zip(marks, marks[1:])]
print(json.dumps([phases_ms, num_nodes, len(loaded), sorted(heavy)]))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One way to start: what is loaded before the clock runs, and what counts beside the pack."""

    label: str
    python: Path = Path(sys.executable)
    directory: Path | None = None
    before_the_clock: str = ""
    on_the_clock: str = ""

    def run(self) -> tuple[list[float], int, int, list[str]]:
        """Start once; returns the milliseconds of each phase, the nodes, the modules loaded, and the heavy ones."""
        script = PROBE.format(
            folder=str(REPOSITORY),
            heavy=set(HEAVY),
            before_the_clock=self.before_the_clock,
            on_the_clock=self.on_the_clock,
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPYCACHEPREFIX": str(bytecode_directory())}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        with tempfile.TemporaryDirectory(prefix="highwater-start-") as base:
            command = [str(self.python), "-c", script, "--base-directory", base, "--cpu"]
            done = subprocess.run(
                command, cwd=self.directory or base, env=environment, capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise SystemExit(f"benchmarks import_cost: {self.label} failed:\n{done.stderr[-2000:]}")
        phases_ms, num_nodes, num_modules, heavy = json.loads(done.stdout.splitlines()[-1])
        return phases_ms, num_nodes, num_modules, heavy

    def row(self) -> dict[str, Any]:
        """Start several times after one that does not count; the times are medians, each of its own column."""
        self.run()
        runs = [self.run() for _ in range(NUM_RUNS)]
        _, num_nodes, num_modules, heavy = runs[0]
        phases = dict(zip(PHASES, zip(*(phases_ms for phases_ms, *_ in runs), strict=True), strict=True))
        totals = [sum(phases_ms) for phases_ms, *_ in runs]
        return {
            "loaded before the clock starts": self.label,
            **{f"{phase}, ms": median(times) for phase, times in phases.items()},
            "all, ms": median(totals),
            "slowest, ms": max(totals),
            "nodes": num_nodes,
            "modules": num_modules,
            "heavy ones": ", ".join(heavy) or "none",
        }


def list_starts(comfyui: HostFiles | None) -> list[Start]:
    starts = [
        Start(label="nothing", on_the_clock=STAND_INS),
        Start(label="torch, psutil, aiohttp", before_the_clock=STAND_IN_HOST),
    ]
    if comfyui is not None:
        (version,) = re.findall(r'__version__ = "(.*)"', (comfyui.directory / "comfyui_version.py").read_text())
        real = {"python": comfyui.python, "directory": comfyui.directory}
        starts.append(Start(label=f"ComfyUI {version}", before_the_clock=COMFYUI, **real))
        starts.append(
            Start(label=f"ComfyUI {version}, no bytecode of the pack", before_the_clock=COMFYUI + NO_BYTECODE, **real)
        )
    return starts


def measure() -> Result:
    """Measure from nothing, beside torch and, where there is one, in ComfyUI; about two minutes."""
    comfyui = find_host()
    rows = [start.row() for start in list_starts(comfyui)]
    found = "" if comfyui else " No ComfyUI was found: not measured in it."
    return Result(
        question=(
            "Wall time to import the pack and run its entry point, `on_load` and all node definitions, beyond what was "
            f"loaded before; medians of {NUM_RUNS} fresh processes, without a GPU. The modules, the standard library's "
            f"included, and the heavy ones among them are those that this loads beside what was there.{found}"
        ),
        rows=rows,
        ratio=max(row["all, ms"] for row in rows) / TARGET_MS,
        meaning=f"slowest of the rows' medians over {TARGET_MS:.0f} ms, target at most 1",
    )
