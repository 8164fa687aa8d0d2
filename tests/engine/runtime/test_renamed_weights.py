"""Weights that other code renames, moves or keeps: released, each is a plain tensor in host memory again."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from highwater.memory import manage
from highwater.memory.errors import InvalidInput, UnsafeState
from highwater.memory.options.precision import Precision
from highwater.memory.planner.form_choice import choose_forms
from highwater.memory.weights.cast_form import find_scale
from highwater.memory.weights.fp8 import encode_fp8
from highwater.memory.weights.module_component import component_from_module

DIM = 64
X = torch.randn(2, DIM, generator=torch.Generator().manual_seed(0))
WAYS = {
    "resident": {},
    "streamed": {"profile": "0.06MiB"},
    "split": {"placement": "gpu:0&gpu:1"},
    "disk": {"placement": "gpu:0:disk", "profile": "0.06MiB"},
    "eight bits": {"precision": "fp8 scaled"},
    "eight bits, streamed": {"precision": "fp8 scaled", "profile": "0.05MiB"},
    "eight bits, split": {"precision": "fp8 scaled", "placement": "gpu:0&gpu:1"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def move_up(net: Net) -> None:
    net.other = net.layers[3][1].weight
    del net.layers[3][1].weight


def make_buffer(net: Net) -> None:
    weight = net.layers[3][1]._parameters.pop("weight")
    net.layers[3][1].register_buffer("weight", weight)


def share(net: Net) -> None:
    net.other = net.layers[3][1].weight


def keep(net: Net) -> list[torch.Tensor]:
    return list(net.layers[3].parameters())


def keep_and_remove(net: Net) -> list[torch.Tensor]:
    kept = list(net.layers[7].parameters())
    del net.layers[7]
    return kept


def keep_and_replace(net: Net) -> list[torch.Tensor]:
    kept = [net.layers[3][1].weight]
    net.layers[3][1] = nn.Linear(DIM, DIM)
    return kept


def exchange(net: Net) -> None:
    one, other = net.layers[3][1], net.layers[5][1]
    one.weight, other.weight = other.weight, one.weight


def tie(net: Net) -> None:
    net.layers[3][1].weight = net.layers[5][1].weight


DEEDS: dict[str, Callable[[Net], object]] = {
    "pruned": lambda net: prune.l1_unstructured(net.layers[3][1], "weight", 0.5),
    "spectral_norm of the old kind": lambda net: nn.utils.spectral_norm(net.layers[3][1]),
    "weight_norm of the old kind": lambda net: nn.utils.weight_norm(net.layers[3][1]),
    "spectral_norm": lambda net: parametrizations.spectral_norm(net.layers[3][1]),
    "weight_norm": lambda net: parametrizations.weight_norm(net.layers[3][1]),
    "moved": move_up,
    "made a buffer": make_buffer,
    "shared": share,
    "exchanged": exchange,
    "tied": tie,
    "kept": keep,
    "kept and removed": keep_and_remove,
    "kept and replaced": keep_and_replace,
}


def build(way: str) -> Net:
    """Return a module whose weights lose nothing in eight bits where they are to rest in them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net().eval().requires_grad_(False)
    if way.startswith("eight bits"):
        for name in choose_forms(component_from_module(net, name="model"), Precision.ENCODED):
            weight = net.get_parameter(name)
            scale = find_scale(weight, name=name)
            weight.copy_(encode_fp8(weight, scale).to(weight.dtype) * scale)
    return net


def call(net: Net) -> None:
    try:
        net(X)
    except UnsafeState as error:
        assert "release it before" in str(error) or "rests in its file: use its weights before" in str(error)


def tensors_of(net: nn.Module) -> dict[str, torch.Tensor]:
    own = {name: value for part in net.modules() for name, value in vars(part).items() if torch.is_tensor(value)}
    return own | dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("called", ["never called", "called before", "called after", "called before and after"])
@pytest.mark.parametrize("deed", DEEDS)
@torch.no_grad()
def test_every_weight_comes_back_whoever_holds_it(
    machine, sim, tmp_path: Path, deed: str, called: str, way: str
) -> None:
    net, plain = build(way), build(way)
    with machine(8, 8) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the norms of the old kind
        torch.manual_seed(1)
        plain_kept = DEEDS[deed](plain)
        options = {"placement": "gpu:0", **WAYS[way]}
        if way == "disk":
            safetensors.torch.save_file(net.state_dict(), tmp_path / "net.safetensors")
            options["files"] = {"model": tmp_path / "net.safetensors"}
        managed = manage(net, manager=manager, **options)
        if "before" in called:
            net(X)
        torch.manual_seed(1)
        kept = DEEDS[deed](net)
        if "after" in called:
            call(net)
        managed.release()
        managed.release()
        gc.collect()  # parametrized layers are cycles
        assert sim.stats(0).used_bytes == sim.stats(1).used_bytes == 0
        found, wanted = tensors_of(net), tensors_of(plain)
        if isinstance(kept, list):
            found |= {f"kept {number}": tensor for number, tensor in enumerate(kept)}
            wanted |= {f"kept {number}": tensor for number, tensor in enumerate(plain_kept)}
        assert found.keys() == wanted.keys()
        if deed == "tied" and way == "disk" and "after" in called:  # refused and undone
            del found["layers.3.1.weight"]
        for name, tensor in found.items():
            assert type(tensor) is type(wanted[name]), name
            assert tensor.device.type == "cpu", name
            if "norm" not in deed and not (deed == "kept and replaced" and name.startswith("layers.3.1")):
                assert torch.equal(tensor, wanted[name]), name
            else:  # computed where the weight was
                assert torch.allclose(tensor, wanted[name], atol=1e-5) or name.startswith("layers.3.1"), name
        if deed not in ("moved", "made a buffer"):
            net(X)


