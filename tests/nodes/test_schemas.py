"""What the host's page learns about our nodes, and what listing them costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from highwater import comfy_entrypoint
from highwater.headless.comfy_stub import comfy_api

PIPELINES = {"LoadPipeline", "SamplePipeline", "VerifyPipeline", "SaveImage"}
NAMES = {*PIPELINES, "Watermark", "Precision", "Keep", "Release", "Limits", "Plan", "MemoryReport"}

comfy_api.install()


def test_the_entry_point_lists_the_nodes() -> None:
    async def list_nodes() -> list[Any]:
        extension = await comfy_entrypoint()
        await extension.on_load()
        return await extension.get_node_list()

    names = {node.GET_SCHEMA().node_id for node in asyncio.run(list_nodes())}
    assert names == {f"Highwater{name}" for name in NAMES} == set(comfy_api.list_node_classes())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_input_and_output_is_explained(name: str) -> None:
    info = comfy_api.object_info()[f"Highwater{name}"]
    inputs = {**info["input"]["required"], **info["input"].get("optional", {})}
    assert all(options.get("tooltip", "").endswith((".", ")")) for _, options in inputs.values())
    assert all(info["output_tooltips"])
    assert info["description"].endswith(".")
    assert info["category"] == "Highwater"
    assert info["search_aliases"]
    assert list(inputs) == [*info["input_order"]["required"], *info["input_order"].get("optional", [])]


def test_object_info_has_the_shape_that_the_host_sends() -> None:
    """Recorded from ComfyUI 0.33 for this very class; its converter fills in what a schema leaves out."""
    info = comfy_api.object_info()["HighwaterMemoryReport"]
    aliases, description = info.pop("search_aliases"), info.pop("description")
    tooltip = info["input"]["optional"]["after"][1].pop("tooltip")
    assert aliases and description and tooltip
    assert info == {
        "input": {
            "required": {},
            "optional": {"after": ["*", {}]},
            "hidden": {"prompt": ["PROMPT"], "extra_pnginfo": ["EXTRA_PNGINFO"]},
        },
        "input_order": {"required": [], "optional": ["after"], "hidden": ["prompt", "extra_pnginfo"]},
        "is_input_list": False,
        "output": ["STRING"],
        "output_is_list": [False],
        "output_name": ["report"],
        "output_tooltips": ["The report as text, one line per item."],
        "output_matchtypes": None,
        "name": "HighwaterMemoryReport",
        "display_name": "Memory Report (Highwater)",
        "python_module": "custom_nodes.highwater",
        "category": "Highwater",
        "output_node": True,
        "deprecated": False,
        "experimental": False,
        "dev_only": False,
        "api_node": False,
        "price_badge": None,
        "essentials_category": None,
        "has_intermediate_output": False,
    }


def test_widgets_report_their_options_as_the_page_spells_them() -> None:
    inputs = comfy_api.object_info()["HighwaterSamplePipeline"]["input"]["required"]
    kind, options = inputs["seed"]
    assert (kind, options["control_after_generate"], options["max"]) == ("INT", True, 2**64 - 1)
    assert inputs["prompt"][1]["multiline"] is True
    combo = comfy_api.object_info()["HighwaterPrecision"]["input"]["required"]["granularity"]
    assert combo[0] == "COMBO"
    options = ["block", "layer", "component"]
    assert {"multiselect": False, "options": options, "default": "block"}.items() <= combo[1].items()


def test_an_option_that_the_stand_in_lacks_is_refused() -> None:
    from comfy_api.latest import io

    with pytest.raises(TypeError, match=r"'steps': unknown options \['maximum'\]"):
        io.Int.Input("steps", maximum=3)


def test_listing_the_nodes_imports_no_torch(run_python: Callable[[str], None]) -> None:
    script = (
        "import sys\n"
        "from highwater.headless.comfy_stub import comfy_api; comfy_api.install()\n"
        "import highwater.nodes.extension\n"
        "assert not {'torch', 'diffusers', 'transformers', 'PIL'} & set(sys.modules)\n"
    )
    run_python(script)


def test_a_node_that_lacks_what_every_node_has_is_refused_when_it_is_listed() -> None:
    from comfy_api.latest import io

    class Unfinished(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(node_id="Unfinished")

    with pytest.raises(TypeError, match="Unfinished has no execute"):
        comfy_api.object_info([Unfinished])
