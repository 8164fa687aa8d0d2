"""The memory panel in ComfyUI's own page, in a real browser: bars, components, buttons, watermark and events."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from highwater.tests.comfyui.graphs import Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostFiles, HostProcess
from highwater.tests.web.conftest import chromium, node, packages  # noqa: F401 (fixtures)

DEVICE_BYTES = 1844 << 20
SCRIPT = Path(__file__).with_name("panel.mjs")


@pytest.mark.expects_errors
def test_the_panel_shows_and_changes_what_the_server_has(
    host_files: HostFiles,
    models: Path,
    node: str,  # noqa: F811
    packages: Path,  # noqa: F811
    chromium: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """About 60 s. A host of its own: nothing is loaded when the panel opens."""
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders().diffusion_model(graph)))
    waiting = Graph()
    model = Loaders().diffusion_model(waiting)
    trouble = {"kind": "wait for interrupt", "module": "diffusion_model.single_blocks.1.linear2", "call": 1}
    model = waiting.add("TestTrouble", model=model, **trouble)
    waiting.keep(sample_flux(waiting, model))
    files = [tmp_path / "workflow.json", tmp_path / "waiting.json"]
    for path, prompt in zip(files, (graph, waiting), strict=True):
        path.write_text(json.dumps(prompt.nodes))
    with HostProcess(host_files, models=models, total_bytes=[DEVICE_BYTES, DEVICE_BYTES]) as host:
        command = [node, SCRIPT, f"http://127.0.0.1:{host.port}", chromium, tmp_path, *files]
        result = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=1200, check=False
        )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
