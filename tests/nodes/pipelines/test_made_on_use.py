"""Tiny pipelines that Load Pipeline makes when it first uses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from highwater.headless.comfy_stub import comfy_api, folder_paths
from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.runner.workflow import parse_workflow
from highwater.memory import default_manager
from highwater.memory.errors import InvalidInput

comfy_api.install()
from highwater.nodes.pipeline_nodes import HighwaterLoadPipeline  # noqa: E402
from highwater.nodes.pipelines.pipeline_folders import find_pipeline, is_to_be_made, ready_pipeline  # noqa: E402

TINY = ["tiny-flux", "tiny-sd", "tiny-wan"]


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    before = folder_paths.models_directory, folder_paths.output_directory
    folder_paths.configure(models=tmp_path / "models", output=tmp_path)
    yield tmp_path / "models" / "diffusers"
    folder_paths.configure(models=before[0], output=before[1])


def offered() -> list[str]:
    (item,) = (item for item in HighwaterLoadPipeline.GET_SCHEMA().inputs if item.id == "pipeline")
    return list(item.options["options"])


def test_a_pipeline_is_offered_before_it_is_made(empty: Path) -> None:
    assert offered() == TINY
    assert all(HighwaterLoadPipeline.validate_inputs(name, "auto", "auto") is True for name in TINY)
    assert HighwaterLoadPipeline.fingerprint_inputs("tiny-sd") == ""
    with pytest.raises(InvalidInput, match=r"was not found; .*Load Pipeline makes it when it first uses it"):
        find_pipeline("tiny-sd")  # a plan makes no files
    assert not empty.exists()


@pytest.mark.parametrize("name", ["tiny", "../tiny-sd", "tiny-sd/", "", None, 3, {"tiny-sd": 1}])
def test_no_other_name_makes_one(empty: Path, name: object) -> None:
    assert not is_to_be_made(name)
    if name is not None:
        with pytest.raises(InvalidInput):
            ready_pipeline(name)  # type: ignore[arg-type]
    assert not empty.exists()


def test_a_run_makes_the_one_that_it_uses(empty: Path, tmp_path: Path) -> None:
    """About 3 s."""
    graph = {
        "1": {
            "class_type": "HighwaterLoadPipeline",
            "inputs": {"pipeline": "tiny-sd", "profile": "auto", "precision": "as stored", "placement": "auto"},
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
                "steps": 1,
                "guidance": 1.0,
                "seed": 1,
            },
        },
        "3": {"class_type": "HighwaterSaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "made"}},
    }
    runner = WorkflowRunner(default_manager(), models_directory=tmp_path / "models", output_directory=tmp_path)
    try:
        runner.run(parse_workflow(graph), name="made")
        assert [path.name for path in empty.iterdir()] == ["tiny-sd"]
        assert len(list(tmp_path.glob("made_*.png"))) == 1
        assert offered() == ["tiny-sd", "tiny-flux", "tiny-wan"]
        assert HighwaterLoadPipeline.fingerprint_inputs("tiny-sd") != ""
    finally:
        runner.cache.clear()


def test_a_folder_that_cannot_be_written_is_named(empty: Path) -> None:
    empty.parent.mkdir(parents=True)
    empty.touch()
    with pytest.raises(InvalidInput, match="the tiny pipeline cannot be made: "):
        ready_pipeline("tiny-sd")
