"""Which components a loader shows: its own, those of an equal result, those called like its file; no one else's."""

from __future__ import annotations

from typing import Any

from highwater.memory.manager.forecast import KnownComponent
from highwater.nodes.forecast.prompt_graph import PromptGraph
from highwater.nodes.loaders import Loaders

CORE = {"class_type": "UNETLoader", "inputs": {"unet_name": "sub/flux.safetensors"}}
OURS = {"class_type": "HighwaterLoadDiffusionModel", "inputs": {"unet_name": "flux.safetensors", "profile": "4"}}


CONTROL = {"class_type": "ControlNetLoader", "inputs": {"control_net_name": "canny.safetensors"}}


def unnamed(id: str, kind: str = "control") -> KnownComponent:
    """One whose loader leaves no file's name with it: it is called like its class."""
    return KnownComponent(id=id, name=id, kind=kind, node_id=None, workflow_id=None, names_file=False)


def applied(*loaders: str) -> dict[str, Any]:
    """Return nodes that take a ControlNet from loaders."""
    node = {"class_type": "ControlNetApply"}
    return {f"apply {id}": {**node, "inputs": {"control_net": [id, 0]}} for id in loaders}


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


def test_of_results_that_are_kept_a_loader_shows_the_models_of_the_one_that_it_gives_now() -> None:
    """It showed those of all its inputs so far together, as long as the host kept their results."""
    loaders = Loaders()
    graphs = [{"1": {**OURS, "inputs": {**OURS["inputs"], "profile": profile}}} for profile in "123"]
    prompts = [PromptGraph(graph, workflow_id="w") for graph in graphs]
    parts: list[KnownComponent] = []

    def shown_after(prompt: PromptGraph, *computed: KnownComponent) -> list[str]:
        loaders.read(prompt)
        if computed:
            loaders.note_computed(prompt.digests["1"], "1", "w", parts)
            parts.extend(computed)
        [row] = loaders.rows(parts)
        return row["components"]

    assert shown_after(prompts[0], part("flux/t", "1", "w"), part("flux/v", "1", "w")) == ["flux/t", "flux/v"]
    assert shown_after(prompts[1], part("flux#2/t", "1", "w")) == ["flux#2/t"]
    assert shown_after(prompts[0]) == ["flux/t", "flux/v"]  # a kept result
    assert shown_after(prompts[1]) == ["flux#2/t"]
    # What is dropped gives its id to what comes next.
    del parts[2]
    assert shown_after(prompts[2], part("flux#2/t", "1", "w")) == ["flux#2/t"]
    assert shown_after(prompts[0]) == ["flux/t", "flux/v"]


def test_a_loader_that_is_gone_is_forgotten() -> None:
    loaders = Loaders()
    loaders.read(PromptGraph({"1": OURS}, workflow_id="w"))
    loaders.read(PromptGraph({"1": OURS}, workflow_id="v"))
    loaders.read(PromptGraph({"2": OURS}, workflow_id="w"))
    rows = loaders.rows([part("flux", "1", "w"), part("flux", "1", "v")])
    assert [(row["node_id"], row["workflow_id"]) for row in rows] == [("1", "v")]


def test_one_model_without_its_files_name_belongs_to_the_one_loader_of_its_kind() -> None:
    vision = {"class_type": "CLIPVisionLoader", "inputs": {"clip_name": "clip_vision.safetensors"}}
    encode = {"class_type": "CLIPVisionEncode", "inputs": {"clip_vision": ["2", 0]}}
    graph = {"1": CONTROL, "2": vision, "3": CORE, "4": encode, **applied("1")}
    parts = [unnamed("ControlNet"), unnamed("Vision", "vision"), part("flux")]
    assert shown(graph, *parts) == {"1": ["ControlNet"], "2": ["Vision"], "3": ["flux"]}
    assert shown(graph, unnamed("Other", "vae"), unnamed("Any", "other")) == {}
    assert shown(graph, part("ControlNet")) == {}, "what is called like its file has another loader"


def test_of_several_models_or_loaders_of_a_kind_nothing_tells_which_is_whose() -> None:
    other = {**CONTROL, "inputs": {"control_net_name": "depth.safetensors"}}
    assert shown({"1": CONTROL, **applied("1")}, unnamed("ControlNet"), unnamed("ControlNet#2")) == {}
    assert shown({"1": CONTROL, "2": other, **applied("1", "2")}, unnamed("ControlNet")) == {}
    equal = {"1": CONTROL, "2": {**CONTROL}, **applied("1", "2")}
    assert shown(equal, unnamed("ControlNet")) == {"1": ["ControlNet"], "2": ["ControlNet"]}


def came_in(prompt: PromptGraph, node_id: str, id: str, kind: str = "control", **fields: bool) -> KnownComponent:
    """Return a component that the host showed in a node's result."""
    result = prompt.digests[node_id]
    return KnownComponent(id=id, name=id, kind=kind, node_id=None, workflow_id=None, result=result, **fields)


def test_a_loader_shows_what_came_in_its_result_whatever_it_is_called() -> None:
    other = {**CONTROL, "inputs": {"control_net_name": "depth.safetensors"}}
    graph = {"1": CONTROL, "2": other, "3": CORE, "4": CORE, **applied("1", "2")}
    prompt = PromptGraph(graph, workflow_id="w")
    parts = [
        came_in(prompt, "2", "ControlNet", names_file=False),
        came_in(prompt, "1", "ControlNet#2", names_file=False),
        came_in(prompt, "3", "flux", "diffusion"),
    ]
    equal = {"3": ["flux"], "4": ["flux"]}
    assert shown(graph, *parts) == {"1": ["ControlNet#2"], "2": ["ControlNet"], **equal}
    assert shown(graph, *parts, workflow=None) == {"1": ["ControlNet#2"], "2": ["ControlNet"], **equal}
    # The same file, read with another dtype, is another model.
    changed = {"3": {**CORE, "inputs": {**CORE["inputs"], "weight_dtype": "fp8_e4m3fn"}}}
    assert shown(changed, *parts) == {}
    assert shown({"1": {**CONTROL, "inputs": {"control_net_name": "new.safetensors"}}, **applied("1")}, *parts) == {}


def test_what_came_before_anyone_looked_may_be_in_a_later_result() -> None:
    loaders = Loaders()
    assert not loaders.trace("lora", ["a loader that did not run"])
    assert not loaders.trace("lora on lora", ["lora", "text"])
    assert loaders.trace("loader", [])
    assert loaders.trace("text", [])
    assert loaders.trace("lora on loader", ["loader", "text"])


def test_what_passes_a_model_on_or_manages_it_is_not_its_loader() -> None:
    lora = {"class_type": "LoraLoaderModelOnly", "inputs": {"lora_name": "a.safetensors", "model": ["1", 0]}}
    graph = {"1": CORE, "2": lora, "3": {"class_type": "KSampler", "inputs": {"model": ["2", 0]}}}
    assert shown(graph, part("flux"), unnamed("Flux", "diffusion")) == {"1": ["flux"]}
    ours = {"class_type": "HighwaterLoadControlNet", "inputs": CONTROL["inputs"]}
    assert shown({"1": ours, **applied("1")}, unnamed("ControlNet")) == {}
    assert shown({"1": CONTROL}, unnamed("ControlNet")) == {}, "nothing says what it gives"
