"""What a prompt says: whether it names a node of ours, what its workflow is, what its nodes are called."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

__all__ = [
    "HALF",
    "NAME_ENDING",
    "OUR_PREFIX",
    "digests_of",
    "invalid_character",
    "is_link",
    "name_of_run",
    "names_our_node",
    "title_of",
    "workflow_id_of",
]

OUR_PREFIX = "Highwater"
# Behind the display name of each node of ours: core has nodes of the same names, and its search finds both.
NAME_ENDING = " (Highwater)"
# Halves of characters in UTF-16, which UTF-8 cannot encode.
HALF = re.compile("[\ud800-\udfff]")


def names_our_node(graph: Any) -> bool:
    """Whether a graph in API format, checked or not, holds a node of this pack."""
    nodes = graph.values() if isinstance(graph, Mapping) else ()
    return any(isinstance(node, Mapping) and str(node.get("class_type")).startswith(OUR_PREFIX) for node in nodes)


def workflow_id_of(extra_data: Any) -> str | None:
    """Return the id of the workflow that a page queued; a prompt from elsewhere has none, or anything."""
    found = extra_data
    for key in ("extra_pnginfo", "workflow", "id"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, str) else None


def name_of_run(graph: Mapping[str, Mapping[str, Any]], workflow_id: str | None) -> str:
    """Return what runs of a workflow are called: its id, or else the same for prompts of equal nodes and links.

    Values do not count: a script that asks for another picture runs the same workflow.
    """
    if workflow_id:
        return workflow_id
    nodes = [
        (
            node_id,
            node.get("class_type"),
            {n: v for n, v in sorted(node.get("inputs", {}).items()) if is_link(v, graph)},
        )
        for node_id, node in sorted(graph.items())
    ]
    text = json.dumps(nodes, default=str)
    return f"prompt {hashlib.blake2b(text.encode(errors='replace'), digest_size=4).hexdigest()}"


def digests_of(graph: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return for each node of a graph in API format what its results follow from: its class, its values, and the same
    of the nodes that it is linked to. Nodes of two workflows with one digest share a result that the host keeps."""
    digests: dict[str, str] = {}
    waiting = list(graph)
    seen: set[str] = set()
    while waiting:
        node_id = waiting[-1]
        inputs = graph[node_id].get("inputs", {})
        sources = [value[0] for value in inputs.values() if is_link(value, graph)]
        missing = [source for source in sources if source not in digests and source not in seen]
        seen.add(node_id)
        if missing and node_id not in digests:
            waiting += missing
            continue
        waiting.pop()
        if node_id not in digests:
            named = {
                name: ["from", digests.get(value[0]), value[1]] if is_link(value, graph) else value
                for name, value in sorted(inputs.items())
            }
            text = json.dumps([graph[node_id].get("class_type"), named], default=str)
            digests[node_id] = hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
    return digests


def is_link(value: Any, graph: Mapping[str, Any]) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and value[0] in graph


def invalid_character(text: str) -> str | None:
    """Return where a text has half of a character, which no file and no tokenizer takes; None for a valid text."""
    half = HALF.search(text)
    return f"contains an invalid character ({ascii(half[0])[1:-1]}) at position {half.start()}" if half else None


def title_of(node: Mapping[str, Any], default: str | None = None) -> str:
    """Return what the user called a node, else the default: its class. Without our ending: what shows it is ours."""
    meta = node.get("_meta")
    title = meta.get("title") if isinstance(meta, Mapping) else None
    name = title if isinstance(title, str) and title else default or str(node["class_type"])
    return name.removesuffix(NAME_ENDING)
