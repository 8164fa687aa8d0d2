"""The subgraph that loads three models with one profile: listed by the host, well formed, inserted by its page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from highwater.tests.comfyui.host_process import HostFiles, HostProcess
from highwater.tests.comfyui.page_script import PageScript

ROOT = Path(__file__).parents[2]
DEVICE_BYTES = 1844 << 20
NAME = "Load with Profile (Highwater)"
FILE = ROOT / "subgraphs" / f"{NAME}.json"


def test_the_host_lists_the_blueprint(cpu_host: HostProcess) -> None:
    listed = cpu_host.get("/global_subgraphs")
    [(entry_id, entry)] = [item for item in listed.items() if item[1]["info"]["node_pack"] == "custom_nodes.highwater"]
    assert entry["name"] == NAME
    assert json.loads(cpu_host.get(f"/global_subgraphs/{entry_id}")["data"]) == json.loads(FILE.read_text())


def test_the_blueprint_fits_the_live_nodes(
    cpu_host: HostProcess, graph_problems: Callable[[Any, Any], list[str]]
) -> None:
    graph = json.loads(FILE.read_text())
    [subgraph] = graph["definitions"]["subgraphs"]
    [whole] = graph["nodes"]
    links = [
        [link["id"], link["origin_id"], link["origin_slot"], link["target_id"], link["target_slot"], link["type"]]
        for link in subgraph["links"]
    ]
    ends = [
        {"id": -10, "type": "Note", "inputs": [], "outputs": as_slots(subgraph["inputs"], "links")},
        {"id": -20, "type": "Note", "outputs": [], "inputs": as_slots(subgraph["outputs"], "link")},
    ]
    assert graph_problems({"nodes": [*subgraph["nodes"], *ends], "links": links}, cpu_host.get("/object_info")) == []
    assert [given["name"] for given in whole["inputs"]] == [given["name"] for given in subgraph["inputs"]]
    assert [given["type"] for given in whole["outputs"]] == ["MODEL", "CLIP", "VAE"]


def as_slots(given: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [{**slot, name: slot["linkIds"] if name == "links" else slot["linkIds"][0]} for slot in given]


def test_the_page_inserts_it_in_both_renderers(
    host_files: HostFiles,
    frontend_arguments: list[str],
    in_page: PageScript,
    tmp_path: Path,
) -> None:
    """About 50 s."""
    (tmp_path / "no_models").mkdir()
    example = ROOT / "workflows" / "highwater-first-image.json"
    with HostProcess(
        host_files, models=tmp_path / "no_models", total_bytes=[DEVICE_BYTES], arguments=frontend_arguments
    ) as host:
        in_page.run("blueprint.mjs", host, [NAME, example])
