"""Templates, texts and help pages agree with the nodes: each is written by hand, and a node changes quickly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from highwater.headless.comfy_api import install, object_info
from highwater.headless.page_files import FIRST_TEMPLATE, TEMPLATES, WEB

install()
INFO = object_info()
LOCALES = sorted((WEB.parent / "locales").iterdir())
GRAPHS = [path for path in sorted(TEMPLATES.glob("*.json")) if "nodes" in json.loads(path.read_text())]
CONTROL = "control_after_generate"  # a widget that the page adds beside a seed


def widget_names(node_id: str) -> list[str]:
    """Return the widgets of a node in the page's order."""
    inputs = INFO[node_id]["input"]
    sockets = {**inputs["required"], **inputs.get("optional", {})}
    names = []
    for name, (kind, options) in sockets.items():
        if kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"):
            names += [name, CONTROL] if options.get(CONTROL) else [name]
    return names


def test_the_first_template_is_there():
    assert FIRST_TEMPLATE in [path.stem for path in GRAPHS]


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_a_template_fits_the_nodes(path: Path):
    graph = json.loads(path.read_text())
    nodes = {node["id"]: node for node in graph["nodes"]}
    for node in nodes.values():
        if node["type"] == "MarkdownNote":
            continue
        info = INFO[node["type"]]
        assert len(node["widgets_values"]) == len(widget_names(node["type"])), node["type"]
        assert [output["type"] for output in node["outputs"]] == info["output"]
        known = {name for names in info["input_order"].values() for name in names}
        assert {given["name"] for given in node["inputs"]} <= known
    for _, source, output, target, slot, kind in graph["links"]:
        assert nodes[source]["outputs"][output]["type"] == kind
        assert nodes[target]["inputs"][slot]["type"] in (kind, "*")


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_a_template_has_a_picture(path: Path):
    assert path.with_suffix(".jpg").is_file()


@pytest.mark.parametrize("folder", LOCALES, ids=lambda folder: folder.name)
def test_translations_name_what_there_is(folder: Path):
    texts = json.loads((folder / "nodeDefs.json").read_text())
    assert texts.keys() == INFO.keys()
    for node_id, text in texts.items():
        sockets = INFO[node_id]["input"]
        inputs = {*sockets["required"], *sockets.get("optional", {})}
        assert text.get("inputs", {}).keys() <= inputs
        if folder.name == "en":  # the schema's own language may only repeat it
            assert text == {"display_name": INFO[node_id]["display_name"]}


@pytest.mark.parametrize("node_id", INFO)
def test_every_node_has_a_help_page_that_explains_its_inputs(node_id: str):
    page = (WEB / "docs" / f"{node_id}.md").read_text()
    assert page.startswith(f"# {INFO[node_id]['display_name']}\n")
    sockets = INFO[node_id]["input"]
    explained = {name for name in {*sockets["required"], *sockets.get("optional", {})} if f"**{name}**" in page}
    assert explained == {*sockets["required"], *sockets.get("optional", {})}


def test_the_scripts_folder_holds_scripts_and_help_only():
    """The host imports every script below it, also one that was meant for tests."""
    found = {path.relative_to(WEB).as_posix() for path in WEB.rglob("*") if path.is_file()}
    assert found == {"extension.js", "readout.js", *(f"docs/{node_id}.md" for node_id in INFO)}
