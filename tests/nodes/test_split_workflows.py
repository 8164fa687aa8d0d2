"""What a workflow's plan says of a diffusion model that is split: whether its devices compute at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from highwater.headless.comfy_stub import comfy_api, folder_paths
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.run import BlockTimes
from highwater.memory.units import GIB

comfy_api.install()
from highwater.nodes.planned_calls import Prediction  # noqa: E402
from highwater.nodes.workflow_plans import WorkflowPlan, plan_workflow  # noqa: E402
from highwater.nodes.workflow_reading.reading import read_workflow  # noqa: E402

NUM_BLOCKS = 12
MACHINE = Machine(
    devices=(
        DeviceCapacity(name="cpu", total_bytes=GIB, available_bytes=GIB),
        *(
            DeviceCapacity(name=f"gpu:{index}", total_bytes=GIB, available_bytes=GIB, link_bytes_per_s=10e9)
            for index in range(2)
        ),
    ),
    pinned_bytes=GIB,
)


def node(name: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": name, "inputs": inputs}


@pytest.fixture
def models(tmp_path: Path) -> Iterator[None]:
    before = folder_paths.models_directory, folder_paths.output_directory
    folder_paths.configure(models=tmp_path, output=tmp_path)
    (tmp_path / "diffusion_models").mkdir()
    weights = {f"double_blocks.{number}.weight": torch.ones(64, 64) for number in range(NUM_BLOCKS)}
    save_file(weights, tmp_path / "diffusion_models/tiny.safetensors")
    yield
    folder_paths.models_directory, folder_paths.output_directory = before


def graph(cfg: float, placement: str, *, hooks: bool = False, batch: int = 1) -> dict[str, Any]:
    """A prompt that samples from prompts that another node gives."""
    cond = {name: node("ConditioningZeroOut", conditioning=["text", 0]) for name in ("positive", "negative")}
    if hooks:
        cond["hooks"] = node("CreateHookLora", lora_name="a.safetensors", strength_model=1.0, strength_clip=1.0)
        cond["hooked"] = node("ConditioningSetProperties", cond_NEW=["positive", 0], hooks=["hooks", 0])
    return {
        "text": node("SomeEncoder"),
        **cond,
        "model": node(
            "HighwaterLoadDiffusionModel", unet_name="tiny.safetensors", placement=placement, profile="auto",
            precision="as stored",
        ),
        "latent": node("EmptyLatentImage", width=64, height=64, batch_size=batch),
        "sample": node(
            "KSampler", model=["model", 0], positive=["hooked" if hooks else "positive", 0], negative=["negative", 0],
            latent_image=["latent", 0], seed=1, steps=20, cfg=cfg, sampler_name="euler", scheduler="simple", denoise=1,
        ),
        "save": node("SaveLatent", samples=["sample", 0], filename_prefix="x"),
    }  # fmt: skip


def plan(cfg: float, placement: str, **more: Any) -> WorkflowPlan:
    """Return the plan for blocks of 10 ms in each call."""
    times = {f"gpu:{index}": BlockTimes(blocks_s=(0.01,) * NUM_BLOCKS) for index in range(2)}
    return plan_workflow(
        read_workflow(graph(cfg, placement, **more)),
        MACHINE,
        lambda call: Prediction(num_passes=20, activation_bytes=0, carried_bytes=1 << 10, times=times),
    )


def planned(cfg: float, placement: str, **more: Any) -> tuple[list[str], float]:
    """Return what the plan says of the model, and what it says that a step takes."""
    found = plan(cfg, placement, **more)
    (part,) = found.plans.values()
    assert found.run is not None and found.run.uses[0].pass_s is not None
    return list(part.components[0].reasons), found.run.uses[0].pass_s


def test_what_a_loader_says_again_has_the_parts_and_the_groups(models: None) -> None:
    found = plan(3.5, "gpu:0&gpu:1@30%/4")
    (text,) = found.placements.values()
    assert text == "gpu:0&gpu:1@0.3/4"
    again = plan(3.5, text)
    shares, others = (
        [share.blocks for share in next(iter(one.plans.values())).components[0].shares] for one in (found, again)
    )
    assert shares == others


@pytest.mark.parametrize(
    ("cfg", "hooks", "batch", "why"),
    [
        (1.0, False, 1, "a step has one conditioning and one picture: a split buys memory, not speed"),
        (3.5, True, 1, "conditionings have hooks that change weights"),
        (3.5, False, 1, ""),
        (1.0, False, 2, ""),
    ],
)
def test_a_plan_tells_before_the_run_what_computes_at_the_same_time(
    models: None, cfg: float, hooks: bool, batch: int, why: str
) -> None:
    reasons, step_s = planned(cfg, "gpu:0&gpu:1", hooks=hooks, batch=batch)
    (line,) = [reason for reason in reasons if reason.startswith("micro-batches: ")]
    if why:
        assert line == f"micro-batches: off: {why}"
        assert step_s == pytest.approx(0.12 if cfg == 1 else 0.24, rel=0.01)
    else:
        assert line.startswith("micro-batches: gpu:0 and gpu:1 compute at the same time")
        assert step_s < 0.24 / 1.3


def test_clones_are_the_alternative_where_a_step_has_two_conditionings(models: None) -> None:
    def alternatives(*given: Any) -> list[str]:
        return [reason for reason in planned(*given)[0] if reason.startswith("instead: ")]

    (line,) = alternatives(3.5, "gpu:0&gpu:1")
    assert "all of it on each of gpu:0 and gpu:1" in line and "about 0.12 s a forward" in line
    assert not alternatives(1.0, "gpu:0&gpu:1")


def test_a_placement_left_open_is_split_where_that_is_faster(models: None) -> None:
    assert any("compute the 2 calls of a forward at the same time" in reason for reason in planned(3.5, "auto")[0])
    assert not any("at the same time" in reason for reason in planned(1.0, "auto")[0])


@pytest.mark.parametrize(("placement", "told"), [("default", False), ("auto", True), ("gpu:1", False)])
def test_a_plan_says_what_auto_means_on_a_loader_of_comfyui(models: None, placement: str, told: bool) -> None:
    """ComfyUI's device: the loader, too, chooses no other."""
    found = plan_workflow(read_workflow(graph(1.0, placement)), MACHINE, home="gpu:0")
    note = "placement auto: loaders of ComfyUI's models read auto as default: ComfyUI chooses the device, gpu:0"
    assert any(note in line for line in found.notes) == told
    (part,) = found.plans.values()
    assert [share.device for share in part.components[0].shares] == ["gpu:1" if placement == "gpu:1" else "gpu:0"]
