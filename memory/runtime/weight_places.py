"""The places that hold a component's weights: in its own module tree, and in the modules of those that borrow them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import nn

from .blocks.added_layers import Structure
from .blocks.read_on_use import ReadOnUse
from .blocks.weight_group import WeightGroup
from .blocks.weight_swaps import Swaps
from .devices.device_share import DeviceShare
from .forwards.forward_pass import ComponentManager, NoManager
from .tensors.absent_weight import AbsentWeight
from .tensors.encoded_weight import EncodedWeight
from .tensors.parameter_slots import ParameterSlot

__all__ = ["WeightPlaces"]


class WeightPlaces:
    """Where in module trees the weights of one component are, and which of them the component is to update.

    Args:
        manager: tells which components own weights of the module ([Note: sharing] in `weights/sharing.py`).
        swaps: the places that hold tensors of others for a while.
    """

    def __init__(
        self, owner: str, module: nn.Module, shares: Sequence[DeviceShare], swaps: Swaps, manager: ComponentManager
    ) -> None:
        self.owner = owner
        self.module = module
        self.shares = shares
        self.swaps = swaps
        self.manager = manager
        self.tree: Structure | None = None
        """The module tree as it was when `has_any` looked last."""

    @property
    def groups(self) -> list[WeightGroup]:
        return [group for share in self.shares for group in share.groups]

    def end(self) -> None:
        """Forget what keeps the module alive: the component is no longer managed."""
        self.tree, self.manager = None, NoManager(self.manager.lock)

    # -- what is where

    def has_any(self, ids: AbstractSet[int]) -> bool:
        """Whether any of these objects is in its module now: modules in the tree, and weights there or at rest."""
        tree = self.tree
        if tree is None or tree.has_changed():
            self.tree = tree = Structure(self.module)
        return not (
            ids.isdisjoint(map(id, tree.tensors()))
            and ids.isdisjoint(map(id, tree.modules))
            and all(
                ids.isdisjoint(map(id, tensors))
                for group in self.groups
                for tensors in (group.at_rest.tensors, group.placed.tensors)
            )
        )

    def known_weights(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that its module holds, or may hold, at rest."""
        for group in self.groups:
            yield from (tensor for _, tensor in group.known_tensors())

    # -- what several components have in common ([Note: sharing] in `weights/sharing.py`)

    def lent_modules(self) -> set[nn.Module]:
        """Return the parts of the module that other components own: the owners' hooks see their calls."""
        return {part for lender in self.manager.lenders() for part in lender.module.modules()}

    def lent_places(self) -> dict[tuple[nn.Module, str], ParameterSlot]:
        """Return the places in the module that hold other components' weights, or temporary replacements of ours."""
        return self.borrowed() | {loan.owner: loan.slot for loan in self.swaps.loans}

    def borrowed(self) -> dict[tuple[nn.Module, str], ParameterSlot]:
        """Return the places of weights that other components own."""
        lenders = self.manager.lenders()
        return {place: e for lender in lenders for group in lender.groups for e in group.slots for place in e.owners}

    def lend_to(self, module: nn.Module) -> None:
        """Update our weights, from now on, in another component's module, too, where it holds them. Idempotent."""
        own = set(self.module.modules())
        self.own([part for part in module.modules() if part not in own])

    def take_back_from(self, module: nn.Module) -> None:
        """Stop updating another component's module: it keeps our weights at rest, as the same objects. Idempotent."""
        own, others = set(self.module.modules()), set(module.modules())
        for group in self.groups:
            for index, slot in enumerate(group.slots):
                for part, name in [place for place in slot.owners if place[0] in others and place[0] not in own]:
                    group.placed.disown(index, (part, name))
                    if group.at_rest.tensors:
                        slot.tensors_of(part)[name] = group.at_rest.tensors[index]

    # -- weights that other code moved within the module

    def resident_views(self) -> dict[int, tuple[torch.Tensor, WeightGroup, int]]:
        """Return the views into resident copies that the module may hold, with group and index, by id."""
        groups = [group for group in self.groups if group.copy is not None]
        return {id(view): (view, group, index) for group in groups for index, view in group.views_on_device()}

    def replace_evicted(self, views: dict[int, tuple[torch.Tensor, WeightGroup, int]]) -> None:
        """Put weights at rest in place of views into evicted copies, which would keep the memory of these.

        A group has done this at its own places; this is for places to which other code moved a view.
        """
        gone = {
            number: group.at_rest.tensors[index]
            for number, (_, group, index) in views.items()
            if group.copy is None and index < len(group.at_rest.tensors)
        }
        for part in self.module.modules() if gone else ():
            places: dict[str, torch.Tensor | None]
            for places in (part._parameters, part._buffers):  # type: ignore[assignment]
                for name, tensor in places.items():
                    if id(tensor) in gone:
                        places[name] = gone[id(tensor)]
        self.swaps.replace_evicted(gone)

    def own(self, parts: Iterable[nn.Module]) -> None:
        """Update our weights, from now on, at all places of these modules that hold one of them, and nowhere else."""
        known = self.find_known()
        ours = {id(tensor) for group in self.groups for _, tensor in group.own_tensors()}
        slots = {id(slot): (group, index) for group in self.groups for index, slot in enumerate(group.slots)}
        homes = {owner: (group, index) for group, index in slots.values() for owner in group.slots[index].owners}
        lent = {loan.owner for loan in self.swaps.loans}
        for part in parts:
            for is_buffer, places in ((False, part._parameters), (True, part._buffers)):
                for name, tensor in list(places.items()):
                    found = known.get(id(tensor))
                    if isinstance(tensor, EncodedWeight) and found is None:
                        found = slots.get(id(tensor.encoded.slot))
                    elif isinstance(tensor, AbsentWeight) and isinstance(tensor.reader, ReadOnUse) and found is None:
                        found = None if tensor.is_data else slots.get(id(tensor.reader.slot))
                    home = homes.get((part, name))
                    if found is None or found == home or (part, name) in lent:
                        continue
                    group, index = found
                    if group.slots[index].is_buffer != is_buffer:
                        continue
                    if home is not None and is_given_anew(group.slots[index], ours):
                        continue  # its own place has another value: here it is a value like any other
                    if home is not None:  # other code put one of our weights in place of another
                        home[0].placed.disown(home[1], (part, name))
                    group.placed.own(index, (part, name))
                    if group.placed.tensors:
                        places[name] = group.placed.tensors[index]  # type: ignore[assignment]

    def find_known(self) -> dict[int, tuple[WeightGroup, int]]:
        """Return which weight each tensor is that the module may hold for one, by its id."""
        known: dict[int, tuple[WeightGroup, int]] = {}
        for group in self.groups:
            known.update((id(tensor), (group, index)) for index, tensor in group.own_tensors())
        for group in self.groups:  # objects that came another way, where they are no other weight's
            held = [(slot.held, index) for index, slot in enumerate(group.slots) if slot.owners]
            for tensor, index in held:
                known.setdefault(id(tensor), (group, index))
        return known

    def follow_renamed(self) -> list[str]:
        """Update weights at the places to which other code moved them within the module, and not at the old ones.

        ``prune`` and ``spectral_norm`` of `torch.nn.utils` give a weight another name. Returns the weights that are not
        where they came under management.
        """
        gone = []
        for group in self.groups:
            for index, slot in enumerate(group.slots):
                for module, name in list(slot.owners):
                    if slot.tensors_of(module).get(name) is None:
                        group.placed.disown(index, (module, name))
                        gone += [] if slot.is_buffer else [slot.spec.name]
        lent = self.lent_modules()
        self.own([part for part in self.module.modules() if part not in lent])
        return gone

    def forget_removed(self, modules: Collection[nn.Module], own: Collection[int]) -> list[str]:
        """Forget the places from which weights were removed; returns the weights that the module still needs.

        It needs no weights of modules that were removed, nor what was removed from a dict of parameters. Those that
        came under management with the module stay in its block's memory until the next `reprofile()`.

        Args:
            modules: those that are in the tree now.
            own: the ids of the groups that came under management with the module.
        """
        gone = []
        for group in self.groups:
            for slot in group.slots:
                if not slot.is_buffer and any(module._parameters.get(name) is None for module, name in slot.owners):
                    lost = [place[0] for place in slot.owners if place[0]._parameters.get(place[1]) is None]
                    is_missed = any(part in modules and not isinstance(part, nn.ParameterDict) for part in lost)
                    if id(group) in own and is_missed:
                        gone.append(slot.spec.name)
                        continue
                    slot.set_owners(place for place in slot.owners if place[0] not in lost)
        return gone


def is_given_anew(slot: ParameterSlot, ours: Collection[int]) -> bool:
    """Whether other code put a tensor of its own in a weight's place; ``ours`` are the ids of what groups gave."""
    held = [slot.tensors_of(module).get(name) for module, name in slot.owners]
    return bool(ours) and any(tensor is not None and id(tensor) not in ours for tensor in held)
