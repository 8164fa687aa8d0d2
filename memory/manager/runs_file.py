"""The file of what workflows needed at their last runs, so that an update that costs memory shows in the next process.

It holds digests, sizes, byte counts and the chosen precision, profile, placement and engine: no name, path or prompt.
If it cannot be used, only that comparison is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["RUNS_FILE_NAME", "RunsFile", "StoredRun", "digest_name"]

RUNS_FILE_NAME = "runs.json"
FORMAT = 1
MAX_WORKFLOWS = 200
MAX_FILE_BYTES = 4 << 20
LARGEST_BYTES = 1 << 50

StoredRun = Mapping[str, Mapping[str, Any]]
"""By the digest of a component: ``weight_bytes``, ``activation_bytes`` and ``choices``, which are texts by name."""


def digest_name(name: str) -> str:
    """Return the digest that stands for a name."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class RunsFile:
    """Reads and writes one small JSON file; never raises for what it finds on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, StoredRun]:
        """Return the last run of each workflow by its digest, the oldest first; what is not ours is left out."""
        try:
            if self.path.stat().st_size > MAX_FILE_BYTES:
                return {}
            stored = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(stored, dict) or stored.get("format") != FORMAT or not isinstance(stored.get("runs"), dict):
            return {}
        return {key: run for key, run in stored["runs"].items() if is_run(run)}

    def write(self, workflow: str, run: StoredRun) -> bool:
        """Replace the last run of a workflow, given by its digest; returns whether that succeeded.

        The file is moved into place in one step. Of two processes that write at once, one may lose its run.
        """
        runs = {key: known for key, known in self.read().items() if key != workflow}
        kept = [*runs.items(), (workflow, run)][-MAX_WORKFLOWS:]
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as workspace:
                finished = Path(workspace, self.path.name)
                finished.write_text(json.dumps({"format": FORMAT, "runs": dict(kept)}), encoding="utf-8")
                os.replace(finished, self.path)
            return True
        return False


def is_run(run: object) -> bool:
    return isinstance(run, dict) and all(is_component(component) for component in run.values())


def is_component(component: object) -> bool:
    if not isinstance(component, dict) or not isinstance(component.get("choices"), dict):
        return False
    sizes = [component.get("weight_bytes"), component.get("activation_bytes")]
    are_sizes = all(type(size) is int and 0 <= size <= LARGEST_BYTES for size in sizes)
    return are_sizes and all(isinstance(text, str) for text in component["choices"].values())
