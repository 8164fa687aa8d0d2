"""Attaching and detaching: a component that is planned gets what manages it, packed and hooked, and loses it again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import ref

from torch import nn

from ..errors import InvalidInput
from ..planner.plan import ComponentPlan
from ..runtime.managed_component import ManagedComponent
from ..runtime.packing import Ending
from ..runtime.weight_places import WeightPlaces
from ..weights.component import Component
from ..weights.source import WeightsSource
from .common_weights import CommonWeights
from .join_checks import refuse_shared_split, refuse_unsuitable
from .known_loadings import KnownLoadings
from .leases import Leases, MemberManager
from .live_capacity import LiveCapacity
from .member import Member
from .shared_weights import SharedWeights

__all__ = ["Attacher"]

# Why a component is released where its user did not ask for that.
WHY_RELEASED = {
    Ending.HANDED_OVER: "packed anew for other choices",
    Ending.TAKEN_BACK: "it could not be managed",
}
RELEASED = "what loaded it released it"


class Attacher:
    """Builds, attaches and detaches what manages a member's module. The caller holds the manager's lock."""

    def __init__(self, capacity: LiveCapacity, leases: Leases) -> None:
        self.capacity = capacity
        self.kept = capacity.kept
        self.leases = leases
        self.members = capacity.members
        self.ledger = capacity.ledger
        self.event_log = capacity.event_log
        self.measures = capacity.measures
        self.sharing = SharedWeights(self.members)
        self.common = CommonWeights(self.members, self.kept)
        self.loadings = KnownLoadings(self.kept)
        self.moved_by_released = 0
        """The bytes of weights that released members had copied to devices."""
        self.waited_by_released_s = 0.0
        """The seconds for which released members had waited for copies."""

    def prepare(
        self,
        member: Member,
        module: nn.Module,
        component: Component,
        plan: ComponentPlan,
        source: WeightsSource | None,
        sharers: Iterable[WeightPlaces],
        *,
        after: ManagedComponent | None = None,
    ) -> None:
        """Build what manages a component, in place of ``after``, and refuse what cannot be attached.

        The module does not change yet.
        """
        refuse_shared_split(module, component, plan)
        managed = ManagedComponent(
            member.id,
            module,
            component,
            plan,
            self.capacity.devices,
            self.ledger,
            manager=MemberManager(self.leases, member),
            guards_state=not member.is_hosted,
            source=source,
            compiles=member.profile.compile,
            after=after,
        )
        try:
            for lender in member.lenders:
                lender.managed.places.lend_to(module)
            for other in self.members.borrowers(member):
                managed.places.lend_to(other.managed.module)
            if not member.is_hosted:
                self.refuse_unsuitable(member, module, component, source, sharers)
        except BaseException:
            self.sharing.take_back(member, module)
            raise
        member.use(managed)
        managed.forwards.clock.go_on_with(self.capacity.speeds.calls_left(member.id, managed.primary.name))
        managed.packing.measure()

    def refuse_unsuitable(
        self,
        member: Member,
        module: nn.Module,
        component: Component,
        source: WeightsSource | None,
        sharers: Iterable[WeightPlaces],
    ) -> None:
        groups = [group for lender in member.lenders for group in lender.managed.groups]
        lent = {place for group in groups for slot in group.slots for place in slot.owners}
        borrowers = self.members.borrowers(member)
        refuse_unsuitable(module, component, sharers, self.members, source, lent=lent, borrowers=borrowers)

    def attach(self, member: Member, sharers: Iterable[WeightPlaces], *, tells: bool = True) -> None:
        """Pack and hook a component that was prepared; ``tells``: the watchers of loading hear of it."""
        managed, plan = member.managed, member.managed.plan
        if not member.is_hosted:  # once more: parts that were prepared together may share weights
            self.refuse_unsuitable(member, managed.module, managed.component, managed.source, sharers)
        content = member.content
        if content is not None:
            member.go_on_with(self.capacity.steered.returns.take(content, self.presence_of(member)))
        common = self.common.find(member) if member.origins and member.shares_files else {}
        kept = self.kept.slabs() if member.origins else ()
        managed.packing.start_from(member.origins, kept, common, member.proven)
        try:
            managed.attach(self.leases.show_progress(member, managed.packing.to_pack()) if tells else None)
            self.members.enter(member)
        except BaseException:
            if member.id not in self.members:
                managed.detach(Ending.TAKEN_BACK)
            raise
        self.kept.hand_over(member)
        self.loadings.note(member)
        member.came_from({}, None)
        for reason in (*member.reasons, *plan.reasons):
            self.event_log.note("plan", member.id, 0, plan.shares[0].device, reason)
        self.leases.note_refusal(member)

    def presence_of(self, member: Member) -> Callable[[], bool]:
        """Return what tells whether a member is under management; it does not keep the member alive."""
        here, members = ref(member), self.members

        def is_there() -> bool:
            found = here()
            return found is not None and members.has(found)

        return is_there

    def detach(self, member: Member, ending: Ending | None = None) -> None:
        if not self.members.has(member):
            if not any(other.managed.module is member.managed.module for other in self.members.values()):
                member.managed.packing.read_left(member.ending)
            return
        freed = self.ledger.bytes_by_place(member.id)
        self.capacity.outdate_plans()
        error: InvalidInput | None = None
        try:
            member.managed.detach(ending or (Ending.LEFT if member.is_left else member.ending))
        except InvalidInput as problem:  # of a file: all else is done
            error = problem
        self.sharing.take_back(member, member.managed.module)
        self.members.strike(member)  # last: interrupted before, it can be released again
        self.moved_by_released += member.managed.bytes_moved
        self.waited_by_released_s += member.managed.waited_s
        if freed:
            reason = RELEASED if ending is None else WHY_RELEASED.get(ending, RELEASED)
            if member.leaves_weights:
                reason = "nothing uses its model any more"
            kind = member.managed.component.kind
            places = "&".join(freed)
            self.event_log.note("release", member.id, sum(freed.values()), places, reason, component_kind=kind)
        self.measures.sample()
        if ending is None and not member.leaves_weights and member.managed.source is not None:
            member.managed.source.drop_kept()
        pristine = member.managed.packing.take_pristine()
        if member.leaves_weights and self.event_log.is_running:
            self.kept.keep(member, pristine)
            self.capacity.trim_kept()
        self.kept.drop_unwanted()
        if error is not None:
            raise error
        assert not self.ledger.bytes_by_place(member.id), self.ledger.bytes_by_place(member.id)
