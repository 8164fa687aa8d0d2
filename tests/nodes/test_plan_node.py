"""The Plan node: it reads the graph that it is in, and says before the run what the run then does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from highwater.headless import simdevice
from highwater.headless.comfy_stub import folder_paths
from highwater.headless.comfy_stub.comfy_api import install
from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.runner.workflow import InvalidWorkflow, parse_workflow
from highwater.memory import MemoryManager, default_manager
from highwater.nodes.described_hardware import parse_hardware
from highwater.nodes.plan_picture import draw_plan

install()
from highwater.nodes.graph_plans import plan_graph  # noqa: E402

HARDWARE = "gpu:0=24MiB@25GB/s@10TFLOPS,gpu:1=32MiB@12GB/s@5TFLOPS,host=8GiB"


def graph(devices: str = HARDWARE, **load: Any) -> dict[str, Any]:
    loader = {"pipeline": "tiny-flux", "profile": "auto", "precision": "as stored", "placement": "auto", **load}
    sample = {
        "pipeline": ["load", 0], "prompt": "a fox", "negative_prompt": "", "width": 64, "height": 64, "steps": 2,
        "guidance": 3.5, "seed": 1, "frames": 1,
    }  # fmt: skip
    return {
        "plan": {"class_type": "HighwaterPlan", "inputs": {"devices": devices}},
        "load": {"class_type": "HighwaterLoadPipeline", "inputs": loader},
        "sample": {"class_type": "HighwaterSamplePipeline", "inputs": sample},
        "save": {"class_type": "HighwaterSaveImage", "inputs": {"images": ["sample", 0], "filename_prefix": "x"}},
    }


def test_the_node_plans_the_graph_that_it_is_in(runner: WorkflowRunner) -> None:
    result = runner.run(parse_workflow(graph()), name="planned")
    (text,) = result.outputs["plan"]["text"]
    assert "node load" in text or "transformer" in text
    for words in ("component", "transformer", "2 steps at 64x64", "a run takes", "gpu:1", "placement: "):
        assert words in text, words


def test_what_does_not_fit_is_shown_and_stops_nothing(runner: WorkflowRunner) -> None:
    result = runner.run(parse_workflow(graph("gpu:0=1MiB,host=8GiB")), name="small")
    (text,) = result.outputs["plan"]["text"]
    assert text.startswith("cannot be planned: ") and "needs at least" in text
    assert "save" in result.executed


def test_a_bad_description_is_refused_at_the_node(runner: WorkflowRunner) -> None:
    with pytest.raises(InvalidWorkflow, match="column 7: size '16' has no unit"):
        runner.run(parse_workflow(graph("gpu:0=16")), name="bad")


@pytest.fixture
def models(models_directory: Path, tmp_path: Path) -> None:
    """Make the tiny pipelines those of the host."""
    folder_paths.configure(models=models_directory, output=tmp_path)


def test_what_cannot_be_planned_is_named(models: None) -> None:
    asked = graph() | {"other": {"class_type": "SomeModelNode", "inputs": {"model": ["load", 0]}}}
    asked["sample"]["inputs"]["pipeline"] = ["other", 0]
    asked["lost"] = {
        "class_type": "HighwaterLoadPipeline",
        "inputs": {**asked["load"]["inputs"], "pipeline": "not-here"},
    }
    asked["again"] = {"class_type": "HighwaterSamplePipeline", "inputs": {**asked["sample"]["inputs"]}}
    asked["again"]["inputs"]["pipeline"] = ["lost", 0]
    asked["save again"] = {"class_type": "HighwaterSaveImage", "inputs": {**asked["save"]["inputs"]}}
    asked["save again"]["inputs"]["images"] = ["again", 0]
    planned = plan_graph(asked, source="test", hardware=parse_hardware(HARDWARE))
    assert any("SomeModelNode" in note for note in planned.notes)
    assert any("'not-here'" in note for note in planned.notes)
    assert planned.plans  # the rest is planned


def test_a_device_that_the_planned_machine_lacks_is_left_out(models: None) -> None:
    """As the loader leaves it out, which says so, too."""
    asked = graph(placement="diffusion=gpu:1,text=gpu:0", profile="auto,gpu:1=10MiB")
    planned = plan_graph(asked, source="test", hardware=parse_hardware("gpu:0=64MiB,host=8GiB"))
    assert sum("there is no gpu:1" in note for note in planned.notes) == 2
    assert all(share.device == "gpu:0" for share in next(iter(planned.plans.values()))["transformer"].shares)


def test_two_loaders_of_one_pipeline_are_told_apart(models: None) -> None:
    asked = graph(placement="transformer=gpu:1")
    asked |= {f"{name} 2": {**node, "inputs": {**node["inputs"]}} for name, node in graph().items() if name != "plan"}
    asked["sample 2"]["inputs"]["pipeline"] = ["load 2", 0]
    asked["save 2"]["inputs"]["images"] = ["sample 2", 0]
    planned = plan_graph(asked, source="test", hardware=parse_hardware("gpu:0=64MiB,gpu:1=64MiB,host=8GiB"))
    assert len(planned.plans) == 2 and planned.run is not None
    assert len({use.use.component for use in planned.run.uses}) == len(planned.run.uses)
    assert all(use.use.activation_bytes for use in planned.run.uses)
    assert "(" not in "".join(planned.placements.values())  # they can be pasted


def test_the_picture_has_a_bar_for_each_use_of_each_device(models: None) -> None:
    planned = plan_graph(graph(), source="test", hardware=parse_hardware(HARDWARE))
    picture = draw_plan(planned.plans, planned.run, planned.machine)
    colors = {color for _, color in picture.getcolors(1 << 20)}
    parts = [part.component for plan in planned.plans.values() for part in plan.components]
    assert picture.width > 1000 and len(colors) > len(parts) + 3
    alone = draw_plan(planned.plans, None, planned.machine)
    assert alone.size != picture.size or alone.tobytes() != picture.tobytes()


def test_without_a_rate_no_seconds_are_shown(models: None) -> None:
    planned = plan_graph(graph(), source="test", hardware=parse_hardware("gpu:0=48MiB@25GB/s,host=8GiB"))
    assert planned.run is not None and planned.run.seconds is None
    assert "time unknown: how fast gpu:0 computes was neither said nor measured\n" in planned.text()
    assert all(use.use.activation_bytes for use in planned.run.uses)  # from the trace, which needs no rate


def test_operations_that_are_not_known_are_what_is_missing(tmp_path: Path) -> None:
    """With all rates said, the line does not ask for them: outside of ComfyUI nothing has its models' code."""
    (tmp_path / "vae").mkdir()
    save_file({f"decoder.{number}.weight": torch.zeros(64, 64) for number in range(4)}, tmp_path / "vae/x.safetensors")
    folder_paths.configure(models=tmp_path, output=tmp_path)
    asked = {
        "load": {"class_type": "VAELoader", "inputs": {"vae_name": "x.safetensors"}},
        "latent": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "decode": {"class_type": "VAEDecode", "inputs": {"vae": ["load", 0], "samples": ["latent", 0]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "x"}},
    }
    planned = plan_graph(asked, source="test", hardware=parse_hardware("gpu:0=1GiB@25GB/s@10TFLOPS,host=8GiB"))
    assert "time unknown: what x computes is not known\n" in planned.text()
    assert sum("its node Plan tells them" in note for note in planned.notes) == 1
    unrated = plan_graph(asked, source="test", hardware=parse_hardware("gpu:0=1GiB@25GB/s,host=8GiB"))
    assert "time unknown: how fast gpu:0 computes was neither" in unrated.text()
    assert not any("node Plan" in note for note in unrated.notes)


