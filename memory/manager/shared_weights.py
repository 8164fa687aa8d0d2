"""Members that share weights ([Note: sharing] in `weights/sharing.py`): which lends to which, and where both are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from torch import nn

from ..errors import InvalidInput, UnsafeState
from ..options.placement import Placement, SplitRatio
from ..planner.plan import ComponentPlan
from ..runtime.holders import find_holders
from ..runtime.managed_component import ManagedComponent
from ..runtime.weight_places import WeightPlaces
from ..weights.component import Component
from ..weights.sharing import Shared, find_shared, named_tensors
from .member import Member
from .members import Members

__all__ = ["SharedWeights"]


class SharedWeights:
    """What the members share with each other and with newcomers. The caller holds the manager's lock."""

    def __init__(self, members: Members) -> None:
        self.members = members

    def find_near(self, members: Iterable[Member]) -> list[WeightPlaces]:
        """Return the managed components that may share weights with some members, with the members themselves."""
        ids = {id(weight) for member in members for weight in member.managed.places.known_weights()}
        ids |= {id(weight) for member in members for _, weight in named_tensors(member.managed.module)}
        return find_holders(ids)

    def find(self, new: Mapping[str, nn.Module], sharers: Iterable[WeightPlaces]) -> dict[str, Shared]:
        """Return what present and new components share, by id; a present one owns what a new one shares with it.

        Args:
            sharers: those that may share something with a new one, or with one another.
        """
        near = [m for one in sharers if (m := self.members.get(one.owner)) is not None and m.managed.places is one]
        known = sorted((member for member in near if not member.is_hosted), key=lambda member: member.rank)
        same = {
            id(tensor): id(slot.held)
            for member in known
            for group in member.managed.groups
            for tensors in (group.at_rest.tensors, group.placed.tensors)
            for slot, tensor in zip(group.slots, tensors, strict=False)
            if slot.owners
        }
        found = find_shared({m.id: m.managed.module for m in known if m.id not in new} | dict(new), same)
        inside = {id(part): m for m in known for part in m.managed.module.modules() if m.id not in new}
        for name, module in new.items():
            owner = inside.get(id(module))
            if owner is not None:
                raise InvalidInput(f"{name} is managed already, inside {owner.id!r}; release that first")
        return found

    def keep_together(
        self,
        placement: Placement,
        kinds: Mapping[str, str],
        ids: Mapping[str, str],
        shared: Mapping[str, Shared],
    ) -> Placement:
        """Return a placement that puts components placed by ``auto`` beside those with which they share weights.

        Args:
            ids: the ids of the components to be placed, by name.
        """
        named = {component_id: name for name, component_id in ids.items()}

        def home(component_id: str) -> str | None:
            if component_id not in named:
                return self.members[component_id].managed.plan.shares[0].device
            name = named[component_id]
            devices = placement.item_for(name, kinds[name]).devices
            return devices[0].device if devices else None

        items = list(placement.items)
        for name, component_id in ids.items():
            item = placement.item_for(name, kinds[name])
            if item.devices or component_id not in shared:
                continue
            borrowers = [other for other, its in shared.items() if component_id in its.owners]
            homes = [home(other) for other in (*shared[component_id].owners, *borrowers)]
            device = next((device for device in homes if device is not None), None)
            if device is not None:
                items = [other for other in items if other.component != name]
                items.append(replace(item, component=name, devices=(SplitRatio(device=device),), groups=None))
        return Placement(items=tuple(items))

    def refuse_apart(
        self, shared: Mapping[str, Shared], new: Mapping[str, tuple[nn.Module, Component, ComponentPlan]]
    ) -> None:
        """Refuse plans under which shared weights would not be where they are used. Raises `InvalidInput`."""
        modules: dict[str, nn.Module] = {}
        parts: dict[str, tuple[Component, ComponentPlan]] = {}
        for name, common in shared.items():
            if name in new:
                modules[name], parts[name] = new[name][0], new[name][1:]
                continue
            managed = self.members[name].managed
            modules[name], parts[name] = managed.module, (managed.component, managed.plan)
            refuse_use_elsewhere(name, managed, common)
        refuse_apart(modules, parts, shared)

    def refuse_lending(self, members: Collection[Member]) -> None:
        """Refuse to release components while others borrow their weights. Raises `UnsafeState`."""
        for lender in members:
            for other in sorted(self.members.borrowers(lender), key=lambda borrower: borrower.rank):
                if other not in members and self.members.get(lender.id) is lender:
                    raise UnsafeState(f"{other.id} borrows weights of {lender.id}; release that first")

    def take_back(self, member: Member, module: nn.Module) -> None:
        """End what is lent to a borrower's module: it keeps the shared weights as they rest now."""
        for lender in member.lenders:
            if self.members.get(lender.id) is lender:
                lender.managed.places.take_back_from(module)


def refuse_use_elsewhere(name: str, managed: ManagedComponent, common: Shared) -> None:
    """Refuse to lend a weight of a block to a component that uses it outside of that block. Raises `InvalidInput`."""
    for group in managed.groups if common.lent else ():
        if not group.name:
            continue
        block = managed.module.get_submodule(group.name)
        for slot in group.slots:
            if any(block not in above for above in common.lent.get(id(slot.held), ())):
                raise InvalidInput(
                    f"{name} lends {slot.spec.name!r}, which is in its block {group.name}, to a component that "
                    "uses it elsewhere: release it, and manage both in one call"
                )


def refuse_apart(
    modules: Mapping[str, nn.Module],
    parts: Mapping[str, tuple[Component, ComponentPlan]],
    shared: Mapping[str, Shared],
) -> None:
    """Refuse plans under which a shared weight would not be on the device that computes with it.

    Args:
        modules, parts, shared: those of all components that share weights, by id.

    Raises:
        InvalidInput: borrower and owner compute on two devices, or a block that uses such a weight does not
                compute where the weight is.
    """
    for name, common in shared.items():
        component, plan = parts[name]
        for owner in common.owners:
            ours, theirs = plan.shares[0].device, parts[owner][1].shares[0].device
            if ours != theirs:
                raise InvalidInput(
                    f"{name} and {owner} share {common.samples[owner]!r}, which can be on one device, not on {ours} "
                    f"and {theirs}: give both the same placement"
                )
        away = {component.blocks[number].name: share.device for share in plan.shares[1:] for number in share.blocks}
        in_blocks = {tensor.name for block in component.blocks for tensor in block.tensors}
        for path, tensor in named_tensors(modules[name]) if away else ():
            block = next((block for block in away if path.startswith(f"{block}.")), None)
            is_common = id(tensor) in common.borrowed or (id(tensor) in common.lent and path not in in_blocks)
            if block is not None and is_common:
                partners = [owner for owner in (common.borrowed.get(id(tensor)),) if owner]
                partners += [other for other, its in shared.items() if id(tensor) in its.borrowed and other != name]
                raise InvalidInput(
                    f"{name} and {partners[0] if partners else 'another component'} share {path!r}, which is on "
                    f"{plan.shares[0].device}, and block {block} computes on {away[block]}: place {name} on one device"
                )
