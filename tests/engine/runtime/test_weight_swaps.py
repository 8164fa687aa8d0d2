"""Weights that others put in place of ours: a swap that is undone is not an assignment, an assignment is never lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import UnsafeState

TIGHT = "0.45MiB"
X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
WAYS = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"profile": TIGHT, "placement": "gpu:0"},
    "eight bits": {"profile": "0.3MiB", "placement": "gpu:0", "precision": "fp8 scaled"},
    "split": {"placement": "gpu:0&gpu:1"},
    "on the CPU": {"placement": "cpu"},
}


@pytest.fixture(params=WAYS)
def way(request) -> str:
    return request.param


def on_device(net: nn.Module, way: str, **weights: torch.Tensor) -> torch.Tensor:
    """Return what a module that nobody manages gives, with other weights if there are any."""
    device = "cpu" if way == "on the CPU" else "sim:0"
    net.to(device)
    try:
        moved = {name: weight.to(device) for name, weight in weights.items()}
        return torch.func.functional_call(net, moved, (X.to(device),)).cpu()
    finally:
        net.to("cpu")


def bits(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in net.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def put(net: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(net.get_submodule(path), attribute, tensor)


CHOSEN = {
    "all": None,
    "one bias inside a block": ["singles.2.up.bias"],
    "of the rest": ["embed.bias"],
    "a buffer": ["doubles.1.gain"],
    "a tied one": ["embed.weight"],
}


@torch.no_grad()
@pytest.mark.parametrize("chosen", CHOSEN)
def test_functional_call_computes_with_its_weights_and_leaves_ours(toys, machine, way: str, chosen: str) -> None:
    net, plain = toys.build_net(), toys.build_net()
    other = bits(toys.build_net(seed=1))
    names = CHOSEN[chosen] or [name for name in other if name != "out.weight"]
    given = {name: other[name] for name in names}
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        ours, before = net(X).cpu(), bits(net)
        held = dict(given)
        got = torch.func.functional_call(net, held, (X,)).cpu()
        if way != "eight bits" or chosen == "all":
            assert torch.equal(got, on_device(plain, way, **given))
        assert all(held[name] is given[name] for name in given)
        assert same(bits(net), before)
        assert torch.equal(net(X).cpu(), ours)
        managed.members[0].managed.unload()
        assert torch.equal(net(X).cpu(), ours)
        managed.members[0].managed.unload()
        assert torch.equal(torch.func.functional_call(net, held, (X,)).cpu(), got)
    assert same(bits(net), before)


@torch.no_grad()
def test_a_context_that_computes_with_averaged_weights_for_a_while_gives_them_back(toys, machine, way: str) -> None:
    net, plain = toys.build_net(), toys.build_net()
    plain.load_state_dict(other := bits(toys.build_net(seed=1)))
    names = ["embed.bias", "singles.2.up.weight", "singles.2.up.bias", "doubles.0.norm.weight"]
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        ours, before = net(X).cpu(), bits(net)
        kept = {name: net.get_parameter(name) for name in names}
        for name in names:
            put(net, name, nn.Parameter(other[name], requires_grad=False))
        averaged = net(X).cpu()
        managed.members[0].managed.unload()
        assert torch.equal(net(X).cpu(), averaged)
        for name, parameter in kept.items():
            put(net, name, parameter)
        del kept, parameter
        assert not torch.equal(averaged, ours)
        assert torch.equal(net(X).cpu(), ours)
        assert same(bits(net), before)
    assert same(bits(net), before)


@torch.no_grad()
@pytest.mark.parametrize("state", ["at rest", "loaded"])
@pytest.mark.parametrize("name", ["embed.bias", "singles.2.up.bias", "doubles.0.norm.weight", "singles.4.down.weight"])
def test_an_assignment_counts_whatever_weight_it_is(toys, machine, way: str, state: str, name: str) -> None:
    net, plain = toys.build_net(), toys.build_net()
    other = bits(toys.build_net(seed=1))[name]
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        net(X)
        if state == "at rest":
            managed.members[0].managed.unload()
        put(net, name, nn.Parameter(other.clone(), requires_grad=False))
        got = net(X).cpu()
        if way != "eight bits":
            assert torch.equal(got, on_device(plain, way, **{name: other}))
        managed.members[0].managed.unload()
        assert torch.equal(net(X).cpu(), got)
    weight = net.get_parameter(name)
    is_cast = way == "eight bits" and "weight" in name and "norm" not in name
    assert (weight - other).norm() < 0.05 * other.norm() if is_cast else torch.equal(weight, other)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("singles.2.up.bias", None, "'singles.2.up.bias' was removed"),
        ("singles.2.up.bias", torch.zeros(192, device="meta"), "'singles.2.up.bias' was replaced"),
    ],
)
def test_what_cannot_be_taken_over_is_undone_and_told_once(toys, machine, way: str, name, tensor, words: str) -> None:
    if way == "on the CPU":  # computes in the module's own memory: nothing is taken over
        return
    with machine(8, 8) as manager, manage(net := toys.build_net(), manager=manager, **WAYS[way]):
        want = net(X).cpu()
        put(net, name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
        with pytest.raises(
            UnsafeState, match=rf"^model: {words}[^\n]*; the change was undone: release it before such changes$"
        ):
            net(X)
        assert torch.equal(net(X).cpu(), want)


def outcome(net: nn.Module) -> torch.Tensor | type[Exception]:
    try:
        return net(X).cpu()
    except RuntimeError as error:
        return type(error)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("singles.2.up.bias", torch.zeros(1)),
        ("singles.2.up.bias", torch.zeros(192, dtype=torch.float16)),
        ("singles.2.up.bias", torch.zeros(3)),
        ("out.weight", torch.ones(64, 3)),
        ("out.weight", torch.ones(3, 64)),
    ],
)
def test_a_weight_of_another_form_computes_as_without_the_engine(toys, machine, way: str, name: str, tensor) -> None:
    with machine(8, 8) as manager:
        plain, net = toys.build_net(), toys.build_net()
        with manage(plain, manager=manager, **WAYS[way]):
            plain(X)  # rounds its weights as the other's are
        with manage(net, manager=manager, **WAYS[way]) as managed:
            want = plain(X)
            for _ in range(2):
                assert torch.equal(net(X).cpu(), want)
                former = plain.get_parameter(name).clone()
                for each in (net, plain):
                    put(each, name, nn.Parameter(tensor.clone(), requires_grad=False))
                expected = outcome(plain)
                for _ in range(2):
                    got = outcome(net)
                    assert got is expected or torch.equal(got, expected)
                    manager.ledger.check()
                managed.members[0].managed.unload()
                for each in (net, plain):
                    put(each, name, nn.Parameter(former.clone(), requires_grad=False))
        assert torch.equal(net(X), want)


@torch.no_grad()
def test_a_weight_whose_place_is_gone_is_told_until_the_release(toys, machine) -> None:
    with machine(8) as manager:
        net, plain = toys.build_net(), toys.build_net()
        with manage(net, TIGHT, placement="gpu:0", manager=manager):
            net(X)
            nn.utils.parametrizations.weight_norm(net.singles[2].up)
            for _ in range(2):
                with pytest.raises(UnsafeState, match=r"^model: 'singles.2.up.weight' is gone .* release it before"):
                    net(X)
        nn.utils.parametrizations.weight_norm(plain.singles[2].up)
        assert torch.allclose(net(X), plain(X), atol=1e-6)


@torch.no_grad()
def test_a_block_that_is_swapped_in_the_middle_of_a_pass_is_refused(toys, machine) -> None:
    class Hyper(type(toys.build_net())):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = {name: weight * 2 for name, weight in self.singles[0].named_parameters()}
            return torch.func.functional_call(self.singles[0], given, (x, self.embed(x)))

    with machine(8) as manager, manage(net := Hyper().requires_grad_(False), TIGHT, placement="gpu:0", manager=manager):
        before = bits(net)
        with pytest.raises(
            UnsafeState, match=r"^model: a weight of singles\.0 was replaced in the forward: replace weights before it"
        ):
            net(X)
        assert same(bits(net), before)


def test_gradients_reach_the_weights_of_a_functional_call(toys, machine) -> None:
    net = toys.build_net()
    given = {name: weight.clone().requires_grad_() for name, weight in net.named_parameters()}
    want = torch.autograd.grad(torch.func.functional_call(net, given, (X,)).sum(), list(given.values()))
    with machine(8) as manager, manage(net, placement="gpu:0", manager=manager):
        got = torch.autograd.grad(torch.func.functional_call(net, given, (X,)).sum(), list(given.values()))
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in zip(got, want, strict=True))


@torch.no_grad()
def test_an_ensemble_of_weights_computes_in_a_vmap(toys, machine, way: str) -> None:
    net = toys.build_net()
    several = {name: torch.stack([weight, weight * 2]) for name, weight in net.named_parameters()}
    several |= {name: torch.stack([buffer] * 2) for name, buffer in net.named_buffers()}
    want = torch.func.vmap(lambda given: torch.func.functional_call(net, given, (X,)))(several)
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]):
        got = torch.func.vmap(lambda given: torch.func.functional_call(net, given, (X,)))(several).cpu()
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("state", ["loaded", "never"])
def test_transforms_that_would_own_our_weights_are_refused(toys, machine, state: str) -> None:
    with machine(8) as manager, manage(net := toys.build_net(), TIGHT, placement="gpu:0", manager=manager):
        if state == "loaded":
            net(X)
        for transform in (torch.func.grad, torch.func.jacrev):
            with pytest.raises(UnsafeState, match=r"inside torch\.func\.(grad|jvp): release it first"):
                transform(lambda x: net(x).sum())(X)
        with torch.no_grad():
            got = net(X).cpu()
            assert torch.equal(got, on_device(toys.build_net(), "streamed"))


def assert_not_merged(refusal: UnsafeState) -> None:
    """After a call one weight of a block is at rest, and the others are resident: writes to both are refused."""
    assert "changed both on the device and in RAM" in str(refusal)


NAMES = ["embed.bias", "doubles.0.norm.weight", "doubles.1.gain", "singles.2.up.weight", "singles.2.up.bias"]
STEP = st.tuples(
    st.sampled_from(["call", "assign", "evict", "write", "forward"]),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from([1, 2]), max_size=3),
)


@settings(max_examples=20)
@given(way=st.sampled_from(["resident", "streamed", "split"]), steps=st.lists(STEP, max_size=6))
@example(way="resident", steps=[("call", {"embed.bias": 1}), ("write", {"embed.bias": 1})])
@torch.no_grad()
def test_any_order_of_calls_swaps_and_assignments_is_as_without_us(toys, machine, way: str, steps) -> None:
    others = {seed: bits(toys.build_net(seed=seed)) for seed in (1, 2)}
    net, plain = toys.build_net(), toys.build_net()
    with machine(8, 8) as manager, manage(net, manager=manager, **WAYS[way]) as managed:
        for step, chosen in [*steps, ("forward", {})]:
            weights = {name: others[seed][name].clone() for name, seed in chosen.items()}
            if step == "call":
                try:
                    got = torch.func.functional_call(net, dict(weights), (X,)).cpu()
                except UnsafeState as refusal:
                    assert_not_merged(refusal)
                    return
                assert torch.equal(got, on_device(plain, way, **weights))
            elif step == "evict":
                managed.members[0].managed.unload()
            elif step == "forward":
                try:
                    got = net(X).cpu()
                except UnsafeState as refusal:
                    assert_not_merged(refusal)
                    return
                assert torch.equal(got, on_device(plain, way))
            else:
                for name in (name for name in weights if "gain" not in name):
                    for module in (net, plain):
                        if step == "write":
                            module.get_parameter(name).copy_(weights[name])
                        else:
                            put(module, name, nn.Parameter(weights[name].clone(), requires_grad=False))
    assert same(bits(net), bits(plain))
