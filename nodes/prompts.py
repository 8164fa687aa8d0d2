"""What a prompt says: whether it names a node of ours, what its workflow is, what its nodes are called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["half_character", "names_our_node", "title_of", "workflow_id_of"]

OUR_PREFIX = "Highwater"
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


def half_character(text: str) -> str | None:
    """Return where a text holds half of a character, which no file and no tokenizer takes; None for a good text."""
    half = HALF.search(text)
    return f"holds half of a character ({ascii(half[0])[1:-1]}) at position {half.start()}" if half else None


def title_of(node: Mapping[str, Any], default: str | None = None) -> str:
    """Return what the user called a node, else the default: its class."""
    meta = node.get("_meta")
    title = meta.get("title") if isinstance(meta, Mapping) else None
    return title if isinstance(title, str) and title else default or str(node["class_type"])
