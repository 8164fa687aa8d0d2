"""The memory panel in ComfyUI's own page, in a real browser: bars, components, buttons, watermark and events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from highwater.benchmarks.badges import PANEL
from highwater.tests.comfyui.graphs import Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostFiles, HostProcess
from highwater.tests.comfyui.page_script import PageScript

DEVICE_BYTES = 1844 << 20


@pytest.mark.expects_errors
def test_the_panel_shows_and_changes_what_the_server_has(
    host_files: HostFiles,
    models: Path,
    frontend_arguments: list[str],
    in_page: PageScript,
    tmp_path: Path,
) -> None:
    """About 60 s. A host of its own: nothing is loaded when the panel opens."""
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders().diffusion_model(graph)))
    waiting = Graph()
    model = Loaders().diffusion_model(waiting)
    trouble = {"kind": "wait for interrupt", "module": "diffusion_model.single_blocks.1.linear2", "call": 2}
    model = waiting.add("TestTrouble", model=model, **trouble)
    waiting.keep(sample_flux(waiting, model))
    files = [tmp_path / "workflow.json", tmp_path / "waiting.json"]
    for path, prompt in zip(files, (graph, waiting), strict=True):
        path.write_text(json.dumps(prompt.nodes))
    with HostProcess(
        host_files, models=models, total_bytes=[DEVICE_BYTES, DEVICE_BYTES], arguments=frontend_arguments
    ) as host:
        in_page.run("panel.mjs", host, [*files, PANEL])
