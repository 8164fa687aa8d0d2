"""Blocks are found by structure, in every shape that models have, and cut where they are too large to move."""

from __future__ import annotations

import copy
import re
from typing import ClassVar

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import InvalidInput
from highwater.memory.planner.sizes import explain_non_block, least_bytes
from highwater.memory.units import format_bytes
from highwater.memory.weights.blocks import find_blocks
from highwater.memory.weights.form_numbers import AS_THEY_CAME
from highwater.memory.weights.module_component import component_from_module

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


def layered(path: str, num_bytes: int) -> dict[str, int]:
    """The weights of a part of two layers."""
    return {f"{path}.{layer}.weight": num_bytes // 2 for layer in ("first", "second")}


def test_numbers_may_stand_in_a_word() -> None:
    """As in Cosmos 1, whose blocks are ``blocks.block0`` with three numbered parts inside each."""
    weights = {
        name: size
        for n in range(28)
        for m in range(3)
        for name, size in layered(f"blocks.block{n}.blocks.{m}", MIB).items()
    }
    assert blocks_of(weights) == [f"blocks.block{n}" for n in range(28)]


def test_a_pair_of_words_with_numbers_is_no_stack() -> None:
    weights = {
        name: size for n in range(8) for m in (1, 2) for name, size in layered(f"layers.{n}.attn{m}", 300 * MIB).items()
    }
    assert blocks_of(weights) == [f"layers.{n}" for n in range(8)]
    assert blocks_of({f"linear{n}.weight": 10 for n in range(8)}) == []


def test_the_layers_of_a_sequential_are_no_blocks() -> None:
    """JoyImageEdit's blocks were cut into their feed-forwards, and the attention between those stayed in the rest."""
    weights = {}
    for n in range(20):
        for layer in ("attn.to_q", "attn.to_out.0", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj"):
            weights[f"double_blocks.{n}.{layer}.weight"] = 100 * MIB
    weights |= {f"time_embed.mlp.{m}.weight": 800 * MIB for m in (0, 2)}
    assert blocks_of(weights) == [f"double_blocks.{n}" for n in range(20)]


def test_the_layers_of_a_sequential_are_blocks_where_smaller_ones_are_asked_for() -> None:
    """But not those of an embedder beside the blocks, which its parent may ask for its dtype."""
    weights = {
        f"blocks.{n}.{layer}.weight": 100 for n in range(4) for layer in ("attn.to_out.0", "ff.net.0.proj", "ff.net.2")
    }
    weights |= {f"time_embed.mlp.{m}.weight": 300 for m in (0, 2)}
    assert blocks_of(weights) == [f"blocks.{n}" for n in range(4)]
    found = blocks_of(weights, largest_bytes=150)
    assert len(found) == 12 and "blocks.3.ff.net.2" in found


def test_stacks_of_different_lengths_and_what_occurs_once_join_until_the_rest_is_small() -> None:
    weights = {}
    for stage, parts in (("encoder.down", 4), ("decoder.up", 6)):
        for m in range(parts):
            weights |= layered(f"{stage}.{m}.block.0", 10) | {f"{stage}.{m}.sample.conv.weight": 1}
    for coder in ("encoder", "decoder"):
        for part in ("block_1", "block_2"):
            weights |= layered(f"{coder}.mid.{part}", 20)
    weights["decoder.conv_out.weight"] = 8
    found = list(find_blocks(weights, lambda path: not path.endswith("mid")))
    assert {path for path in found if "mid" in path} == {
        f"{coder}.mid.block_{part}" for coder in ("encoder", "decoder") for part in (1, 2)
    }
    inside = sum(size for name, size in weights.items() if any(name.startswith(f"{path}.") for path in found))
    assert inside == sum(weights.values()) - 8


@pytest.mark.parametrize("layer_bytes", [40, 400 * MIB], ids=["small", "larger than a block should be"])
def test_single_layers_that_numbered_parts_have_each_are_blocks_where_the_rest_is_large(layer_bytes: int) -> None:
    """A third of HunyuanVideo 1.5's VAE was in no block: the layers between the levels, which are no list."""
    weights: dict[str, int] = {}
    for coder, level in (("encoder", "down"), ("decoder", "up")):
        for n in range(4):
            for m in range(2):
                weights |= layered(f"{coder}.{level}.{n}.block.{m}", layer_bytes)
            weights[f"{coder}.{level}.{n}.sample.conv.weight"] = layer_bytes
    weights |= {f"linear_{n}.weight": layer_bytes for n in (1, 2)}
    is_container = re.compile(r".*\.(down|up)(\.\d+)?(\.block)?")
    found = list(find_blocks(weights, lambda path: is_container.fullmatch(path) is None))
    levels = [
        [*(f"{coder}.{level}.{n}.block.{m}" for m in range(2)), f"{coder}.{level}.{n}.sample"]
        for coder, level in (("encoder", "down"), ("decoder", "up"))
        for n in range(4)
    ]
    assert found == [path for level in levels for path in level]


def test_an_embedder_stays_in_the_rest_and_the_plan_says_so(machine) -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(2000, 64), "layers": nn.ModuleList(Stage(64, 2) for _ in range(4))})
    component = component_from_module(net, name="net")
    assert [block.name for block in component.blocks] == [f"layers.{n}" for n in range(4)]
    line = explain_non_block(component)
    assert line == "non-block weights have 0.49MiB (66%) and are never streamed: embed 0.49MiB", line
    assert explain_non_block(component_from_module(net["layers"], name="net")) == ""


