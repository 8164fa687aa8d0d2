"""Graphs in the page's own format, as `workflows/` has them: as the prompts that the page would queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["prompt_of"]

NOTES = ("MarkdownNote", "Note")
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
CONTROL = "control_after_generate"  # a widget that the page adds beside a seed; prompts do not have it


def prompt_of(graph: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """Return a graph in API format; ``info`` is the host's ``object_info``."""
    links = {link[0]: [str(link[1]), link[2]] for link in graph["links"]}
    prompt = {}
    for node in graph["nodes"]:
        if node["type"] in NOTES:
            continue
        sockets = {**info[node["type"]]["input"].get("required", {}), **info[node["type"]]["input"].get("optional", {})}
        values = iter(node["widgets_values"])
        inputs = {}
        for name, spec in sockets.items():
            if isinstance(spec[0], list) or spec[0] in WIDGETS:
                inputs[name] = next(values)
                if len(spec) > 1 and spec[1].get(CONTROL):
                    next(values)
        inputs |= {given["name"]: links[given["link"]] for given in node["inputs"] if given["link"] is not None}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt
