"""The timeline gives back what was entered and costs what changes; reports are copies, made beside other work."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory import manage
from highwater.memory.manager.timeline import Timeline
from highwater.memory.planner.plan import ComponentPlan

BYTES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3))
POINTS = st.lists(st.tuples(st.sampled_from(["x", "y"]), BYTES, st.booleans()), max_size=20)


@given(points=POINTS, most=st.integers(1, 6))
def test_points_in_full_are_what_was_entered(points: list[tuple[str, dict[str, int], bool]], most: int) -> None:
    timeline, want = Timeline(most), []
    for number, (device, held, always) in enumerate(points):
        before = next((sample for sample in reversed(want) if sample[0] == device), None)
        timeline.add(float(number), device, dict(held), 0, 0, always=always)
        if always or before is None or before[1] != held:
            want.append((device, held, float(number)))
    for view in (timeline, timeline.copy()):
        assert [(s.device, s.component_bytes, s.t_s) for s in view.samples()] == want[-most:]


def test_a_point_costs_what_changes_however_many_components_there_are() -> None:
    timeline, held = Timeline(100), {str(number): 1 for number in range(2000)}
    for number in range(1000):
        held = held | {str(number): number + 2}
        timeline.add(float(number), "gpu:0", held, 0, 0)
    assert len(timeline.points) == 100
    assert max(len(point.changes) for point in timeline.points) == 1


@torch.no_grad()
def test_the_report_is_built_while_others_go_on(toys, machine, monkeypatch) -> None:
    """Only copying holds the lock."""
    net, x, free = toys.build_net(), torch.ones(1, 3, 64), []
    build = ComponentPlan.to_json

    def look(plan: ComponentPlan) -> dict:
        def try_lock() -> None:
            free.append(manager.lock.rlock.acquire(timeout=10))
            manager.lock.rlock.release()

        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return build(plan)

    with machine(8) as manager:
        manage({"net": net}, placement="gpu:0", manager=manager)
        net(x)
        monkeypatch.setattr(ComponentPlan, "to_json", look)
        before = manager.report()
        assert free == [True]
        assert json.loads(json.dumps(before)) == before
        before["samples"][0]["component_bytes"].clear()
        before["components"][0]["tiers"].clear()
        assert manager.report()["samples"][-1]["component_bytes"] == manager.ledger.by_component("gpu:0")


@pytest.mark.parametrize("number", [0, 1, 3, 100])
def test_a_recent_report_is_the_end_of_the_whole_one(toys, machine, number: int) -> None:
    net = toys.build_net()
    with machine(8, 8) as manager, manage(net, manager=manager):
        for run in range(3):
            manager.begin_run(str(run), "run")
            for node in range(3):
                manager.begin_node(str(node), "node")
                net(torch.randn(2, 3, 64))
                manager.end_node()
            manager.end_run()
        whole, recent = manager.report(), manager.recent_report(number)
        for part in ("nodes", "runs", "events"):
            assert recent[part] == whole[part][len(whole[part]) - min(number, len(whole[part])) :]
        assert recent["samples"] == [] and whole["samples"]
        assert recent.keys() == whole.keys()
        # Free RAM changes at any time.
        assert recent["devices"][1:] == whole["devices"][1:] and whole["devices"][0]["name"] == "cpu"
        assert json.dumps(recent["components"]) == json.dumps(whole["components"])
