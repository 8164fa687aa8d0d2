"""What the case of the tiers plans from: headers that say what the models have, and the least that a pass reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from highwater.benchmarks.tiers import MODELS, describe, header_only, least_read_bytes, on_meta, plan_on, sdxl_name
from highwater.memory import load_model
from highwater.memory.manager.module_plans import plan_modules
from highwater.memory.model_loading import source_of
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.units import GIB, MIB
from highwater.memory.weights.component import component_from_files
from highwater.nodes.described_hardware import DescribedDevice, Hardware
from highwater.nodes.plans import plan_files

BLOCK_BYTES = 64 * MIB


class Model(nn.Module):
    """Ten gibibytes in blocks of 64 MiB, without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(160))


def test_a_header_says_what_a_model_has_and_takes_no_disk(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header_only(Model(), path)
    component = component_from_files([path], name="model", kind="diffusion")
    assert (len(component.blocks), component.weight_bytes) == (160, 160 * BLOCK_BYTES)
    assert path.stat().st_blocks * 512 < MIB


def test_a_pass_reads_about_the_least(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header_only(Model(), path)
    component = component_from_files([path], name="model", kind="diffusion")
    reads = []
    for ram in (2, 4, 8, 16):
        found = plan_on([component], 4 * GIB, ram * GIB)
        assert found is not None
        plan, ram_bytes = found[0]["model"], found[1]
        least = least_read_bytes(component, plan, ram_bytes)
        assert least <= plan.shares[0].read_bytes <= least + BLOCK_BYTES
        reads.append(least)
    assert reads[0] > reads[1] > reads[3] == 0
    assert plan_on([component], 64 * MIB, 16 * GIB) is None


def test_a_checkpoint_is_planned_as_its_parts(tmp_path: Path) -> None:
    unet, clip, vae = describe("SDXL", tmp_path)
    assert [part.kind for part in (unet, clip, vae)] == ["diffusion", "text", "vae"]
    total_bytes = sum(part.weight_bytes for part in (unet, clip, vae))
    assert abs(total_bytes - 6.46 * GIB) < 0.01 * GIB, "as the file that people have, in fp16"
    blocks = {block.name.removeprefix("model.diffusion_model.") for block in unet.blocks}
    assert {"input_blocks.1", "middle_block.1.transformer_blocks.9", "output_blocks.8"} <= blocks
    found = plan_on([unet, clip, vae], 24 * GIB, 32 * GIB)
    assert found is not None
    assert all(plan.file_bytes == plan.weight_bytes for plan in found[0].components), "resident: no copy in RAM"


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("model.diffusion_model.conv_in.weight", "input_blocks.0.0.weight"),
        ("model.diffusion_model.down_blocks.0.downsamplers.0.conv.bias", "input_blocks.3.0.op.bias"),
        ("model.diffusion_model.down_blocks.2.resnets.1.norm2.weight", "input_blocks.8.0.out_layers.0.weight"),
        ("model.diffusion_model.down_blocks.1.attentions.0.norm.bias", "input_blocks.4.1.norm.bias"),
        ("model.diffusion_model.up_blocks.1.upsamplers.0.conv.weight", "output_blocks.5.2.conv.weight"),
        ("model.diffusion_model.up_blocks.2.resnets.0.conv_shortcut.bias", "output_blocks.6.0.skip_connection.bias"),
    ],
)
def test_a_checkpoint_has_the_names_that_such_files_have(name: str, stored: str) -> None:
    assert sdxl_name(name) == f"model.diffusion_model.{stored}"
    assert sdxl_name("first_stage_model.encoder.conv_in.weight") == "first_stage_model.encoder.conv_in.weight"


@pytest.mark.parametrize(("card", "ram"), [(24, 32), (8, 32), (6, 16)])
def test_a_file_is_planned_as_the_model_that_is_loaded_from_it(tmp_path: Path, card: int, ram: int) -> None:
    """What `highwater plan FILE` says, this table too, is what `manage` then does."""
    kind, build = MODELS["T5-XXL"]
    path = tmp_path / "T5-XXL.safetensors"
    with torch.no_grad():
        header_only(on_meta(build), path)
        model = load_model(path, lambda: on_meta(build), config={})
    device = DescribedDevice(name="gpu:0", total_bytes=card * GIB)
    machine = Hardware(devices=(device,), host_bytes=ram * GIB).machine()
    names = {"devices": ["cpu", "gpu:0"], "components": [path.stem]}
    source = source_of(model)
    assert source is not None and kind is not None
    managed = plan_modules(
        {path.stem: model},
        machine,
        placement=parse_placement("auto", **names),
        profile=parse_profile("auto", **names),
        precision=None,
        kinds={path.stem: kind},
        sources={path.stem: source},
    ).plan
    planned = plan_files([path], machine, profile="auto", placement="auto", precision=None)
    assert planned.to_json() == managed.to_json()
