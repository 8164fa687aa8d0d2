"""Workflows with broken parts: each is named in a line, and all else is read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from highwater.headless.comfy_stub import comfy_api
from highwater.nodes.described_hardware import parse_hardware

comfy_api.install()
from highwater.nodes.workflow_plans import plan_workflow, unread_lines  # noqa: E402
from highwater.nodes.workflow_reading.reading import read_workflow  # noqa: E402

PACK = Path(__file__).parents[3]
PAGES = [*sorted((PACK / "workflows").glob("*.json")), *sorted((PACK / "subgraphs").glob("*.json"))]
FLUX = json.loads((PACK / "workflows/highwater-flux-8gb.json").read_text(encoding="utf-8"))


def graph(**nodes: Any) -> dict[str, Any]:
    loader = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "a.safetensors"}}
    size = {"width": 64, "height": 64, "batch_size": 1}
    prompt = {
        "1": loader,
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": ""}},
        "3": {"class_type": "EmptyLatentImage", "inputs": size},
        "4": {
            "class_type": "KSampler",
            "inputs": {"model": ["1", 0], "positive": ["2", 0], "negative": ["2", 0], "latent_image": ["3", 0],
                       "steps": 4, "cfg": 7.0, "denoise": 1.0},
        },
        "5": {"class_type": "VAEDecode", "inputs": {"samples": ["4", 0], "vae": ["1", 2]}},
        "6": {"class_type": "SaveImage", "inputs": {"images": ["5", 0]}},
    }  # fmt: skip
    return prompt | nodes


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_nothing_of_an_example_is_broken(path: Path) -> None:
    assert read_workflow(json.loads(path.read_text(encoding="utf-8"))).broken == ()


def test_entries_that_are_no_nodes_are_named() -> None:
    broken = graph(a=[1, 2], b={"inputs": {}}, c={"class_type": 7, "inputs": {}}, d=None, e={}, **{"7": None})
    broken["6"]["inputs"] |= {"first": ["a", 0], "second": ["d", 0], "third": ["e", 0]}
    assert read_workflow(broken).broken == (
        "node 'a': is [1, 2], no node; it is left out",
        "node 'b': has no class_type; it is left out",
        "node 'c': its class_type is 7; it is left out",
        "node 'd': is None, no node; it is left out",
        "node 'e': has no class_type; it is left out",
        "node '7': is None, no node; it is left out",
        *(
            f"node 6 (SaveImage): input {name!r} is linked to node {node_id!r}, which is not in the workflow"
            for name, node_id in (("first", "a"), ("second", "d"), ("third", "e"))
        ),
    )
    assert read_workflow(broken).uses == read_workflow(graph()).uses


def test_what_lies_beside_the_nodes_is_none_of_them() -> None:
    """Keys of the request that queues a prompt, at the top level of one."""
    beside = {"client_id": "x", "version": 0.4, "number": None, "extra_data": {"extra_pnginfo": {}}, "targets": ["6"]}
    assert read_workflow(graph(**beside)) == read_workflow(graph())


def test_links_to_nowhere_are_named_and_values_that_look_like_links_are_not() -> None:
    found = graph()
    found["4"]["inputs"] |= {"model": ["99", 0], "sigmas": [1, 2]}
    assert read_workflow(found).broken == (
        "node 4 (KSampler): input 'model' is linked to node '99', which is not in the workflow",
    )


def test_many_broken_parts_are_counted() -> None:
    found = read_workflow(graph(**{f"{number}": 0 for number in range(100, 600)})).broken
    assert len(found) == 21 and found[-1] == "480 more nodes or links are broken"


def test_an_output_that_a_node_is_not_known_to_have_is_named() -> None:
    found = graph()
    found["4"]["inputs"]["model"] = ["1", 9]
    found["5"]["inputs"]["samples"] = ["4", 3]
    lines = [line for use in read_workflow(found).uses for line in use.unknown]
    of_loader = "output 9 of node 1 (CheckpointLoaderSimple), which is not known to have one"
    assert f"model: node 4 (KSampler): model comes from {of_loader}" in lines
    assert "size: output 3 of node 4 (KSampler), which is not known to have one, does not tell" in lines


@pytest.mark.parametrize("value", [float("inf"), 10**40, 1e300, "9" * 60, -(10**40)])
def test_a_huge_number_is_not_said_to_be_none(value: Any) -> None:
    found = graph()
    found["3"]["inputs"]["width"] = value
    lines = [line for use in read_workflow(found).uses for line in use.unknown]
    assert "size: node 3 (EmptyLatentImage): width is beyond 16777216" in lines
    found["3"]["inputs"]["width"] = "wide"
    lines = [line for use in read_workflow(found).uses for line in use.unknown]
    assert "size: node 3 (EmptyLatentImage): width is not a number" in lines


def test_broken_parts_of_a_page_are_named() -> None:
    page = copy.deepcopy(FLUX)
    sampler = next(node for node in page["nodes"] if node["type"] == "KSampler")
    model, positive = (
        next(each for each in sampler["inputs"] if each["name"] == name) for name in ("model", "positive")
    )
    origin = next(link for link in page["links"] if link[0] == model["link"])
    origin[1] = 4242
    positive["link"] = 99999
    page["nodes"] += [None, {"id": 500}, {"type": "KSampler"}]
    place = len(page["nodes"])
    assert set(read_workflow(page).broken) == {
        f"entry {place - 3} of the nodes: is None, no node; it is left out",
        "node 500: has no type; it is left out",
        f"entry {place - 1} of the nodes: has no id; it is left out",
        f"node {sampler['id']} (KSampler): input 'model' is linked to node 4242, which is not in the workflow",
        f"node {sampler['id']} (KSampler): input 'positive' has link 99999, which is not in the workflow",
    }


def test_of_two_nodes_of_a_page_with_one_id_the_first_is_named() -> None:
    page = copy.deepcopy(FLUX)
    sampler = next(node for node in page["nodes"] if node["type"] == "KSampler")
    page["nodes"].append(copy.deepcopy(sampler) | {"type": "KSamplerAdvanced"})
    assert read_workflow(page).broken == (
        f"node {sampler['id']} (KSampler): another node has its id; it is left out",
    )  # fmt: skip
    page["nodes"][-1]["mode"] = 2
    assert read_workflow(page).broken == ()


def test_a_muted_node_is_not_broken() -> None:
    page = copy.deepcopy(FLUX)
    sampler = next(node for node in page["nodes"] if node["type"] == "KSampler")
    model = next(each for each in sampler["inputs"] if each["name"] == "model")
    origin = next(link[1] for link in page["links"] if link[0] == model["link"])
    next(node for node in page["nodes"] if node["id"] == origin)["mode"] = 2
    assert read_workflow(page).broken == ()


def test_a_plan_names_what_is_broken() -> None:
    described = read_workflow(graph(**{"9": []}))
    with pytest.raises(ValueError, match=r"node '9': is \[\], no node; it is left out; .*'a.safetensors' is not in"):
        plan_workflow(described, parse_hardware("gpu:0=1GiB").machine())


def test_no_title_breaks_a_line_or_colours_it() -> None:
    found = graph(**{"9": []})
    found["3"]["inputs"]["width"] = "wide"
    found["3"]["_meta"] = {"title": "a\nb\x1b[31mc"}
    found["4"]["class_type"] = "K\nSampler\u202e"
    described = read_workflow(found)
    lines = [*described.broken, *(line for use in described.uses for line in use.unknown)]
    lines += [node.label for node in described.unknown]
    assert len(lines) > 2 and all(line.isprintable() for line in lines), lines


def test_what_a_line_says_of_its_own_node_names_it_once() -> None:
    found = graph()
    found["4"]["inputs"]["steps"] = 10**40
    found["3"]["inputs"]["width"] = 0
    lines = unread_lines(read_workflow(found).uses)
    assert "node 4 (KSampler): steps is beyond 16777216" in lines
    nodes = "node 4 (KSampler) and node 5 (VAEDecode)"
    assert f"{nodes}: size: node 3 (EmptyLatentImage): width 0 is less than 8" in lines
