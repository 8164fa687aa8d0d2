"""What the engine learns from its passes: how long blocks compute, how fast the link is, and a better plan."""

from __future__ import annotations

import random

import pytest
import torch

from highwater.memory import manage
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.transfer.link_speed import known_link, link_bytes_per_s

LINK = 8e9


def test_the_link_is_measured_by_the_loading_and_remembered(sim, machine, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("highwater.memory.transfer.link_speed.cache_directory", lambda: tmp_path)
    monkeypatch.setattr("highwater.memory.manager.live_capacity.known_link", known_link)
    monkeypatch.setattr("highwater.memory.manager.live_capacity.link_bytes_per_s", link_bytes_per_s)
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))  # 48 MiB
    with machine(64, h2d_bytes_per_s=LINK) as manager, torch.no_grad():
        assert known_link(manager.devices["gpu:0"]) is None
        with manage(net, profile="40MiB", manager=manager) as managed:
            for _ in range(4):
                net(torch.randn(4, 1024))
            assert manager.capacity.links["gpu:0"] == pytest.approx(LINK, rel=0.05)
            assert known_link(manager.devices["gpu:0"]) == manager.capacity.links["gpu:0"]
            seconds = managed.members[0].block_seconds
            assert len(seconds) == 12 and all(value > 0 for value in seconds.values())
        assert type(manager)().capacity.links["gpu:0"] == manager.capacity.links["gpu:0"]


def test_times_are_taken_once_and_cost_nothing_after(toys, machine, sim) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, profile="0.45MiB", manager=manager) as managed:
            share = managed.members[0].managed.shares[0]
            for _ in range(4):
                net(torch.randn(2, 5, 64))
            seconds = managed.members[0].block_seconds
            assert seconds is not None
            for _ in range(9):
                net(torch.randn(2, 5, 64))
                assert share.times.watch is None
            assert managed.members[0].block_seconds is seconds


def test_what_computes_meanwhile_is_not_taken_for_the_link(sim, machine) -> None:
    """As an encoder does while the first blocks of the transformer behind it are queued."""
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))
    with machine(128, h2d_bytes_per_s=LINK) as manager, torch.no_grad():
        other = torch.randn(2048, 2048, device="sim:0")
        with manage(net, profile="40MiB", manager=manager):
            for _ in range(4):
                for _ in range(3):
                    other = other @ other
                net(torch.randn(4, 1024))
        del other
        assert manager.capacity.links["gpu:0"] == pytest.approx(LINK, rel=0.05)


@pytest.mark.parametrize("budget", ["9MiB", "17MiB"])
def test_pageable_memory_is_learned_as_it_streams(sim, machine, budget: str) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))
    with (
        machine(64, h2d_bytes_per_s=LINK) as manager,
        torch.no_grad(),
        manage(net, profile=f"{budget},pinned=none", manager=manager) as managed,
    ):
        for _ in range(6):
            net(torch.randn(4, 1024))
        assert manager.capacity.links == {}
        assert manager.capacity.pageable_links == pytest.approx({"gpu:0": LINK}, rel=0.05)
        (share,) = managed.members[0].managed.plan.shares
        assert share.pass_s is not None
        begin_s = sim.clock_s()
        for _ in range(8):
            net(torch.randn(4, 1024))
        torch.accelerator.synchronize(0)
        assert (sim.clock_s() - begin_s) / 8 == pytest.approx(share.pass_s, rel=0.1)


def test_what_the_driver_does_not_lock_is_planned_as_pageable(sim, machine) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))
    with machine(64) as manager, torch.no_grad():
        sim.fail_registration(1)
        with manage(net, profile="17MiB", manager=manager) as managed:
            assert managed.members[0].managed.plan.pinned == frozenset()
            assert not any(weight.is_pinned() for weight in net.parameters())


