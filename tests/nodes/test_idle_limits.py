"""The Limits node: how many models stay loaded, and for how long while nothing uses them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from highwater.headless.comfy_stub import comfy_api
from highwater.memory import InvalidInput, manage
from highwater.memory.manager import default
from highwater.memory.options.idle_limits import LONGEST_IDLE_S, MOST_LOADED, IdleLimits

comfy_api.install()
from highwater.memory import MemoryManager  # noqa: E402
from highwater.nodes.idle_limits import HighwaterLimits  # noqa: E402

X = torch.ones(1, 64)


@pytest.fixture
def manager(sim: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryManager]:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=8 << 20)]), torch.no_grad():
        manager = MemoryManager()
        monkeypatch.setattr(default, "made", [manager])
        yield manager
        manager.release_all()


def load(manager: MemoryManager, name: str) -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    manage({name: model}, manager=manager)
    model(X)
    return model


def loaded(manager: MemoryManager) -> list[str]:
    return sorted(name for name in manager.members if manager.ledger.held(name, "gpu:0"))


def told(max_loaded: int, idle_minutes: float) -> list[str]:
    return list(HighwaterLimits.execute(max_loaded, idle_minutes).ui_dict()["text"])


def test_the_node_limits_how_many_stay_loaded_and_zero_ends_that(manager: MemoryManager) -> None:
    models = [load(manager, name) for name in "abc"]
    assert loaded(manager) == ["a", "b", "c"]
    assert told(2, 0.0) == ["at most 2 loaded, no idle unload"]
    assert loaded(manager) == ["b", "c"], "the least recently used one has left"
    models[0](X)
    assert loaded(manager) == ["a", "c"]
    assert told(0, 0.0) == ["any number loaded, no idle unload"]
    models[1](X)
    assert loaded(manager) == ["a", "b", "c"]
    manager.ledger.check()


def test_the_node_unloads_what_is_idle_for_so_many_minutes(manager: MemoryManager) -> None:
    model = load(manager, "a")
    assert told(0, 10.0) == ["any number loaded, unloaded after 600 s idle"]
    assert manager.idle.limits == IdleLimits(idle_s=600.0) and loaded(manager) == ["a"]
    told(0, 0.003)
    end = time.monotonic() + 60
    while loaded(manager):
        assert time.monotonic() < end, "it is never unloaded"
        time.sleep(0.02)
    assert "idle for more than" in manager.report()["events"][-1]["reason"]
    assert torch.isfinite(model(X).cpu()).all()


def test_the_nodes_limits_count_again_each_time_that_it_runs(manager: MemoryManager) -> None:
    told(2, 10.0)
    manager.commands.set_idle_limits(IdleLimits(num_loaded=5))  # as the page's settings do
    first, second = (HighwaterLimits.fingerprint_inputs(max_loaded=2, idle_minutes=10.0) for _ in range(2))
    assert first != second, "a host runs it again, though its widgets are the same"
    told(2, 10.0)
    assert manager.idle.limits == IdleLimits(num_loaded=2, idle_s=600.0)


@pytest.mark.parametrize(
    ("max_loaded", "idle_minutes", "allowed"),
    [(-1, 0.0, f"1 to {MOST_LOADED} components"), (MOST_LOADED + 1, 0.0, f"1 to {MOST_LOADED} components"),
     (0, -1.0, "more than 0, up to 7 days"), (0, float("nan"), "more than 0, up to 7 days"),
     (0, 10080.5, "more than 0, up to 7 days")],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_and_change_nothing(
    manager: MemoryManager, max_loaded: int, idle_minutes: float, allowed: str
) -> None:
    told(2, 10.0)
    with pytest.raises(InvalidInput, match=allowed):
        HighwaterLimits.execute(max_loaded, idle_minutes)
    assert manager.idle.limits == IdleLimits(num_loaded=2, idle_s=600.0)


def test_the_widgets_allow_what_the_engine_does() -> None:
    """And the page's settings the same; both show no limit at first."""
    found = {item.id: item.options for item in HighwaterLimits.GET_SCHEMA().inputs}
    assert (found["max_loaded"]["min"], found["max_loaded"]["max"]) == (0, MOST_LOADED)
    assert (found["idle_minutes"]["min"], found["idle_minutes"]["max"] * 60) == (0, LONGEST_IDLE_S)
    assert not found["max_loaded"]["default"] and not found["idle_minutes"]["default"]
    settings = (Path(__file__).parents[2] / "web" / "page_settings.js").read_text(encoding="utf-8")
    for widget in found.values():
        assert f"attrs: {{ min: 0, max: {widget['max']:g}, step: 1 }}" in settings


def test_a_workflow_with_the_node_sets_the_limits(manager: MemoryManager, tmp_path: Path) -> None:
    from highwater.headless.runner.runner import WorkflowRunner
    from highwater.headless.runner.workflow import parse_workflow

    graph = {"1": {"class_type": "HighwaterLimits", "inputs": {"max_loaded": 3, "idle_minutes": 90.0}}}
    WorkflowRunner(manager, models_directory=tmp_path, output_directory=tmp_path).run(
        parse_workflow(graph), name="limits"
    )
    assert manager.idle.limits == IdleLimits(num_loaded=3, idle_s=5400.0)
