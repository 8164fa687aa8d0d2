"""Where loaders of ComfyUI's models put what is left to ``auto``: as the plan of their whole workflow says.

[Note: auto placements] A loader runs alone, but what it should choose follows from all that the workflow loads. So the
first one that says ``auto`` plans the whole workflow, and the others take theirs from that plan. A choice holds as long
as its node keeps its inputs: ComfyUI keeps the model, too, and a model that is there does not move because another one
comes. A workflow that changes is planned with what was chosen before as given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..memory.errors import DoesNotFit, InvalidInput
from ..memory.options.placement import AUTO
from .device_choices import DEFAULT, accelerator_names
from .forecast.queue_forecast import remember
from .open_placements import ChosenPlacement

if TYPE_CHECKING:
    from .workflow_plans import WorkflowPlan

__all__ = ["choose_placement", "plan_as_chosen"]

WIDGET = "placement"
chosen_before: dict[str, ChosenPlacement] = {}
"""By node and its inputs, the latest last."""


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
    graph = with_text(graph, node_id, AUTO)  # it may come over a link
    key = key_of(graph, node_id)
    if key not in chosen_before:
        try:
            plan_as_chosen(graph)
        except (DoesNotFit, InvalidInput) as error:
            return DEFAULT, [f"placement {AUTO}: {DEFAULT} is used, as the workflow cannot be planned: {error}"]
    chosen = chosen_before.get(key)
    if chosen is None:
        return DEFAULT, [f"placement {AUTO}: the plan of this workflow does not have this model, so {DEFAULT} is used"]
    why = f": {'; '.join(chosen.why)}" if chosen.why else ""
    return chosen.text, [f"placement {AUTO} chooses {chosen.text}{why}"]


def plan_as_chosen(graph: Mapping[str, Any]) -> WorkflowPlan:
    """Plan a workflow on this machine, with what was chosen before as given; remember what is chosen now.

    Raises as `plan_graph`.
    """
    from .graph_plans import plan_graph

    known = graph
    for node_id in graph:
        chosen = chosen_before.get(key_of(graph, node_id))
        if chosen is not None:
            known = with_text(known, node_id, chosen.text)
    planned = plan_graph(known, source="this workflow")
    for node_id, chosen in planned.chosen.items():
        if node_id in graph:
            remember(chosen_before, key_of(graph, node_id), chosen)
    return planned


def with_text(graph: Mapping[str, Any], node_id: str, text: str) -> dict[str, Any]:
    """Return a prompt in which a node's widget has another text."""
    node = graph[node_id]
    return {**graph, node_id: {**node, "inputs": {**node["inputs"], WIDGET: text}}}


def key_of(graph: Mapping[str, Any], node_id: str) -> str:
    """Return what tells a node and its inputs from all others."""
    node = graph[node_id]
    return json.dumps([node_id, node.get("class_type"), node.get("inputs")], sort_keys=True, default=str)
