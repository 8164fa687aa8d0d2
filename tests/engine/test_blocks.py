"""Blocks are found by structure, in every shape that models have, and cut where they are too large to move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.blocks import find_blocks

MIB = 1 << 20


def anywhere(path: str) -> bool:
    return True


def blocks_of(weights: dict[str, int], **options) -> list[str]:
    return list(find_blocks(weights, anywhere, **options))


class Stage(nn.Module):
    """As a stage of a UNet: residual layers and a chain of transformer blocks, run by the stage itself."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.chain = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [self.resnets[0], *self.chain, self.resnets[1]]:
            x = x + torch.tanh(layer(x))
        return self.norm(x)


class UNet(nn.Module):
    def __init__(self, dim: int = 64, num_stages: int = 3, depth: int = 6) -> None:
        super().__init__()
        self.conv_in = nn.Linear(dim, dim)
        self.down_blocks = nn.ModuleList(Stage(dim, 0 if index == 0 else depth) for index in range(num_stages))
        self.up_blocks = nn.ModuleList(Stage(dim, depth) for _ in range(num_stages))
        self.mid_block = Stage(dim, depth)
        self.conv_out = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_in(x)
        skips = []
        for stage in self.down_blocks:
            x = stage(x)
            skips.append(x)
        x = self.mid_block(x)
        for stage in self.up_blocks:
            x = stage(self.conv_out(torch.cat([x, skips.pop()], dim=-1)))
        return x


def build_unet(**shape: int) -> UNet:
    torch.manual_seed(1)
    return UNet(**shape).eval().requires_grad_(False)


def test_a_large_stage_gives_way_to_the_blocks_inside_it() -> None:
    weights = {
        f"{stage}.attentions.{i}.transformer_blocks.{n}.w.weight": 80 * MIB
        for stage in ("down_blocks.2", "up_blocks.0")
        for i in (0, 1)
        for n in range(10)
    }
    weights |= {f"{stage}.{part}.weight": 20 * MIB for stage in ("down_blocks.0", "down_blocks.1") for part in "ab"}
    weights |= {
        f"{stage}.attentions.{i}.proj.weight": MIB for stage in ("down_blocks.2", "up_blocks.0") for i in (0, 1)
    }
    found = blocks_of(weights)
    assert found[:2] == ["down_blocks.0", "down_blocks.1"]
    assert found[2] == "down_blocks.2.attentions.0.transformer_blocks.0"
    assert found[-1] == "up_blocks.0.attentions.1.transformer_blocks.9"
    assert len(found) == 42


def test_a_block_of_a_deep_model_stays_whole_however_large() -> None:
    weights = {f"blocks.{n}.mlp.{m}.weight": 300 * MIB for n in range(40) for m in range(2)}
    assert blocks_of(weights) == [f"blocks.{n}" for n in range(40)]
    assert len(blocks_of(weights, largest_bytes=400 * MIB)) == 80


def test_a_part_that_is_mostly_not_numbered_is_not_cut() -> None:
    weights = {f"blocks.{n}.big.weight": 900 for n in range(2)} | {
        f"blocks.{n}.small.{m}.weight": 50 for n in range(2) for m in range(2)
    }
    assert blocks_of(weights, largest_bytes=100) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("num_stages", [3, 4])
def test_unets_of_three_and_four_stages(num_stages: int) -> None:
    names = [f"{part}.{n}.resnets.0.weight" for part in ("down_blocks", "up_blocks") for n in range(num_stages)]
    names += ["mid_block.resnets.0.weight", "mid_block.resnets.1.weight"]
    found = blocks_of(dict.fromkeys(names, 1000))
    expected = [f"down_blocks.{n}" for n in range(num_stages)] + ["mid_block.resnets.0", "mid_block.resnets.1"]
    assert found == expected + [f"up_blocks.{n}" for n in range(num_stages)]


def test_a_pattern_says_what_a_block_is() -> None:
    weights = {f"layers.{n}.{part}.weight": 10 for n in range(3) for part in ("attention", "mlp")} | {"head.weight": 5}
    assert blocks_of(weights, pattern="layers.*.attention") == [f"layers.{n}.attention" for n in range(3)]
    assert blocks_of(weights, pattern="layers.*.*")[:2] == ["layers.0.attention", "layers.0.mlp"]


def test_no_repeated_blocks_means_no_blocks() -> None:
    assert blocks_of({"encoder.conv.weight": 10, "decoder.conv.weight": 10}) == []


@pytest.mark.parametrize("num_stages", [3, 4])
@pytest.mark.parametrize("budget", ["auto", "0.5MiB", "0.15MiB"])
def test_a_unet_computes_alike_whole_and_in_pieces(machine, num_stages: int, budget: str) -> None:
    """The least budget is less than a stage: its inner blocks stream."""
    net = build_unet(num_stages=num_stages)
    x = torch.randn(3, 64)
    with machine(4) as manager, torch.no_grad():
        want = build_unet(num_stages=num_stages).to("sim:0")(x.to("sim:0")).cpu()
        with manage(net, profile=budget, manager=manager) as managed:
            blocks = managed.members[0].attachment.component.blocks
            stage_bytes = max(block.weight_bytes for block in blocks)
            assert (stage_bytes < 0.1 * MIB) == (budget == "0.15MiB")
            for _ in range(3):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()


def test_a_unet_is_split_with_its_skips(machine) -> None:
    net = build_unet()
    x = torch.randn(3, 64)
    with machine(4, 4) as manager, torch.no_grad():
        want = build_unet().to("sim:0")(x.to("sim:0")).cpu()
        with manage(net, placement="gpu:0&gpu:1", manager=manager):
            for _ in range(2):
                assert torch.equal(net(x).cpu(), want)
