"""ComfyUI's own model classes over two devices, in its own Python: the same bits, whatever core does between blocks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from highwater.tests.comfyui.host_process import HostFiles

SCRIPT = Path(__file__).parent / "own_models.py"
# Those whose parents compute between blocks in ways of their own.
SELECTED = ["flux_patched", "flux2", "chroma", "hidream", "cosmos", "wan_vace", "qwen_image"]


def compare(files: HostFiles, names: list[str], folder: Path) -> list[str]:
    """Return what differs, by model. The script imports the package by its name, whatever its folder is called."""
    (folder / "highwater").symlink_to(SCRIPT.parents[2])
    command = [files.python, SCRIPT, files.directory, *names]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert not names or [result["name"] for result in results] == names
    return [f"{result['name']}: {result['problems']}" for result in results if result["problems"]]


@pytest.mark.comfyui_cpu
def test_models_whose_parents_compute_between_blocks(host_files: HostFiles, tmp_path: Path) -> None:
    assert compare(host_files, SELECTED, tmp_path) == []


@pytest.mark.slow
@pytest.mark.comfyui_cpu
def test_every_model(host_files: HostFiles, tmp_path: Path) -> None:
    assert compare(host_files, [], tmp_path) == []