def test_copies_are_timed_until_their_speed_is_known(sim, machine) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))
    with (
        machine(64, h2d_bytes_per_s=LINK) as manager,
        torch.no_grad(),
        manage(net, profile="17MiB", manager=manager) as managed,
    ):
        speeds = managed.members[0].managed.shares[0].copies.speeds
        assert speeds.watches.keys() == {True, False}
        for _ in range(4):
            net(torch.randn(4, 1024))
        assert speeds.watches.keys() == {False}  # nothing is pageable, nothing of that is timed


def test_the_link_is_learned_where_nothing_streams_too(sim, machine) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    with machine(64, h2d_bytes_per_s=LINK) as manager, torch.no_grad(), manage(net, manager=manager) as managed:
        for _ in range(2):
            net(torch.randn(4, 1024))
        assert manager.capacity.links["gpu:0"] == pytest.approx(LINK, rel=0.05)
        assert managed.members[0].block_seconds is None  # it would be of no use


def test_a_split_of_which_one_part_streams_learns_the_times_of_both(toys, machine) -> None:
    with machine(8, 8, h2d_bytes_per_s=LINK) as manager, torch.no_grad():
        net = toys.build_net()
        profile = "gpu:0=unlimited,gpu:1=0.3MiB"
        with manage(net, profile=profile, placement="gpu:0&gpu:1@0.5", manager=manager) as managed:
            manager.capacity.links |= {"gpu:0": LINK, "gpu:1": LINK}
            for _ in range(4):
                net(torch.randn(2, 5, 64))
            first, second = managed.members[0].managed.shares
            assert first.streamer is None and second.streamer is not None
            assert managed.members[0].block_seconds.keys() == {*first.blocks, *second.blocks}


