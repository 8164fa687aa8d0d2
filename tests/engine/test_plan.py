"""The plan is arithmetic: it never exceeds its budget, wastes no room a block would fit in, and says why."""

from __future__ import annotations

import pytest
import torch
from highwater.memory.component import (
    Block,
    Component,
    TensorSpec,
    component_from_files,
    component_from_module,
    group_tensors,
)
from highwater.memory.errors import DoesNotFit, InvalidInput
from highwater.memory.footprint import all_resident_bytes, block_bytes, wide_bytes
from highwater.memory.placement import parse_placement
from highwater.memory.plan import DeviceCapacity, Machine, Plan, plan_components
from highwater.memory.profile import parse_profile
from highwater.memory.schedule import spread_residents
from highwater.memory.units import MIB
from highwater.memory.upcast import Precision
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import save_file

DEVICES = ["cpu", "gpu:0", "gpu:1"]


def component(sizes: list[int], rest: int = 1000) -> Component:
    def block(name: str, num_bytes: int) -> Block:
        spec = TensorSpec(name=f"{name}.weight", dtype="BF16", shape=(num_bytes // 2, 1), castable=True)
        return Block(name=name, tensors=(spec,))

    return Component(
        name="transformer",
        kind="diffusion",
        blocks=tuple(block(f"layers.{number}", size) for number, size in enumerate(sizes)),
        rest=block("", rest),
    )


def machine(first: int = 100 * MIB, second: int = 50 * MIB, pinned: int = 1 << 40) -> Machine:
    return Machine(
        devices=(
            DeviceCapacity(name="cpu", total_bytes=1 << 40, available_bytes=1 << 40),
            DeviceCapacity(name="gpu:0", total_bytes=2 * first, available_bytes=first, kept_free_bytes=MIB),
            DeviceCapacity(name="gpu:1", total_bytes=2 * second, available_bytes=second),
        ),
        pinned_bytes=pinned,
    )


def plan(part: Component, *, placement: str = "gpu:0", profile: str = "auto", on: Machine | None = None,
         precision: Precision = Precision.AS_STORED) -> Plan:  # fmt: skip
    return plan_components(
        [part],
        on or machine(),
        placement=parse_placement(placement, devices=DEVICES),
        profile=parse_profile(profile, devices=DEVICES),
        precision=precision,
    )


sizes_of_blocks = st.lists(st.integers(1, 4000).map(lambda n: n * 512), min_size=1, max_size=60)


@given(sizes_of_blocks, st.integers(0, 60 * 4000 * 512))
def test_residents_fit_the_budget_and_no_other_block_would(sizes: list[int], budget: int) -> None:
    resident = spread_residents(sizes, budget)
    left = budget - sum(sizes[position] for position in resident)
    assert left >= 0
    assert all(sizes[position] > left for position in range(len(sizes)) if position not in resident)


@given(st.integers(2, 80), st.data())
def test_equal_blocks_are_spread_evenly(count: int, data) -> None:
    kept = data.draw(st.integers(0, count))
    streamed = sorted(set(range(count)) - spread_residents([10] * count, 10 * kept))
    assert len(streamed) == count - kept
    if streamed:
        gaps = [after - before for before, after in zip(streamed, [*streamed[1:], streamed[0] + count], strict=True)]
        assert max(gaps) - min(gaps) <= 1


@given(sizes_of_blocks, st.integers(1, 200 * MIB), st.sampled_from(list(Precision)))
def test_device_bytes_never_exceed_what_is_available(sizes: list[int], available: int, precision: Precision) -> None:
    part = component(sizes)
    try:
        decided = plan(part, on=machine(first=available), precision=precision)["transformer"]
    except DoesNotFit:
        cast = plan(part, precision=precision, on=machine(first=1 << 40))["transformer"].cast
        least = 1024 + max(block_bytes(block, cast) for block in part.blocks)
        least += max(wide_bytes(block, cast) for block in part.blocks)
        assert least > available
        return
    (share,) = decided.shares
    assert share.device_bytes <= available
    assert share.resident | set(share.streamed) == set(range(len(sizes)))
    assert bool(share.num_slots) == bool(share.streamed)
    if all_resident_bytes(part, decided.cast) + share.scratch_bytes <= available:
        assert not share.streamed


@given(sizes_of_blocks, st.floats(0.05, 0.95))
def test_a_split_covers_every_block_once_in_order_near_the_ratio(sizes: list[int], ratio: float) -> None:
    assume(len(sizes) > 1)
    decided = plan(component(sizes), placement=f"gpu:0&gpu:1@{ratio:.3f}", on=machine(1 << 40, 1 << 40))["transformer"]
    first, second = decided.shares
    assert first.blocks + second.blocks == tuple(range(len(sizes)))
    assert first.blocks and second.blocks
    asked = ratio * sum(sizes)
    got = sum(sizes[number] for number in second.blocks)
    assert abs(got - asked) <= max(sizes)


def test_the_printed_placement_gives_the_same_plan_again() -> None:
    part = component([MIB] * 40)
    first = plan(part, placement="auto", profile="20MiB")
    again = plan(part, placement=first.placement.replace("transformer=", ""), profile="20MiB")
    assert first["transformer"].shares == again["transformer"].shares


def test_a_budget_below_the_largest_block_is_the_users_error() -> None:
    with pytest.raises(InvalidInput, match=r"budget '1\.50MiB' is too small: transformer needs at least 2\.00MiB"):
        plan(component([MIB, 2 * MIB]), profile="1.5MiB")


def test_a_device_below_the_least_form_does_not_fit_and_names_the_remedy() -> None:
    with pytest.raises(DoesNotFit, match=r"2\.00MiB for the largest block.*lower the watermark"):
        plan(component([MIB, 2 * MIB]), on=machine(first=MIB))


def test_fp8_halves_what_streams_and_needs_scratch() -> None:
    stored = plan(component([MIB] * 8))["transformer"]
    cast = plan(component([MIB] * 8), precision=Precision.FP8_SCALED)["transformer"]
    assert cast.shares[0].resident_bytes * 2 == stored.shares[0].resident_bytes
    assert cast.shares[0].scratch_bytes == MIB
    assert stored.shares[0].scratch_bytes == 0


def test_pageable_memory_is_chosen_and_said_when_pinning_is_not_allowed() -> None:
    decided = plan(component([MIB] * 8), on=machine(pinned=MIB))["transformer"]
    assert decided.tier == "host"
    assert any("pageable" in reason for reason in decided.reasons)


@pytest.mark.parametrize("placement", ["cpu:pinned", "gpu:0:disk", "gpu:0:gpu:1"])
def test_a_tier_that_cannot_be_had_is_refused(placement: str) -> None:
    with pytest.raises(InvalidInput, match="is not available for transformer"):
        plan(component([MIB] * 8), placement=placement)


def test_tier_device_refuses_to_stream() -> None:
    with pytest.raises(DoesNotFit, match="tier 'device'"):
        plan(component([MIB] * 8), placement="gpu:0:device", profile="5MiB")


def test_blocks_are_found_alike_in_a_module_and_in_its_file(toys, tmp_path) -> None:
    net = toys.build_net()
    from_module = component_from_module(net, name="net")
    save_file(
        {name: tensor for name, tensor in net.state_dict().items() if name != "out.weight"},
        tmp_path / "net.safetensors",
    )
    from_file = component_from_files([tmp_path / "net.safetensors"])
    names = [f"doubles.{n}" for n in range(3)] + [f"singles.{n}" for n in range(5)]
    assert [block.name for block in from_module.blocks] == names
    assert [block.name for block in from_file.blocks] == names
    # A file cannot tell buffers from weights: it has the blocks' gains besides.
    gains = 8 * 64 * 4
    assert from_file.weight_bytes == from_module.weight_bytes + gains


@pytest.mark.parametrize("shuffled", [False, True])
def test_blocks_stand_in_the_order_in_which_they_run(shuffled: bool) -> None:
    names = [
        "down_blocks.0",
        "down_blocks.1",
        "mid_block.resnets.0",
        "mid_block.resnets.1",
        "up_blocks.0",
        "up_blocks.1",
    ]
    tensors = [TensorSpec(name=f"{name}.w.weight", dtype="F32", shape=(100, 100)) for name in names]
    if shuffled:  # as a file sorted by name, or a UNet that defines its middle last
        tensors = [tensors[index] for index in (4, 0, 1, 5, 2, 3)]
    part = group_tensors("unet", "diffusion", tensors, lambda path: True)
    assert [block.name for block in part.blocks] == names


def test_tied_weights_count_once(toys) -> None:
    net = toys.build_net()
    part = component_from_module(net, name="net")
    assert part.weight_bytes == sum(parameter.nbytes for parameter in net.parameters())


def test_lists_that_cannot_be_called_are_not_blocks() -> None:
    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = torch.nn.ModuleList(
                torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2)) for _ in range(3)
            )

    part = component_from_module(Nested(), name="nested")
    assert [block.name for block in part.blocks] == [f"stages.{i}.{j}" for i in range(3) for j in range(2)]
