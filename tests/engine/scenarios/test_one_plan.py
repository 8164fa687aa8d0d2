"""A plan is made once per load: `manage` makes it, and the first forward makes another only if memory has changed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.manager import live_capacity, module_plans
from highwater.memory.units import MIB


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the planner's functions that were called."""
    called: list[str] = []

    def count(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return function(*args, **kwargs)

    for module, name in ((module_plans, "plan_components"), (live_capacity, "replan")):
        monkeypatch.setattr(module, name, partial(count, name, getattr(module, name)))
    yield called


def build_net(num_blocks: int = 8, width: int = 256) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_blocks)))
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return net.requires_grad_(False)


@pytest.mark.parametrize("kind", ["net", "transformer", "vae"])
def test_a_resident_component_is_planned_once(sim: Any, plans: list[str], kind: str) -> None:
    net = build_net()
    expected = net(torch.ones(1, 256))
    manager = MemoryManager()
    device = manager.devices["gpu:0"].torch_device
    with manage({kind: net}, manager=manager, placement="gpu:0"):
        for _ in range(3):  # the input takes some of the free memory: what is resident still fits
            assert torch.equal(net(torch.ones(1, 256, device=device)).cpu(), expected)
        assert plans == ["plan_components"]


def test_a_streamed_component_is_planned_once_while_memory_is_the_same(sim: Any, plans: list[str]) -> None:
    net = build_net()
    manager = MemoryManager()
    with manage(net, manager=manager, placement="gpu:0", profile="1MiB") as managed:
        made = len(plans)  # a tight budget cuts blocks, and plans each cut
        net(torch.ones(1, 256))
        assert managed.members[0].managed.plan.streams
        assert len(plans) == made


def test_another_plan_is_made_where_memory_has_become_short(sim: Any, plans: list[str]) -> None:
    net = build_net(num_blocks=16, width=512)  # 16 MiB
    expected = net(torch.ones(1, 512))
    manager = MemoryManager()
    device = manager.devices["gpu:0"]
    with manage({"net": net}, manager=manager, placement="gpu:0", profile="auto") as managed:
        assert not managed.plan["net"].streams
        num_bytes = device.free_bytes() - 12 * MIB
        occupied = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        manager.set_watermark("gpu:0", 0, 0)
        assert torch.equal(net(torch.ones(1, 512)).cpu(), expected)
        assert plans == ["plan_components", "replan"]
        assert managed.members[0].managed.plan.streams
        assert manager.ledger.used("gpu:0") <= 12 * MIB
        del occupied
