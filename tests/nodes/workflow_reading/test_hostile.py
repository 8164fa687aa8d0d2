"""Whatever JSON a workflow is: a description, or one line that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.headless.comfy_stub import comfy_api
from highwater.memory.errors import InvalidInput

comfy_api.install()
from highwater.nodes.workflow_reading.description import Size, WorkflowDescription  # noqa: E402
from highwater.nodes.workflow_reading.prompt_reading import RULES  # noqa: E402
from highwater.nodes.workflow_reading.reading import read_workflow  # noqa: E402
from highwater.nodes.workflow_reading.widget_names import KNOWN_WIDGETS  # noqa: E402

PACK = Path(__file__).parents[3]
GRAPHS = [
    json.loads(path.read_text(encoding="utf-8"))
    for path in [*sorted((PACK / "workflows").glob("*.json")), *sorted((PACK / "subgraphs").glob("*.json"))]
]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.sampled_from([0, 1, -1, 8, 64, 1024, 10**400, "auto", "x.safetensors", "x.gguf", "1:1", "a / 0", "t", "none"]),
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
IDS = st.sampled_from(["1", "2", "3", "4", "5", "6"])
LINKED = """
    model clip vae positive negative samples latent_image latent image pixels guider sigmas conditioning control_net
    model_patch pipeline precision_options others watermark values.a on_true on_false switch start_image
"""
INPUTS = [*sorted({name for names in KNOWN_WIDGETS.values() for name in names}), *LINKED.split()]


def read(graph: Any) -> WorkflowDescription | None:
    """Return a description whose numbers hold together; None for one line of a complaint."""
    try:
        found = read_workflow(graph)
    except InvalidInput as error:
        assert "\n" not in str(error)
        return None
    for use in found.uses:
        assert use.model is None or 0 <= use.model < len(found.models)
        assert all(0 <= place < len(found.models) for place in use.beside)
        assert use.size is None or (isinstance(use.size, Size) and min(use.size.width, use.size.height) >= 1)
        assert use.size is None or (use.size.frames >= 1 and use.size.batch >= 0)
        assert use.steps is None or use.steps >= 0
        assert use.model is not None or use.unknown
    return found


@given(JSON)
def test_any_json(graph: Any) -> None:
    read(graph)


@settings(max_examples=400)
@given(
    st.dictionaries(
        IDS,
        st.fixed_dictionaries(
            {
                "class_type": st.sampled_from([*sorted(RULES), "Foreign"]),
                "inputs": st.dictionaries(
                    st.sampled_from(INPUTS),
                    st.tuples(IDS, st.sampled_from([0, 1, 2, -1, "x", None, True, 99])).map(list) | SCALARS | JSON,
                    max_size=8,
                ),
            },
            optional={"_meta": JSON},
        ),
        max_size=6,
    )
)
def test_any_graph_of_known_nodes(graph: Any) -> None:
    read(graph)


def test_every_rule_stands_any_input() -> None:
    """Each class alone, given links to itself's neighbours of all sorts."""
    values = {"none": None, "number": 8, "text": "x.safetensors", "link": ["other", 0], "list": [1, 2], "true": True}
    for name in RULES:
        for value in values.values():
            inputs = dict.fromkeys(INPUTS, value)
            read({"node": {"class_type": name, "inputs": inputs}, "other": {"class_type": "Foreign", "inputs": {}}})
        for other in (
            "UNETLoader",
            "EmptyLatentImage",
            "CLIPTextEncode",
            "CFGGuider",
            "BasicScheduler",
            "PrimitiveInt",
        ):
            inputs = {key: ["other", 0] for key in INPUTS}
            given_by = {"class_type": other, "inputs": {"width": 64, "height": 64, "steps": 3, "cfg": 2, "value": 3}}
            read({"node": {"class_type": name, "inputs": inputs}, "other": given_by})


