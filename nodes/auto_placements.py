"""Where loaders of ComfyUI's models put what is left to ``auto``: as the plan of their whole workflow says.

[Note: auto placements] A loader runs alone, but what it should choose follows from all that the workflow loads. So the
first one that says ``auto`` plans the whole workflow, and the others take theirs from that plan. ComfyUI keeps a loaded
model as long as its node keeps its inputs, and a model that is there does not move because another one comes: a plan of
a changed workflow takes what was chosen before as given. A loader that runs again with the same inputs loads anew, as
after ComfyUI gave its model up: then it is chosen anew, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..memory.errors import DoesNotFit, InvalidInput
from ..memory.options.placement import AUTO
from .default_profile import profile_fingerprint
from .device_choices import DEFAULT, accelerator_names
from .forecast.queue_forecast import remember
from .open_placements import ChosenPlacement
from .prompts import is_link

if TYPE_CHECKING:
    from .described_hardware import Hardware
    from .workflow_plans import WorkflowPlan

__all__ = ["choose_placement", "plan_as_chosen"]

WIDGET = "placement"
DIFFUSION_NODES = ("HighwaterLoadDiffusionModel", "HighwaterLoadCheckpoint", "HighwaterManageModel")
# Core's nodes that need a diffusion model on the device that ComfyUI computes on, or say themselves where it computes.
STAYING = ("ControlNetLoader", "DiffControlNetLoader", "MultiGPU_WorkUnits", "SelectModelDevice")
chosen_before: dict[str, ChosenPlacement] = {}
"""By node and its inputs, the latest last."""
taken: dict[str, None] = {}
"""Those of them by which a model was loaded."""


def choose_placement(graph: Mapping[str, Any] | None, node_id: str | None) -> tuple[str, list[str]]:
    """Return where a loader whose widget says ``auto`` computes, as the widget takes it, and what it says about that.

    ``default`` where there are not two GPUs to choose from, and where the workflow cannot be planned. The first loader
    of a workflow reads the headers of all its models, which takes about a second; the others look it up.

    Args:
        graph: the prompt that runs, in API format.
        node_id: of the loader, or of the Manage node.
    """
    if len(accelerator_names()) < 2:
        return DEFAULT, []
    if graph is None or node_id not in graph:
        return DEFAULT, [f"placement {AUTO}: this node is not one of the workflow's own, so {DEFAULT} is used"]
    stays = why_stays(graph, node_id)
    if stays:
        return DEFAULT, [f"placement {AUTO}: {DEFAULT} is used, as {stays}"]
    graph = with_text(graph, node_id, AUTO)  # it may come over a link
    key = key_of(graph, node_id)
    if key in taken:
        chosen_before.pop(key, None)
        del taken[key]
    if key not in chosen_before:
        try:
            planned = plan_as_chosen(graph)
        except (DoesNotFit, InvalidInput) as error:
            return DEFAULT, [f"placement {AUTO}: {DEFAULT} is used, as the workflow cannot be planned: {error}"]
        for other, found in planned.chosen.items():
            if other in graph:
                remember(chosen_before, key_of(graph, other), found)
    chosen = chosen_before.get(key)
    remember(taken, key, None)
    if chosen is None:
        return DEFAULT, [f"placement {AUTO}: the plan of this workflow does not have this model, so {DEFAULT} is used"]
    why = f": {'; '.join(chosen.why)}" if chosen.why else ""
    return chosen.text, [f"placement {AUTO} chooses {chosen.text}{why}"]


def plan_as_chosen(graph: Mapping[str, Any], hardware: Hardware | None = None) -> WorkflowPlan:
    """Plan a workflow as its loaders choose: on this machine with what they chose before as given. Raises as
    `plan_graph`.

    Args:
        hardware: another machine, for which nothing was chosen yet.
    """
    from .graph_plans import plan_graph

    known = graph
    for node_id, node in graph.items():
        inputs = node.get("inputs") if isinstance(node, Mapping) else None
        given = inputs.get(WIDGET) if isinstance(inputs, Mapping) else None
        if given == AUTO or is_link(given, graph):
            chosen = chosen_before.get(key_of(graph, node_id))
            if given == AUTO and why_stays(graph, node_id):
                known = with_text(known, node_id, DEFAULT)
            elif chosen is not None and hardware is None:
                known = with_text(known, node_id, chosen.text)
    return plan_graph(known, source="this workflow", hardware=hardware)


def why_stays(graph: Mapping[str, Any], node_id: str) -> str:
    """Return why a diffusion model has to stay where ComfyUI computes it; empty where it may compute elsewhere."""
    if graph[node_id].get("class_type") not in DIFFUSION_NODES:
        return ""
    classes = {id: node.get("class_type") for id, node in graph.items() if isinstance(node, Mapping)}
    found = next((f"node {id} ({name})" for id, name in classes.items() if name in STAYING), "")
    return found and f"{found} works with a model on ComfyUI's own device, or says where it computes"


def with_text(graph: Mapping[str, Any], node_id: str, text: str) -> dict[str, Any]:
    """Return a prompt in which a node's widget has another text."""
    node = graph[node_id]
    return {**graph, node_id: {**node, "inputs": {**node["inputs"], WIDGET: text}}}


def key_of(graph: Mapping[str, Any], node_id: str) -> str:
    """Return what tells a loader and what it loads, as it is asked to, from all others; but for where it computes."""
    node = graph[node_id]
    inputs = {name: value for name, value in node["inputs"].items() if name != WIDGET}
    profile = profile_fingerprint(inputs.get("profile"))
    return json.dumps([node_id, node.get("class_type"), inputs, profile], sort_keys=True, default=str)
