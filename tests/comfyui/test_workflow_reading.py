"""What is read off our examples is what ComfyUI does: it takes their prompts, in this order, with these models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from highwater.headless.comfy_stub import comfy_api
from highwater.tests.comfyui.host_process import HostProcess

comfy_api.install()
from highwater.nodes.workflow_reading.page_graph import prompt_of_page  # noqa: E402
from highwater.nodes.workflow_reading.reading import read_workflow  # noqa: E402

WORKFLOWS = Path(__file__).parents[2] / "workflows"


@pytest.mark.parametrize(
    "name", ["highwater-first-image", "highwater-keep-text-encoder", "highwater-release-after-use"]
)
def test_an_example_runs_as_it_is_read(gpu_host: HostProcess, name: str) -> None:
    graph = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    prompt, _ = prompt_of_page(graph, lambda class_type: None)
    (sampler,) = (node for node in prompt.values() if node["class_type"] == "KSampler")
    sampler["inputs"]["seed"] += 1  # the host has no result of it
    (text,) = (node for node in prompt.values() if node["class_type"] == "CLIPTextEncode")
    text["inputs"]["text"] += f", as in {name}"
    gpu_host.forget()
    prompt_id = gpu_host.queue(prompt)
    gpu_host.wait_for(prompt_id)
    found = read_workflow(prompt)
    report = gpu_host.get("/highwater/report?only=runs,nodes,components&limit=all")
    ran = [node["node_id"] for node in report["nodes"] if node["run_id"] == prompt_id]
    calls = [use.node.id for use in found.uses]
    assert [node_id for node_id in ran if node_id in calls] == calls
    used = {node["node_id"]: node["components"] for node in report["nodes"] if node["run_id"] == prompt_id}
    for use in found.uses:
        assert use.model is not None
        (file,) = found.models[use.model].files
        assert [Path(file).stem in name for name in used[use.node.id]] == [True], (use.node.label, used[use.node.id])
