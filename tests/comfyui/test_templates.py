"""The templates that ComfyUI comes with: all are read, and what their widgets are called is what it says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from highwater.headless.comfy_stub import comfy_api
from highwater.tests.comfyui.host_process import HostFiles

comfy_api.install()
from highwater.nodes.workflow_reading.description import Call  # noqa: E402
from highwater.nodes.workflow_reading.reading import read_workflow  # noqa: E402
from highwater.nodes.workflow_reading.widget_names import KNOWN_WIDGETS  # noqa: E402

SCRIPT = Path(__file__).with_name("core_widgets.py")
PACK = Path(__file__).parents[2]
# Of other packs: ComfyUI-GGUF's loaders, and ours.
OTHERS = (
    "Highwater",
    "UnetLoaderGGUF",
    "CLIPLoaderGGUF",
    "DualCLIPLoaderGGUF",
    "TripleCLIPLoaderGGUF",
    "QuadrupleCLIP",
)
# Nodes of single models that few workflows have, and what none of ours can say of them.
NOT_UNDERSTOOD = {"TripoSplatConditioning", "SeedVR2TemporalChunk", "SeedVR2TemporalMerge"}


@pytest.fixture(scope="module")
def templates(host_files: HostFiles) -> dict[str, Any]:
    """The graphs in the packages that the host's page takes its templates from, and its blueprints of subgraphs."""
    roots = [*host_files.python.parents[1].glob("lib/python*/site-packages"), host_files.directory / "blueprints"]
    paths = [path for root in roots for path in root.glob("comfyui_workflow_templates*/**/*.json")]
    paths += (host_files.directory / "blueprints").glob("*.json")
    graphs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    found = {name: graph for name, graph in graphs.items() if isinstance(graph, dict) and "nodes" in graph}
    if not found:
        pytest.skip("NOT TESTED: no templates beside ComfyUI; pip install comfyui-workflow-templates")
    return found


def test_all_templates_are_read(templates: dict[str, Any]) -> None:
    unknown: dict[str, str] = {}
    calls = 0
    for name, graph in templates.items():
        found = read_workflow(graph, source=name)
        unknown |= {node.class_type: name for node in found.unknown}
        for use in found.uses:
            calls += 1
            assert use.model is not None, (name, use.node.label)
            assert use.size is not None or use.unknown or use.call in (Call.ENCODE_TEXT, Call.OTHER), (name, use)
            assert use.call is not Call.SAMPLE or use.steps is not None or use.unknown, (name, use)
        assert all(model.files or model.unknown for model in found.models), name
    assert set(unknown) <= NOT_UNDERSTOOD, unknown
    assert calls > len(templates)


def test_the_widgets_of_core_are_those_that_its_classes_name(host_files: HostFiles, tmp_path: Path) -> None:
    output = tmp_path / "widgets.json"
    command = [str(host_files.python), str(SCRIPT), str(PACK), str(output)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=host_files.directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    installed = json.loads(output.read_text())
    known = {name: list(widgets) for name, widgets in KNOWN_WIDGETS.items() if not name.startswith(OTHERS)}
    assert {name: installed.get(name) for name in known} == known
