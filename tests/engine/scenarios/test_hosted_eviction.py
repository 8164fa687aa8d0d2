"""What a host loaded gives back as few blocks as were asked for, and computes without being loaded again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory.errors import DoesNotFit
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import parse_profile

X = torch.ones(4, 256)
BLOCK_BYTES = 256 * 256 * 4 + 256 * 4
NUM_BLOCKS = 8


class Stack(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def host(
    manager: Any,
    module: nn.Module,
    name: str,
    placement: str = "gpu:0",
    form: Precision | None = None,
    profile: str = "auto",
) -> Any:
    """Load a module as a host does."""
    devices = ["gpu:0", "gpu:1"]
    (member,), _ = manager.add(
        {name: module.eval().requires_grad_(False)},
        placement=parse_placement(placement, devices=devices),
        profile=parse_profile(profile, devices=devices),
        precision=form or Precision.AS_STORED,
        name=None,
        node_id=None,
        is_hosted=True,
    )
    manager.hosting.load(member)
    return member


def free(manager: Any, num_bytes: int, *, kept: Any = None, unrunnable: bool = False) -> int:
    """Ask for memory as a host does before it loads another model."""
    exclude = [kept.id] if kept is not None else []
    return manager.free_memory("gpu:0", num_bytes, "the host asks", exclude=exclude, allow_unrunnable=unrunnable)


def compute(model: nn.Module, *, is_loaded: bool = True) -> torch.Tensor:
    """Compute as a host does: on the device where it loaded the model, else on the CPU."""
    return model(X.to("sim:0") if is_loaded else X).cpu()


def moved(manager: Any, member: Any) -> int:
    return sum(e["bytes"] for e in manager.report()["events"] if (e["kind"], e["component"]) == ("load", member.id))


@torch.no_grad()
def test_what_leaves_is_what_was_asked_for_and_the_next_load_brings_no_more(machine) -> None:
    with machine(64) as manager:
        model = Stack(0)
        member = host(manager, model, "model")
        want = compute(model)
        for num_blocks in (1, 2, 5):
            before = moved(manager, member)
            asked = num_blocks * BLOCK_BYTES
            assert asked <= free(manager, asked) < asked + BLOCK_BYTES / 2
            manager.hosting.load(member)
            assert moved(manager, member) - before < asked + BLOCK_BYTES / 2
            assert torch.equal(compute(model), want)


@torch.no_grad()
def test_it_computes_in_what_it_has_left_when_it_is_not_loaded_again(machine) -> None:
    with machine(64) as manager:
        model = Stack(0)
        member = host(manager, model, "model")
        want = compute(model)
        free(manager, 5 * BLOCK_BYTES)
        held = manager.ledger.held(member.id, "gpu:0")
        assert torch.equal(compute(model), want)
        assert manager.ledger.held(member.id, "gpu:0") <= held
        assert member.managed.is_loaded and member.managed.plan.shares[0].streamed
        manager.hosting.unload(member)
        assert torch.equal(compute(model, is_loaded=False), want)
        assert not manager.ledger.held(member.id, "gpu:0")


@torch.no_grad()
def test_it_keeps_the_least_with_which_it_computes_however_much_is_asked_for(machine) -> None:
    with machine(64) as manager:
        model = Stack(0)
        member = host(manager, model, "model")
        want = compute(model)
        for _ in range(3):
            free(manager, 60 << 20)
        assert manager.ledger.held(member.id, "gpu:0") >= BLOCK_BYTES
        assert torch.equal(compute(model), want)
        assert member.managed.is_loaded


@pytest.mark.parametrize("profile", ["auto", "0.9MiB", "0.6MiB"])
@torch.no_grad()
def test_what_keeps_its_least_computes_when_others_have_the_rest(machine, profile: str) -> None:
    """Also where it streams: then staging memory is what it gives back."""
    with machine(4) as manager:
        model = Stack(0)
        member = host(manager, model, "model", profile=profile)
        want = compute(model)
        free(manager, 60 << 20)
        left = manager.ledger.held(member.id, "gpu:0")
        assert BLOCK_BYTES <= left <= 3 * BLOCK_BYTES
        others = torch.empty(manager.devices["gpu:0"].free_bytes() - (1 << 16), dtype=torch.uint8, device="sim:0")
        assert torch.equal(compute(model), want)
        assert member.managed.is_loaded
        del others


@torch.no_grad()
def test_a_load_that_failed_leaves_it_to_its_host(machine) -> None:
    with machine(4) as manager:
        model = Stack(0)
        member = host(manager, model, "model")
        want = compute(model)
        free(manager, 60 << 20, unrunnable=True)
        others = torch.empty(manager.devices["gpu:0"].free_bytes() - (1 << 16), dtype=torch.uint8, device="sim:0")
        with pytest.raises(DoesNotFit):
            manager.hosting.load(member)
        del others
        assert torch.equal(compute(model, is_loaded=False), want)


DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["compute", "load", "unload", "free", "free all", "evict"]), st.integers(0, 1), st.floats(0, 10)
    ),
    max_size=10,
)


@pytest.mark.parametrize("form", [Precision.AS_STORED, Precision.ENCODED], ids=["as stored", "fp8"])
@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0&gpu:1"])
@settings(max_examples=25)
@given(deeds=DEEDS, room=st.sampled_from([1.2, 2.2, 3.5, 16.0]))
@torch.no_grad()
def test_any_order_of_evictions_and_loads_gives_the_same_results(
    machine, placement: str, form: Precision, deeds: list[tuple[str, int, float]], room: float
) -> None:
    models = [Stack(seed) for seed in range(2)]
    with machine(64, 64) as manager:
        members = [host(manager, model, f"model{n}", placement, form) for n, model in enumerate(models)]
        want = [compute(model) for model in models]
        for member in members:
            manager.remove(member)
    with machine(room, room, low=1 << 17, high=1 << 17) as manager:  # for what it computes
        members = [host(manager, model, f"model{n}", placement, form) for n, model in enumerate(models)]
        loaded = {0, 1}
        for deed, number, blocks in deeds:
            member, num_bytes = members[number], int(blocks * BLOCK_BYTES)
            if deed == "load":
                manager.hosting.load(member)
                loaded.add(number)
            elif deed == "unload":
                manager.hosting.unload(member)
                loaded.discard(number)
            elif deed.startswith("free"):
                free(manager, num_bytes, unrunnable=deed == "free all")
            elif deed == "evict":
                manager.commands.release_from(member, reason="asked")
            elif number in loaded:
                assert torch.equal(compute(models[number]), want[number])
            manager.ledger.check()
        for number, member in enumerate(members):
            if number not in loaded:
                manager.hosting.load(member)
            assert torch.equal(compute(models[number]), want[number])
            manager.remove(member)
