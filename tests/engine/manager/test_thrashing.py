"""Thrashing and growth are told with numbers, and runs begin and end with the watermark free."""

from __future__ import annotations

import pytest
import torch

from highwater.memory import manage
from highwater.memory.units import MIB

X = torch.ones(1, 3, 64)


def events(manager, kind: str) -> list[dict]:
    return [event for event in manager.report()["events"] if event["kind"] == kind]


def run_all(manager, nets, runs: int, name: str = "both") -> None:
    for number in range(runs):
        manager.begin_run(str(number), name)
        for node, net in nets.items():
            manager.begin_node(node, node)
            net(X)
            manager.end_node()
        manager.end_run()
        manager.ledger.check()


@torch.no_grad()
@pytest.mark.parametrize(
    ("sizes", "mark", "remedy"),
    [
        ((2.6,), 0.9, "a watermark of gpu:0 of low "),
        ((2,), 0.0, "a profile with budget "),
        ((2, 8), 0.0, "placement gpu:1 would stop that: 8.00MiB are free there, it has 1.06MiB"),
    ],
)
def test_three_reloads_within_five_runs_are_thrashing(toys, machine, sizes, mark, remedy: str) -> None:
    with machine(*sizes, low=int(mark * MIB), high=int(mark * MIB)) as manager:
        nets = {name: toys.build_net(seed) for seed, name in enumerate("ab")}
        for name, net in nets.items():
            manage({name: net}, placement="gpu:0", manager=manager)
        run_all(manager, nets, 3)
        assert not events(manager, "thrashing")
        run_all(manager, nets, 2)
        found = events(manager, "thrashing")
        assert {event["component"] for event in found} == {"a", "b"}
        for event in found:
            assert remedy in event["reason"] and event["node_id"] == event["component"]
            assert event["reason"].startswith("evicted and loaded again 3 times within 5 runs, ")


@torch.no_grad()
def test_what_fits_does_not_thrash_and_moves_nothing_again(toys, machine) -> None:
    with machine(8) as manager:
        nets = {name: toys.build_net(seed) for seed, name in enumerate("ab")}
        for name, net in nets.items():
            manage({name: net}, placement="gpu:0", manager=manager)
        run_all(manager, nets, 6)
        assert not events(manager, "thrashing") and not events(manager, "growth")
        assert [run["bytes_moved"] > 0 for run in manager.report()["runs"]] == [True, *[False] * 5]


@torch.no_grad()
def test_a_workflow_that_needs_more_says_what_and_since_which_change(toys, machine) -> None:
    with machine(8) as manager:
        nets = {"a": toys.build_net()}
        managed = manage(nets, placement="gpu:0", precision="fp8 scaled", manager=manager)
        run_all(manager, nets, 2)
        assert not events(manager, "growth")
        managed.reprofile(precision="as stored")
        managed.release()
        manage(nets, placement="gpu:0", manager=manager)
        nets["b"] = toys.build_net(1)
        manage({"b": nets["b"]}, placement="gpu:0", manager=manager)
        run_all(manager, nets, 2)
        (event,) = events(manager, "growth")
        assert event["reason"].startswith("both needs ") and "b is new, 1.06MiB" in event["reason"]
        assert "(since precision as stored, was fp8 scaled)" in event["reason"]
        run_all(manager, {"a": nets["a"]}, 1)
        assert len(events(manager, "growth")) == 1, "less is no news"


@torch.no_grad()
def test_a_run_begins_and_ends_with_the_watermark_free(toys, machine) -> None:
    with machine(4, low=MIB, high=MIB) as manager:
        net = toys.build_net()
        manage({"a": net}, placement="gpu:0", manager=manager)
        net(X)
        other = torch.empty(int(2.4 * MIB), dtype=torch.uint8, device="sim:0")
        assert manager.devices["gpu:0"].free_bytes() < MIB
        manager.begin_run("1", "first")
        assert manager.devices["gpu:0"].free_bytes() >= MIB
        (event,) = events(manager, "evict")
        assert event["run_id"] == "1" and event["reason"].startswith("less than the watermark is free; ")
        more = torch.empty(MIB // 2, dtype=torch.uint8, device="sim:0")
        manager.end_run()
        assert manager.devices["gpu:0"].free_bytes() >= MIB
        del other, more
