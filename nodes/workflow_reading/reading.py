"""Reads a workflow of either format: the API's, or the page's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...memory.errors import InvalidInput, quoted
from .broken_parts import broken_links, broken_nodes, shortened
from .description import WorkflowDescription
from .page_graph import MAX_NODES, is_page_graph, prompt_of_page
from .prompt_reading import PromptReader

__all__ = ["read_workflow"]

EXPECTED = "expected a workflow of ComfyUI: its page's format, or the API format"


def read_workflow(
    graph: Any,
    *,
    source: str = "workflow",
    widgets_of: Callable[[str], Sequence[str] | None] = lambda name: None,
    image_size: Callable[[str], tuple[int, int] | None] = lambda name: None,
) -> WorkflowDescription:
    """Return what a workflow loads and computes. Runs nothing and reads no file; a thousand nodes take some 50 ms.

    Nodes that are not understood, and what is broken, are named, and all else is read.

    Args:
        graph: as parsed from JSON.
        source: named first in every complaint.
        widgets_of: by class of nodes that are not known here, the names of their widgets in order; for the page's
            format.
        image_size: width and height in pixels of an image that a node loads, by its name.

    Raises:
        InvalidInput: no workflow, one of more than 5,000 nodes, links that form a cycle, or widgets of a Precision or
            Watermark node that another node gives.
    """
    if not isinstance(graph, Mapping):
        raise InvalidInput(f"{source}: is {quoted(graph)}, {EXPECTED}")
    try:
        prompt, broken = prompt_of_page(graph, widgets_of) if is_page_graph(graph) else checked(graph)
        found = PromptReader(prompt, image_size).read()
    except InvalidInput as error:
        raise InvalidInput(f"{source}: {error}") from None
    return replace(found, broken=shortened(broken))


def checked(graph: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the nodes of a graph in API format, or of the request that queues one, and what of it is broken.

    Raises:
        InvalidInput: there are no nodes, or too many.
    """
    inner = graph.get("prompt")
    if isinstance(inner, Mapping) and "class_type" not in inner:
        graph = inner
    prompt = {
        node_id: node
        for node_id, node in graph.items()
        if isinstance(node, Mapping) and isinstance(node.get("class_type"), str)
    }
    if not prompt:
        raise InvalidInput(f"has no nodes, {EXPECTED}")
    if len(prompt) > MAX_NODES:
        raise InvalidInput(f"the workflow has {len(prompt)} nodes; more than {MAX_NODES} are not read")
    return prompt, [*broken_nodes(graph), *broken_links(prompt)]
