"""What LoRAs add to a plan, from the headers of their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from highwater.headless.comfy_stub import folder_paths
from highwater.headless.comfy_stub.comfy_api import install
from highwater.nodes.described_hardware import parse_hardware
from highwater.nodes.workflow_plans import WorkflowPlan

install()
from highwater.nodes.graph_plans import plan_graph  # noqa: E402

WIDTH, BLOCKS, MODEL = 256, 8, "model.diffusion_model."
HARDWARE = parse_hardware("gpu:0=1GiB@25GB/s,host=8GiB")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for name in ("diffusion_models", "loras"):
        (folder / name).mkdir(parents=True)
    weights = {f"{MODEL}blocks.{number}.to_q.weight": torch.zeros(WIDTH, WIDTH) for number in range(BLOCKS)}
    weights |= {f"{MODEL}blocks.{number}.to_q.bias": torch.zeros(WIDTH) for number in range(BLOCKS)}
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "diffusion_models/model.safetensors"
    )
    folder_paths.configure(models=folder, output=tmp_path)
    return folder / "loras"


def write_lora(path: Path, ranks: dict[str, int], up: str = ".lora_up.weight", down: str = ".lora_down.weight") -> None:
    """Write a LoRA of the layers with these names."""
    tensors = {name + up: torch.zeros(WIDTH, rank) for name, rank in ranks.items()}
    save_file(tensors | {name + down: torch.zeros(rank, WIDTH) for name, rank in ranks.items()}, path)


def plan_with(*loras: str, precision: str = "int8", **changed: Any) -> WorkflowPlan:
    request = {"profile": "auto", "precision": precision, "placement": "gpu:0"}
    graph: dict[str, Any] = {
        "0": {"class_type": "HighwaterLoadDiffusionModel", "inputs": {"unet_name": "model.safetensors", **request}}
    }
    for number, file in enumerate(loras, start=1):
        inputs = {"lora_name": file, "strength_model": 1.0, "model": [str(number - 1), 0], **changed}
        graph[str(number)] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
    latent = {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}}
    sample = {"model": [str(len(loras)), 0], "latent_image": ["latent", 0], "steps": 2, "cfg": 1.0}
    graph |= {"latent": latent, "sample": {"class_type": "KSampler", "inputs": sample}}
    return plan_graph(graph, source="test", hardware=HARDWARE)


def weight_bytes(planned: WorkflowPlan) -> int:
    return sum(part.weight_bytes for plan in planned.plans.values() for part in plan.components)


def test_loras_over_encoded_weights_take_their_factors(models: Path) -> None:
    """However their programs write the names of layers; two over one weight add their ranks."""
    write_lora(models / "kohya.safetensors", {f"lora_unet_blocks_{number}_to_q": 4 + number for number in range(4)})
    peft = {f"base_model.model.diffusion_model.blocks.{number}.to_q": 8 for number in range(3, 6)}
    write_lora(models / "peft.safetensors", peft, ".lora_B.weight", ".lora_A.weight")
    # Rank 200 is more than the weight at rest: that LoRA is merged.
    write_lora(models / "large.safetensors", {"diffusion_model.blocks.7.to_q": 200, "diffusion_model.other.0": 4})
    alone = weight_bytes(plan_with())
    ranks = [4, 5, 6, 7 + 8, 8, 8]
    planned = plan_with("kohya.safetensors", "peft.safetensors", "large.safetensors")
    assert weight_bytes(planned) - alone == sum(ranks) * 2 * WIDTH * 2  # two factors of bf16
    text = planned.text()
    assert f"beside {len(ranks)} encoded weights" in text and "merged into 1 weights" in text
    assert "large.safetensors: 1 of its 2 layers are called like none of 'model'" in text
    assert weight_bytes(plan_with("kohya.safetensors", strength_model=0)) == alone


def test_what_a_lora_does_otherwise_is_said_and_not_counted(models: Path) -> None:
    write_lora(models / "plain.safetensors", {f"diffusion_model.blocks.{number}.to_q": 4 for number in range(3)})
    (models / "broken.safetensors").write_bytes(b"\1" * 100)
    alone = weight_bytes(plan_with(precision="as stored"))
    merged = plan_with("plain.safetensors", "broken.safetensors", "missing.safetensors", precision="as stored")
    assert weight_bytes(merged) == alone
    assert "plain.safetensors: merged into 3 weights, which takes about 0.38MiB more of RAM" in merged.text()
    notes = [note for note in merged.notes if "LoraLoader" in note]
    assert len(notes) == 2 and "broken.safetensors" in notes[0] and "'missing.safetensors' is not in" in notes[1]
