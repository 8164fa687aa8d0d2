"""What the case of the tiers plans from: headers that say what the models have, and the least that a pass reads."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from highwater.benchmarks.tiers import header_only, least_read_bytes, plan_on
from highwater.memory.units import GIB, MIB
from highwater.memory.weights.component import component_from_files

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
        found = plan_on(component, 4 * GIB, ram * GIB)
        assert found is not None
        plan, ram_bytes = found
        least = least_read_bytes(component, plan, ram_bytes)
        assert least <= plan.shares[0].read_bytes <= least + BLOCK_BYTES
        reads.append(least)
    assert reads[0] > reads[1] > reads[3] == 0
    assert plan_on(component, 64 * MIB, 16 * GIB) is None
