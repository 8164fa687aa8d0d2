"""Write the English texts of the nodes, from which translators work, out of the nodes' schemas.

Usage: python scripts/write_node_texts.py   (writes locales/en/nodeDefs.json; a test compares it)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "locales" / "en" / "nodeDefs.json"


def node_texts(info: dict[str, Any]) -> dict[str, Any]:
    """Return the texts of nodes as ComfyUI reads translations: names, descriptions and tooltips of what is shown.

    Args:
        info: the nodes as ``/object_info`` has them.
    """
    return {node_id: texts_of(node) for node_id, node in info.items()}


def texts_of(node: dict[str, Any]) -> dict[str, Any]:
    sockets = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
    inputs = {
        name: named(options.get("display_name") or name, options.get("tooltip"))
        for name, (_, options) in sockets.items()
    }
    tooltips = node.get("output_tooltips") or [None] * len(node["output_name"])
    outputs = {
        str(at): named(name, tip) for at, (name, tip) in enumerate(zip(node["output_name"], tooltips, strict=True))
    }
    texts = {
        "display_name": node["display_name"],
        "description": node["description"],
        "inputs": inputs,
        "outputs": outputs,
    }
    return {name: text for name, text in texts.items() if text}


def named(name: str, tooltip: str | None) -> dict[str, str]:
    return {"name": name, **({"tooltip": tooltip} if tooltip else {})}


def main() -> None:
    from highwater.headless.comfy_stub.comfy_api import install, object_info

    install()
    from highwater.nodes.extension import MODEL_NODES, NODE_CLASSES

    texts = node_texts(object_info([*NODE_CLASSES, *MODEL_NODES]))
    TARGET.write_text(json.dumps(texts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
