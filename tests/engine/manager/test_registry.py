"""What joins costs the same beside many others, and finds each of them that has weights of it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import UnsafeState
from highwater.memory.runtime.holders import attached, find_sharers

X = torch.ones(1, 64)


def build_stack() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(3)]).requires_grad_(False)


def count_calls(call: Callable[[], object]) -> int:
    """Return how many Python functions a call enters."""
    num_calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return num_calls


@torch.no_grad()
def test_joining_takes_no_more_calls_beside_many_others(machine) -> None:
    with machine(64) as manager:
        handles = []

        def join(number: int) -> int:
            module = build_stack()
            return count_calls(
                lambda: handles.append(manage({f"c{number}": module}, manager=manager, placement="gpu:0"))
            )

        counts = [join(number) for number in range(60)]
        assert counts[-1] <= counts[5] * 1.02 + 20


@torch.no_grad()
def test_a_forward_takes_no_more_calls_beside_many_others(machine) -> None:
    with machine(64) as manager:
        first, others = build_stack(), [build_stack() for _ in range(40)]
        manage({"first": first}, manager=manager, placement="gpu:0")
        for _ in range(4):
            first(X)
        alone = count_calls(lambda: first(X))
        for number, other in enumerate(others):
            manage({f"c{number}": other}, manager=manager, placement="gpu:0")
            other(X)
        for _ in range(4):
            first(X)
        assert count_calls(lambda: first(X)) <= alone


def holds_weights_of(managed: object, module: nn.Module) -> bool:
    """Whether a managed component has weights of a module, by looking at all of them."""
    theirs = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    return any(id(weight) in theirs for weight in managed.known_weights())


FORMS = st.sampled_from(
    [
        {"placement": "gpu:0"},
        {"placement": "gpu:0", "profile": "0.05MiB"},
        {"placement": "gpu:0", "precision": "fp8 scaled"},
        {"placement": "cpu"},
    ]
)
TIES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 5)), max_size=3)


@settings(max_examples=40)
@given(forms=st.lists(FORMS, min_size=3, max_size=3), computed=st.lists(st.booleans(), min_size=3, max_size=3),
       ties=TIES, early=TIES, kept=st.booleans())  # fmt: skip
@torch.no_grad()
def test_each_component_that_has_weights_of_a_new_module_is_found(
    machine, forms: list[dict], computed: list[bool], ties: list, early: list, kept: bool
) -> None:
    """Tied before the others came under management, or since, while they are at rest or on a device."""
    with machine(8) as manager:
        stacks, new = [build_stack() for _ in forms], build_stack()
        linears = [layer for layer in new.modules() if isinstance(layer, nn.Linear)]

        def tie(others: list[tuple[int, int, int]]) -> None:
            for stack, theirs, ours in others:
                weights = [layer for layer in stacks[stack].modules() if isinstance(layer, nn.Linear)]
                linears[ours].weight = weights[theirs].weight

        tie(early)
        for number, (stack, form) in enumerate(zip(stacks, forms, strict=True)):
            manage({f"c{number}": stack}, manager=manager, **form)
            if computed[number]:
                stack(X)
        tie(ties)
        others = list(new.parameters()) if kept else []  # a list of weights is a holder as well
        found = {managed.owner for managed in find_sharers([new])}
        assert found == {managed.owner for managed in attached if holds_weights_of(managed, new)}
        assert found >= {f"c{stack}" for stack in {ours: stack for stack, _, ours in ties}.values()}
        del others


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = build_stack()
        self.extra: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(x)
        return self.extra(x) if self.extra is not None else x


@torch.no_grad()
@pytest.mark.parametrize("order", ["hung in, then managed", "managed, then hung in", "tied"])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_layers_that_another_component_manages_are_refused(machine, order: str, is_loaded: bool) -> None:
    """Both would move them; refused as they would join, until the other one is released."""
    host, layers = Host(), build_stack()
    with machine(8) as manager:
        manage({"host": host}, manager=manager, placement="gpu:0")
        want = host(X).cpu()
        if order == "hung in, then managed":
            host.extra = layers
        other = manage({"layers": layers}, manager=manager, placement="gpu:0")
        if is_loaded:
            layers(X)
        if order == "managed, then hung in":
            host.extra = layers
        elif order == "tied":
            host.extra = nn.Sequential(nn.Linear(64, 64, bias=False))
            host.extra[0].weight = layers[0][0].weight
        with pytest.raises(UnsafeState, match=r"host: 'extra.*weight' was added, and 'layers' manages it: release"):
            host(X)
        manager.ledger.check()
        other.release()
        got, tail = host(X).cpu(), host.extra
        host.extra = None
        assert torch.equal(host(X).cpu(), want) and torch.equal(got, tail(want))
