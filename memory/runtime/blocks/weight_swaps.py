"""Tensors that other code puts into the module in place of its weights, for a while or for good.

[Note: swaps] `torch.func.functional_call` puts other tensors into the module, calls it and puts ours back; so do
contexts that compute with averaged weights for a while. An assignment puts another tensor there for good. Code that
will put our tensor back keeps a reference to it. So if only the engine still references our tensor, it was replaced for
good, and the new bytes are written to the weight store. Otherwise the place is lent: as long as the other tensor is
there, the module computes with it, moved to the block's device, and the weight store keeps its bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..tensors.absent_weight import AbsentWeight
from ..tensors.parameter_slots import ParameterSlot, in_list
from .weight_group import WeightGroup

__all__ = ["Swaps"]


@dataclass(eq=False, slots=True)
class Loan:
    """A place in the module that holds a tensor of other code. The engine puts no weight there meanwhile."""

    group: WeightGroup
    index: int
    owner: tuple[nn.Module, str]
    given: torch.Tensor
    """The tensor that other code put there."""
    ours: torch.Tensor
    """Our tensor, which that code will put back."""
    device: torch.device
    computing: torch.Tensor | None = None
    """The copy of ``given`` on the device, while a pass is under way."""

    @property
    def slot(self) -> ParameterSlot:
        return self.group.slots[self.index]

    @property
    def table(self) -> dict[str, torch.Tensor]:
        """The module's dict that has the place."""
        return self.slot.tensors_of(self.owner[0])

    def take_other(self, given: torch.Tensor) -> None:
        """Note that other code put yet another tensor there, and still keeps ours."""
        self.given = given

    def replace_evicted(self, gone: Mapping[int, torch.Tensor]) -> None:
        """As `Swaps.replace_evicted`."""
        self.given, self.ours = gone.get(id(self.given), self.given), gone.get(id(self.ours), self.ours)

    def begin(self) -> None:
        """Put a copy of the other code's tensor there if that is on another device than its block."""
        if self.given.device != self.device:
            given, device = self.given, self.device
            self.computing = given.copy_on(device) if isinstance(given, AbsentWeight) else given.to(device)
            self.table[self.owner[1]] = self.computing

    def end(self) -> None:
        """Put the other code's own tensor back, if its copy is still there."""
        if self.computing is not None and self.table.get(self.owner[1]) is self.computing:
            self.table[self.owner[1]] = self.given
        self.computing = None


class Swaps:
    """The places in a component's module that hold tensors of other code.

    Args:
        groups: each group with the device on which it computes.
    """

    def __init__(self, groups: Iterable[tuple[WeightGroup, torch.device]] = ()) -> None:
        self.devices = dict(groups)
        self.loans: list[Loan] = []

    def watch(self, groups: Iterable[tuple[WeightGroup, torch.device]]) -> None:
        """Tell apart the weights of these groups from now on; the loans of others are over."""
        self.devices = dict(groups)
        self.loans = [loan for loan in self.loans if loan.group in self.devices]

    def take_back(self) -> list[tuple[WeightGroup, int, torch.Tensor]]:
        """End the loans of places that no longer hold the other code's tensor.

        Returns group, index and tensor of each weight that was put back after its group had been loaded: writes to the
        tensor since then are not on the device.
        """
        returned = []
        for loan in list(self.loans):
            places, name = loan.table, loan.owner[1]
            held = places.get(name)
            if held is loan.given or held is loan.computing:
                continue
            if held is not None and held is not loan.ours and self.is_kept_by_others(loan.group, loan.index, loan.ours):
                loan.take_other(held)
                continue
            self.loans.remove(loan)
            loan.group.placed.own(loan.index, loan.owner)
            if held is loan.ours:
                places[name] = loan.group.placed.tensors[loan.index]
                if places[name] is not held:
                    returned.append((loan.group, loan.index, held))
        return returned

    def lend(self, changed: Sequence[WeightGroup]) -> None:
        """Begin loans of the places where other code put its tensors for a while.

        Args:
            changed: the groups of which the module holds another tensor in some place.
        """
        for group in changed:
            for index, owner, held in list(foreign_tensors(group)):
                if held is not None and self.is_kept_by_others(group, index, group.placed.tensors[index]):
                    group.placed.disown(index, owner)
                    self.loans.append(Loan(group, index, owner, held, group.placed.tensors[index], self.devices[group]))

    def replace_evicted(self, gone: Mapping[int, torch.Tensor]) -> None:
        """Lend the weights at rest in place of views into copies that are gone, by the ids of these."""
        for loan in self.loans:
            loan.replace_evicted(gone)

    def begin(self) -> None:
        """At the begin of a pass: move the lent tensors to the devices of their blocks. Costs their bytes there."""
        for loan in self.loans:
            loan.begin()

    def end(self) -> None:
        """At the end of a pass: put the other code's own tensors back, in places that still hold the moved ones."""
        for loan in self.loans:
            loan.end()

    def is_kept_by_others(self, group: WeightGroup, index: int, ours: torch.Tensor) -> bool:
        """Whether code other than the engine references the tensor that the group gave the module for a weight."""
        slot = group.slots[index]
        num_own = group.count_references(ours)
        num_own += sum(in_list(place)[1] is ours for place in slot.lists)
        num_own += sum(loan.ours is ours for loan in self.loans)
        num_own += sum(slot.tensors_of(module).get(name) is ours for module, name in slot.owners)
        alone = object()  # has exactly the references of a local variable
        return sys.getrefcount(ours) - num_own > sys.getrefcount(alone)

    @property
    def names(self) -> frozenset[str]:
        """The names of the weights in whose places other tensors are."""
        return frozenset(loan.slot.spec.name for loan in self.loans)


def foreign_tensors(group: WeightGroup) -> Iterator[tuple[int, tuple[nn.Module, str], torch.Tensor | None]]:
    """Yield index, owner and held tensor of each place where the module does not hold the group's tensor."""
    for index, (slot, placed) in enumerate(zip(group.slots, group.placed.tensors, strict=False)):
        for module, name in slot.owners:
            held = slot.tensors_of(module).get(name)
            if held is not placed:
                yield index, (module, name), held
