"""What a workflow file may not be: each mistake gives one line with the place, the value and what is allowed."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from highwater.headless.runner.workflow import InvalidWorkflow, load_workflow, parse_workflow
from highwater.headless.runner.workflow_file import read_graph
from highwater.memory.errors import InvalidInput

WORKFLOWS = Path(__file__).parents[3] / "headless" / "workflows"

GRAPH: dict[str, Any] = {
    "1": {
        "class_type": "HighwaterLoadPipeline",
        "inputs": {
            "pipeline": "tiny-sd",
            "profile": "auto",
            "precision": "as stored",
            "placement": "auto",
        },
    },
    "2": {
        "class_type": "HighwaterSamplePipeline",
        "inputs": {
            "pipeline": ["1", 0],
            "prompt": "a fox",
            "negative_prompt": "",
            "width": 64,
            "height": 64,
            "frames": 1,
            "steps": 2,
            "guidance": 4.0,
            "seed": 1,
        },
    },
    "3": {
        "class_type": "HighwaterSaveImage",
        "inputs": {"images": ["2", 0], "filename_prefix": "out"},
        "_meta": {"title": "Keep it"},
    },
}
MISSING = object()


def graph_with(path: str, value: Any) -> Any:
    """Return the graph with one place changed; a path is node id, then keys, joined by dots."""
    graph = copy.deepcopy(GRAPH)
    *parents, last = path.split(".")
    place = graph
    for key in parents:
        place = place[key]
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    return graph


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("1.class_type", "HighwaterLoadPipelin", "'HighwaterLoadPipelin' is unknown; did you mean 'HighwaterLoadPi"),
        ("1.class_type", 3, "node 1 has no class_type"),
        ("1.inputs", [], "node 1: inputs is []"),
        ("2", "text", "node 2 has no class_type: \"text\""),
        ("2.inputs.seed", MISSING, "(Sample Pipeline): input 'seed' is missing; expected a whole number from 0 "),
        ("2.inputs.pipeline", MISSING, "input 'pipeline' is missing; expected a link"),
        ("2.inputs.promt", "x", "input 'promt' is unknown; did you mean 'prompt'?"),
        ("2.inputs.steps", "4", "input 'steps' is \"4\"; expected a whole number from 1 to 1000"),
        ("2.inputs.steps", 2.5, "input 'steps' is 2.5; expected a whole number"),
        ("2.inputs.steps", True, "input 'steps' is true; expected a whole number"),
        ("2.inputs.steps", 0, "input 'steps' is 0; expected a whole number from 1 to 1000"),
        ("2.inputs.guidance", "high", "input 'guidance' is \"high\"; expected a number from 0.0 to 100.0"),
        ("2.inputs.guidance", float("inf"), "expected a number from 0.0 to 100.0"),
        ("2.inputs.prompt", 7, "input 'prompt' is 7; expected text"),
        ("2.inputs.pipeline", "tiny-sd", "input 'pipeline' is \"tiny-sd\"; expected a link"),
        ("2.inputs.pipeline", ["1"], "a link is [\"node id\", output index]"),
        ("2.inputs.pipeline", [1, 0], "a link is [\"node id\", output index]"),
        ("2.inputs.pipeline", ["9", 0], "links to node '9', which does not exist; allowed: 1, 2, 3"),
        ("2.inputs.pipeline", ["1", 1], "links to output 1 of node 1; allowed: 0 (pipeline)"),
        ("3.inputs.images", ["1", 0], "node 3 (Keep it): input 'images' takes IMAGE, but output 0 of node 1"),
        ("1.inputs.precision", "fp8 scale", "unknown; did you mean 'fp8 scaled'? allowed: as stored, fp8"),
        ("1.inputs.precision", {"a": 1}, "input 'precision' is {\"a\": 1}; expected text"),
        ("1.inputs.pipeline", "tiny-ds", "pipeline 'tiny-ds' was not found; did you mean 'tiny-sd'?"),
        ("1.inputs.pipeline", {"a": 1}, "input 'pipeline' is {\"a\": 1}; allowed: tiny-flux, tiny-sd, tiny-wan"),
        ("1.inputs.profile", "6", "column 1: '6' is not a profile and has no unit; allowed: 1 to 5"),
        ("1.inputs.placement", "gpu:7=cpu", "placement 'gpu:7=cpu', column 6: '=' is unexpected"),
        ("2.inputs.prompt", "a \ud800 fox", "input 'prompt' contains an invalid character (\\ud800) at position 2; "),
        ("2.inputs.pipeline", ["\udfff", 0], "links to node '\\udfff', which does not exist; allowed: 1, 2, 3"),
        ("3.inputs.filename_prefix", "/tmp/evil", "(Keep it): filename_prefix '/tmp/evil' leads out of the output fol"),
        ("3.inputs.filename_prefix", "../../evil", "filename_prefix '../../evil' leads out of the output folder; all"),
        ("3.inputs.filename_prefix", "a\0b", "filename_prefix 'a\\x00b' contains unprintable characters; allowed: a"),
        ("3.inputs.filename_prefix", "x" * 5000, "xxx... is longer than 255 characters; allowed: a name such as"),
        ("1.inputs.placement", "wings=cpu", "component 'wings' is unknown"),
    ],
)  # fmt: skip
def test_one_line_names_the_place_the_value_and_what_is_allowed(
    runner: object, path: str, value: Any, said: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_workflow(graph_with(path, value), source="graph.json")
    message = str(caught.value)
    assert said in message
    assert message.startswith("graph.json: ")
    assert "\n" not in message
    assert isinstance(caught.value, InvalidWorkflow)
    assert caught.value.node_id == path.split(".")[0]


def test_without_any_pipeline_the_line_says_where_it_looked(runner: object, tmp_path: Path) -> None:
    from highwater.headless.comfy_stub import folder_paths

    folder_paths.configure(models=tmp_path, output=tmp_path)
    graph = copy.deepcopy(GRAPH)
    parse_workflow(graph)  # a tiny pipeline, which its node makes
    graph["1"]["inputs"]["pipeline"] = "mine"
    with pytest.raises(InvalidInput, match=r"there is no folder with a model_index\.json; searched in") as caught:
        parse_workflow(graph)
    assert str(tmp_path / "diffusers") in str(caught.value)


def test_a_watermark_checks_its_sizes(runner: object) -> None:
    graph = {"1": {"class_type": "HighwaterWatermark", "inputs": {"device": "*", "low": "2GiB", "high": "1GiB"}}}
    with pytest.raises(InvalidWorkflow, match=r"low 2.00GiB is above high 1.00GiB"):
        parse_workflow(graph)


def test_a_cycle_is_named(runner: object) -> None:
    graph = {
        "1": {"class_type": "HighwaterMemoryReport", "inputs": {"after": ["2", 0]}},
        "2": {"class_type": "HighwaterMemoryReport", "inputs": {"after": ["3", 0]}},
        "3": {"class_type": "HighwaterMemoryReport", "inputs": {"after": ["2", 0]}},
    }
    with pytest.raises(
        InvalidWorkflow, match=r"cycle: 2 \(Memory Report\) <- 3 \(Memory Report\) <- 2 \(Memory Report\)"
    ):
        parse_workflow(graph)


def test_a_chain_longer_than_the_stack_is_fine(runner: object) -> None:
    graph = {
        str(i): {"class_type": "HighwaterMemoryReport", "inputs": {"after": [str(i + 1), 0]} if i < 3000 else {}}
        for i in range(3001)
    }
    order = parse_workflow(graph).order
    assert order[0] == "3000" and len(order) == 3001


def test_without_an_output_node_nothing_would_run(runner: object) -> None:
    graph = {key: GRAPH[key] for key in ("1", "2")}
    with pytest.raises(InvalidInput, match=r"no output node.*HighwaterSaveImage"):
        parse_workflow(graph)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not valid JSON: .* at line 1, column 2"),
        ("[]", r"a workflow is a JSON object, not \[\]"),
        ("{}", "the workflow has no nodes"),
        ('{"nodes": [], "links": []}', r"choose Workflow > Export \(API\)"),
        ('{"1": {}, "1": {}}', "'1' appears twice in one object"),
        ('{"1": NaN}', "NaN is not a number that JSON allows"),
        ("[" * 100_000, "is nested too deeply"),
        ("\xff", "is not UTF-8"),
    ],
)
def test_a_file_that_is_no_workflow(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "workflow.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidInput, match=said) as caught:
        load_workflow(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.json: no such file"):
        load_workflow(tmp_path / "nowhere.json")
    with pytest.raises(InvalidInput, match="is a folder"):
        load_workflow(tmp_path)


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("demo_*.json")), ids=lambda path: path.stem)
def test_our_workflows_are_valid(runner: object, path: Path) -> None:
    graph = json.loads(path.read_text(encoding="utf-8"))
    for node in graph.values():  # devices that this machine may lack
        if "placement" in node["inputs"]:
            node["inputs"]["placement"] = "auto"
    assert parse_workflow(graph).output_ids


def test_nodes_without_links_that_set_the_scene_come_first(runner: object) -> None:
    graph = copy.deepcopy(GRAPH)
    graph["4"] = {"class_type": "HighwaterWatermark", "inputs": {"device": "*", "low": "1MiB", "high": "1MiB"}}
    assert parse_workflow(graph).order == ("4", "1", "2", "3")


def test_a_workflow_that_windows_editors_saved_is_read(tmp_path) -> None:
    """They put a byte order mark before the first brace."""
    path = tmp_path / "marked.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"1": {"class_type": "A", "inputs": {}}}).encode())
    assert read_graph(path) == {"1": {"class_type": "A", "inputs": {}}}