@pytest.mark.parametrize("way", ["resident", "split", "eight bits"])
@torch.no_grad()
def test_another_profile_leaves_nothing_of_a_kept_weight_on_the_device(machine, sim, way: str) -> None:
    net, plain = build(way), build(way)
    with machine(8, 8) as manager:
        with manage(net, manager=manager, **{"placement": "gpu:0", **WAYS[way]}) as managed:
            net(X)
            kept = keep_and_remove(net)
            managed.reprofile("0.05MiB")
            net(X)
            for tensor, wanted in zip(kept, keep_and_remove(plain), strict=True):
                assert type(tensor) is nn.Parameter
                assert tensor.device.type == "cpu"
                assert torch.equal(tensor, wanted)
            assert sim.stats(0).used_bytes == manager.ledger.used("gpu:0")
        assert sim.stats(0).used_bytes == 0


@torch.no_grad()
@pytest.mark.parametrize("evicts", ["unloaded", "shrunk"])
@pytest.mark.parametrize("deed", ["pruned", "moved", "made a buffer", "shared", "exchanged", "tied"])
def test_an_eviction_leaves_no_copy_on_the_device_for_a_weight_that_moved(machine, sim, deed: str, evicts: str) -> None:
    net, plain = build("as stored"), build("as stored")
    with machine(8) as manager:
        with manage(net, placement="gpu:0", manager=manager) as managed:
            for _ in range(3):
                net(X)
            for each in (plain, net):
                torch.manual_seed(1)
                DEEDS[deed](each)
            component = managed.members[0].managed
            if evicts == "unloaded":
                component.unload()
            else:
                component.shrink("gpu:0", 1 << 20)
            layer = net.layers[3][1]  # what prune makes of a weight is its own
            made = [layer.weight_mask, layer.weight] if deed == "pruned" else []
            assert sim.stats(0).used_bytes == sum(tensor.nbytes for tensor in made)
            del made
            if deed in ("exchanged", "tied"):  # the others are refused until the release
                for _ in range(2):
                    assert torch.allclose(net(X).cpu(), plain(X), atol=1e-5)
        if deed not in ("moved", "made a buffer"):
            assert torch.allclose(net(X), plain(X), atol=1e-5)


ANEW = {
    "as it was": {},
    "another profile": {"profile": "0.05MiB"},
    "another device": {"placement": "gpu:1"},
    "a split": {"placement": "gpu:0&gpu:1"},
    "the CPU": {"placement": "cpu"},
}


def can_compute(deed: str, way: str, *, is_undone: bool) -> bool:
    """Whether the module can compute after a deed, to what it computes unmanaged."""
    is_rounded = deed == "kept and replaced" and way.startswith("eight bits")
    return deed not in ("moved", "made a buffer") and not is_rounded and not is_undone


CALLED = ("never called", "called before", "called before and after")
# Of all combinations some that have each deed in each way.
FEW = [
    (deed, CALLED[(number + place) % len(CALLED)], list(ANEW)[(2 * number + place) % len(ANEW)], way)
    for number, deed in enumerate(DEEDS)
    for place, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("deed", "called", "anew", "way"), FEW)
def test_another_profile_follows_a_weight_to_where_it_went(
    machine, sim, tmp_path: Path, deed: str, called: str, anew: str, way: str
) -> None:
    follow_renamed(machine, sim, tmp_path, deed, called, anew, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("deed", DEEDS)
def test_any_profile_follows_a_weight_to_where_it_went(machine, sim, tmp_path: Path, deed: str, way: str) -> None:
    for called, anew in itertools.product(CALLED, ANEW):
        follow_renamed(machine, sim, tmp_path, deed, called, anew, way)


@torch.no_grad()
def follow_renamed(machine: Any, sim: Any, tmp_path: Path, deed: str, called: str, anew: str, way: str) -> None:
    net, plain = build(way), build(way)
    is_undone = deed == "tied" and way == "disk" and "after" in called  # and the forward refused
    with machine(8, 8) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the norms of the old kind
        options = {"placement": "gpu:0", **WAYS[way]}
        if way == "disk":
            safetensors.torch.save_file(net.state_dict(), tmp_path / "net.safetensors")
            options["files"] = {"model": tmp_path / "net.safetensors"}
        managed = manage(net, manager=manager, **options)
        if "before" in called:
            net(X)
        for each in (plain, net):
            torch.manual_seed(1)
            DEEDS[deed](each)
        if "after" in called:
            call(net)
        try:
            managed.reprofile(**ANEW[anew])
        except (InvalidInput, UnsafeState) as error:
            assert "\n" not in str(error)
        else:
            if can_compute(deed, way, is_undone=is_undone):
                assert torch.allclose(net(X).cpu(), plain(X), atol=1e-5)
        manager.ledger.check()
        managed.release()
        gc.collect()  # parametrized layers are cycles
        assert sim.stats(0).used_bytes == sim.stats(1).used_bytes == 0
        if can_compute(deed, way, is_undone=is_undone):
            assert torch.allclose(net(X), plain(X), atol=1e-5)
        found, wanted = tensors_of(net), tensors_of(plain)
        assert found.keys() == wanted.keys()
        if is_undone:
            del found["layers.3.1.weight"]
        for name, tensor in found.items():
            assert type(tensor) is type(wanted[name]), name
            assert tensor.device.type == "cpu", name
            is_rounded = deed == "kept and replaced" and way.startswith("eight bits")
            assert torch.allclose(tensor, wanted[name], atol=0.02 if is_rounded else 1e-5), name
