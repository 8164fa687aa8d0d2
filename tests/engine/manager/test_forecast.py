"""What hosts foresee decides who leaves, and events say when, where and why."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory import MemoryManager, manage
from highwater.memory.units import MIB, format_seconds

X = torch.ones(1, 3, 64)


def build_three(toys, manager: MemoryManager) -> dict[str, torch.nn.Module]:
    """Three nets of 1.06 MiB each, of which two fit beside what a third needs of 2.7 MiB."""
    nets = {name: toys.build_net(seed) for seed, name in enumerate("abc")}
    for name, net in nets.items():
        manage({name: net}, placement="gpu:0", manager=manager)
    return nets


def evictions(manager: MemoryManager) -> list[dict]:
    return [event for event in manager.report()["events"] if event["kind"] == "evict"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("steps", "leaves"),
    [
        ([], "a"),  # the least recently used
        (["c", "a", "b"], "b"),
        (["c", "b", "a"], "a"),
        (["c", "a"], "b"),  # no prompt names it
        (["c", "zzz"], "a"),  # what is unknown here is no error
    ],
)
def test_who_is_used_last_leaves_first(toys, machine, steps: list[str], leaves: str) -> None:
    with machine(2.9) as manager:
        nets = build_three(toys, manager)
        nets["a"](X), nets["b"](X)
        manager.foresee([step] for step in steps)
        nets["c"](X)
        assert [event["component"] for event in evictions(manager)] == [leaves]


@torch.no_grad()
def test_an_eviction_says_when_where_and_why(toys, machine) -> None:
    with machine(2.9) as manager:
        nets = build_three(toys, manager)
        manager.begin_run("run 1", "first")
        manager.begin_node("7", "Sample")
        nets["a"](X), nets["b"](X)
        manager.foresee([["c"], ["b"], ["a"]])
        nets["c"](X)
        manager.end_node()
        manager.foresee([])
        nets["a"](X)
        manager.end_run()
        first, second = evictions(manager)
        assert (first["run_id"], first["node_id"], first["device"]) == ("run 1", "7", "gpu:0")
        assert (first["to"], first["component_kind"]) == ("pinned", "diffusion")
        assert first["reason"].startswith("c needs 1.06MiB; ")
        assert "; next use in 2 steps" in first["reason"]
        assert (second["run_id"], second["node_id"]) == ("run 1", None)
        assert ", next use unknown" in second["reason"]


@torch.no_grad()
def test_an_eviction_says_how_long_a_reload_takes_once_copies_were_measured(toys, machine) -> None:
    with machine(8, h2d_bytes_per_s=1e9) as manager:
        big = {name: toys.build_net(seed, dim=256, doubles=1, singles=1) for seed, name in enumerate("ab")}
        for name, net in big.items():
            manage({name: net}, placement="gpu:0", manager=manager)
        x = torch.ones(1, 3, 256)
        for name in "aabbab":
            big[name](x)
        last = evictions(manager)[-1]
        seconds = last["bytes"] / manager.capacity.links["gpu:0"]
        assert f", reload {format_seconds(seconds)}; " in last["reason"]


@settings(max_examples=25)
@given(
    uses=st.lists(st.sampled_from("abcd"), min_size=3, max_size=12),
    seen=st.integers(0, 4),
    kept=st.sets(st.sampled_from("abcd"), max_size=2),
    mark=st.floats(0, 0.6),
)
def test_no_more_leaves_than_is_needed_and_nobody_that_computes(toys, machine, uses, seen, kept, mark) -> None:
    """Of every eviction: without its last block less than ``high`` would have been free."""
    low = int(mark * MIB / 2)
    with torch.no_grad(), machine(2.9, low=low, high=2 * low) as manager:
        nets = {name: toys.build_net(seed, doubles=2, singles=3) for seed, name in enumerate("abcd")}
        members = {
            name: manage({name: net}, placement="gpu:0", manager=manager).members[0] for name, net in nets.items()
        }
        largest = max(block.weight_bytes for block in members["a"].managed.component.blocks)
        manager.commands.keep([members[name] for name in kept], True)
        for number, name in enumerate(uses):
            manager.foresee([step] for step in uses[number : number + 1 + seen])
            before = len(evictions(manager))
            nets[name](X)
            manager.ledger.check()
            events = evictions(manager)[before:]
            assert name not in {event["component"] for event in events}
            partly = [event for event in events if "stay loaded" in event["reason"]]
            assert len(partly) <= 1, "block by block, and the next one only when the one before is gone"
            if partly:
                assert manager.devices["gpu:0"].free_bytes() <= 2 * low + 2 * largest
            order = [event["component"] in kept for event in events]
            assert order == sorted(order), "what is kept leaves last"


@torch.no_grad()
@pytest.mark.parametrize(
    ("num_passes", "coming", "leaves"),
    [
        (1, ["b"], []),  # b is needed next, and one pass copies each weight once in any case
        (3, ["b"], ["b"]),  # the second pass would copy them again
        (1, ["b", "a", "c"], []),  # it is used again itself, but later than b
        (1, ["c", "a", "b"], ["b"]),  # b later than it
        (1, [], ["b"]),
    ],
)
def test_what_makes_one_pass_streams_past_what_the_next_step_needs(
    toys, machine, num_passes: int, coming: list[str], leaves: list[str]
) -> None:
    """With room for one and a half of them."""
    with machine(8, h2d_bytes_per_s=1e9) as manager:
        nets = {name: toys.build_net(seed, doubles=3, singles=3) for seed, name in enumerate("ab")}
        for name, net in nets.items():
            manage({name: net}, placement="gpu:0", manager=manager)
        size = manager.plans()["a"].weight_bytes
        manager.set_watermark("gpu:0", 8 * MIB - int(1.5 * size), 8 * MIB - int(1.5 * size))
        manager.begin_run("run 1", "first")
        for name, passes in [("a", num_passes), ("b", 2)]:
            manager.begin_node(name, name)
            for _ in range(passes):
                nets[name](X)
            manager.end_node()
        manager.end_run()
        manager.hosting.unload(manager.commands.find("a"))
        held = manager.ledger.held("b", "gpu:0")
        assert held == size
        manager.begin_run("run 2", "first")
        manager.begin_node("1", "encode")
        manager.foresee([["a"], *([name] for name in coming)])
        before = len(evictions(manager))
        results = [nets["a"](X).cpu() for _ in range(num_passes)]
        assert {event["component"] for event in evictions(manager)[before:]} == set(leaves)
        assert (manager.ledger.held("b", "gpu:0") == held) == (not leaves)
        load = [event for event in manager.report()["events"] if event["kind"] == "load"][-1]
        assert ("streams past b, which is needed sooner" in load["reason"]) == (not leaves)
        manager.end_node()
        manager.end_run()
        manager.hosting.unload(manager.commands.find("b"))
        assert all(torch.equal(nets["a"](X).cpu(), result) for result in results)


@torch.no_grad()
def test_what_cannot_compute_beside_what_the_next_step_needs_pushes_it_out(toys, machine) -> None:
    with machine(8) as manager:
        nets = {name: toys.build_net(seed, doubles=3, singles=3) for seed, name in enumerate("ab")}
        for name, net in nets.items():
            manage({name: net}, placement="gpu:0", manager=manager)
        size = manager.plans()["a"].weight_bytes
        manager.set_watermark("gpu:0", 8 * MIB - size - 1024, 8 * MIB - size - 1024)
        for name in "ab":
            manager.begin_node(name, name)
            nets[name](X)
            manager.end_node()
        manager.begin_node("a", "again")
        manager.foresee([["a"], ["b"]])
        nets["a"](X)
        assert {event["component"] for event in evictions(manager)} == {"a", "b"}
