"""Layers and weights that other code exchanges, removes or replaces count, or are refused in one line."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import InvalidInput, UnsafeState
from highwater.memory.options.precision import Precision
from highwater.memory.planner.form_choice import choose_forms
from highwater.memory.runtime.blocks.weight_store import FileStore
from highwater.memory.weights.cast_form import find_scale
from highwater.memory.weights.fp8 import encode_fp8
from highwater.memory.weights.module_component import component_from_module

DIM = 32
X = torch.randn(2, DIM, generator=torch.Generator().manual_seed(0))
STREAMED = {"profile": "0.02MiB"}
DISK = {"placement": "gpu:0:disk"}
EIGHT_BITS = {"precision": "fp8 scaled"}
WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": STREAMED,
    "on the CPU": {"placement": "cpu"},
    "eight bits": EIGHT_BITS,
    "disk": DISK,
    "disk, streamed": {**DISK, **STREAMED},
    "disk, written before": {**DISK, **STREAMED},
}
THEN: dict[str, dict[str, Any] | None] = {
    "forward": None,
    "as it was": {},
    "in RAM": {"placement": "gpu:0"},
    "on disk": DISK,
    "on disk, streamed": {**DISK, **STREAMED},
    "split": {"placement": "gpu:0&gpu:1"},
    "release": None,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(DIM, DIM)
            self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def build(way: str) -> Net:
    """Return a module whose weights lose nothing in eight bits where they are to rest in them."""
    net = Net()
    if way.startswith("eight bits"):
        for name in choose_forms(component_from_module(net, name="model"), Precision.ENCODED):
            round_off(net.get_parameter(name))
    return net


def round_off(weight: torch.Tensor) -> None:
    scale = find_scale(weight, name="weight")
    weight.copy_(encode_fp8(weight, scale).to(weight.dtype) * scale)


def new_block() -> Block:
    block = Net(1).blocks[0]
    round_off(block.up.weight)
    round_off(block.down.weight)
    return block


def new(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, 0.25), requires_grad=False)


def exchange_blocks(net: Net) -> None:
    net.blocks[1], net.blocks[2] = net.blocks[2], net.blocks[1]


def exchange_layers(net: Net) -> None:
    net.blocks[1].up, net.blocks[2].up = net.blocks[2].up, net.blocks[1].up


def exchange_weights(net: Net) -> None:
    one, other = net.blocks[1].up, net.blocks[2].up
    one.weight, other.weight = other.weight, one.weight


def exchange_by_swapping(net: Net) -> None:
    torch.utils.swap_tensors(net.blocks[1].up.weight, net.blocks[2].up.weight)


def exchange_data(net: Net) -> None:
    one, other = net.blocks[1].up.weight, net.blocks[2].up.weight
    one.data, other.data = other.data, one.data


def exchange_in_new_objects(net: Net) -> None:
    one, other = net.blocks[1].up, net.blocks[2].up
    data = one.weight.data, other.weight.data
    other.weight, one.weight = (nn.Parameter(each, requires_grad=False) for each in data)


def delete_block(net: Net) -> None:
    del net.blocks[1]


def insert_block(net: Net) -> None:
    net.blocks.insert(1, new_block())


def replace_block(net: Net) -> None:
    net.blocks[1] = new_block()


def replace_layer(net: Net) -> None:
    net.blocks[1].up = new_block().up


def use_block_twice(net: Net) -> None:
    net.blocks[1] = net.blocks[2]


def tie(net: Net) -> None:
    net.blocks[1].up.weight = net.blocks[2].up.weight


def tie_data(net: Net) -> None:
    net.blocks[1].up.weight.data = net.blocks[2].up.weight.data


def assign(net: Net) -> None:
    net.blocks[1].up.weight = new(DIM, DIM)


def assign_data(net: Net) -> None:
    net.blocks[1].up.weight.data = new(DIM, DIM).data


def assign_data_of_rest(net: Net) -> None:
    net.first.weight.data = new(DIM, DIM).data


def write(net: Net) -> None:
    net.blocks[1].up.weight.copy_(new(DIM, DIM))


def swap(net: Net) -> None:
    torch.utils.swap_tensors(net.blocks[1].up.weight, new(DIM, DIM))


def swap_rest(net: Net) -> None:
    torch.utils.swap_tensors(net.first.weight, new(DIM, DIM))


def assign_after_data(net: Net) -> None:
    """What was done to the object that a weight had is over when another takes its place."""
    net.blocks[1].up.weight.data = new(DIM, DIM).data * 2
    net.blocks[1].up.weight = new(DIM, DIM)


def assign_after_conversion(net: Net) -> None:
    net.blocks[1].up.bfloat16().float()
    net.blocks[1].up.weight = new(DIM, DIM)
    net.blocks[1].up.bias = new(DIM)


def swap_bias(net: Net) -> None:
    torch.utils.swap_tensors(net.blocks[1].up.bias, new(DIM))


def remove_bias(net: Net) -> None:
    net.blocks[1].up.bias = None


def remove_biases(net: Net) -> None:
    net.first.bias = net.blocks[3].down.bias = None


def load_assigned(net: Net) -> None:
    net.blocks[1].load_state_dict(new_block().state_dict(), assign=True)


DEEDS: dict[str, Callable[[Net], None]] = {
    deed.__name__.replace("_", " "): deed
    for deed in (
        exchange_blocks,
        exchange_layers,
        exchange_weights,
        exchange_by_swapping,
        exchange_data,
        exchange_in_new_objects,
        delete_block,
        insert_block,
        replace_block,
        replace_layer,
        use_block_twice,
        tie,
        tie_data,
        assign,
        assign_data,
        assign_data_of_rest,
        assign_after_data,
        assign_after_conversion,
        write,
        swap,
        swap_rest,
        swap_bias,
        remove_bias,
        remove_biases,
        load_assigned,
    )
}
ALL = list(itertools.product(WAYS, THEN, (False, True)))
NOT_DETECTED = [("exchange data", "eight bits"), ("exchange in new objects", "eight bits")]


@pytest.mark.parametrize("deed", DEEDS)
def test_some_ways_and_continuations(machine, tmp_path: Path, deed: str) -> None:
    """Each deed with a seventh of the ways and continuations, deeds in turn with each."""
    begin = list(DEEDS).index(deed)
    for way, then, is_called in [case for case in ALL if (deed, case[0]) not in NOT_DETECTED][begin % 7 :: 7]:
        try_deed(machine, tmp_path, deed, way, then, is_called=is_called)


@pytest.mark.slow
@pytest.mark.parametrize(("deed", "way"), [case for case in itertools.product(DEEDS, WAYS) if case not in NOT_DETECTED])
def test_every_way_and_continuation(machine, tmp_path: Path, deed: str, way: str) -> None:
    for then, is_called in itertools.product(THEN, (False, True)):
        try_deed(machine, tmp_path, deed, way, then, is_called=is_called)


@torch.no_grad()
def try_deed(machine: Any, folder: Path, deed: str, way: str, then: str, *, is_called: bool) -> None:
    """Compare with the unmanaged module after the same deed, bit by bit, now, at the second call, and released."""
    case = f"{deed}; {way}; called: {is_called}; {then}"
    net, plain = build(way), build(way)
    path = folder / "net.safetensors"
    safetensors.torch.save_file(net.state_dict(), path)
    refused: list[str] = []

    def allow(action: Callable[[], object]) -> Any:
        try:
            return action()
        except (InvalidInput, UnsafeState) as error:
            assert str(error) and "\n" not in str(error), case
            refused.append(str(error))
            return None

    with machine(8, 8) as manager:
        managed = manage(net, manager=manager, files={"model": path}, **{"placement": "gpu:0", **WAYS[way]})
        if way == "disk, written before":
            for each in (net, plain):
                each.blocks[1].up.weight.mul_(2.0)
            managed.reprofile(**WAYS[way])
        old = plain(X)
        if is_called:
            assert torch.equal(net(X).cpu(), old), case
        DEEDS[deed](plain)
        want = plain(X)
        allow(lambda: DEEDS[deed](net))
        has_deed = not refused
        if then == "release":
            allow(managed.release)
        elif THEN[then] is not None:
            options = {**WAYS[way], **THEN[then]}
            if "disk" in options.get("placement", ""):
                options.pop("precision", None)
            allow(lambda: managed.reprofile(**options))
        for _ in range(2):
            got = allow(lambda: net(X).cpu())
            is_undone = not has_deed or any("undone" in line or "undid" in line for line in refused)
            if got is not None:
                assert torch.equal(got, old if is_undone else want), case
        manager.ledger.check()
        allow(managed.release)
        gc.collect()
        is_undone = not has_deed or any("undone" in line or "undid" in line for line in refused)
        assert torch.equal(net(X), old if is_undone else want), case
        assert all(weight.is_cpu for weight in net.parameters()), case


@pytest.mark.parametrize("is_called", [False, True])
@torch.no_grad()
def test_on_disk_only_what_was_written_stays_in_ram(machine, tmp_path: Path, is_called: bool) -> None:
    """Reading `.data`, and moving the module, look like writes: these weights are compared with their file."""
    net, plain = Net(), Net()
    path = tmp_path / "net.safetensors"
    safetensors.torch.save_file(net.state_dict(), path)
    with machine(8, 8) as manager:
        managed = manage(net, manager=manager, files={"model": path}, placement="gpu:0")
        if is_called:
            net(X)
        for each in (net, plain):
            each.blocks[1].up.weight.mul_(2.0)
            each.blocks[2].up.weight.data.sum()
            each.to("cpu")
        managed.reprofile(placement="gpu:0:host")
        managed.reprofile(placement="gpu:0:disk")
        assert [name for name, weight in net.named_parameters() if not weight.is_meta] == ["blocks.1.up.weight"]
        stores = [group.at_rest.store for group in managed.members[0].managed.groups]
        assert sum(store.kept_bytes for store in stores if isinstance(store, FileStore)) == DIM * DIM * 4
        assert torch.equal(net(X).cpu(), plain(X))
        managed.release()
        assert torch.equal(net(X), plain(X))


@torch.no_grad()
def test_a_quick_look_sees_weights_without_memory_exchanged(machine, tmp_path: Path) -> None:
    """`torch.utils.swap_tensors` leaves the objects where they are, and no address changes."""
    net = Net()
    path = tmp_path / "net.safetensors"
    safetensors.torch.save_file(net.state_dict(), path)
    with machine(8) as manager:
        managed = manage(net, manager=manager, files={"model": path}, **WAYS["disk, streamed"])
        old = Net()(X)
        for _ in range(3):
            net(X)
        assert managed.members[0].managed.changes.is_steady()
        exchange_by_swapping(net)
        with pytest.raises(
            UnsafeState, match=r"up.weight', which rests in its file, was replaced; the change was undone"
        ):
            net(X)
        assert torch.equal(net(X).cpu(), old)


def test_what_is_kept_of_the_block_is_no_copy_for_another(machine, tmp_path: Path) -> None:
    """A copy of a block beside its original is read once, and keeps its own weights."""
    net, plain = Net(), Net()
    path = tmp_path / "net.safetensors"
    safetensors.torch.save_file(net.state_dict(), path)
    with machine(8) as manager, torch.no_grad():
        managed = manage(net, manager=manager, files={"model": path}, placement="gpu:0:disk")
        for each in (net, plain):
            each.blocks[1] = copy.deepcopy(each.blocks[2])
        managed.reprofile(placement="gpu:0:disk")
        assert torch.equal(net(X).cpu(), plain(X))
