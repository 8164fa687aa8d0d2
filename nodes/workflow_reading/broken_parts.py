"""What of a workflow's graph is broken, so that no plan counts it: a line for each node or link."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...memory.errors import one_line, quoted
from ..prompts import is_link

__all__ = ["broken_links", "broken_nodes", "label_of", "shortened", "why_no_node"]

MAX_LINES = 20


def broken_nodes(graph: Mapping[str, Any]) -> list[str]:
    """Return which entries of a graph in API format are no nodes, and why; not what lies beside its nodes."""
    linked = {
        value[0]
        for node in graph.values()
        if isinstance(node, Mapping) and isinstance(node.get("inputs"), Mapping)
        for value in node["inputs"].values()
        if looks_linked(value)
    }
    return [
        f"node {quoted(node_id)}: {why}; it is left out"
        for node_id, node in graph.items()
        if (why := why_no_node(node, "class_type")) and (node_id in linked or not lies_beside(node_id, node))
    ]


def lies_beside(key: str, value: Any) -> bool:
    """Whether an entry is one of the request that queued a prompt, such as `extra_data`: nothing of a node is in it."""
    has_parts = isinstance(value, Mapping) and ("class_type" in value or "inputs" in value)
    return not has_parts and not str(key).replace(":", "").isdigit()


def why_no_node(node: Any, class_key: str) -> str:
    """Return why something in a graph is no node; empty for one."""
    if not isinstance(node, Mapping):
        return f"is {quoted(node)}, no node"
    found = node.get(class_key)
    if isinstance(found, str):
        return ""
    return f"has no {class_key}" if found is None else f"its {class_key} is {quoted(found)}"


def broken_links(prompt: Mapping[str, Any]) -> list[str]:
    """Return which inputs of nodes in API format are linked to nodes that are not there."""
    lines = []
    for node_id, node in prompt.items():
        inputs = node.get("inputs")
        for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
            if looks_linked(value) and not is_link(value, prompt):
                told = f"{label_of(node_id, node['class_type'])}: input {quoted(name)} is linked to node"
                lines.append(f"{told} {quoted(value[0])}, which is not in the workflow")
    return lines


def looks_linked(value: Any) -> bool:
    """Whether a value is a link as ComfyUI reads it, wherever it leads."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int)
        and not isinstance(value[1], bool)
    )


def label_of(node_id: str, class_type: Any) -> str:
    return one_line(f"node {node_id} ({class_type})")


def shortened(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the first of these lines, each once, and how many more there are."""
    lines = list(dict.fromkeys(lines))
    more = len(lines) - MAX_LINES
    return (*lines[:MAX_LINES], f"{more} more nodes or links are broken") if more > 0 else tuple(lines)
