"""A group's state says what its module holds, whatever has been done."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from highwater.memory import manage
from highwater.memory.runtime.blocks.block_state import BlockState
from highwater.memory.runtime.blocks.weight_group import WeightGroup
from highwater.memory.runtime.managed_component import ManagedComponent

X = torch.randn(2, 3, 64)
WAYS = {
    "in place": {"placement": "cpu"},
    "in place, eight bits": {"placement": "cpu", "precision": "fp8 scaled"},
    "resident": {"placement": "gpu:0"},
    "resident, eight bits": {"placement": "gpu:0", "precision": "fp8 scaled"},
    "streamed": {"placement": "gpu:0", "profile": "0.45MiB"},
    "pageable": {"placement": "gpu:0:host", "profile": "0.45MiB"},
    "split": {"placement": "gpu:0&gpu:1@0.5"},
}


def what_is_held(group: WeightGroup) -> BlockState:
    """Return the state of a group at rest by what its module holds."""
    held = next(slot.held for slot in group.slots if not slot.is_buffer)
    if held.is_meta:
        return BlockState.IN_FILE
    if group.copy is not None and all(
        slot.held is view for slot, view in zip(group.slots, group.copy.views, strict=True)
    ):
        assert group.copy.slab.device.type == "sim"
        return BlockState.RESIDENT
    return BlockState.HOST if group.host_slab is not None else BlockState.IN_PLACE


def states(managed: ManagedComponent) -> set[BlockState]:
    groups = [group for group in managed.groups if any(not slot.is_buffer for slot in group.slots)]
    for group in groups:
        assert group.state is what_is_held(group)
    return {group.state for group in groups}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_the_state_is_what_the_module_holds(toys, machine, way: str) -> None:
    net = toys.build_net()
    with machine(8, 8) as manager:
        handle = manage(net, manager=manager, **WAYS[way])
        managed = handle.members[0].managed
        seen: set[BlockState] = set()
        for module in net.modules():
            if module in managed.forwards.blocks:
                module.register_forward_pre_hook(
                    lambda block, args: seen.update(
                        group.state for group in managed.groups if group.name and net.get_submodule(group.name) is block
                    ),
                )
        at_rest = states(managed)
        for _ in range(3):
            net(X)
            loaded = states(managed)
        managed.unload()
        assert states(managed) == at_rest
        groups = managed.groups
        handle.release()
        assert {group.state for group in groups} == {BlockState.IN_PLACE}
    streams, is_cpu = way in ("streamed", "pageable"), way.startswith("in place")
    assert at_rest == {BlockState.IN_PLACE if way == "in place" else BlockState.HOST} | (
        {BlockState.IN_PLACE} if way == "in place, eight bits" else set()
    )
    assert loaded == (at_rest if is_cpu else {BlockState.RESIDENT} | ({BlockState.HOST} if streams else set()))
    assert seen <= {BlockState.COMPUTING, BlockState.RESIDENT, BlockState.IN_PLACE}
    assert (BlockState.COMPUTING in seen) is (streams or "eight bits" in way or way in ("split", "resident"))


@torch.no_grad()
def test_what_rests_in_its_file_says_so(toys, machine, tmp_path: Path) -> None:
    net, file = toys.build_net(), tmp_path / "net.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items() if name != "out.weight"}, file)
    choices = {"placement": "gpu:0:disk", "files": {"net": file}}
    with machine(8) as manager, manage({"net": net}, "0.45MiB", manager=manager, **choices) as handle:
        managed = handle.members[0].managed
        assert states(managed) == {BlockState.IN_FILE}
        net(X)
        assert states(managed) == {BlockState.IN_FILE, BlockState.RESIDENT}
        group = next(group for group in managed.groups if group.name and group.state is BlockState.IN_FILE)
        next(slot.held for slot in group.slots if not slot.is_buffer).sum()  # other code uses it
        assert group.state is BlockState.HOST
        managed.unload()
        assert states(managed) == {BlockState.IN_FILE, BlockState.HOST}
