"""Who is under management: joins with all its parts or not at all, gets another profile in place, and leaves."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn

from ..errors import InvalidInput, UnsafeState, allowed_values, quoted
from ..options.placement import Placement, PlacementItem, SplitRatio
from ..options.precision import Precision
from ..options.profile import OffloadProfile
from ..planner.plan import ComponentPlan, Plan
from ..runtime.managed_component import ManagedComponent, Phase, find_holders, find_sharers
from ..runtime.packing import Ending
from ..weights.component import Component, guess_kind
from ..weights.sharing import NOTHING_SHARED, Shared, find_shared, named_tensors
from ..weights.source import WeightsSource
from .admission import Admission
from .leases import Leases, MemberLeases
from .member import Member, refuse_apart, refuse_odd, refuse_shared_split, refuse_unsuitable
from .module_plans import Draft, bytes_in_ram, plan_modules

__all__ = ["Registry"]


class Registry:
    """Adds members and takes them out again. The caller holds the manager's lock."""

    def __init__(self, admission: Admission, leases: Leases) -> None:
        self.admission = admission
        self.leases = leases
        self.members = admission.members
        self.ledger = admission.ledger
        self.event_log = admission.event_log
        self.by_module: dict[int, Member] = {}
        """The members that no host manages, by the ids of their modules."""
        self.groups: defaultdict[str, set[str]] = defaultdict(set)
        """The ids of members by what they have before a slash."""
        self.ranks = itertools.count()
        self.moved_by_released = 0
        """Bytes of weights that those who left had copied to devices."""

    def add(
        self,
        modules: dict[str, nn.Module],
        *,
        placement: Placement,
        profile: OffloadProfile,
        precision: Precision | None,
        name: str | None,
        node_id: str | None,
        kinds: Mapping[str, str] | None = None,
        sources: Mapping[str, WeightsSource] | None = None,
        patterns: Mapping[str, str] | None = None,
        is_hosted: bool = False,
        draft: Draft | None = None,
    ) -> tuple[list[Member], Plan]:
        """Take modules under management: plan, pack in host memory, hook. All of them or none.

        Args:
            kinds: component kinds by name, where they are known; names suggest the others.
            sources: the files of components by name: those may rest on disk.
            patterns: what a block is, by component (`find_blocks`), where structure does not tell.
            is_hosted: a host decides when they come (`load`) and go (`unload`).
            draft: what was planned of them before, with the same choices.
        """
        refuse_unknown("files of", sources or {}, modules)
        refuse_unknown("blocks of", patterns or {}, modules)
        for component_name, module in modules.items():
            refuse_odd(component_name, module)
        kinds = {component: (kinds or {}).get(component) or guess_kind(component) for component in modules}
        choices = {
            component: choices_of(placement.item_for(component, kind), profile, precision)
            for component, kind in kinds.items()
        }
        found = {} if is_hosted else self.find_managed(modules, choices)
        new = {component: module for component, module in modules.items() if component not in found}
        prefix = f"{self.free_name(name)}/" if name else ""
        ids = {component: self.free_name(prefix + component) for component in new}
        # The diffusion model comes first, so that it owns what it shares with its guides.
        ranked = sorted(new, key=lambda component: kinds[component] != "diffusion")
        sharers = [] if is_hosted else find_sharers(new.values())
        shared = self.find_shared({ids[component]: new[component] for component in ranked}, sharers)
        common = {component: shared[ids[component]] for component in new if ids[component] in shared}
        planned = plan_modules(
            new,
            self.admission.machine(None, freed_bytes=bytes_in_ram(new.values()), is_hosted=is_hosted),
            placement=self.keep_together(placement, kinds, ids, shared),
            profile=profile,
            precision=precision,
            kinds=kinds,
            sources=sources or {},
            patterns=patterns,
            shared=common,
            draft=draft,
        )
        components, plan = planned.components, planned.plan
        self.refuse_apart(shared, {ids[part.name]: (new[part.name], part, plan[part.name]) for part in components})
        workflow_id = self.event_log.node.workflow_id if self.event_log.node else None
        members: dict[str, Member] = {}
        for component in ranked:
            member = Member(ids[component], component, node_id, workflow_id, profile)
            member.is_hosted = is_hosted
            member.patterns = patterns
            member.rank = next(self.ranks)
            member.choices = choices[component]
            by_id = self.members | {other.id: other for other in members.values()}
            member.borrow_from(by_id[owner] for owner in common.get(component, NOTHING_SHARED).owners)
            for other in members.values():
                member.come_with(other)
            members[component] = member
        described = {component.name: component for component in components}
        self.join(
            [(members[name], new[name], described[name], plan[name], (sources or {}).get(name)) for name in ranked],
            sharers,
        )
        for member in found.values():
            member.num_holders += 1
        self.admission.epoch += 1
        everyone = {**found, **members}
        plans = [found[c].managed.plan if c in found else plan[c] for c in modules]
        return [everyone[component] for component in modules], Plan(components=tuple(plans), profile=profile)

    def join(
        self,
        newcomers: Sequence[tuple[Member, nn.Module, Component, ComponentPlan, WeightsSource | None]],
        sharers: Sequence[ManagedComponent],
    ) -> None:
        """Prepare and attach new components, lenders before their borrowers: all of them or none.

        Args:
            sharers: what is managed already and may have weights of theirs (`find_sharers`).
        """
        near = list(sharers)
        prepared: list[tuple[Member, nn.Module]] = []
        try:
            for member, module, component, plan, source in newcomers:
                self.prepare(member, module, component, plan, source, near)
                prepared.append((member, module))
            for member, _ in prepared:
                self.attach(member, near)
                near.append(member.managed)
        except BaseException:
            for member, module in reversed(prepared):
                self.detach(member, Ending.TAKEN_BACK)
                self.take_back(member, module)
            raise

    # -- weights that several components share ([Note: sharing] in `weights/sharing.py`)

    def find_managed(
        self, modules: Mapping[str, nn.Module], choices: Mapping[str, tuple[object, ...]]
    ) -> dict[str, Member]:
        """Return the members whose modules are among these, by the names given here.

        Raises:
            InvalidInput: other choices were made for one of them.
        """
        here = ((name, self.by_module.get(id(module))) for name, module in modules.items())
        found = {name: member for name, member in here if member is not None}
        for name, member in found.items():
            if member.choices != choices[name]:
                raise InvalidInput(
                    f"{name} is managed already, with other choices, as {member.id!r}: choose the same, "
                    "reprofile() the first, or release that"
                )
        return found

    def find_shared(self, new: Mapping[str, nn.Module], sharers: Iterable[ManagedComponent]) -> dict[str, Shared]:
        """Return what present and new components share, by id; a present one owns what a new one shares with it.

        Args:
            sharers: those that may share something with a new one, or with one another.
        """
        near = [m for one in sharers if (m := self.members.get(one.owner)) is not None and m.managed is one]
        known = sorted((member for member in near if not member.is_hosted), key=lambda member: member.rank)
        same = {
            id(tensor): id(slot.held)
            for member in known
            for group in member.managed.groups
            for tensors in (group.resting, group.placed)
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
                items.append(PlacementItem(component=name, devices=(SplitRatio(device=device),), tier=item.tier))
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

    def take_back(self, member: Member, module: nn.Module) -> None:
        """Stop updating a borrower's module: it keeps the shared weights at rest."""
        for lender in member.lenders:
            if self.members.get(lender.id) is lender:
                lender.managed.take_back_from(module)

    def refuse_lending(self, members: Collection[Member]) -> None:
        """Refuse to release components while others borrow their weights. Raises `UnsafeState`."""
        for lender in members:
            for other in sorted(self.admission.borrowers(lender), key=lambda borrower: borrower.rank):
                if other not in members and self.members.get(lender.id) is lender:
                    raise UnsafeState(f"{other.id} borrows weights of {lender.id}; release that first")

    def replace(
        self,
        members: Sequence[Member],
        *,
        placement: Placement,
        profile: OffloadProfile,
        precision: Precision | None,
    ) -> Plan:
        """Give components another profile, placement or precision, where they are; on failure they have the old ones.

        They leave their devices and come back as they are used. Blocks whose precision and tier stay are not packed
        anew. What rested in eight bits and is to no more was rounded: the bits that it lost stay lost.
        """
        self.refuse_unready(members)
        members = sorted(members, key=lambda member: member.rank)
        ids = {member.name: member.id for member in members}
        modules = {member.name: member.managed.module for member in members}
        hosted = any(member.is_hosted for member in members)
        sharers = self.find_near(members)
        shared = {} if hosted else self.find_shared({}, sharers)
        sources = {m.name: m.managed.source for m in members if m.managed.source is not None}
        kinds = {member.name: member.managed.component.kind for member in members}
        asked, placement = placement, self.keep_together(placement, kinds, ids, shared)
        locked = sum(member.managed.packing.host_bytes["pinned"] for member in members)
        planned = plan_modules(
            modules,
            self.admission.machine(None, freed_bytes=locked),
            placement=placement,
            profile=profile,
            precision=precision,
            kinds=kinds,
            sources=sources,
            patterns=next((member.patterns for member in members), None),
            in_file=[member.name for member in members if member.managed.plan.tier == "disk"],
            shared={member.name: shared[member.id] for member in members if member.id in shared},
        )
        components, plan = planned.components, planned.plan
        if shared:
            self.refuse_apart(
                shared, {ids[part.name]: (modules[part.name], part, plan[part.name]) for part in components}
            )
        before = [(member, member.managed, member.profile) for member in members]
        try:
            for member, component in zip(members, components, strict=True):
                self.detach(member, Ending.HANDED_OVER)
                self.give(member, profile)
                item = asked.item_for(member.name, kinds[member.name])
                member.choices = choices_of(item, profile, precision)
                new = component, plan[component.name], sources.get(component.name)
                self.prepare(member, modules[member.name], *new, self.find_near([member]), after=member.managed)
                self.attach(member, self.find_near([member]))
        except BaseException:
            for member, managed, old_profile in before:
                changed = member.managed is not managed or member.id not in self.members
                if changed or managed.phase is Phase.ENDING:
                    self.put_back(member, managed, old_profile)
            raise
        self.admission.epoch += 1
        return plan

    def refuse_unready(self, members: Sequence[Member]) -> None:
        """Refuse to replace what was released or computes now. Raises `UnsafeState`."""
        gone = [member.id for member in members if self.members.get(member.id) is not member]
        if gone:
            raise UnsafeState(f"{', '.join(gone)}: was released; manage it again")
        busy = [member.id for member in members if member.leases]
        if busy:
            raise UnsafeState(f"{', '.join(busy)}: computes now; profiles change between passes")

    def put_back(self, member: Member, managed: ManagedComponent, profile: OffloadProfile) -> None:
        """Give a component the form again that it had in an earlier managed component; released if that fails."""
        self.detach(member, Ending.HANDED_OVER)
        self.give(member, profile)
        try:
            former = managed.component, managed.plan, managed.source
            self.prepare(member, managed.module, *former, self.find_near([member]), after=member.managed)
            self.attach(member, self.find_near([member]), tells=False)  # who cancelled would cancel this, too
        except BaseException:
            managed.hooks.remove()
            managed.packing.unpack_left()
            raise

    def give(self, member: Member, profile: OffloadProfile) -> None:
        member.profile, member.block_seconds, member.planned_in_epoch = profile, None, -1
        member.taken_seconds = {}

    def prepare(
        self,
        member: Member,
        module: nn.Module,
        component: Component,
        plan: ComponentPlan,
        source: WeightsSource | None,
        sharers: Iterable[ManagedComponent],
        *,
        after: ManagedComponent | None = None,
    ) -> None:
        """Build a component's managed component, in place of another, and refuse what cannot be attached; changes
        nothing."""
        refuse_shared_split(module, component, plan)
        managed = ManagedComponent(
            member.id,
            module,
            component,
            plan,
            self.admission.devices,
            self.ledger,
            leases=MemberLeases(self.leases, member),
            guards_state=not member.is_hosted,
            source=source,
            compiles=member.profile.compile,
            after=after,
        )
        try:
            for lender in member.lenders:
                lender.managed.lend_to(module)
            for other in self.admission.borrowers(member):
                managed.lend_to(other.managed.module)
            if not member.is_hosted:
                self.refuse_unsuitable(member, module, component, source, sharers)
        except BaseException:
            self.take_back(member, module)
            raise
        member.managed = managed
        managed.packing.measure()

    def find_near(self, members: Iterable[Member]) -> list[ManagedComponent]:
        """Return what may share weights with components, themselves included while they are managed."""
        ids = {id(weight) for member in members for weight in member.managed.known_weights()}
        ids |= {id(weight) for member in members for _, weight in named_tensors(member.managed.module)}
        return find_holders(ids)

    def refuse_unsuitable(
        self,
        member: Member,
        module: nn.Module,
        component: Component,
        source: WeightsSource | None,
        sharers: Iterable[ManagedComponent],
    ) -> None:
        groups = [group for lender in member.lenders for group in lender.managed.groups]
        lent = {place for group in groups for slot in group.slots for place in slot.owners}
        borrowers = self.admission.borrowers(member)
        refuse_unsuitable(module, component, sharers, self.members, source, lent=lent, borrowers=borrowers)

    def attach(self, member: Member, sharers: Iterable[ManagedComponent], *, tells: bool = True) -> None:
        """Pack and hook a component that was prepared; ``tells`` those who watch loadings."""
        managed, plan = member.managed, member.managed.plan
        if not member.is_hosted:  # once more: parts that were prepared together may share weights
            self.refuse_unsuitable(member, managed.module, managed.component, managed.source, sharers)
        try:
            managed.attach(self.leases.show_progress(member, managed.packing.to_pack()) if tells else None)
            self.enter_member(member)
        except BaseException:
            if member.id not in self.members:
                managed.detach(Ending.TAKEN_BACK)
            raise
        for reason in plan.reasons:
            self.event_log.note("plan", member.id, 0, plan.shares[0].device, reason)
        self.leases.note_refusal(member)

    def free_name(self, wanted: str) -> str:
        """Return a name that no component, and no group before a slash, has yet."""
        candidates = itertools.chain([wanted], (f"{wanted}#{number}" for number in itertools.count(2)))
        return next(name for name in candidates if name not in self.members and name not in self.groups)

    def enter_member(self, member: Member) -> None:
        self.groups[member.id.partition("/")[0]].add(member.id)
        if not member.is_hosted:
            self.by_module[id(member.managed.module)] = member
        self.members[member.id] = member

    def strike_member(self, member: Member) -> None:
        group = member.id.partition("/")[0]
        self.groups[group].discard(member.id)
        if not self.groups[group]:
            del self.groups[group]
        if self.by_module.get(id(member.managed.module)) is member:
            del self.by_module[id(member.managed.module)]
        del self.members[member.id]

    def detach(self, member: Member, ending: Ending | None = None) -> None:
        if self.members.get(member.id) is not member:
            if not any(other.managed.module is member.managed.module for other in self.members.values()):
                member.managed.packing.read_left(Ending.RESTORED if member.restores else Ending.DISCARDED)
            return
        freed = self.ledger.places(member.id)
        self.admission.epoch += 1
        error: InvalidInput | None = None
        try:
            member.managed.detach(ending or (Ending.RESTORED if member.restores else Ending.DISCARDED))
        except InvalidInput as problem:  # of a file: all else is done
            error = problem
        self.take_back(member, member.managed.module)
        self.strike_member(member)  # last: interrupted before, it can be released again
        self.moved_by_released += member.managed.bytes_moved
        for place, num_bytes in freed.items():
            self.event_log.note("release", member.id, num_bytes, place, "released")
        self.event_log.sample()
        if error is not None:
            raise error
        assert not self.ledger.places(member.id), self.ledger.places(member.id)


def refuse_unknown(what: str, named: Mapping[str, object], modules: Mapping[str, nn.Module]) -> None:
    """Refuse names that no component has. Raises `InvalidInput`."""
    for unknown in sorted(set(named) - set(modules), key=quoted):
        known = allowed_values(quoted(unknown), list(modules))
        raise InvalidInput(f"{what} {quoted(unknown)}: no such component; {known}")


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


def choices_of(item: PlacementItem, profile: OffloadProfile, precision: Precision | None) -> tuple[object, ...]:
    """Return what was chosen for a component, to compare it with the choices of another call."""
    return item.devices, item.tier, profile, precision
