"""Our texts in languages that ComfyUI's page has and lacks, and what the settings of the display change."""

from __future__ import annotations

import json
from pathlib import Path

from highwater.tests.comfyui.graphs import Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostFiles, HostProcess
from highwater.tests.comfyui.page_script import PageScript

DEVICE_BYTES = 1844 << 20


def test_texts_units_badges_and_keys(
    host_files: HostFiles,
    models: Path,
    frontend_arguments: list[str],
    in_page: PageScript,
    tmp_path: Path,
) -> None:
    """About 40 s."""
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders().diffusion_model(graph)))
    workflow = tmp_path / "workflow.json"
    workflow.write_text(json.dumps(graph.nodes))
    with HostProcess(host_files, models=models, total_bytes=[DEVICE_BYTES], arguments=frontend_arguments) as host:
        in_page.run("languages.mjs", host, [workflow])
