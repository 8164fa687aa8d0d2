"""Which components a loader shows: its own, those of an equal result, those called like its file; no one else's."""

from __future__ import annotations

from typing import Any

from highwater.memory.manager.forecast import KnownComponent
from highwater.nodes.forecast.prompt_graph import PromptGraph
from highwater.nodes.loaders import Loaders

CORE = {"class_type": "UNETLoader", "inputs": {"unet_name": "sub/flux.safetensors"}}
OURS = {"class_type": "HighwaterLoadDiffusionModel", "inputs": {"unet_name": "flux.safetensors", "profile": "4"}}


def part(id: str, node_id: str | None = None, workflow_id: str | None = None) -> KnownComponent:
    return KnownComponent(id=id, name=id.partition("#")[0], kind="diffusion", node_id=node_id, workflow_id=workflow_id)


def shown(graph: dict[str, Any], *parts: KnownComponent, workflow: str | None = "w") -> dict[str, list[str]]:
    loaders = Loaders()
    loaders.read(PromptGraph(graph, workflow_id=workflow))
    return {row["node_id"]: row["components"] for row in loaders.rows(parts) if row["workflow_id"] == workflow}


def test_a_loader_of_the_hosts_shows_what_is_called_like_its_file() -> None:
    graph = {"1": CORE, "2": {"class_type": "KSampler", "inputs": {"model": ["1", 0]}}}
    assert shown(graph, part("flux"), part("t5")) == {"1": ["flux"]}
    assert shown(graph, part("flux/transformer")) == {"1": ["flux/transformer"]}
    assert shown(graph) == {}


def test_what_another_node_manages_is_shown_by_the_loader_before_it_too() -> None:
    graph = {"1": CORE, "2": {"class_type": "HighwaterManageModel", "inputs": {"model": ["1", 0]}}}
    assert shown(graph, part("flux", "2", "w")) == {"1": ["flux"], "2": ["flux"]}


def test_two_loaders_of_one_file_show_their_own_and_no_other_workflows() -> None:
    graph = {"1": OURS, "2": {**OURS, "inputs": {**OURS["inputs"], "profile": "1"}}, "3": CORE}
    own = [part("flux", "1", "w"), part("flux#2", "2", "w"), part("flux#3", "1", "v"), part("flux#4", "1", None)]
    assert shown(graph, *own) == {"1": ["flux"], "2": ["flux#2"]}
    assert shown(graph, *own, part("flux#5")) == {"1": ["flux"], "2": ["flux#2"], "3": ["flux#5"]}
    assert shown(graph, *own[2:]) == {}


def test_a_loader_that_is_gone_is_forgotten() -> None:
    loaders = Loaders()
    loaders.read(PromptGraph({"1": OURS}, workflow_id="w"))
    loaders.read(PromptGraph({"1": OURS}, workflow_id="v"))
    loaders.read(PromptGraph({"2": OURS}, workflow_id="w"))
    rows = loaders.rows([part("flux", "1", "w"), part("flux", "1", "v")])
    assert [(row["node_id"], row["workflow_id"]) for row in rows] == [("1", "v")]