class Whole(Stage):
    """A part that its model declares to be one piece."""


class DeclaringNet(nn.Module):
    _no_split_modules: ClassVar = ["Whole"]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Whole(64, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Outer(nn.Module):
    """Declares nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(DeclaringNet() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stages[1](self.stages[0](x))


def block_names(module: nn.Module, **options) -> list[str]:
    return [block.name for block in component_from_module(module, name="net", **options).blocks]


def test_what_a_class_declares_to_be_one_piece_is_cut_only_on_demand() -> None:
    whole = [f"stages.{m}.layers.{n}" for m in range(2) for n in range(3)]
    assert block_names(Outer()) == ["stages.0", "stages.1"]
    assert block_names(Outer(), largest_bytes=300_000) == whole
    assert block_names(Outer(), largest_bytes=60_000) == whole
    parts = block_names(Outer(), largest_bytes=60_000, cuts_whole=True)
    assert len(parts) == 2 * 3 * 10 and "stages.1.layers.2.chain.7" in parts


def test_a_declaration_of_what_is_outside_counts_for_nothing_inside() -> None:
    net = Outer()
    net._repeated_blocks = ["DeclaringNet"]
    assert block_names(net, largest_bytes=300_000)[0] == "stages.0.layers.0"
    del DeclaringNet._no_split_modules
    try:
        assert block_names(net, largest_bytes=300_000) == ["stages.0", "stages.1"]
    finally:
        DeclaringNet._no_split_modules = ["Whole"]


@pytest.mark.parametrize("value", [None, "Whole", 3, [None, 3], {"Whole": 1}, property(lambda self: 1 / 0)])
def test_what_is_no_list_of_names_declares_nothing_or_what_it_says(value) -> None:
    class Odd(DeclaringNet):
        _no_split_modules = value
        _skip_layerwise_casting_patterns = value

    assert len(block_names(Odd(), largest_bytes=60_000)) in (3, 30)


@pytest.mark.parametrize(("budget", "num_blocks"), [("auto", 3), ("0.4MiB", 3), ("0.1MiB", 30)])
def test_pieces_stream_whole_while_anything_fits(machine, budget: str, num_blocks: int) -> None:
    torch.manual_seed(1)
    net = DeclaringNet().eval().requires_grad_(False)
    x = torch.randn(3, 64)
    with machine(4) as manager, torch.no_grad():
        want = copy.deepcopy(net).to("sim:0")(x.to("sim:0")).cpu()
        with manage(net, profile=budget, manager=manager) as managed:
            assert len(managed.members[0].managed.component.blocks) == num_blocks
            for _ in range(2):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()


class Wide(nn.Module):
    """Most of it has no number, and joins the rest once the others are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers[1](self.layers[0](x)))


def test_a_refusal_names_the_least_of_all_cuts(machine) -> None:
    net = nn.Sequential(*(Wide() for _ in range(4)))
    with machine(4) as manager, pytest.raises(InvalidInput, match="needs at least") as refusal:
        manage(net, profile="0.01MiB", placement="gpu:0", manager=manager)
    whole = component_from_module(net, name="net")
    least = least_bytes(whole, range(4), AS_THEY_CAME, first=True)
    assert f"needs at least {format_bytes(least)} " in str(refusal.value)


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
            blocks = managed.members[0].managed.component.blocks
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
