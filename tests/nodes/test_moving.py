"""A component is moved to another placement on request: it computes the same there, and its node stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from highwater.headless.runner.output_cache import OutputCache
from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.runner.workflow import parse_workflow
from highwater.memory import MemoryManager, manage
from highwater.memory.errors import InvalidInput, UnsafeState
from highwater.memory.hosted_component import HostedComponent
from highwater.memory.manager import default
from highwater.nodes.memory_requests import NotThere, move
from highwater.tests.nodes.pipelines.test_pipelines import make_graph, read_pixels

MIB = 1 << 20
X = torch.ones(1, 64)


@pytest.fixture
def manager(sim: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryManager]:
    """The process's manager, with two devices of 8 MiB."""
    monkeypatch.setattr(default, "made", [])
    with sim.cluster([sim.SimDeviceSpec(total_bytes=8 * MIB)] * 2), torch.no_grad():
        manager = default.default_manager()
        yield manager
        manager.release_all()


def make_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))


def computes(model: torch.nn.Module, expected: torch.Tensor) -> bool:
    """Whether a model computes the same, bit for bit, wherever it does."""
    return torch.equal(model(X).cpu(), expected)


def used(manager: MemoryManager) -> list[bool]:
    return [manager.ledger.used(name) > 0 for name in ("gpu:0", "gpu:1")]


def test_a_component_computes_where_it_was_moved_to(manager: MemoryManager) -> None:
    model = make_model()
    expected = model(X)
    with manage({"model": model}, manager=manager, name="part", placement="gpu:0") as managed:
        assert computes(model, expected) and used(manager) == [True, False]
        answer = move(manager, {"component": "part/model", "placement": "gpu:1"})
        assert answer["component"] == "part/model" and answer["placement"].startswith("model=gpu:1")
        assert "the node that loads it is not changed" in answer["text"]
        assert used(manager) == [False, False]  # it moves when it is used
        assert computes(model, expected) and used(manager) == [False, True]
        event = [event for event in manager.report()["events"] if event["kind"] == "plan"][-1]
        assert event["reason"] == f"moved on request: {answer['placement']}" and event["device"] == "gpu:1"
        member = managed.members[0]
        assert member.choices[0].devices[0].device == "gpu:0"  # what its user chose
        manager.ledger.check()


def test_planned_anew_it_comes_where_its_user_wanted_it(manager: MemoryManager) -> None:
    model = make_model()
    with manage({"model": model}, manager=manager, name="part", placement="gpu:0") as managed:
        move(manager, {"component": "part/model", "placement": "gpu:1"})
        managed.reprofile(4)
        model(X).cpu()
        assert used(manager) == [True, False]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.sampled_from(["gpu:0", "gpu:1", "cpu", "gpu:0&gpu:1@50%", "gpu:1&gpu:0@30%", "auto"]), max_size=4))
def test_wherever_it_is_moved_it_computes_the_same(manager: MemoryManager, placements: list[str]) -> None:
    model = make_model()
    expected = model(X)
    with manage({"model": model}, manager=manager, name="part", placement="gpu:0"):
        for placement in placements:
            move(manager, {"component": "part/model", "placement": placement})
            assert computes(model, expected)
            manager.ledger.check()
    assert computes(model, expected) and used(manager) == [False, False]


@pytest.mark.parametrize("placement", ["gpu:9", "", "gpu:1:disk", "vae=gpu:1", "gpu:0&gpu:1@150%", "/etc/passwd"])
def test_a_placement_that_cannot_be_leaves_it_where_it_is(manager: MemoryManager, placement: str) -> None:
    model = make_model()
    with manage({"model": model}, manager=manager, name="part", placement="gpu:0"):
        model(X).cpu()
        with pytest.raises(InvalidInput) as refused:
            move(manager, {"component": "part/model", "placement": placement})
        assert isinstance(refused.value, NotThere) == (placement == "gpu:9") and len(str(refused.value)) < 400
        assert used(manager) == [True, False]


def test_nothing_is_moved_while_it_computes_or_a_run_is_open(manager: MemoryManager) -> None:
    model = make_model()
    body = {"component": "part/model", "placement": "gpu:1"}
    with manage({"model": model}, manager=manager, name="part", placement="gpu:0") as managed:
        model(X).cpu()
        with manager.lease(managed.members[0]), pytest.raises(UnsafeState, match="part/model: computes now"):
            move(manager, body)
        manager.begin_run("r", "run")
        with pytest.raises(UnsafeState, match="a prompt is running"):
            move(manager, body)
        manager.end_run()
        assert used(manager) == [True, False]
        with pytest.raises(NotThere, match="'part/other'; did you mean 'part/model'"):
            move(manager, {**body, "component": "part/other"})


def test_a_host_chooses_the_device_of_what_it_loads(manager: MemoryManager) -> None:
    model, device = make_model(), manager.devices["gpu:0"].torch_device
    hosted = HostedComponent("part", "diffusion")
    hosted.join(model, device)
    hosted.load()
    with pytest.raises(
        InvalidInput, match="part computes on gpu:0, as its host chose; choose the device in its loader"
    ):
        move(manager, {"component": hosted.member.id, "placement": "gpu:1"})
    answer = move(manager, {"component": hosted.member.id, "placement": "gpu:0&gpu:1@50%"})
    assert answer["placement"].startswith("part=gpu:0&gpu:1@")
    hosted.load()
    assert used(manager) == [True, True]
    hosted.release()


def test_a_pipeline_paints_the_same_on_another_device(
    sim: Any, monkeypatch: pytest.MonkeyPatch, models_directory: Path, tmp_path: Path
) -> None:
    """Its parts one by one, between the runs of a workflow whose loader's result the host has."""
    monkeypatch.setattr(default, "made", [])
    with sim.cluster([sim.SimDeviceSpec(total_bytes=256 * MIB)] * 2), torch.no_grad():
        manager = default.default_manager()
        cache = OutputCache(max_entries=3)
        runner = WorkflowRunner(manager, models_directory=models_directory, output_directory=tmp_path, cache=cache)

        def picture(seed: int) -> torch.Tensor:
            graph = make_graph("tiny-flux", placement="gpu:0", precision="as stored")
            graph["sample"]["inputs"]["seed"] = seed
            (saved,) = runner.run(parse_workflow(graph), name="flux").outputs["save"]["images"]
            return read_pixels(saved)

        expected = [picture(seed) for seed in range(4)]
        ids = [part["id"] for part in manager.report()["components"]]
        assert len(ids) > 2
        for seed, component in enumerate(ids):
            move(manager, {"component": component, "placement": "gpu:1"})
            assert torch.equal(picture(seed), expected[seed]), component
            assert manager.ledger.held(component, "gpu:0") == 0 < manager.ledger.held(component, "gpu:1")
        assert not manager.ledger.used("gpu:0")
        runner.cache.clear()
        manager.release_all()
