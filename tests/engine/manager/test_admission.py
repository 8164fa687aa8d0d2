"""What several components of one call leave free of a device, and hold of it, together."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory import InvalidInput, manage
from highwater.memory.options.budget import exact_size
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.units import MIB

X = torch.randn(2, 5, 64)
PARTS = ("transformer", "text_encoder", "vae")


def build_parts(toys) -> dict[str, torch.nn.Module]:
    """Three nets of 1.06 MiB each."""
    return {name: toys.build_net(seed) for seed, name in enumerate(PARTS)}


def evictions(manager) -> list[dict]:
    return [event for event in manager.report()["events"] if event["kind"] == "evict"]


# -- what stays free


@pytest.mark.parametrize(
    "profile", ["auto,reserve=2MiB", "-2MiB", "50%,reserve=50%", "auto,reserve:gpu:0=2MiB", "gpu:0=-2MiB", "-50%"]
)
@torch.no_grad()
def test_what_is_to_stay_free_does_so_beside_all_components(toys, machine, profile: str) -> None:
    parts = build_parts(toys)
    with machine(4) as manager:
        manage(parts, profile, placement="gpu:0", manager=manager)
        for name, _ in itertools.product(PARTS, range(2)):
            want = toys.build_net(PARTS.index(name)).to("sim:0")(X.to("sim:0")).cpu()
            assert torch.equal(parts[name](X).cpu(), want)
            assert manager.devices["gpu:0"].free_bytes() >= 2 * MIB
            assert manager.ledger.used("gpu:0") > 1.5 * MIB or name == PARTS[0]  # and no more
        assert all("2.00MiB reserved" in event["reason"] for event in evictions(manager))
        assert evictions(manager)


@torch.no_grad()
def test_a_reserve_is_of_its_component_and_device_alone(toys, machine) -> None:
    parts = build_parts(toys)
    with machine(4, 8) as manager:
        manage(parts, "auto,reserve:vae=2MiB,reserve:gpu:1=7MiB", placement="gpu:0", manager=manager)
        parts["transformer"](X), parts["text_encoder"](X)
        assert not evictions(manager)
        parts["vae"](X)
        assert manager.devices["gpu:0"].free_bytes() >= 2 * MIB
        parts["transformer"](X), parts["text_encoder"](X)  # which ask for nothing
        assert manager.devices["gpu:0"].free_bytes() < 1 * MIB


@torch.no_grad()
def test_what_another_took_of_a_reserve_comes_back_with_the_next_pass(toys, machine) -> None:
    parts = build_parts(toys)
    with machine(4) as manager:
        manage(parts["transformer"], "auto,reserve=2MiB", placement="gpu:0", manager=manager, name="careful")
        careless = {name: parts[name] for name in PARTS[1:]}
        manage(careless, placement="gpu:0", manager=manager)
        for net in parts.values():
            net(X)
        assert manager.devices["gpu:0"].free_bytes() < MIB
        parts["transformer"](X)
        assert manager.devices["gpu:0"].free_bytes() >= 2 * MIB
        moved = manager.bytes_moved()
        parts["transformer"](X)
        assert manager.bytes_moved() == moved


def test_of_two_reserves_and_what_a_budget_leaves_the_larger_counts(toys, machine) -> None:
    texts = ["-2MiB,reserve=1MiB", "-1MiB,reserve=2MiB", "-1MiB,reserve:model=1MiB,reserve:gpu:0=2MiB"]
    with machine(2.75) as manager:
        for text in ["reserve=2MiB", *texts]:
            with manage(toys.build_net(), text, placement="gpu:0", manager=manager) as managed:
                (share,) = managed.plan["model"].shares
                assert 0.6 * MIB < share.device_bytes <= 0.75 * MIB


@pytest.mark.parametrize("profile", ["auto,reserve=1MiB", "-1MiB"])
@torch.no_grad()
def test_a_hosts_ceiling_and_what_is_to_stay_free_do_not_add_up(toys, machine, profile: str) -> None:
    with machine(4) as manager:
        (member,), _ = manager.add(
            {"model": toys.build_net()},
            placement=parse_placement("gpu:0", devices=["gpu:0"]),
            profile=parse_profile(profile, devices=["gpu:0"]),
            precision=None,
            name=None,
            node_id=None,
            is_hosted=True,
        )
        manager.hosting.load(member, {"gpu:0": int(0.9 * MIB)})
        assert 0.8 * MIB < manager.ledger.used("gpu:0") <= 0.9 * MIB
        freed = manager.free_memory("gpu:0", 64 << 10, "the host asks")
        assert 64 << 10 <= freed < 192 << 10
        filler = torch.empty(int(2.5 * MIB), dtype=torch.uint8, device="sim:0")
        manager.hosting.load(member, {"gpu:0": int(0.9 * MIB)})
        assert manager.ledger.used("gpu:0") <= 0.5 * MIB
        del filler


@settings(max_examples=25)
@given(
    sequence=st.lists(st.sampled_from("abcd"), min_size=2, max_size=10),
    together=st.floats(0.3, 4),
    reserve=st.floats(0, 2.5),
    low=st.floats(0.1, 0.5),  # activations of a first pass need room
    precision=st.sampled_from(["as stored", "fp8 scaled"]),
)
def test_any_sequence_keeps_to_what_two_calls_allow_and_leave_free(
    toys, machine, sequence: list[str], together: float, reserve: float, low: float, precision: str
) -> None:
    nets = {name: toys.build_net(seed) for seed, name in enumerate("abcd")}
    budget, left = int(together * MIB), int(reserve * MIB)
    with torch.no_grad(), machine(4, low=int(low * MIB), high=int(low * MIB)) as manager:
        first = manage(
            {name: nets[name] for name in "ab"},
            f"gpu:0={exact_size(budget)},*=1MiB",
            placement="gpu:0",
            precision=precision,
            manager=manager,
        )
        manage(
            {name: nets[name] for name in "cd"},
            f"-{exact_size(left)}",
            placement="gpu:0",
            precision=precision,
            manager=manager,
        )
        want = {}
        for name in sequence:
            result = nets[name](X).cpu()
            assert torch.equal(result, want.setdefault(name, result))
            manager.ledger.check()
            held = manager.ledger.by_component("gpu:0")
            assert sum(held.get(member.id, 0) for member in first.members) <= budget
            assert all(held.get(member.id, 0) <= MIB for member in first.members)
            assert manager.devices["gpu:0"].free_bytes() >= max(int(low * MIB), left if name in "cd" else 0)


# -- a device's budget


@torch.no_grad()
def test_a_devices_budget_is_for_all_components_together(toys, machine) -> None:
    parts = build_parts(toys)
    with machine(16) as manager:
        managed = manage(parts, "gpu:0=1MiB", placement="gpu:0", manager=manager)
        for name, _ in itertools.product(PARTS, range(2)):
            want = toys.build_net(PARTS.index(name)).to("sim:0")(X.to("sim:0")).cpu()
            assert torch.equal(parts[name](X).cpu(), want)
            assert 0.8 * MIB < manager.ledger.used("gpu:0") <= MIB
        assert {event["component"] for event in evictions(manager)} == {"transformer", "text_encoder"}
        assert all("budget gpu:0=1MiB is for all of them together" in e["reason"] for e in evictions(manager))
        assert "gpu:0=1MiB" in managed.plan.explicit_profile


@torch.no_grad()
def test_a_devices_budget_evicts_no_more_than_it_must_and_nobody_else(toys, machine) -> None:
    parts = build_parts(toys)
    with machine(16) as manager:
        stranger = toys.build_net(7)
        manage(stranger, placement="gpu:0", manager=manager, name="stranger")
        manage(parts, "gpu:0=3MiB", placement="gpu:0", manager=manager)
        stranger(X)
        for net in parts.values():
            net(X)
        assert {event["component"] for event in evictions(manager)} == {"transformer"}
        held = manager.ledger.by_component("gpu:0")
        assert held["stranger/model"] + held["text_encoder"] + held["vae"] > 3 * MIB > sum(held.values()) - 1.1 * MIB
        assert held["transformer"] > 0.7 * MIB


@torch.no_grad()
def test_each_device_has_its_own_budget_and_those_without_none(toys, machine) -> None:
    parts = build_parts(toys)
    placement = "diffusion=gpu:0,text=gpu:1,vae=gpu:1"
    with machine(16, 16) as manager:
        manage(parts, "gpu:0=0.5MiB", placement=placement, manager=manager)
        for net in parts.values():
            net(X)
        assert manager.ledger.used("gpu:0") <= 0.5 * MIB and manager.ledger.used("gpu:1") > 2 * MIB
        assert not evictions(manager)


@pytest.mark.parametrize("text", ["gpu:0=0.5MiB,model=1MiB", "gpu:0=1MiB,*=0.5MiB", "gpu:0=3.125%,unlimited"])
@torch.no_grad()
def test_of_a_devices_and_a_components_budget_the_smaller_counts(toys, machine, text: str) -> None:
    with machine(16) as manager:
        net = toys.build_net()
        with manage(net, text, placement="gpu:0", manager=manager):
            net(X)
            assert 0.4 * MIB < manager.ledger.used("gpu:0") <= 0.5 * MIB


@torch.no_grad()
def test_what_a_sibling_under_a_lease_holds_counts_against_a_devices_budget(toys, machine) -> None:
    parts = build_parts(toys)
    with machine(16) as manager:
        managed = manage(parts, "gpu:0=1.6MiB", placement="gpu:0", manager=manager)
        with manager.lease(managed.members[0]):
            parts["vae"](X)
            assert manager.ledger.held("transformer", "gpu:0") > MIB
            assert manager.ledger.used("gpu:0") <= 1.6 * MIB
        with manage(toys.build_net(9), "gpu:0=1.6MiB", placement="gpu:0", manager=manager, name="other"):
            pass
        managed.reprofile("gpu:0=1.1MiB", placement="gpu:0")
        with manager.lease(managed.members[0]):
            words = re.escape("budget 'gpu:0=1.1MiB' is too small") + ".*components that compute hold 1.06MiB of it"
            with pytest.raises(InvalidInput, match=words):
                parts["vae"](X)
        parts["vae"](X)
        assert manager.ledger.used("gpu:0") <= 1.1 * MIB
