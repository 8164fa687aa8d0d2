"""What a host adds to encoded weights as low-rank factors: computed exactly, wherever they rest, and paid for."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory.errors import InvalidInput
from highwater.memory.hosted_component import HostedComponent, SideFactors
from highwater.memory.manager.manager import MemoryManager
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import parse_profile
from highwater.memory.planner.request import PlanRequest, plan_request
from highwater.memory.runtime.packing import Packing
from highwater.memory.weights.known_forms import FORMS
from highwater.memory.weights.module_component import component_from_module

WIDTH = 128
NAMES = [f"{number}.0.weight" for number in range(6)]
MODES = {
    "resident": ("auto", "gpu:0"),
    "streamed": ("0.14MiB", "gpu:0"),
    "split": ("auto", "gpu:0&gpu:1/2"),
    "split and streamed": ("gpu:0=0.12MiB,gpu:1=0.12MiB", "gpu:0&gpu:1/2"),
}


def build(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)))
    for parameter in net.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.05).to(dtype)
    return net.requires_grad_(False)


def factors(rank: int = 4, *, seed: int = 1, size: float = 0.05) -> SideFactors:
    generator = torch.Generator().manual_seed(seed)
    return SideFactors(
        up=torch.randn(WIDTH, rank, generator=generator) * size,
        down=torch.randn(rank, WIDTH, generator=generator) * size,
    )


X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()


class Loaded:
    """A net under management as a host has it, and what it should compute."""

    def __init__(self, manager: MemoryManager, form: str, mode: str) -> None:
        profile, placement = MODES[mode]
        self.manager, self.form = manager, form
        self.device = manager.devices["gpu:0"].torch_device
        self.plain = build()
        self.net = copy.deepcopy(self.plain)
        self.hosted = HostedComponent(
            "net",
            "diffusion",
            profile=parse_profile(profile, devices=["gpu:0", "gpu:1"]),
            precision=Precision(form),
            placement=parse_placement(placement, devices=["gpu:0", "gpu:1"]),
        )
        self.hosted.join(self.net, self.device)
        self.kept: dict[str, SideFactors] = {}

    def set(self, found: dict[str, SideFactors]) -> None:
        self.kept = found
        self.hosted.set_factors(found)
        self.hosted.load()

    @torch.no_grad()
    def want(self) -> torch.Tensor:
        net = copy.deepcopy(self.plain)
        for name, weight in net.named_parameters():
            if not name.endswith(".weight"):
                continue
            form = FORMS[self.form][1]().measure(weight, name=name)
            weight.copy_(form.decode(form.encode(weight), weight.dtype))
            if name in self.kept:
                up, down = (each.to(weight.dtype) for each in (self.kept[name].up, self.kept[name].down))
                weight.addmm_(up, down)
        return net(X)

    @torch.no_grad()
    def compute(self) -> torch.Tensor:
        found = self.net(X.to(self.device)).cpu()
        self.manager.ledger.check()
        return found

    def used(self) -> int:
        return sum(self.manager.ledger.used(name) for name in ("gpu:0", "gpu:1"))


@pytest.fixture
def manager(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryManager]:
    with machine(4, 4) as manager:
        monkeypatch.setattr("highwater.memory.hosted_component.default_manager", lambda: manager)
        yield manager


@pytest.mark.parametrize("form", ["fp8 scaled", "fp8 plain", "fp8 per row", "int8", "qint8", "qint4", "qfloat8"])
@pytest.mark.parametrize("mode", MODES)
def test_a_weight_computes_as_its_decoded_values_and_its_factors(manager: MemoryManager, mode: str, form: str) -> None:
    loaded = Loaded(manager, form, mode)
    loaded.set({})
    plain = loaded.compute()
    assert torch.equal(plain, loaded.want())
    loaded.set({name: factors(seed=number) for number, name in enumerate(NAMES[1:4])})
    assert not torch.equal(loaded.compute(), plain)
    for _ in range(2):
        assert torch.equal(loaded.compute(), loaded.want())
    loaded.set({})
    assert torch.equal(loaded.compute(), plain)
    loaded.hosted.release()


@pytest.mark.parametrize("mode", ["resident", "streamed"])
@pytest.mark.parametrize("form", ["fp8 scaled", "int8", "qint4"])
def test_small_factors_take_effect_that_rounding_to_the_form_would_swallow(
    manager: MemoryManager, mode: str, form: str
) -> None:
    """A sum that is rounded to the form again is the weight that was there before."""
    loaded = Loaded(manager, form, mode)
    small = factors(size=0.004)
    weight = loaded.plain.get_parameter(NAMES[0])
    kind = FORMS[form][1]().measure(weight, name="weight")
    decoded = kind.decode(kind.encode(weight), torch.float32)
    again = kind.measure((decoded + small.up @ small.down).bfloat16(), name="weight")
    encoded = again.encode((decoded + small.up @ small.down).bfloat16())
    unchanged = (again.decode(encoded, torch.float32) == decoded).float().mean()
    assert unchanged > 0.9
    loaded.set({})
    plain = loaded.compute()
    loaded.set(dict.fromkeys(NAMES, small))
    assert torch.equal(loaded.compute(), loaded.want())
    assert not torch.equal(loaded.compute(), plain)


@pytest.mark.parametrize("mode", ["resident", "streamed"])
def test_their_bytes_are_in_the_ledger_with_their_block(manager: MemoryManager, mode: str) -> None:
    loaded = Loaded(manager, "int8", mode)
    loaded.set({})
    loaded.compute()
    before, at_rest = loaded.used(), manager.ledger.used("pinned") + manager.ledger.used("host")
    added = dict.fromkeys(NAMES, factors(8))
    loaded.set(added)
    num_bytes = len(NAMES) * 8 * 2 * WIDTH * 2
    rests = manager.ledger.used("pinned") + manager.ledger.used("host") - at_rest
    assert num_bytes <= rests <= num_bytes + len(NAMES) * 4096  # page-locked memory comes in pages
    if mode == "resident":
        assert loaded.used() == before + num_bytes
    loaded.compute()
    loaded.hosted.unload()
    assert loaded.used() == 0
    loaded.hosted.load()
    assert torch.equal(loaded.compute(), loaded.want())


@pytest.mark.parametrize("mode", ["resident", "streamed"])
def test_another_strength_is_written_in_place(manager: MemoryManager, mode: str) -> None:
    """Nothing but the factors moves: what is resident stays so."""
    loaded = Loaded(manager, "fp8 scaled", mode)
    loaded.set({name: factors(seed=number) for number, name in enumerate(NAMES[:3])})
    loaded.compute()
    managed = loaded.hosted.joined().managed
    moved, slabs = managed.bytes_moved, [group.copy and group.copy.slab.data_ptr() for group in managed.groups]
    kept = dict(loaded.kept)
    loaded.set({**kept, NAMES[0]: SideFactors(up=kept[NAMES[0]].up * 0.5, down=kept[NAMES[0]].down)})
    assert managed.bytes_moved == moved
    assert [group.copy and group.copy.slab.data_ptr() for group in managed.groups] == slabs
    assert torch.equal(loaded.compute(), loaded.want())
    loaded.hosted.unload()
    loaded.hosted.load()
    assert torch.equal(loaded.compute(), loaded.want())


def test_a_weight_as_a_host_reads_it_has_them_only_where_asked(manager: MemoryManager) -> None:
    loaded = Loaded(manager, "int8", "resident")
    loaded.set({NAMES[0]: factors()})
    weight = loaded.hosted.weights[NAMES[0]]
    base = weight.wide(torch.device("cpu"))
    with_factors = weight.add_factors(weight.original())
    up, down = (each.bfloat16() for each in (factors().up, factors().down))
    assert torch.equal(with_factors, base.clone().addmm_(up, down))
    assert set(loaded.hosted.weights) == {name for name, _ in loaded.plain.named_parameters()}
    assert torch.equal(loaded.compute(), loaded.want())


@pytest.mark.parametrize("nth", range(4))
@pytest.mark.parametrize("mode", ["resident", "streamed"])
def test_what_fails_half_way_can_be_undone_or_done_again(
    manager: MemoryManager, monkeypatch: pytest.MonkeyPatch, mode: str, nth: int
) -> None:
    loaded = Loaded(manager, "int8", mode)
    loaded.set({})
    plain = loaded.compute()
    wanted = {name: factors(seed=number) for number, name in enumerate(NAMES)}
    add, calls = Packing.add, itertools.count()

    def fail(*given: Any) -> None:
        if next(calls) == nth:
            raise MemoryError
        add(*given)

    for again in ({}, wanted):
        calls = itertools.count()
        with monkeypatch.context() as patched:
            patched.setattr(Packing, "add", fail)
            with pytest.raises(MemoryError):
                loaded.hosted.set_factors(wanted)
        manager.ledger.check()
        loaded.set(again)
        assert torch.equal(loaded.compute(), loaded.want())
    loaded.set({})
    assert torch.equal(loaded.compute(), plain)


def test_what_cannot_have_factors_is_refused(manager: MemoryManager) -> None:
    loaded = Loaded(manager, "int8", "resident")
    with pytest.raises(InvalidInput, match=r"'0\.0\.bias' is not encoded, or not contiguous: merge"):
        loaded.hosted.set_factors({"0.0.bias": factors()})
    with pytest.raises(InvalidInput, match=r"'0\.0\.weight'.*128 x 128.*128 x 4 and 4 x 64"):
        loaded.hosted.set_factors({NAMES[0]: SideFactors(up=factors().up, down=factors().down[:, :64])})
    loaded.set({})
    assert torch.equal(loaded.compute(), loaded.want())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["set", "strength", "clear", "evict some", "unload", "compute"]),
        st.integers(0, 5),
        st.sampled_from([1, 3, 4]),
    ),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(steps=STEPS, mode=st.sampled_from(sorted(MODES)))
def test_any_order_of_factors_evictions_and_computes(manager: MemoryManager, steps: Any, mode: str) -> None:
    loaded = Loaded(manager, "int8", mode)
    loaded.set({})
    for deed, number, rank in steps:
        if deed == "set":
            loaded.set({**loaded.kept, NAMES[number]: factors(rank, seed=number)})
        elif deed == "strength" and loaded.kept:
            loaded.set({name: SideFactors(up=f.up * 0.7, down=f.down) for name, f in loaded.kept.items()})
        elif deed == "clear":
            loaded.set({})
        elif deed == "evict some":
            loaded.hosted.free_memory(loaded.device, 20_000, "a test", is_loaded=lambda module: True)
            loaded.hosted.load()
        elif deed == "unload":
            loaded.hosted.unload()
            loaded.hosted.load()
        assert torch.equal(loaded.compute(), loaded.want())
    loaded.hosted.release()
    for name in ("gpu:0", "gpu:1", "pinned"):
        assert manager.ledger.used(name) == 0


@pytest.mark.parametrize(
    ("mode", "form", "rank"),
    [
        ("resident", "fp8 scaled", 16),
        ("streamed", "qint4", 3),
        ("split", "qint8", 1),
        ("split and streamed", "int8", 3),
    ],
)
def test_a_plan_with_the_ranks_takes_what_the_component_with_the_factors_holds(
    manager: MemoryManager, mode: str, form: str, rank: int
) -> None:
    machine, profile = manager.machine(), MODES[mode][0]
    part = component_from_module(build(), name="net", kind="diffusion")
    ranks = {name: rank + number for number, name in enumerate(NAMES[1:4])}
    request = PlanRequest(
        components=(replace(part, side_ranks=frozenset(ranks.items())),),
        machine=machine,
        profile=parse_profile(profile, devices=["gpu:0", "gpu:1"]),
        placement=parse_placement(MODES[mode][1], devices=["gpu:0", "gpu:1"]),
        precision=Precision(form),
    )
    planned = plan_request(request)["net"]
    without = plan_request(replace(request, components=(part,)))["net"]
    loaded = Loaded(manager, form, mode)
    made = {name: factors(ranks[name], seed=number) for number, name in enumerate(ranks)}
    # As a host does: what would be larger than the weight at rest is merged into that.
    taken = {name: each for name, each in made.items() if loaded.hosted.weights[name].takes_factors(each)}
    loaded.set(taken)
    assert torch.equal(loaded.compute(), loaded.want())
    for share in planned.shares:
        assert share.device_bytes == manager.ledger.used(share.device)
    assert (planned.weight_bytes > without.weight_bytes) is bool(taken)
    loaded.hosted.release()
