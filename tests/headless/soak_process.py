"""Runs three workflows in turn on a simulated device that has room for one of them, and says what each run left.

``python -m highwater.tests.headless.soak_process MODELS OUTPUT NUM_RUNS [COUNTED_RUN...]`` writes one line of JSON for
each run: the resident bytes of the process (`resident_bytes`), page-locked bytes, bytes of the device, and after the
counted runs how many objects of each kind there are. The pictures of a workflow and seed are compared with the first
ones of both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from highwater.headless import simdevice
from highwater.headless.runner.output_cache import OutputCache
from highwater.headless.runner.runner import RunResult, WorkflowRunner
from highwater.headless.runner.workflow import parse_workflow
from highwater.memory import default_manager
from highwater.tests.comfyui.stand_in.highwater_test_held import count_held, resident_bytes

__all__ = ["ANEW_EVERY"]

MIB = 1 << 20
WORKFLOWS = Path(__file__).parents[2] / "headless" / "workflows"
NAMES = ("demo_flux", "demo_sd", "demo_wan")
NUM_SEEDS = 5
# The results of three workflows and of some runs: a picture that a later run asks for again is not among them.
CACHED_RESULTS = 16
ANEW_EVERY = 30
"""After so many runs all pipelines are forgotten, and loaded again by the next ones."""


def graph_of(name: str, seed: int) -> dict[str, Any]:
    graph = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    for node in graph.values():
        if "seed" in node["inputs"]:
            node["inputs"] |= {"seed": seed, "steps": 1, "width": 32, "height": 32}
    return graph  # type: ignore[no-any-return]


def take_pictures(result: RunResult, output: Path) -> str:
    """Return a digest of the pictures of a run, and remove them."""
    digest = hashlib.sha256()
    for shown in result.outputs.values():
        for image in shown.get("images", ()):
            path = output / image["subfolder"] / image["filename"]
            with Image.open(path) as picture:
                digest.update(picture.convert("RGB").tobytes())
            path.unlink()
    return digest.hexdigest()


def soak(models: str, output: Path, num_runs: int, counted: set[int]) -> None:
    torch.set_num_threads(1)
    simdevice.install("sim", num_devices=1)
    with simdevice.cluster([simdevice.SimDeviceSpec(total_bytes=64 * MIB)]):  # leaving it fails if bytes are left
        manager = default_manager()
        cache = OutputCache(max_entries=CACHED_RESULTS)
        runner = WorkflowRunner(manager, models_directory=models, output_directory=output, cache=cache)
        pictures: dict[tuple[str, int], str] = {}
        for turn in range(num_runs):
            name, seed = NAMES[turn % len(NAMES)], turn // len(NAMES) % NUM_SEEDS
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # the report, as text
                result = runner.run(parse_workflow(graph_of(name, seed)), name=name)
            digest = take_pictures(result, output)
            assert pictures.setdefault((name, seed), digest) == digest, f"run {turn + 1}: another picture"
            manager.ledger.check()
            told = {
                **resident_bytes(),
                "pinned": simdevice.pinned().used_bytes,
                "device": simdevice.stats(0).used_bytes,
                "evictions": sum(run.num_evictions for run in list(manager.event_log.runs)[-1:]),
                "executed": len(result.executed),
            }
            if turn + 1 in counted:
                told["held"] = {**count_held(), "components": len(manager.members), "results": len(cache.entries)}
                told["books"] = {place: manager.ledger.used(place) for place in ("gpu:0", "pinned", "host")}
            print(json.dumps(told), flush=True)
            if (turn + 1) % ANEW_EVERY == 0:
                runner.forget_results()
        runner.forget_results()
        manager.ledger.check()
        assert manager.report()["components"] == []


if __name__ == "__main__":
    models, output, num_runs, *counted = sys.argv[1:]
    try:
        soak(models, Path(output), int(num_runs), {int(turn) for turn in counted})
    except simdevice.CompilerMissing as error:
        sys.exit(f"NOT TESTED: {error}")
