"""The report tells as numbers what the "load" events tell of look-ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from highwater.memory import MemoryManager, load_model, manage
from highwater.memory.manager.look_ahead import ReadAhead
from highwater.memory.planner import mixed_tiers
from highwater.memory.units import format_bytes, format_seconds
from highwater.memory.weights.source import WeightsSource
from highwater.tests.engine.conftest import build_net

X = torch.linspace(-1, 1, 192).view(3, 64)
READ_BYTES = 4000


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.nn.Module]:
    """Two models in files of their own, of which each reading ahead tells so many bytes, whatever the system has."""
    monkeypatch.setattr(mixed_tiers, "LEAST_SPARED_BYTES", 0)
    monkeypatch.setattr(WeightsSource, "warm", lambda source, names: iter([READ_BYTES]))
    for number, name in enumerate("ab"):
        weights = build_net(seed=number).state_dict()
        save_file({key: weight.clone() for key, weight in weights.items()}, tmp_path / f"{name}.safetensors")
    return {name: load_model(tmp_path / f"{name}.safetensors", build_net).eval() for name in "ab"}


def totals(manager: MemoryManager, name: str) -> tuple[int, float]:
    (row,) = [row for row in manager.report()["components"] if row["id"] == name]
    return row["ahead_bytes"], row["hidden_s"]


def last_load(manager: MemoryManager, name: str) -> str:
    return [e.reason for e in manager.event_log.events if e.kind == "load" and e.component == name][-1]


def come_ahead(manager: MemoryManager, wait_until: Callable) -> ReadAhead:
    """Wait until all of b is on its device; returns what was read ahead of it."""
    manager.foresee([["a"], ["b"]])
    member = manager.members["b"]
    (share,), (plan,) = member.managed.shares, member.managed.plan.shares

    def is_there() -> bool:
        copies = list(share.early.by_group.values())
        return sum(copy.slab.numel() for copy in copies if copy.is_there) == plan.resident_bytes

    wait_until(is_there)
    return manager.leases.look_ahead.done.get("b", ReadAhead())


@torch.no_grad()
@pytest.mark.parametrize("tier", ["pinned", "disk"])
def test_a_component_has_the_sums_of_what_its_load_events_say(machine, models, wait_until, tier: str) -> None:
    with machine(8) as manager, manage(models, placement=f"*=gpu:0:{tier}", manager=manager):
        assert totals(manager, "b") == (0, 0)
        num_bytes, seconds = 0, 0.0
        for _ in range(2):
            models["a"](X)
            read = come_ahead(manager, wait_until)
            assert (read.num_bytes > 0) == (tier == "disk")
            manager.foresee([["b"]])
            models["b"](X)
            (share,) = manager.members["b"].managed.shares
            copied = ReadAhead(share.early.taken_bytes, share.early.taken_s)
            assert copied.num_bytes and copied.seconds
            told = [(read, "read")] * (tier == "disk") + [(copied, "on the device")]
            for ahead, done in told:
                amount, time = format_bytes(ahead.num_bytes), format_seconds(ahead.seconds)
                assert f"; {amount} of it were {done} ahead: {time} hidden" in last_load(manager, "b")
                num_bytes, seconds = num_bytes + ahead.num_bytes, seconds + ahead.seconds
            assert totals(manager, "b") == (num_bytes, pytest.approx(seconds, abs=1e-6))
            manager.free_memory("gpu:0", 8 << 20, "a test", exclude=["a"])

        before = totals(manager, "b")
        manager.look_ahead(False)
        models["b"](X)
        assert "hidden" not in last_load(manager, "b")
        assert totals(manager, "b") == before, "nothing came ahead this time"
        assert totals(manager, "a") == (0, 0)