@st.composite
def changed_pages(draw: st.DrawFn) -> Any:
    """A graph of ours with a few of its values replaced or taken out."""
    graph = json.loads(json.dumps(draw(st.sampled_from(GRAPHS))))
    for _ in range(draw(st.integers(1, 4))):
        holder: Any = graph
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 9)):
                holder = holder[key]
                continue
            if draw(st.booleans()):
                holder[key] = draw(JSON)
            else:
                del holder[key]
            break
    return graph


@settings(max_examples=300)
@given(changed_pages())
def test_any_change_of_a_page_graph(graph: Any) -> None:
    read(graph)


def test_a_cycle_is_one_line_that_names_two_nodes() -> None:
    graph = {
        "1": {"class_type": "LatentUpscaleBy", "inputs": {"samples": ["2", 0]}},
        "2": {"class_type": "LatentFlip", "inputs": {"samples": ["1", 0]}},
        "3": {"class_type": "SaveLatent", "inputs": {"samples": ["1", 0]}},
    }
    with pytest.raises(InvalidInput, match=r"cycle: node 2 \(LatentFlip\) needs node 1 \(LatentUpscaleBy\)"):
        read_workflow(graph)


def test_a_link_to_nothing_is_a_missing_input() -> None:
    graph = {
        "1": {"class_type": "VAEDecode", "inputs": {"samples": ["7", 0], "vae": ["8", 0]}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0]}},
    }
    (use,) = read_workflow(graph).uses
    assert use.model is None and use.size is None and len(use.unknown) == 2


@pytest.mark.parametrize("depth", [4_990])
def test_long_chains_are_read_fast(depth: int) -> None:
    """Neither recursion nor squares: a chain of unknown nodes, of LoRAs, and of reroutes."""
    chain = {
        str(place): {"class_type": "Foreign", "inputs": {"model": [str(place - 1), 0]}} for place in range(1, depth)
    }
    chain["0"] = {"class_type": "UNETLoader", "inputs": {"unet_name": "x.safetensors"}}
    chain["save"] = {"class_type": "SaveImage", "inputs": {"images": [str(depth - 1), 0]}}
    reroutes = {
        "nodes": [
            {"id": 0, "type": "UNETLoader", "widgets_values": ["x"], "inputs": [], "outputs": [{"type": "MODEL"}]}
        ]
        + [{"id": place, "type": "Reroute", "inputs": [{"link": place}]} for place in range(1, depth)]
        + [{"id": depth, "type": "SaveImage", "inputs": [{"name": "model", "link": depth}]}],
        "links": [[place, place - 1, 0, place, 0, "MODEL"] for place in range(1, depth + 1)],
    }
    for graph in (chain, reroutes):
        found = read(graph)
        assert found is not None and len(found.models) == 1


def test_prompts_that_are_joined_again_and_again_do_not_grow() -> None:
    """Each of these prompts is the two before it: as lists of what is attached, they would double."""
    graph: dict[str, Any] = {
        "0": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64}},
        "1": {"class_type": "LotusConditioning", "inputs": {}},
    }
    for place in range(2, 2000, 2):
        graph[str(place)] = {
            "class_type": "ReferenceLatent", "inputs": {"conditioning": [str(place - 1), 0], "latent": ["0", 0]}
        }  # fmt: skip
        graph[str(place + 1)] = {
            "class_type": "ConditioningCombine",
            "inputs": {"conditioning_1": [str(place), 0], "conditioning_2": [str(place - 1), 0]},
        }
    graph["sample"] = {"class_type": "KSampler", "inputs": {"positive": ["1999", 0], "latent_image": ["0", 0]}}
    graph["save"] = {"class_type": "SaveLatent", "inputs": {"samples": ["sample", 0]}}
    found = read(graph)
    assert found is not None and 100 < len(found.uses[0].references) < 1000


def test_more_nodes_than_are_read_are_one_line() -> None:
    graph = {str(place): {"class_type": "Foreign", "inputs": {}} for place in range(10_000)}
    with pytest.raises(InvalidInput, match="10000 nodes; more than 5000"):
        read_workflow(graph)
    page = {"nodes": [{"id": place, "type": "Foreign"} for place in range(10_000)]}
    with pytest.raises(InvalidInput, match="more than 5000 nodes"):
        read_workflow(page)