def test_a_workflow_that_cannot_run_so_gets_a_line_for_each_reason(tmp_path: Path) -> None:
    """As ComfyUI refuses these values: no latents, no steps."""
    for folder in ("vae", "diffusion_models"):
        (tmp_path / folder).mkdir()
        weights = {f"blocks.{number}.weight": torch.zeros(64, 64) for number in range(4)}
        save_file(weights, tmp_path / folder / f"{folder}.safetensors")
    folder_paths.configure(models=tmp_path, output=tmp_path)
    asked = {
        "load": {"class_type": "UNETLoader", "inputs": {"unet_name": "diffusion_models.safetensors"}},
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "vae.safetensors"}},
        "latent": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 1, "batch_size": 0}},
        "sample": {"class_type": "KSampler", "inputs": {"model": ["load", 0], "steps": 0, "cfg": 1.0}},
        "again": {"class_type": "KSampler", "inputs": {"model": ["load", 0], "steps": 4, "cfg": 1.0}},
        "decode": {"class_type": "VAEDecode", "inputs": {"vae": ["vae", 0], "samples": ["again", 0]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "x"}},
    }
    asked["sample"]["inputs"]["latent_image"] = ["latent", 0]
    asked["again"]["inputs"]["latent_image"] = ["sample", 0]
    planned = plan_graph(asked, source="test", hardware=parse_hardware("gpu:0=1GiB@25GB/s,host=8GiB"))
    assert planned.run is not None and [use.use.what for use in planned.run.uses] == ["4 steps", "decode"]
    assert planned.notes == (
        "node sample (KSampler): 0 steps: it computes nothing",
        "node sample (KSampler), node again (KSampler) and node decode (VAEDecode): "
        "size: node latent (EmptyLatentImage): height 1 is less than 8",
    )
    asked["sample"]["inputs"]["steps"] = -1
    planned = plan_graph(asked, source="test", hardware=parse_hardware("gpu:0=1GiB@25GB/s,host=8GiB"))
    assert "node sample (KSampler): steps -1 is less than 0" in planned.notes


