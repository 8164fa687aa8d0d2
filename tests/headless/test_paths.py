"""What a steady forward crosses stays short: `scripts/paths.py` counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_paths_are_short_and_texts_are_read_once() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "paths.py", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    forward, eviction, profile = json.loads(done.stdout)
    assert 0 < forward["calls"] <= 250
    assert forward["files"] <= 28
    assert eviction["calls by file"]["memory/manager/eviction.py"]
    assert profile["parsed"] == 1
    assert profile["by"][0].startswith("nodes/") and profile["by"][-1] == "memory/planner/planning.py"
