"""Who is under management: joins with all its parts or not at all, gets another profile in place, and leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from torch import nn

from .attachment import Attachment, Phase
from .component import Component
from .errors import InvalidInput, UnsafeState, allowed_values, quoted
from .membership import Member, refuse_odd, refuse_shared_split, refuse_unsuitable
from .modules import bytes_in_ram, plan_modules
from .packing import Ending
from .passes import Pass
from .placement import Placement
from .plan import ComponentPlan, Plan
from .profile import OffloadProfile
from .room import Room
from .source import WeightsSource
from .upcast import Precision

__all__ = ["Roster"]


class Roster:
    """Adds members to the room and takes them out of it. The caller holds the manager's lock.

    Args:
        exclusive: holds the manager's lock.
        enter, give_back: what a member's outermost entry and its exit call.
        show_progress: returns what is called with the bytes packed or read, of so many in all.
    """

    def __init__(
        self,
        room: Room,
        *,
        exclusive: Callable[[], AbstractContextManager[None]],
        enter: Callable[[Member, Attachment, Pass], bool],
        give_back: Callable[[Member, Pass], None],
        show_progress: Callable[[Member, int], Callable[[int], None]],
    ) -> None:
        self.room = room
        self.members = room.members
        self.ledger = room.ledger
        self.recorder = room.recorder
        self.exclusive = exclusive
        self.enter = enter
        self.give_back = give_back
        self.show_progress = show_progress
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
    ) -> tuple[list[Member], Plan]:
        """Take modules under management: plan, pack in host memory, hook. All of them or none.

        Args:
            kinds: component kinds by name, where they are known; names suggest the others.
            sources: the files of components by name: those may rest on disk.
            patterns: what a block is, by component (`find_blocks`), where structure does not tell.
            is_hosted: a host decides when they come (`bring`) and go (`leave`).
        """
        for what, named in (("files of", sources), ("blocks of", patterns)):
            for unknown in sorted(set(named or {}) - set(modules), key=quoted):
                known = allowed_values(quoted(unknown), list(modules))
                raise InvalidInput(f"{what} {quoted(unknown)}: no such component; {known}")
        for component_name, module in modules.items():
            refuse_odd(component_name, module)
        components, plan = plan_modules(
            modules,
            self.room.machine(None, freed_bytes=sum(map(bytes_in_ram, modules.values())), is_hosted=is_hosted),
            placement=placement,
            profile=profile,
            precision=precision,
            kinds=kinds or {},
            sources=sources or {},
            patterns=patterns,
        )
        prefix = f"{self.free_name(name)}/" if name else ""
        workflow_id = self.recorder.node.workflow_id if self.recorder.node else None
        members: list[Member] = []
        call = object()
        for component, module in zip(components, modules.values(), strict=True):
            member_id = self.free_name(prefix + component.name)
            member = Member(member_id, component.name, node_id, workflow_id, profile)
            member.call = call
            member.is_hosted = is_hosted
            member.patterns = patterns
            members.append(member)
            self.prepare(member, module, component, plan[component.name], (sources or {}).get(component.name))
        try:
            for member in members:
                self.attach(member)
        except BaseException:
            for member in members:
                self.detach(member, Ending.TAKEN_BACK)
            raise
        self.room.epoch += 1
        return members, plan

    def replace(
        self,
        members: Sequence[Member],
        *,
        placement: Placement,
        profile: OffloadProfile,
        precision: Precision | None,
    ) -> Plan:
        """Give components another profile, placement or precision, where they are; on failure they have the old ones.

        They leave their devices and come back as they are used. What rests in eight bits was widened in between: the
        bits that it lost stay lost.
        """
        gone = [member.id for member in members if self.members.get(member.id) is not member]
        if gone:
            raise UnsafeState(f"{', '.join(gone)}: was released; manage it again")
        busy = [member.id for member in members if member.leases]
        if busy:
            raise UnsafeState(f"{', '.join(busy)}: computes now; profiles change between passes")
        modules = {member.name: member.attachment.module for member in members}
        sources = {m.name: m.attachment.source for m in members if m.attachment.source is not None}
        kinds = {member.name: member.attachment.component.kind for member in members}
        locked = sum(member.attachment.packing.host_bytes["pinned"] for member in members)
        components, plan = plan_modules(
            modules,
            self.room.machine(None, freed_bytes=locked),
            placement=placement,
            profile=profile,
            precision=precision,
            kinds=kinds,
            sources=sources,
            patterns=next((member.patterns for member in members), None),
            in_file=[member.name for member in members if member.attachment.plan.tier == "disk"],
        )
        before = [(member, member.attachment, member.profile) for member in members]
        try:
            for member, component in zip(members, components, strict=True):
                self.detach(member, Ending.HANDED_OVER)
                self.give(member, profile)
                new = component, plan[component.name], sources.get(component.name)
                self.prepare(member, modules[member.name], *new, after=member.attachment)
                self.attach(member)
        except BaseException:
            for member, attachment, old_profile in before:
                changed = member.attachment is not attachment or member.id not in self.members
                if changed or attachment.phase is Phase.ENDING:
                    self.put_back(member, attachment, old_profile)
            raise
        self.room.epoch += 1
        return plan

    def put_back(self, member: Member, attachment: Attachment, profile: OffloadProfile) -> None:
        """Give a component the form again that it had in an earlier attachment; released if that fails."""
        self.detach(member, Ending.HANDED_OVER)
        self.give(member, profile)
        try:
            former = attachment.component, attachment.plan, attachment.source
            self.prepare(member, attachment.module, *former, after=member.attachment)
            self.attach(member, tells=False)  # who cancelled would cancel this, too
        except BaseException:
            attachment.hooks.remove()
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
        *,
        after: Attachment | None = None,
    ) -> None:
        """Build a component's attachment, in place of another, and refuse what cannot be attached; changes nothing."""
        if not member.is_hosted:
            refuse_unsuitable(module, component, self.members.values(), source)
        refuse_shared_split(module, component, plan)
        attachment = Attachment(
            member.id,
            module,
            component,
            plan,
            self.room.devices,
            self.ledger,
            exclusive=self.exclusive,
            acquire=lambda current: self.enter(member, attachment, current),
            give_back=lambda current: self.give_back(member, current),
            guards_state=not member.is_hosted,
            source=source,
            compiles=member.profile.compile,
            after=after,
            tell_read=partial(self.note_read, member.id),
        )
        member.attachment = attachment
        attachment.packing.measure()

    def attach(self, member: Member, *, tells: bool = True) -> None:
        """Pack and hook a component that was prepared; ``tells`` those who watch loadings."""
        attachment, plan = member.attachment, member.attachment.plan
        if not member.is_hosted:  # once more: parts that were prepared together may share weights
            refuse_unsuitable(attachment.module, attachment.component, self.members.values(), attachment.source)
        try:
            attachment.attach(self.show_progress(member, attachment.packing.to_pack()) if tells else None)
            self.members[member.id] = member
        except BaseException:
            if member.id not in self.members:
                attachment.detach(Ending.TAKEN_BACK)
            raise
        for reason in plan.reasons:
            self.recorder.note("plan", member.id, 0, plan.shares[0].device, reason)
        self.note_refusal(member)

    def note_refusal(self, member: Member) -> None:
        if member.attachment.packing.tell_refusal():
            reason = "the driver refused more page-locked memory: the rest is pageable, its copies block the host"
            self.recorder.note("plan", member.id, 0, "host", reason)

    def note_read(self, owner: str, num_bytes: int) -> None:
        reason = "a block that rests in its file was read into RAM and stays there: others may write to its weights"
        self.recorder.note("plan", owner, num_bytes, "host", reason)

    def free_name(self, wanted: str) -> str:
        """Return a name that no component, and no group before a slash, has yet."""
        taken = set(self.members) | {member_id.partition("/")[0] for member_id in self.members}
        candidates = itertools.chain([wanted], (f"{wanted}#{number}" for number in itertools.count(2)))
        return next(candidate for candidate in candidates if candidate not in taken)

    def detach(self, member: Member, ending: Ending | None = None) -> None:
        if self.members.get(member.id) is not member:
            if not any(other.attachment.module is member.attachment.module for other in self.members.values()):
                member.attachment.packing.read_left(Ending.RESTORED if member.restores else Ending.DISCARDED)
            return
        freed = self.ledger.places(member.id)
        self.room.epoch += 1
        error: InvalidInput | None = None
        try:
            member.attachment.detach(ending or (Ending.RESTORED if member.restores else Ending.DISCARDED))
        except InvalidInput as problem:  # of a file: all else is done
            error = problem
        del self.members[member.id]  # last: interrupted before, it can be released again
        self.moved_by_released += member.attachment.bytes_moved
        for place, num_bytes in freed.items():
            self.recorder.note("release", member.id, num_bytes, place, "released")
        self.recorder.sample()
        if error is not None:
            raise error
        assert not self.ledger.places(member.id), self.ledger.places(member.id)
