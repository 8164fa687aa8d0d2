"""The advice at the end of `highwater run`, and what a run with the advised budget says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from highwater.nodes.texts import MAX_LENGTH

WORKFLOW = Path(__file__).parents[3] / "headless" / "workflows" / "demo_flux.json"
# Its weights come so slowly that a pass waits for them.
DEVICES = "gpu:0=64MiB@0.05GB/s"


def advice_of(profile: str, models: Path, folder: Path) -> list[str]:
    """Return the last lines of a run of the tiny Flux with a profile."""
    graph = json.loads(WORKFLOW.read_text())
    graph["2"]["inputs"]["profile"] = profile
    path = folder / "flux.json"
    path.write_text(json.dumps(graph))
    command = [
        sys.executable,
        "-m",
        "highwater",
        "run",
        path,
        "--devices",
        DEVICES,
        "--models",
        models,
        "--out",
        folder,
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    title, *lines = done.stdout.rstrip().splitlines()[-3:]
    assert title.startswith("Advice") and all(len(line.strip()) <= MAX_LENGTH for line in lines)
    return [line.strip() for line in lines]


def test_who_raises_the_budget_as_told_waits_no_more(sim: Any, models_directory: Path, tmp_path: Path) -> None:
    """About 30 s."""
    limit, change = advice_of("auto,transformer=12MiB", models_directory, tmp_path)
    told = r"The last run waited .+ s for weights that stream to gpu:0 \(tiny-flux/transformer, \d+ of 12 blocks\)"
    assert re.fullmatch(told, limit), limit
    found = re.match(r"Raise the budget of tiny-flux/transformer \(transformer=12MiB\) to (\d+MiB): ", change)
    assert found, change
    assert advice_of(f"auto,transformer={found[1]}", models_directory, tmp_path) == [
        "Nothing limits it: all weights were resident, after 37.9MiB were loaded",
        "Nothing to change: the next run finds them loaded.",
    ]
