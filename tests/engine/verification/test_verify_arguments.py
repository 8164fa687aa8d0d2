"""`verify` of calls whose arguments are containers: they move on both sides, and what is done to them comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.runtime.tensors.nested_tensors import find_tensors


@dataclass
class Condition:
    shift: torch.Tensor
    extra: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FrozenCondition:
    shift: torch.Tensor
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


class Busy(nn.Module):
    """Adds what an argument holds, and does something to it."""

    def __init__(self, deed: Callable[[object, torch.Tensor], None] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.deed = deed

    def forward(self, x: torch.Tensor, given: object, *, fails: bool = False) -> object:
        for tensor in find_tensors(given):
            x = x + tensor
        for layer in self.layers:
            x = layer(x)
        if self.deed is not None:
            self.deed(given, x)
        if fails:
            raise ValueError("on purpose")
        return {"x": x, "given": given}


def replace_in_dataclass(given: Condition, x: torch.Tensor) -> None:
    given.shift = x * 2
    given.extra.append(x)


def write_through(given: list[torch.Tensor], x: torch.Tensor) -> None:
    given[0].mul_(2)
    given[1].add_(x)


GIVEN = {
    "a dataclass": (lambda: Condition(torch.randn(2, 16), [torch.randn(16)]), None),
    "a frozen one": (lambda: FrozenCondition(torch.randn(2, 16), {"a": torch.randn(16)}), None),
    "a namespace": (lambda: SimpleNamespace(shift=torch.randn(2, 16)), None),
    "a deque": (lambda: deque([torch.randn(16)]), lambda given, x: given.append(x)),
    "a dataclass that is written": (lambda: Condition(torch.randn(16)), replace_in_dataclass),
    "a list that is emptied": (lambda: [torch.randn(16), torch.randn(16)], lambda given, x: given.clear()),
    "a list that is filled": (lambda: [torch.randn(16)], lambda given, x: given.extend([x, x + 1])),
    "an empty list that is filled": (list, lambda given, x: given.append(x)),
    "a list of another order": (lambda: [torch.randn(16), torch.randn(16)], lambda given, x: given.reverse()),
    "a dict that is emptied": (lambda: {"a": torch.randn(16)}, lambda given, x: given.clear()),
    "a dict that is filled": (lambda: {"a": torch.randn(16)}, lambda given, x: given.update(b=x)),
    "a dict in a list": (lambda: [{"a": torch.randn(16)}], lambda given, x: given[0].pop("a")),
    "tensors that are written": (lambda: [torch.randn(16), torch.randn(2, 16)], write_through),
    "views of one memory": (lambda: list(torch.randn(3, 2, 16)), write_through),
    "the same tensor twice": (lambda: [torch.zeros(2, 16).add_(1)] * 2, write_through),
}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("profile", ["auto", "gpu:0=0.003MiB"])
@pytest.mark.parametrize("what", GIVEN)
def test_arguments_in_containers_are_moved_and_come_back_on_both_sides(
    what: str, profile: str, fails: bool, machine
) -> None:
    make, deed = GIVEN[what]
    with machine(8) as manager:
        managed = manage(Busy(deed), profile, manager=manager)
        if fails:
            with pytest.raises(ValueError, match="on purpose"):
                managed.verify(torch.randn(2, 16), make(), fails=True)
        else:
            found = managed.verify(torch.randn(2, 16), make())
            assert found.is_equal, found.text()
        managed.manager.ledger.check()
        assert not managed.members[0].leases
        managed.release()


def test_a_list_that_the_engine_does_not_empty_is_found(machine) -> None:
    with machine(8) as manager:
        managed = manage(Busy(lambda given, x: given.clear()), manager=manager)
        hops = managed.members[0].managed.forwards.hops
        visit = hops.visit

        def lose(value, device, **named):
            made = visit(value, device, **named)
            made.lent.come_back = lambda bring: None
            return made

        hops.visit = lose
        found = managed.verify(torch.randn(2, 16), [torch.randn(16)])
        del hops.visit
        assert not found.is_equal and "what the call wrote into its arguments" in found.text()
        managed.release()
