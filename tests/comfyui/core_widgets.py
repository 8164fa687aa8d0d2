"""Writes the widgets of all installed nodes, as our adaptor and as ComfyUI's own description tells them.

usage: core_widgets.py PACK OUTPUT.json   (in ComfyUI's folder, by its Python; PACK is imported as highwater)
"""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path

pack, output = sys.argv[1:]
sys.path.insert(0, ".")
sys.argv[1:] = ["--cpu"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import nodes  # noqa: E402

asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
spec = importlib.util.spec_from_file_location("highwater", Path(pack, "__init__.py"), submodule_search_locations=[pack])
sys.modules["highwater"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["highwater"])
from highwater.nodes.host.node_widgets import widgets_of  # noqa: E402


class Broken:
    @classmethod
    def INPUT_TYPES(cls) -> None:
        raise OSError("no disk")


nodes.NODE_CLASS_MAPPINGS["Broken"] = Broken
assert widgets_of("Broken") is None and widgets_of("Missing") is None
with open(output, "w") as file:
    json.dump({name: widgets_of(name) for name in nodes.NODE_CLASS_MAPPINGS}, file)
