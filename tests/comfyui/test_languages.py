"""Our texts in languages that ComfyUI's page has and lacks, and what the settings of the display change."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from highwater.tests.comfyui.graphs import Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostFiles, HostProcess
from highwater.tests.web.conftest import chromium, node, packages  # noqa: F401 (fixtures)

DEVICE_BYTES = 1844 << 20
SCRIPT = Path(__file__).with_name("languages.mjs")


def test_texts_units_badges_and_keys(
    host_files: HostFiles,
    models: Path,
    node: str,  # noqa: F811
    packages: Path,  # noqa: F811
    chromium: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    """About 40 s."""
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders().diffusion_model(graph)))
    workflow = tmp_path / "workflow.json"
    workflow.write_text(json.dumps(graph.nodes))
    with HostProcess(host_files, models=models, total_bytes=[DEVICE_BYTES]) as host:
        command = [node, SCRIPT, f"http://127.0.0.1:{host.port}", chromium, tmp_path, workflow]
        result = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=1200, check=False
        )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
