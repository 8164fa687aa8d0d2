"""Graphs in the page's format: subgraphs, reroutes, primitives, muted and bypassed nodes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from highwater.headless.comfy_stub import comfy_api
from highwater.memory.errors import InvalidInput

comfy_api.install()
from highwater.nodes.workflow_reading.description import DIFFUSION, Call, WorkflowDescription  # noqa: E402
from highwater.nodes.workflow_reading.page_graph import prompt_of_page  # noqa: E402
from highwater.nodes.workflow_reading.reading import read_workflow  # noqa: E402

PACK = Path(__file__).parents[3]
FLUX = json.loads((PACK / "workflows/highwater-flux-8gb.json").read_text(encoding="utf-8"))
WAN = json.loads((PACK / "workflows/highwater-wan-12gb.json").read_text(encoding="utf-8"))
BLUEPRINT = json.loads((PACK / "subgraphs/Load with Profile (Highwater).json").read_text(encoding="utf-8"))


def copied(graph: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(graph)


def the(graph: dict[str, Any], name: str, place: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = [node for node in graph["nodes"] if node["type"] == name][place]
    return found


def without_names(description: WorkflowDescription) -> list[Any]:
    """Return what does not depend on the ids of nodes."""
    return [
        [(model.kind, model.files, model.asked, len(model.loras)) for model in description.models],
        [(use.call, use.model, use.size, use.steps, use.prompt, use.conds, use.tiling) for use in description.uses],
    ]


def splice(graph: dict[str, Any], target: dict[str, Any], input_name: str, node: dict[str, Any]) -> None:
    """Put a node with one input and one output into the link to an input."""
    given = next(each for each in target["inputs"] if each["name"] == input_name)
    link = next(each for each in graph["links"] if each[0] == given["link"])
    node |= {"inputs": [{"name": "", "type": link[5], "link": link[0]}], "outputs": [{"name": "", "type": link[5]}]}
    new_link = max(each[0] for each in graph["links"]) + 1
    graph["links"].append([new_link, node["id"], 0, link[3], link[4], link[5]])
    link[3], link[4] = node["id"], 0
    given["link"] = new_link
    graph["nodes"].append(node)


@pytest.mark.parametrize("node", [{"type": "Reroute"}, {"type": "Anything", "mode": 4}], ids=["reroute", "bypassed"])
def test_reroutes_and_bypassed_nodes_pass_on(node: dict[str, Any]) -> None:
    graph = copied(FLUX)
    splice(graph, the(graph, "KSampler"), "model", {"id": 900, **node})
    splice(graph, the(graph, "VAEDecode"), "vae", {"id": 901, **node})
    assert read_workflow(graph) == read_workflow(FLUX)


def test_a_muted_loader_is_not_there() -> None:
    graph = copied(FLUX)
    the(graph, "HighwaterLoadDiffusionModel")["mode"] = 2
    found = read_workflow(graph)
    assert DIFFUSION not in [model.kind for model in found.models]
    (sampled,) = [use for use in found.uses if use.call is Call.SAMPLE]
    assert sampled.model is None and sampled.unknown == ("model: node 8 (KSampler): model is not linked",)


def test_a_bypassed_lora_is_not_applied() -> None:
    graph = copied(WAN)
    assert all(use.loras for use in read_workflow(graph).uses if use.call is Call.SAMPLE)
    for place in (0, 1):
        the(graph, "LoraLoaderModelOnly", place)["mode"] = 4
    assert not any(use.loras for use in read_workflow(graph).uses)


def test_a_primitive_gives_its_value() -> None:
    graph = copied(FLUX)
    latent = the(graph, "EmptySD3LatentImage")
    given = next(each for each in latent["inputs"] if each["name"] == "width")
    given["link"] = 950
    graph["links"].append([950, 960, 0, latent["id"], 0, "INT"])
    graph["nodes"].append({"id": 960, "type": "PrimitiveNode", "widgets_values": [640, "fixed"], "inputs": []})
    (sampled,) = [use for use in read_workflow(graph).uses if use.call is Call.SAMPLE]
    assert sampled.size is not None and (sampled.size.width, sampled.size.height) == (640, 1024)


def test_older_pages_list_no_widgets_among_the_inputs() -> None:
    for graph in (FLUX, WAN):
        older = copied(graph)
        for node in older["nodes"]:
            node["inputs"] = [each for each in node["inputs"] if "widget" not in each or each["link"] is not None]
        assert read_workflow(older) == read_workflow(graph)


@pytest.mark.parametrize(
    ("values", "size"),
    [
        (["scale total pixels", 1.0, "area"], (1448, 720)),
        (["scale dimensions", 320, 256, "center", "area"], (320, 256)),
        (["scale longer dimension", 512, "lanczos"], (512, 256)),
        (["scale to multiple", 64, "area"], None),
    ],
)
def test_widgets_that_another_one_chooses_are_read(values: list[Any], size: tuple[int, int] | None) -> None:
    graph = {
        "nodes": [
            {"id": 1, "type": "EmptyImage", "widgets_values": [1600, 800, 1, 0]},
            {
                "id": 2,
                "type": "ResizeImageMaskNode",
                "widgets_values": values,
                "inputs": [{"name": "input", "link": 1}],
            },
            {"id": 3, "type": "VAEEncode", "inputs": [{"name": "pixels", "link": 2}]},
            {"id": 4, "type": "SaveLatent", "inputs": [{"name": "samples", "link": 3}]},
        ],
        "links": [[place, place, 0, place + 1, 0, "*"] for place in (1, 2, 3)],
    }
    (encoded,) = read_workflow(graph).uses
    assert (encoded.size and (encoded.size.width, encoded.size.height)) == size


def in_subgraph(graph: dict[str, Any], name: str = "sub") -> dict[str, Any]:
    """Return a graph with all nodes inside a subgraph but for the last two; a link and a widget lead in, one out."""
    graph = copied(graph)
    decode, save = the(graph, "VAEDecode"), the(graph, "SaveImage")
    text = the(graph, "CLIPTextEncode")
    (picture,) = [link for link in graph["links"] if link[3] == save["id"]]
    graph["links"].remove(picture)
    given = next(each for each in text["inputs"] if each["name"] == "text")
    given["link"] = 801
    inner_links = [dict(zip(("id", "origin_id", "origin_slot", "target_id", "target_slot", "type"), link, strict=True))
                   for link in graph["links"]]  # fmt: skip
    inner_links += [
        {"id": 800, "origin_id": decode["id"], "origin_slot": 0, "target_id": -20, "target_slot": 0, "type": "IMAGE"},
        {"id": 801, "origin_id": -10, "origin_slot": 0, "target_id": text["id"], "target_slot": 1, "type": "STRING"},
    ]
    inner = {
        "id": name,
        "name": "Everything",
        "inputs": [{"name": "prompt", "type": "STRING", "linkIds": [801]}],
        "outputs": [{"name": "IMAGE", "type": "IMAGE", "linkIds": [800]}],
        "nodes": [node for node in graph["nodes"] if node is not save],
        "links": inner_links,
    }
    given = {"name": "prompt", "type": "STRING", "widget": {"name": "prompt"}, "link": None}
    instance = {"id": 99, "type": name, "outputs": [{"type": "IMAGE"}], "widgets_values": [], "inputs": [given]}
    save["inputs"][0]["link"] = 900
    graph |= {"nodes": [instance, save], "links": [[900, 99, 0, save["id"], 0, "IMAGE"]]}
    graph["definitions"] = {"subgraphs": [inner, *graph.get("definitions", {}).get("subgraphs", [])]}
    return graph


def test_a_subgraph_reads_as_its_nodes() -> None:
    found = read_workflow(in_subgraph(FLUX))
    assert without_names(found) == without_names(read_workflow(FLUX))
    assert {use.node.id.partition(":")[0] for use in found.uses} == {"99"}


def test_an_input_of_a_subgraph_counts_in_place_of_the_widget_inside() -> None:
    graph = in_subgraph(FLUX)
    graph["nodes"][0]["widgets_values"] = ["outside"]
    assert read_workflow(graph).uses[0].prompt == "outside"
    graph["nodes"][0]["inputs"][0]["link"] = 901
    graph["links"].append([901, 70, 0, 99, 0, "STRING"])
    graph["nodes"].append({"id": 70, "type": "PrimitiveStringMultiline", "widgets_values": ["linked"], "inputs": []})
    assert read_workflow(graph).uses[0].prompt == "linked"


def test_widgets_that_a_subgraph_shows_have_its_values() -> None:
    graph = in_subgraph(FLUX)
    sampler = the(graph["definitions"]["subgraphs"][0], "KSampler")
    graph["nodes"][0] |= {"properties": {"proxyWidgets": [[str(sampler["id"]), "steps"]]}, "widgets_values": [33]}
    (sampled,) = [use for use in read_workflow(graph).uses if use.call is Call.SAMPLE]
    assert sampled.steps == 33


@pytest.mark.parametrize("mode", [2, 4])
def test_a_muted_or_bypassed_subgraph_does_not_run(mode: int) -> None:
    graph = in_subgraph(FLUX)
    graph["nodes"][0]["mode"] = mode
    found = read_workflow(graph)
    assert not found.models and not found.uses


def test_our_blueprint_loads_three_models() -> None:
    found = read_workflow(BLUEPRINT)
    assert [model.kind for model in found.models] == ["diffusion", "text", "vae"] and not found.unknown
    assert all(model.files and model.is_ours for model in found.models)


def test_a_subgraph_inside_itself_is_refused_in_one_line() -> None:
    graph = in_subgraph(FLUX)
    graph["definitions"]["subgraphs"][0]["nodes"].append({"id": 5000, "type": "sub", "inputs": [], "outputs": []})
    with pytest.raises(
        InvalidInput, match=r"^x: subgraph 'Everything': is nested more than 32 deep, or contains itself"
    ):
        read_workflow(graph, source="x")


def test_subgraphs_that_multiply_are_refused() -> None:
    levels = [
        {"id": f"s{level}", "nodes": [{"id": i, "type": f"s{level + 1}"} for i in range(20)], "links": []}
        for level in range(10)
    ]
    with pytest.raises(InvalidInput, match="more than 5000 nodes"):
        read_workflow({"nodes": [{"id": 1, "type": "s0"}], "links": [], "definitions": {"subgraphs": levels}})


def test_ids_inside_are_those_that_the_page_queues() -> None:
    prompt, _ = prompt_of_page(in_subgraph(FLUX), lambda name: None)
    assert prompt[str(the(FLUX, "SaveImage")["id"])]["inputs"]["images"] == [f"99:{the(FLUX, 'VAEDecode')['id']}", 0]
