"""The registry of members: components join, all parts of a call or none, and get another profile in place."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from ..errors import InvalidInput, UnsafeState, allowed_values, quoted
from ..options.placement import Placement, PlacementItem, SplitRatio
from ..options.precision import PrecisionRequest
from ..options.profile import OffloadProfile
from ..planner.plan import Plan
from ..planner.run import Use, largest_activations
from ..runtime.blocks.pristine_slab import KnownOrigins
from ..runtime.holders import find_sharers
from ..runtime.managed_component import ManagedComponent, Phase
from ..runtime.packing import Ending
from ..runtime.weight_places import WeightPlaces
from ..weights.component import guess_kind
from ..weights.mapped_files import find_sources
from ..weights.module_component import component_from_module
from ..weights.sharing import NOTHING_SHARED
from ..weights.source import WeightsSource
from .attacher import Attacher
from .join_checks import refuse_odd
from .known_loadings import Newcomer
from .leases import Leases
from .live_capacity import LiveCapacity
from .member import Choices, Member
from .module_plans import Draft, bytes_in_ram, plan_modules

__all__ = ["Registry"]


class Registry:
    """Adds and replaces members. The caller holds the manager's lock."""

    def __init__(self, capacity: LiveCapacity, leases: Leases, attacher: Attacher) -> None:
        self.capacity = capacity
        self.members = capacity.members
        self.event_log = capacity.event_log
        self.measures = capacity.measures
        self.attacher = attacher
        self.sharing = attacher.sharing
        self.ranks = itertools.count()
        leases.pack_with(self.pack_anew)

    def add(
        self,
        modules: dict[str, nn.Module],
        *,
        placement: Placement,
        profile: OffloadProfile,
        precision: PrecisionRequest,
        name: str | None,
        node_id: str | None,
        kinds: Mapping[str, str] | None = None,
        sources: Mapping[str, WeightsSource] | None = None,
        patterns: Mapping[str, str] | None = None,
        is_hosted: bool = False,
        draft: Draft | None = None,
        reasons: Sequence[str] = (),
        origins: Mapping[str, KnownOrigins] | None = None,
        uses: Sequence[Use] = (),
    ) -> tuple[list[Member], Plan]:
        """Take modules under management: plan, pack in host memory, hook. All of them or none.

        Args:
            kinds: component kinds by name, where they are known; names suggest the others.
            sources: the files of components by name: those may rest on disk.
            patterns: what a block is, by component (`find_blocks`), where structure does not tell.
            is_hosted: a host decides when they come (`load`) and go (`unload`).
            draft: their components and plan, made before with the same choices.
            reasons: what was decided for them before they were planned, for the report.
            origins: by component, what its weights were read from.
            uses: what the run to come computes with them, by the components' names.
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
        sources = find_sources(new, sources or {})
        prefix = f"{self.members.free_name(name)}/" if name else ""
        ids = {component: self.members.free_name(prefix + component) for component in new}
        # The diffusion model comes first, so that it owns what it shares with its guides.
        ranked = sorted(new, key=lambda component: kinds[component] != "diffusion")
        sharers = [] if is_hosted else find_sharers(new.values())
        shared = self.sharing.find({ids[component]: new[component] for component in ranked}, sharers)
        common = {component: shared[ids[component]] for component in new if ids[component] in shared}
        planned = plan_modules(
            new,
            self.capacity.machine(None, freed_bytes=bytes_in_ram(new, sources), is_hosted=is_hosted),
            placement=self.sharing.keep_together(placement, kinds, ids, shared),
            profile=profile,
            precision=precision,
            kinds=kinds,
            sources=sources,
            patterns=patterns,
            shared=common,
            draft=draft,
            is_hosted=is_hosted,
            uses=uses,
        )
        components, plan = planned.components, planned.plan
        self.sharing.refuse_apart(
            shared, {ids[part.name]: (new[part.name], part, plan[part.name]) for part in components}
        )
        workflow_id = self.measures.node.workflow_id if self.measures.node else None
        members: dict[str, Member] = {}
        for component in ranked:
            member = Member(
                ids[component],
                component,
                node_id=node_id,
                workflow_id=workflow_id,
                profile=plan.profile,
                is_hosted=is_hosted,
                rank=next(self.ranks),
                choices=choices[component],
                patterns=patterns,
                reasons=reasons,
                origins=(origins or {}).get(component, {}),
            )
            by_id = self.members | {other.id: other for other in members.values()}
            member.borrow_from(by_id[owner] for owner in common.get(component, NOTHING_SHARED).owners)
            for other in members.values():
                member.come_with(other)
            members[component] = member
        described = {component.name: component for component in components}
        newcomers = [(members[name], new[name], described[name], plan[name], sources.get(name)) for name in ranked]
        self.capacity.make_lockable(sum(plan[name].pinned_bytes for name in ranked), bytes_in_ram(new, sources))
        self.attacher.loadings.claim(newcomers)
        self.join(newcomers, sharers)
        for member in found.values():
            member.add_holder()
        # In a plan uses may be in tiles, so that less is kept free for them.
        expected = [each.use for each in plan.run.uses] if plan.run is not None else uses
        for component, member in members.items():
            member.note_tiles(max((use.tile_bytes or 0 for use in expected if use.component == component), default=0))
            num_bytes = largest_activations(expected, component)
            if num_bytes is not None:
                self.capacity.expect(member, num_bytes)
        self.capacity.trim_kept()
        self.capacity.outdate_plans()
        joined = {**found, **members}
        plans = [found[c].managed.plan if c in found else plan[c] for c in modules]
        run = plan.run if not found else None
        return [joined[component] for component in modules], Plan(components=tuple(plans), profile=profile, run=run)

    def join(
        self,
        newcomers: Sequence[Newcomer],
        sharers: Sequence[WeightPlaces],
    ) -> None:
        """Prepare and attach new components, lenders before their borrowers: all of them or none.

        Args:
            sharers: what is managed already and may have weights of theirs (`find_sharers`).
        """
        near = list(sharers)
        prepared: list[tuple[Member, nn.Module]] = []
        try:
            for member, module, component, plan, source in newcomers:
                self.attacher.prepare(member, module, component, plan, source, near)
                prepared.append((member, module))
            for member, _ in prepared:
                self.attacher.attach(member, near)
                near.append(member.managed.places)
        except BaseException:
            for member, module in reversed(prepared):
                self.attacher.detach(member, Ending.TAKEN_BACK)
                self.sharing.take_back(member, module)
            raise

    def find_managed(self, modules: Mapping[str, nn.Module], choices: Mapping[str, Choices]) -> dict[str, Member]:
        """Return the members that manage some of these modules already, by the names given here.

        Raises:
            InvalidInput: other choices were made for one of them.
        """
        here = ((name, self.members.of_module(module)) for name, module in modules.items())
        found = {name: member for name, member in here if member is not None}
        for name, member in found.items():
            if member.choices != choices[name]:
                raise InvalidInput(
                    f"{name} is managed already, with other choices, as {member.id!r}: choose the same, "
                    "reprofile() the first, or release that"
                )
        return found

    def replace(
        self,
        members: Sequence[Member],
        *,
        placement: Placement,
        profile: OffloadProfile,
        precision: PrecisionRequest,
    ) -> Plan:
        """Give components another profile, placement or precision in place; on failure they keep the old ones.

        They leave their devices and are loaded again when they are used. Blocks whose precision and tier stay are not
        packed again. Weights that rested encoded were rounded: another precision does not restore them.
        """
        self.refuse_unready(members)
        plan = self.replace_ready(members, placement=placement, profile=profile, precision=precision)
        for member in members:
            member.note_move(False)
        return plan

    def move(self, member: Member, placement: Placement) -> Plan:
        """Give a component another placement, on request and not by what loads it: its user's choices stay.

        Planned anew or loaded again, it comes where these say. The first device of a component that a host loads is the
        host's to choose.

        Raises:
            InvalidInput: the placement is of others, or its host chose another device to compute it. Else as `replace`.
        """
        self.refuse_unready([member])
        managed = member.managed
        item, here = placement.item_for(member.name, managed.component.kind), managed.primary.name
        if item not in placement.items:
            raise InvalidInput(f"placement '{placement}' does not place {member.id}; allowed: such as gpu:1")
        if member.is_hosted and item.devices and item.devices[0].device != here:
            raise InvalidInput(
                f"{member.id} computes on {here}, as its host chose; choose the device in its loader. "
                f"Allowed here: a placement that begins with {here}"
            )
        _, profile, precision = member.choices
        plan = self.replace_ready(
            [member], placement=placement, profile=profile, precision=precision, keeps_choices=True
        )
        member.note_move(True)
        found = plan[member.name]
        self.event_log.note("plan", member.id, 0, found.shares[0].device, f"moved on request: {found.placement}")
        return plan

    def pack_anew(self, member: Member) -> None:
        """Describe, plan and pack a component anew, by the same choices: other code converted its weights.

        No pass of it runs. Raises as `replace`.
        """
        changes = member.managed.changes
        changes.refuse()
        what = changes.given_up
        chosen, profile, precision = member.choices
        # Where `auto` put it, because its pipeline may have made tensors for there by now.
        devices = chosen.devices or tuple(SplitRatio(device=share.device) for share in member.managed.plan.shares)
        tier = chosen.tier
        if tier == "disk" and not self.has_files_as_it_is(member):
            if chosen.forbids_ram:
                raise UnsafeState(
                    f"{member.id}: {what} by other code, so that its files do not hold its weights as they are; its "
                    f"placement {str(chosen)!r} keeps it out of RAM: load it anew, or place it at disk"
                )
            tier = None
            reason = "its files do not hold its weights as they are now: they rest in RAM"
            self.event_log.note("plan", member.id, 0, "host", reason)
            member.managed.read_all()  # what other code has not read by now
        item = replace(chosen, component=member.name, devices=devices, tier=tier)
        plan = self.replace_ready(
            [member], placement=Placement(items=(item,)), profile=profile, precision=precision, keeps_choices=True
        )
        member.note_move(False)
        reason = f"{what} by other code: packed anew"
        self.event_log.note("plan", member.id, 0, plan[member.name].shares[0].device, reason)

    def has_files_as_it_is(self, member: Member) -> bool:
        """Whether a component's files hold its weights in the dtypes and shapes that its module has now.

        Not where they were cast as they were read: converted again, they may be rounded, whatever the files have.
        """
        managed = member.managed
        if managed.component.stored_as:
            return False
        described = component_from_module(managed.module, name=member.name, kind=managed.component.kind)
        return managed.source is not None and managed.source.covers_as_it_is(described)

    def replace_ready(
        self,
        members: Sequence[Member],
        *,
        placement: Placement,
        profile: OffloadProfile,
        precision: PrecisionRequest,
        keeps_choices: bool = False,
    ) -> Plan:
        """As `replace`, for members that are ready for it; ``keeps_choices``: these are not new ones of the user's."""
        members = sorted(members, key=lambda member: member.rank)
        for member in members:
            member.managed.packing.mapped.refuse_overwritten()
            member.managed.finish_loading()  # weights may be measured where they are
            member.managed.describe_anew()
        ids = {member.name: member.id for member in members}
        modules = {member.name: member.managed.module for member in members}
        hosted = any(member.is_hosted for member in members)
        sharers = self.sharing.find_near(members)
        shared = {} if hosted else self.sharing.find({}, sharers)
        sources = {m.name: m.managed.source for m in members if m.managed.source is not None}
        kinds = {member.name: member.managed.component.kind for member in members}
        asked, placement = placement, self.sharing.keep_together(placement, kinds, ids, shared)
        locked = sum(member.managed.packing.books.taken["pinned"] for member in members)
        # What rests in part in its file gets what RAM has beside the others: what it takes now is part of that.
        ledger, mixed = self.capacity.ledger, [member for member in members if member.managed.plan.in_file]
        ours = sum(ledger.held(member.id, tier) for member in mixed for tier in ("pinned", "host"))
        planned = plan_modules(
            modules,
            self.capacity.machine(None, freed_bytes=locked, given={"cpu": ours}),
            placement=placement,
            profile=profile,
            precision=precision,
            kinds=kinds,
            sources=sources,
            patterns=next((member.patterns for member in members), None),
            in_file=[member.name for member in members if member.managed.plan.in_file],
            shared={member.name: shared[member.id] for member in members if member.id in shared},
            is_hosted=hosted,
        )
        components, plan = planned.components, planned.plan
        if shared:
            self.sharing.refuse_apart(
                shared, {ids[part.name]: (modules[part.name], part, plan[part.name]) for part in components}
            )
        before = [(member, member.managed, member.profile, member.choices) for member in members]
        try:
            for member, component in zip(members, components, strict=True):
                self.attacher.detach(member, Ending.HANDED_OVER)
                item = asked.item_for(member.name, kinds[member.name])
                chosen = member.choices if keeps_choices else choices_of(item, profile, precision)
                member.take_profile(profile, chosen)
                new = component, plan[component.name], sources.get(component.name)
                near = self.sharing.find_near([member])
                self.attacher.prepare(member, modules[member.name], *new, near, after=member.managed)
                self.attacher.attach(member, self.sharing.find_near([member]))
        except BaseException:
            for member, managed, old_profile, old_choices in before:
                changed = member.managed is not managed or member.id not in self.members
                if changed or managed.phase is Phase.ENDING:
                    self.put_back(member, managed, old_profile, old_choices)
            raise
        self.capacity.outdate_plans()
        return plan

    def refuse_unready(self, members: Sequence[Member]) -> None:
        """Refuse to replace members that were released or compute now. Raises `UnsafeState`."""
        gone = [member.id for member in members if not self.members.has(member)]
        if gone:
            raise UnsafeState(f"{', '.join(gone)}: was released; manage it again")
        busy = [member.id for member in members if member.leases or member.managed.forwards.is_called_unseen()]
        if busy:
            raise UnsafeState(f"{', '.join(busy)}: computes now; profiles change between passes")
        for member in members:
            member.managed.changes.refuse()

    def put_back(self, member: Member, managed: ManagedComponent, profile: OffloadProfile, choices: Choices) -> None:
        """Restore a component's former profile and form; it is released if that fails."""
        self.attacher.detach(member, Ending.HANDED_OVER)
        member.take_profile(profile, choices)
        try:
            former = managed.describe_left(), managed.plan, managed.source
            near = self.sharing.find_near([member])
            self.attacher.prepare(member, managed.module, *former, near, after=member.managed)
            # Watchers are not told: one that cancelled the other form would cancel this one, too.
            self.attacher.attach(member, self.sharing.find_near([member]), tells=False)
        except BaseException:
            managed.hooks.remove()
            managed.packing.restore_left()
            raise


def refuse_unknown(what: str, named: Mapping[str, object], modules: Mapping[str, nn.Module]) -> None:
    """Refuse names that no component has. Raises `InvalidInput`."""
    for unknown in sorted(set(named) - set(modules), key=quoted):
        known = allowed_values(quoted(unknown), list(modules))
        raise InvalidInput(f"{what} {quoted(unknown)}: no such component; {known}")


def choices_of(item: PlacementItem, profile: OffloadProfile, precision: PrecisionRequest) -> Choices:
    """Return the choices for a component, to compare them with those of another call."""
    return replace(item, component="*"), profile, precision