class Backwards(torch.nn.Sequential):
    """Layers of which the last runs first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self):
            x = layer(x)
        return x


def test_staging_memory_that_is_made_anew_knows_the_order(machine) -> None:
    net = Backwards(*(torch.nn.Linear(512, 512) for _ in range(8)))
    with machine(64, h2d_bytes_per_s=LINK) as manager, torch.no_grad():
        with manage(net, profile="4.5MiB", manager=manager) as managed:
            managed_component = managed.members[0].managed
            for _ in range(4):
                net(torch.randn(4, 512))
            before = manager.bytes_moved()
            net(torch.randn(4, 512))
            moved = manager.bytes_moved() - before
            managed_component.unload()
            before = manager.bytes_moved()
            net(torch.randn(4, 512))
            again = manager.bytes_moved() - before
        # What is loaded besides: residents, and what the staging memory holds at the end. Nothing comes in vain.
        (share,) = managed_component.plan.shares
        assert again <= share.fixed_bytes + share.resident_bytes + moved + share.staging_bytes


def test_a_plan_follows_the_order_in_which_blocks_ran(machine) -> None:
    net = Backwards(*(torch.nn.Linear(512, 512) for _ in range(8)))
    with machine(64, h2d_bytes_per_s=LINK) as manager, torch.no_grad():
        manager.capacity.links["gpu:0"] = LINK
        with manage(net, profile="4.5MiB", manager=manager) as managed:
            for _ in range(4):
                net(torch.randn(4, 512))
            (share,) = managed.members[0].managed.plan.shares
            assert list(managed.members[0].block_seconds) == list(range(8))[::-1]
            assert share.pass_s is not None
            assert list(share.offsets[0]) == sorted(share.streamed, reverse=True)


def test_widening_is_part_of_what_a_block_takes(toys, machine, sim) -> None:
    rates = {"h2d_bytes_per_s": LINK, "memory_bytes_per_s": 1e9, "flops_per_s": 1e15, "launch_s": 1e-7}
    with machine(8, **rates) as manager, torch.no_grad():
        manager.capacity.links["gpu:0"] = LINK
        net = toys.build_net(dtype=torch.bfloat16)
        choices = {"profile": "0.3MiB", "precision": "fp8 scaled", "manager": manager}
        with manage({"transformer": net}, **choices) as managed:
            for _ in range(4):
                net(torch.randn(2, 5, 64, dtype=torch.bfloat16))
            seconds = sum(managed.members[0].block_seconds.values())
            torch.accelerator.synchronize(0)
            begin_s = sim.clock_s()
            net(torch.randn(2, 5, 64, dtype=torch.bfloat16))
            torch.accelerator.synchronize(0)
            # Little else computes, and copies take a tenth of it.
            assert 0.8 <= seconds / (sim.clock_s() - begin_s) <= 1


def test_times_are_learned_behind_a_pass_that_left_blocks_out(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, profile="0.45MiB", manager=manager) as managed:
            net(torch.randn(2, 5, 64))
            net.skip = frozenset({2})
            net(torch.randn(2, 5, 64))
            net.skip = frozenset()
            for _ in range(3):
                net(torch.randn(2, 5, 64))
            assert managed.members[0].block_seconds is not None


def test_short_passes_in_turn_with_whole_ones_keep_the_order(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, profile="0.45MiB", manager=manager) as managed:
            for number in range(8):
                net.skip = frozenset(range(3, 20)) if number % 2 else frozenset()
                net(torch.randn(2, 5, 64))
                (share,) = managed.members[0].managed.shares
                assert set(share.streamer.order) == share.streamer.groups.keys()


class Chain(torch.nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = ((torch.nn.Linear(64, width), torch.nn.Linear(width, 64)) for width in widths)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(*pair) for pair in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("seed", [7, 20, 34, 37])
def test_a_host_is_told_and_left_with_what_measured_times_decide(machine, seed: int) -> None:
    draw = random.Random(seed)
    widths = [draw.choice([64, 128, 256, 400]) for _ in range(8)]
    net = Chain(widths).eval().requires_grad_(False)
    x = torch.randn(16, 64)
    with machine(8, flops_per_s=10 ** draw.uniform(8.3, 10.5), h2d_bytes_per_s=1e9) as manager, torch.no_grad():
        manager.capacity.links["gpu:0"] = 1e9
        budget = draw.uniform(0.4, 0.8) * sum(widths) * 128 * 4
        (member,), _ = manager.add(
            {"model": net},
            placement=parse_placement("gpu:0", devices=["gpu:0"]),
            profile=parse_profile(f"{budget / 1e6:.4f}MB", devices=["gpu:0"]),
            precision=None,
            name=None,
            node_id=None,
            is_hosted=True,
        )
        manager.hosting.load(member)
        for _ in range(5):
            net(x.to("sim:0"))
        assert member.block_seconds is not None
        manager.hosting.unload(member)
        manager.hosting.load(member)
        manager.hosting.unload(member)
        told = manager.planned_bytes(member, "gpu:0")
        manager.hosting.load(member)
        assert told == manager.ledger.held("model", "gpu:0")
        manager.free_memory("gpu:0", 1, "the host asks")
        assert manager.ledger.held("model", "gpu:0") < told
        assert member.managed.plan.shares[0].pass_s is not None


@pytest.mark.parametrize("skipped", [0, 1, 2, 6, 7])
def test_a_split_learns_where_a_pass_left_out_a_block_of_one_part(toys, machine, skipped: int) -> None:
    with machine(8, 8, h2d_bytes_per_s=LINK) as manager, torch.no_grad():
        net = toys.build_net()
        profile = "gpu:0=0.4MiB,gpu:1=0.3MiB"
        with manage(net, profile=profile, placement="gpu:0&gpu:1@0.5", manager=manager) as managed:
            manager.capacity.links |= {"gpu:0": LINK, "gpu:1": LINK}
            (member,) = managed.members
            for number in range(8):
                net.skip = frozenset({skipped}) if number == 1 else frozenset()
                net(torch.randn(2, 5, 64))
            assert list(member.block_seconds) == list(range(8))
            assert not member.taken_seconds