def test_the_table_of_devices_shows_budgets(models: None) -> None:
    hardware = parse_hardware("gpu:0=64MiB,gpu:1=64MiB,host=8GiB")
    asked = graph()
    header = "device  room     peak     remains"
    assert header + "\n" in plan_graph(asked, source="test", hardware=hardware).text()
    asked["load"]["inputs"]["profile"] = "gpu:0=12MiB"
    text = plan_graph(asked, source="test", hardware=hardware).text()
    rows = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.startswith("gpu:")}
    assert "weights at most" in text and rows == {"gpu:0": "12.0MiB", "gpu:1": "-"}


def test_what_is_planned_is_what_runs(models: None) -> None:
    hardware = parse_hardware("gpu:0=24MiB@25GB/s@10TFLOPS,host=8GiB")
    planned = plan_graph(graph(), source="test", hardware=hardware)
    (plan,) = planned.plans.values()
    simdevice.install("sim", num_devices=2)
    spec = simdevice.SimDeviceSpec(total_bytes=24 << 20, flops_per_s=10e12)
    with simdevice.cluster([spec], pinned_bytes=hardware.pinned_bytes):
        from highwater.memory import manage
        from highwater.nodes.pipeline_predictions import predict_uses
        from highwater.nodes.pipelines.diffusers_pipelines import load_with_sources
        from highwater.nodes.pipelines.pipeline_folders import ready_pipeline
        from highwater.nodes.pipelines.sampling import LoadedPipeline, Sampling

        manager = MemoryManager()
        pipe, sources = load_with_sources(ready_pipeline("tiny-flux"))
        uses, sizes = predict_uses(graph(), "load", pipe)
        texts = {"profile": str(plan.profile), "placement": plan.placement}
        managed = manage(pipe, **texts, files=sources, name="flux", manager=manager, uses=uses)
        for part in plan.components:
            share = next(member for member in managed.members if member.name == part.component).managed.plan.shares[0]
            assert share.device_bytes == part.shares[0].device_bytes, part.component
            assert share.resident == part.shares[0].resident
        loaded = LoadedPipeline(pipe=pipe, managed=managed, traced=sizes)
        held: dict[str, int] = {}

        members = list(managed.members)

        def note(*_: Any) -> None:
            for member in members:
                held.setdefault(member.name, manager.ledger.held(member.id, "gpu:0"))

        pipe.transformer.register_forward_hook(note)
        sampling = {name: value for name, value in graph()["sample"]["inputs"].items() if name != "pipeline"}
        loaded.sample(Sampling(**sampling), on_step=lambda *_: None)
        assert held["transformer"] == plan["transformer"].shares[0].device_bytes
        managed.release()
        members.clear()
        del pipe, managed, loaded, sources, share


def test_a_pipeline_that_ran_is_planned_with_measured_seconds(runner: WorkflowRunner, monkeypatch) -> None:
    monkeypatch.setattr("highwater.nodes.pipeline_predictions.described_rates", {})
    speeds = default_manager().capacity.speeds
    asked = {name: node for name, node in graph().items() if name != "plan"}
    asked["load"]["inputs"]["placement"] = "cpu"  # simulated devices that other tests left take no time
    unknown = plan_graph(asked, source="test")
    assert unknown.run is not None and unknown.run.seconds is None
    assert re.search("time unknown: how long .* was not measured here yet", unknown.text())
    asked["sample"]["inputs"]["steps"] = 4
    runner.run(parse_workflow(asked), name="first")
    planned = plan_graph(asked, source="test")
    assert planned.run is not None
    sources = {use.use.component: use.source for use in planned.run.uses}
    assert sources["transformer"] == "measured", planned.text()
    (step,) = [use for use in planned.run.uses if use.use.component == "transformer"]
    assert step.pass_s in [pytest.approx(call.seconds) for call in speeds.known.values()]
    assert "transformer as measured here" in planned.text()


def test_a_bad_file_of_measured_calls_is_one_line_of_the_plan(models: None, monkeypatch) -> None:
    monkeypatch.setattr("highwater.nodes.pipeline_predictions.described_rates", {})
    monkeypatch.setattr(default_manager().capacity.speeds, "problem", "speeds.json: cannot be read (x)")
    assert "speeds.json: cannot be read (x)" in plan_graph(graph(), source="test").notes
