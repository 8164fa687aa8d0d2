"""python scripts/paths.py [--json]: what a steady forward, an eviction and a profile's text cross on their way.

Counts calls of Python functions (`sys.setprofile`), less those of the plain module on the same device, and the files
and rooms of the engine that they stand in. Runs on a simulated device; nothing here measures time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import highwater
from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.units import MIB

PACK = Path(highwater.__file__).resolve().parent
NUM_BLOCKS = 12
NUM_WARM = 4
# For each path, by what is counted: the target, and the count before the paths were shortened.
FORWARD_MARKS = {"files": (8, 24), "calls": (400, 1657)}
PROFILE_MARKS = {"parsed": (1, 5)}


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x))


class Stack(nn.Module):
    """A transformer as far as its tree goes."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.head = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_pack(file: str) -> str:
    """Return the path of a file in the pack; empty for other files."""
    path = Path(file).resolve() if file.startswith("/") else Path()
    return path.relative_to(PACK).as_posix() if path.is_relative_to(PACK) else ""


class Calls:
    """The calls of Python functions in a stretch of a program, in order."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str]] = []

    @contextmanager
    def recorded(self) -> Iterator[Calls]:
        def note(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                self.made.append((frame.f_code.co_filename, frame.f_code.co_qualname))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            yield self
        finally:
            sys.setprofile(before)
            self.made = self.made[: -1 if self.made else None]  # the exit of this function

    @property
    def ours(self) -> list[str]:
        """The engine's and the nodes' files of the calls, relative to the pack, one for each call."""
        return [file for name, _ in self.made if (file := in_pack(name)) and file.startswith(("memory/", "nodes/"))]


# -- the three paths


def count_forward() -> dict[str, Any]:
    """Count what a forward of resident blocks adds to the plain module's, after it was warmed up."""
    x = torch.zeros(1, 64, device="sim:0")
    with torch.no_grad():
        plain = Stack().eval().to("sim:0")
        plain(x)
        with Calls().recorded() as alone:
            plain(x)
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        model = Stack().eval()
        with manage(model, manager=manager, placement="gpu:0"):
            for _ in range(NUM_WARM):
                model(x)
            with Calls().recorded() as managed:
                model(x)
    calls = Counter(managed.made)
    calls.subtract(Counter(alone.made))
    files = Counter(managed.ours)
    return {
        "path": f"a steady forward of {NUM_BLOCKS} resident blocks",
        "files": len(files),
        "calls": sum(calls.values()),
        "marks": FORWARD_MARKS,
        "calls by file": dict(files.most_common()),
    }


def count_eviction() -> dict[str, Any]:
    """Count the engine's calls in a forward before which another component has to leave."""
    simdevice.configure([simdevice.SimDeviceSpec(total_bytes=8 * MIB)])
    manager = MemoryManager()
    manager.set_watermark("*", 0, 0)
    models = [Stack(dim=256).eval() for _ in range(2)]
    x = torch.zeros(1, 256, device="sim:0")
    with torch.no_grad():
        handles = [manage(model, manager=manager, placement="gpu:0") for model in models]
        for turn in range(2 * NUM_WARM):
            models[turn % 2](x)
        with Calls().recorded() as made:
            models[0](x)
        evictions = [event for event in manager.report()["events"] if event["kind"] == "evict"]
        for handle in handles:
            handle.release()
    assert evictions, "nothing was evicted"
    files = Counter(made.ours)
    return {
        "path": "a forward that evicts another component",
        "files": len(files),
        "calls": sum(files.values()),
        "calls by file": dict(files.most_common()),
    }


def count_profile() -> dict[str, Any]:
    """Count how often a loader node's profile is read and planned with, and what lies between node and plan."""
    from highwater.headless.runner.runner import WorkflowRunner
    from highwater.headless.runner.workflow import load_workflow
    from highwater.memory.options import profile
    from highwater.memory.planner import planning, replanning
    from highwater.nodes.pipelines.tiny_pipelines import ensure_pipelines

    simdevice.configure([simdevice.SimDeviceSpec(total_bytes=64 * MIB)])
    parse, make = profile.parse_profile.__code__, planning.plan_components.__code__
    again = replanning.replan.__code__
    counts: Counter[str] = Counter()
    stacks: list[list[str]] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event != "call":
            return
        counts["parsed"] += frame.f_code is parse
        counts["planned"] += frame.f_code in (make, again)
        if frame.f_code is make:
            stack = []
            while frame is not None:
                stack.append(in_pack(frame.f_code.co_filename))
                frame = frame.f_back
            stacks.append(stack[::-1])

    with TemporaryDirectory() as folder:
        models, out = Path(folder, "models"), Path(folder, "out")
        ensure_pipelines(models)
        runner = WorkflowRunner(MemoryManager(), models_directory=models, output_directory=out)
        sys.setprofile(note)
        try:
            workflow = load_workflow(PACK / "headless" / "workflows" / "demo_sd.json")
            runner.run(workflow, name="paths")
        finally:
            sys.setprofile(None)
    path = [file for file, _ in groupby(filter(None, stacks[0]))]
    path = path[next(number for number, file in enumerate(path) if file.startswith("nodes/")) :]
    return {
        "path": "a loader node's profile on its way to the plan",
        "files": len(set(path)),
        "parsed": counts["parsed"],
        "marks": PROFILE_MARKS,
        "plans of the run": counts["planned"],
        "by": path,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    simdevice.install("sim", num_devices=1)
    simdevice.configure([simdevice.SimDeviceSpec(total_bytes=1 << 32)])
    rows = [count_forward(), count_eviction(), count_profile()]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(row.pop("path"))
        marks = row.pop("marks", {})
        for name, value in row.items():
            told = ", ".join(f"{file} {number}" for file, number in value.items()) if isinstance(value, dict) else value
            mark = " (target {}, before {})".format(*marks[name]) if name in marks else ""
            print(f"  {name}: {' -> '.join(told) if isinstance(told, list) else told}{mark}")


if __name__ == "__main__":
    main()
