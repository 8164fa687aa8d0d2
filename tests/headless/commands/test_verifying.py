"""`highwater verify`: a workflow's first step beside itself without the engine, and what it refuses to run twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from highwater.headless.cli import main
from highwater.headless.comfy_stub import comfy_api
from highwater.headless.commands.verifying import load_for_verifying, verify_workflow
from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.runner.workflow import parse_workflow
from highwater.memory import default_manager
from highwater.memory.errors import InvalidInput
from highwater.memory.runtime.blocks.weight_group import WeightGroup

comfy_api.install()
MIB = 1 << 20


def graph(pipeline: str = "tiny-sd", **choices: object) -> dict[str, dict[str, object]]:
    loader = {"pipeline": pipeline, "profile": "auto", "precision": "as stored", "placement": "auto"} | choices
    sampler = {
        "pipeline": ["1", 0], "prompt": "a fox", "negative_prompt": "", "width": 64, "height": 64, "frames": 1,
        "steps": 7, "guidance": 3.5, "seed": 1,
    }  # fmt: skip
    return {
        "1": {"class_type": "HighwaterLoadPipeline", "inputs": loader},
        "2": {"class_type": "HighwaterSamplePipeline", "inputs": sampler},
        "3": {"class_type": "HighwaterSaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "x"}},
        "4": {"class_type": "HighwaterMemoryReport", "inputs": {"after": ["2", 0]}},
    }


def write(nodes: object, folder: Path) -> Path:
    path = folder / "workflow.json"
    path.write_text(json.dumps(nodes))
    return path


@pytest.fixture
def devices(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Two devices of 64 MiB, strict, and a process-wide manager that has met no others."""
    from highwater.memory.manager import default

    monkeypatch.setattr(default, "made", [])
    with sim.cluster([sim.SimDeviceSpec(total_bytes=64 * MIB)] * 2):
        yield sim
        default_manager().release_all()


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"profile": "unet=6MiB", "precision": "fp8 scaled"},
        {"placement": "unet=gpu:0&gpu:1,text_encoder=cpu"},
    ],
)
def test_a_workflow_is_equal(
    choices: dict[str, str], devices, models_directory: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = verify_workflow(write(graph(**choices), tmp_path), models=models_directory)
    assert found.is_equal, found.text()
    assert found.num_calls > 30
    assert "each sampler ran one step" in found.notes
    assert [path.name for path in tmp_path.iterdir()] == ["workflow.json"]
    assert not default_manager().members


@pytest.fixture
def faulty(monkeypatch) -> list[str]:
    """One block computes with weights that are not its own; the names that it had."""
    compute_from = WeightGroup.compute_from

    def corrupt(group: WeightGroup, *args: object, **options: object) -> None:
        compute_from(group, *args, **options)
        if group.name.startswith("up_blocks.1"):
            seen.append(group.name)
            for slot in group.slots:
                if slot.spec.name.endswith("weight") and slot.held.dim() == 4:
                    slot.hold(torch.nn.Parameter(slot.held * 1.5, requires_grad=False))

    seen: list[str] = []
    monkeypatch.setattr(WeightGroup, "compute_from", corrupt)
    return seen


def test_a_fault_is_found_and_named(devices, models_directory: Path, tmp_path: Path, faulty: list[str]) -> None:
    found = verify_workflow(write(graph(profile="unet=6MiB"), tmp_path), models=models_directory)
    assert faulty and not found.is_equal
    assert found.first.place in {f"unet.{name}" for name in faulty}, found.text()
    assert "from equal inputs" in found.first.text and found.first.max_abs > 0


def test_the_node_for_pipelines_finds_it_too(
    devices, models_directory: Path, tmp_path: Path, faulty: list[str]
) -> None:
    runner = WorkflowRunner(default_manager(), models_directory=models_directory, output_directory=tmp_path)
    loader = next(node for node in graph(profile="unet=6MiB").values() if node["class_type"] == "HighwaterLoadPipeline")
    words = {"prompt": "a fox", "width": 64, "height": 64, "frames": 1, "guidance": 4.0, "seed": 1}
    verify = {"class_type": "HighwaterVerifyPipeline", "inputs": {"pipeline": ["load", 0], **words}}
    result = runner.run(parse_workflow({"load": loader, "verify": verify}), name="test")
    text = "\n".join(result.outputs["verify"]["text"])
    assert "equal, bit for bit" not in text and any(f"unet.{name}" in text for name in faulty), text


def test_the_exit_code_tells(models_directory: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    path = write(graph(), tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["verify", str(path), "--models", str(models_directory), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["is_equal"] is True and told["differences"] == []


@pytest.mark.parametrize("kind", ["CheckpointLoaderSimple", "UNETLoader", "HighwaterLoadDiffusionModel", "EvilNode"])
def test_a_node_that_needs_comfyui_is_refused_by_name(kind: str, tmp_path: Path, capsys) -> None:
    nodes = graph() | {"9": {"class_type": kind, "inputs": {}}}
    assert main(["verify", str(write(nodes, tmp_path))]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"node 9 ({kind}) needs ComfyUI" in line and "Verify node" in line


def test_an_output_node_with_effects_outside_is_refused_by_name(models_directory: Path, tmp_path: Path) -> None:
    from comfy_api.latest import io

    from highwater.headless.comfy_stub import folder_paths

    class PostImage(io.ComfyNode):
        @classmethod
        def define_schema(cls) -> io.Schema:
            return io.Schema(node_id="PostImage", inputs=[io.Image.Input("images")], outputs=[], is_output_node=True)

        @classmethod
        def execute(cls, images: torch.Tensor) -> None:
            raise AssertionError("must not run")

    folder_paths.configure(models=models_directory, output=tmp_path)
    classes = comfy_api.list_node_classes() | {"PostImage": PostImage}
    nodes = graph() | {"5": {"class_type": "PostImage", "inputs": {"images": ["2", 0]}}}
    with pytest.raises(InvalidInput, match=r"node 5 \(PostImage\) has effects outside"):
        load_for_verifying(write(nodes, tmp_path), node_classes=classes)
    del nodes["5"]
    workflow = load_for_verifying(write(nodes, tmp_path), node_classes=classes)
    assert workflow.nodes["2"].inputs["steps"] == 1


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([], "a workflow is a JSON object"),
        ({}, "has no nodes"),
        ({"1": 3}, "has no class_type"),
        ({"1": {"class_type": "HighwaterMemoryReport", "inputs": {}}}, "no node loads a model"),
    ],
)
def test_bad_input_is_one_line(nodes: object, words: str, tmp_path: Path, capsys) -> None:
    assert main(["verify", str(write(nodes, tmp_path))]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and words in line
