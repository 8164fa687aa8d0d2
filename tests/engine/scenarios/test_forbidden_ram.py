"""A component at ``disk!``: nothing of it rests in RAM, before, between and after its forwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from highwater.memory import load_model, manage
from highwater.memory.errors import InvalidInput, UnsafeState
from highwater.memory.options.placement import parse_placement
from highwater.memory.runtime.devices.ledger import Kind
from highwater.tests.engine.conftest import build_net

X = torch.linspace(-1, 1, 192).view(3, 64)
PLACE = "gpu:0:disk!"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({name: weight.clone() for name, weight in build_net().state_dict().items()}, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@torch.no_grad()
def compute(module: nn.Module) -> torch.Tensor:
    return module(X).cpu()


def in_ram(manager: Any) -> int:
    """Return the bytes of weights that rest in RAM, without buffers of the module, which no file has."""
    buffers = sum(slot.held.nbytes for member in manager.members.values() for slot in member.managed.buffers)
    held = sum(manager.ledger.entry(place, "net", Kind.WEIGHTS) for place in ("pinned", "host"))
    return max(0, held - buffers)


@pytest.mark.parametrize("profile", ["auto", "0.3MiB"])
def test_nothing_of_it_rests_in_ram(machine, path: Path, profile: str) -> None:
    with machine(8) as manager:
        net = load_model(path, build_net)
        with manage({"net": net}, profile, placement=PLACE, manager=manager) as handle:
            assert str(handle.plan.placement) == f"net={PLACE}"
            for _ in range(2):
                assert torch.equal(compute(net), compute(build_net()))
                assert not in_ram(manager)
                manager.free_memory("gpu:0", 1 << 30, "a test")
                assert not in_ram(manager)
            assert net.state_dict().keys() == build_net().state_dict().keys()
            assert torch.equal(net.embed.weight.to("sim:0").cpu(), build_net().embed.weight)  # for the caller
            assert not in_ram(manager)


USES: dict[str, Callable[[nn.Module], Any]] = {
    "an operator": lambda net: net.embed.weight + 1,
    "a write": lambda net: net.embed.weight.mul_(2),
    "a write through .data": lambda net: net.embed.weight.data.mul_(2),
    "a layer": lambda net: net.doubles[0].up(X),
    "numpy": lambda net: net.embed.weight.numpy(),
    "another dtype": lambda net: net.half(),
}


@pytest.mark.parametrize("use", USES)
@torch.no_grad()
def test_what_would_put_it_there_is_refused_in_one_line(machine, path: Path, use: str) -> None:
    with machine(8) as manager:
        net = load_model(path, build_net)
        with manage({"net": net}, placement=PLACE, manager=manager):
            with pytest.raises(
                UnsafeState, match=r"^net rests in its file, and its placement .* keeps it out of RAM"
            ) as told:
                USES[use](net)
            assert "\n" not in str(told.value)
            assert not in_ram(manager)
            assert torch.equal(compute(net), compute(build_net()))


@torch.no_grad()
def test_what_is_written_on_its_device_is_not_lost(machine, path: Path) -> None:
    """It is nowhere else, so its block rests in RAM from then on, and the log says so."""
    expected = build_net()
    expected.doubles[1].up.weight.mul_(2)
    with machine(8) as manager:
        net = load_model(path, build_net)
        with manage({"net": net}, placement=PLACE, manager=manager):
            compute(net)
            net.doubles[1].up.weight.mul_(2)
            manager.free_memory("gpu:0", 1 << 30, "a test")
            assert torch.equal(compute(net), compute(expected))
            assert any("because other code wrote to its weights" in event.reason for event in manager.event_log.events)


@torch.no_grad()
def test_a_conversion_on_its_device_is_refused_by_the_next_forward(machine, path: Path) -> None:
    with machine(8) as manager:
        net = load_model(path, build_net)
        with manage({"net": net}, placement=PLACE, manager=manager):
            compute(net)
            net.half()
            with pytest.raises(
                UnsafeState, match="by other code, so that its files do not hold its weights as they are"
            ):
                net(X.half())
            assert not in_ram(manager)


@torch.no_grad()
def test_a_conversion_back_to_the_dtype_of_its_file_is_refused_too(machine, toys, path: Path) -> None:
    """Its values were rounded before: they are not the file's, though the dtypes are."""
    with machine(8) as manager:
        net = toys.bare_net().to(torch.bfloat16)
        with manage({"net": net}, placement=PLACE, files={"net": path}, manager=manager):
            net(X.bfloat16())
            net.float()
            with pytest.raises(
                UnsafeState, match="by other code, so that its files do not hold its weights as they are"
            ):
                net(X)
            assert not in_ram(manager)


def test_weights_that_no_file_has_are_refused(machine, path: Path) -> None:
    with machine(8) as manager:
        with pytest.raises(InvalidInput, match="tier 'disk' is not available for net: no file is known"):
            manage({"net": build_net()}, placement=PLACE, manager=manager)
        with pytest.raises(InvalidInput, match="it computes on the CPU"):
            manage({"net": load_model(path, build_net)}, placement="cpu:disk!", manager=manager)


@pytest.mark.parametrize("text", ["gpu:0:host!", "gpu:0!", "auto!", "gpu:0:disk!!"])
def test_it_is_a_word_of_the_tier_disk_alone(text: str) -> None:
    with pytest.raises(InvalidInput, match="'!' is unexpected"):
        parse_placement(text, devices=["cpu", "gpu:0"])


def test_it_is_written_as_it_is_read() -> None:
    placement = parse_placement("text = gpu:0 : disk ! , vae=cpu", devices=["cpu", "gpu:0"])
    assert str(placement) == "text=gpu:0:disk!,vae=cpu"
