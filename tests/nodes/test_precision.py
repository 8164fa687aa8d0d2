"""The node Precision: what its widgets say, and what a loader and a plan make of it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from highwater.headless.comfy_stub import comfy_api

comfy_api.install()

from highwater.headless.commands.planning import plan_workflow  # noqa: E402
from highwater.headless.runner.runner import WorkflowRunner  # noqa: E402
from highwater.headless.runner.workflow import parse_workflow  # noqa: E402
from highwater.memory.errors import InvalidInput  # noqa: E402
from highwater.memory.options.precision import Precision, precision_for  # noqa: E402
from highwater.nodes.comfy_models.model_request import ModelNode  # noqa: E402
from highwater.nodes.comfy_models.models import HighwaterLoadCheckpoint  # noqa: E402
from highwater.nodes.pipeline_nodes import HighwaterLoadPipeline  # noqa: E402
from highwater.nodes.precision import HighwaterPrecision  # noqa: E402
from highwater.nodes.widget_values import precision_input, read_precision  # noqa: E402


def run(**widgets: Any) -> Any:
    (given,) = HighwaterPrecision.execute(**widgets).args
    return given


def test_widgets_left_alone_are_fp8_scaled_for_each_part() -> None:
    inputs = {item.id: item.options.get("default") for item in HighwaterPrecision.GET_SCHEMA().inputs}
    given = run(**{name: value for name, value in inputs.items() if value is not None})
    assert precision_for(given, "model", "diffusion") == precision_for(given, "ae", "vae") == Precision("fp8 scaled")


def test_every_widget_says_its_part() -> None:
    given = run(
        storage="float8_e5m2", scale="row", compute="bfloat16", granularity="layer", skips="none",
        exclude=r"attn, blocks\.[01]\." + "\n^norm", exclude_classes="Conv2d", error_limit=0.5, component="text",
    )  # fmt: skip
    assert precision_for(given, "clip", "text") == Precision(
        "e5m2 per row",
        granularity="layer",
        exclude=("attn", r"blocks\.[01]\.", "^norm"),
        exclude_classes=("Conv2d",),
        honours_declared=False,
        error_limit=0.5,
        compute="BF16",
    )
    assert precision_for(given, "model", "diffusion") is None
    assert precision_for(run(storage="bfloat16"), "model", "diffusion") == Precision("bf16")


def test_two_nodes_are_for_two_parts() -> None:
    text = run(storage="bfloat16", component="text")
    both = run(component="diffusion", others=text)
    assert str(both) == "text=bf16,diffusion=fp8 scaled"
    with pytest.raises(InvalidInput, match="component 'text' has two Precision nodes"):
        run(component="text", others=both)


def test_a_node_for_one_part_leaves_the_others_to_the_loaders_own_widget() -> None:
    text = run(storage="bfloat16", component="text")
    both = read_precision("fp8 scaled", text)
    assert precision_for(both, "clip", "text") == Precision("bf16")
    assert precision_for(both, "model", "diffusion") == Precision("fp8 scaled")
    both = read_precision("text=fp8 plain,vae=fp16", text)
    assert precision_for(both, "clip", "text") == Precision("bf16")
    assert precision_for(both, "ae", "vae") == Precision("fp16")
    assert precision_for(both, "model", "diffusion") is None
    assert precision_for(read_precision("fp8 scaled", run()), "model", "diffusion") == Precision("fp8 scaled")


def test_the_comma_of_a_repetition_separates_nothing() -> None:
    (item,) = run(exclude=r"blocks\.\d{1,3}\.up, ^norm{2,}").items
    assert item.precision is not None and item.precision.exclude == (r"blocks\.\d{1,3}\.up", "^norm{2,}")


@pytest.mark.parametrize(
    ("widgets", "why"),
    [
        ({"storage": "bfloat16", "scale": "row", "compute": "the model's"}, "scale 'row' of bfloat16; allowed: none"),
        ({"storage": "bfloat16", "scale": "usual", "compute": "bfloat16"}, "both bfloat16: nothing would be cast"),
        ({"storage": "int4", "scale": "usual", "compute": "the model's"}, "storage_dtype 'int4'; .*allowed"),
        ({"exclude": "("}, r"exclude '\(' is no regular expression"),
    ],
)
def test_what_does_not_fit_together_is_said_before_the_run(widgets: dict[str, str], why: str) -> None:
    import re

    said = HighwaterPrecision.validate_inputs(**widgets)
    assert isinstance(said, str) and re.search(why, said)
    with pytest.raises(InvalidInput, match=why):
        run(**widgets)


@pytest.mark.parametrize(("name", "value"), [("component", "txt"), ("skips", "all"), ("granularity", "leaf")])
def test_another_word_is_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name} '{value}' is unknown; .*allowed"):
        run(**{name: value})


def test_loaders_check_the_text_before_the_run() -> None:
    assert HighwaterLoadCheckpoint.validate_inputs(precision="text=fp8 scaled,diffusion=bf16") is True
    said = HighwaterLoadCheckpoint.validate_inputs(precision="fp9")
    assert isinstance(said, str) and "precision 'fp9', column 1: precision 'fp9' is unknown" in said
    assert "precision_options" in {item.id for item in HighwaterLoadPipeline.GET_SCHEMA().inputs}


@pytest.mark.parametrize(
    ("value", "is_taken"),
    [("fp8 scaled", True), ("text=fp8 scaled,diffusion=bf16", True), ("fp9", False), ("text=", False), (8, False)],
)
def test_a_list_takes_a_text_for_each_part_too(value: object, is_taken: bool) -> None:
    """The host looks for a value in a copy of the list, and marks no other input."""
    for offered in (choices := precision_input().options["options"], type(choices)(choices)):
        assert (value in offered) is is_taken
    assert "precision" not in inspect.signature(ModelNode.validate_inputs).parameters


def graph(**options: Any) -> dict[str, Any]:
    load = {"pipeline": "tiny-flux", "profile": "auto", "precision": "as stored", "placement": "cpu"}
    sample = {
        "pipeline": ["load", 0], "prompt": "x", "negative_prompt": "", "width": 64, "height": 64, "steps": 1,
        "guidance": 3.5, "seed": 1, "frames": 1,
    }  # fmt: skip
    widgets = {"storage": "float8_e4m3fn", "scale": "row", "compute": "the model's", "granularity": "layer",
               "skips": "declared", "exclude": "", "exclude_classes": "", "error_limit": 0.0}  # fmt: skip
    return {
        "text": {"class_type": "HighwaterPrecision", "inputs": {**widgets, "scale": "none", "component": "text"}},
        "precision": {
            "class_type": "HighwaterPrecision",
            "inputs": {**widgets, "component": "diffusion", "others": ["text", 0], **options},
        },
        "load": {"class_type": "HighwaterLoadPipeline", "inputs": {**load, "precision_options": ["precision", 0]}},
        "sample": {"class_type": "HighwaterSamplePipeline", "inputs": sample},
        "save": {"class_type": "HighwaterSaveImage", "inputs": {"images": ["sample", 0], "filename_prefix": "x"}},
    }


def test_a_pipeline_rests_as_its_nodes_say_and_the_plan_says_so_before(
    runner: WorkflowRunner, tmp_path: Path, models_directory: Path
) -> None:
    runner.run(parse_workflow(graph()), name="test")
    found = {part["name"]: part["precision"] for part in runner.manager.report()["components"]}
    assert found["transformer"] == "fp8 per row" and found["text_encoder_2"] == "fp8 plain"
    assert found["vae"] == "as stored"
    path = tmp_path / "workflow.json"
    path.write_text(json.dumps(graph()))
    (plan,) = plan_workflow(path, None, models_directory, {}).plans.values()
    assert {part.component: part.precision.name for part in plan.components} == found
    path.write_text(json.dumps(graph(storage=["load", 0])))
    with pytest.raises(InvalidInput, match=r"the links form a cycle: node precision"):
        plan_workflow(path, None, models_directory, {})
