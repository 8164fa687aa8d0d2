"""Weights that others put in place of ours: for one call, which gives them back, or for good.

[Note: swaps] `torch.func.functional_call` puts other tensors into the module, calls it and puts ours back; so do
contexts that compute with averaged weights for a while. An assignment puts another tensor there and forgets ours. Code
that will put a tensor back keeps it, so a tensor that only we refer to was replaced for good: the new bytes become the
master's. All else is lent: the module computes with the other tensor itself, moved to where its block computes, as long
as it is there. The master keeps its bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .parameter_slots import ParameterSlot, in_list
from .weight_group import WeightGroup

__all__ = ["Swaps"]


@dataclass(eq=False, slots=True)
class Loan:
    """A place in the module that holds another's tensor, and is not written to by us meanwhile."""

    unit: WeightGroup
    index: int
    owner: tuple[nn.Module, str]
    given: torch.Tensor
    """What they put there."""
    ours: torch.Tensor
    """What they will put back."""
    device: torch.device
    computing: torch.Tensor | None = None
    """That on the device, while a pass is under way."""

    @property
    def entry(self) -> ParameterSlot:
        return self.unit.entries[self.index]


class Swaps:
    """The places in a component's module that hold tensors of others.

    Args:
        units: with the device on which each computes.
    """

    def __init__(self, units: Sequence[tuple[WeightGroup, torch.device]]) -> None:
        self.devices = dict(units)
        self.loans: list[Loan] = []

    def take_back(self) -> list[tuple[WeightGroup, int, torch.Tensor]]:
        """End the loans of places that hold what they were lent for no more.

        Returns the weights that were given back after their unit had been loaded, by place: what was written to them
        since is not on the device.
        """
        returned = []
        for loan in list(self.loans):
            slots, name = loan.entry.slots_of(loan.owner[0]), loan.owner[1]
            held = slots.get(name)
            if held is loan.given or held is loan.computing:
                continue
            if held is not None and held is not loan.ours and self.is_kept_by_others(loan.unit, loan.index, loan.ours):
                loan.given = held  # taken out and lent again, with what they had from us before
                continue
            self.loans.remove(loan)
            loan.unit.own(loan.index, loan.owner)
            if held is loan.ours:
                slots[name] = loan.unit.placed[loan.index]
                if slots[name] is not held:
                    returned.append((loan.unit, loan.index, held))
        return returned

    def lend(self, changed: Sequence[WeightGroup]) -> None:
        """Lend the places where others put their tensors for a while.

        Args:
            changed: the units whose weights the module does not hold everywhere.
        """
        for unit in changed:
            for index, owner, held in list(foreign_tensors(unit)):
                if held is not None and self.is_kept_by_others(unit, index, unit.placed[index]):
                    unit.disown(index, owner)
                    self.loans.append(Loan(unit, index, owner, held, unit.placed[index], self.devices[unit]))

    def begin(self) -> None:
        """A pass begins: what was lent computes on the device of its block. Costs its bytes there."""
        for loan in self.loans:
            if loan.given.device != loan.device:
                loan.computing = loan.given.to(loan.device)
                loan.entry.slots_of(loan.owner[0])[loan.owner[1]] = loan.computing

    def end(self) -> None:
        """The pass is over: the module holds the others' own tensors again, if it still holds what they put there."""
        for loan in self.loans:
            slots = loan.entry.slots_of(loan.owner[0])
            if loan.computing is not None and slots.get(loan.owner[1]) is loan.computing:
                slots[loan.owner[1]] = loan.given
            loan.computing = None

    def is_kept_by_others(self, unit: WeightGroup, index: int, ours: torch.Tensor) -> bool:
        """Whether anyone but us holds what the unit gave the module for a weight."""
        entry = unit.entries[index]
        own: list[Any] = [unit.masters, unit.placed, unit.known[0], unit.known[1][0], *unit.view_cache.values()]
        if unit.copy is not None:
            own += [unit.copy.views, unit.copy.buffers, unit.copy.known[0], unit.copy.known[1][0]]
        lists = {id(tensors): tensors for tensors in own if tensors is not None}.values()  # some are the same
        num_own = sum(tensor is ours for tensors in lists for tensor in tensors)
        num_own += sum(in_list(place)[1] is ours for place in entry.lists)
        num_own += sum(loan.ours is ours for loan in self.loans)
        num_own += sum(entry.slots_of(module).get(name) is ours for module, name in entry.owners)
        alone = object()  # as many references as there are to a variable here
        return sys.getrefcount(ours) - num_own > sys.getrefcount(alone)

    @property
    def names(self) -> frozenset[str]:
        """The weights that are lent."""
        return frozenset(loan.entry.spec.name for loan in self.loans)


def foreign_tensors(unit: WeightGroup) -> Iterator[tuple[int, tuple[nn.Module, str], torch.Tensor | None]]:
    """Yield the places where the module does not hold what the unit gave it, and what it holds."""
    for index, (entry, placed) in enumerate(zip(unit.entries, unit.placed, strict=False)):
        for module, name in entry.owners:
            held = entry.slots_of(module).get(name)
            if held is not placed:
                yield index, (module, name), held
