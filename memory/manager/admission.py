"""Admission: makes room for the component that is entered, by evicting idle ones.

[Note: admission] A component is admitted when it is entered, never before. It may plan with what `LiveCapacity` says.
If loading it would leave less than ``low`` free, idle components leave, in the order that the policy chooses, whole or
block by block, until ``high`` is free. Between the marks nothing moves: a component in place that streams grows only
when a block more than the high mark is free (`steady_limit` in `planner/device_limit.py`). What the forwards of the
newcomer are known to need, or its kind may need, raises both marks, as far as it can compute beside that ([Note: needs]
in `needs.py`); so does what its profile leaves free. Where it has a budget for the device, idle siblings, which the
same call manages, leave until all of them together are within it. A component that computes holds a lease and is never
a victim.

The policies stand in `policies/`, the words of causes in `eviction.py`, the arithmetic in `live_capacity.py`; here
only the loops that ask them, and one mover, `evict`, which passes on the reason that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ..errors import DoesNotFit, InvalidInput, UnsafeState
from ..options.budget import BudgetItem
from ..options.marks import HOST, Marks
from ..runtime.forwards.input_size import Size
from ..transfer.devices import Device
from ..units import format_bytes
from .eviction import over_budget, short_beside_weights, short_of_memory
from .live_capacity import LiveCapacity, computable
from .member import Member
from .policies.candidate import EvictionPolicy, Victim
from .steered import SteeredComponent
from .watermark import WatermarkReport

__all__ = ["Admission"]


class Admission:
    """Evicts idle components so that others can be loaded. The caller holds the manager's lock."""

    def __init__(self, capacity: LiveCapacity, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.devices = capacity.devices
        self.members = capacity.members
        self.ledger = capacity.ledger
        self.event_log = capacity.event_log
        self.measures = capacity.measures

    def set_watermark(self, device: str, low: int | str, high: int | str) -> None:
        """Set the VRAM watermark (keep free) of one accelerator, of all (``*``) or of the RAM (``host``); at once.

        Raises:
            InvalidInput: an unknown device, or marks that are not 0 <= low <= high <= total.
        """
        changed = self.capacity.watermarks.set(device, low, high)
        self.note_marks(changed)
        self.keep_changed(changed)
        self.capacity.trim_kept()  # though its mark is the same as before, some may have stopped being shared
        self.keep_free_in_host()

    def set_default_watermarks(self, asked: Mapping[str, Marks], *, moves: bool) -> dict[str, WatermarkReport]:
        """Set what counts for devices for which `set_watermark` was not called, in place of what was set so.

        Returns the marks of all devices and of the RAM as they are now.

        Args:
            moves: whether idle components leave at once where too little is free; at the next boundary of a run if not.

        Raises:
            InvalidInput: as `set_watermark`; nothing is set then.
        """
        changed = self.capacity.watermarks.set_defaults(asked)
        self.note_marks(changed)
        if moves:
            self.keep_changed(changed)
        self.capacity.outdate_plans()
        self.keep_free_in_host()
        return self.capacity.watermark_reports()

    def note_marks(self, changed: Iterable[str]) -> None:
        """Note the marks of devices that have others now."""
        for target in changed:
            mark = self.capacity.mark_of_host() if target == HOST else self.capacity.watermarks.of(target)
            reason = f"keep free: low {format_bytes(mark.low_bytes)}, high {format_bytes(mark.high_bytes)}"
            self.event_log.note("watermark", "", mark.low_bytes, target, reason)

    def keep_changed(self, changed: Iterable[str]) -> None:
        """Make room on devices that have other marks now."""
        for target in changed:
            if target == HOST:
                self.capacity.trim_kept()
                continue
            self.make_room(self.devices[target], 0, None)
            self.capacity.outdate_plans()

    def keep_marks(self) -> None:
        """Evict idle components where less than the low mark is free, as at the boundaries of runs."""
        for device in self.devices.values():
            if not device.is_cpu:
                self.make_room(device, 0, None)

    def keep_free_in_host(self) -> None:
        """Make the host that moves components keep free what the marks say; it knows one number for all devices."""
        marks = self.capacity.watermarks.all_set()
        lows = {name: mark.low_bytes for name, mark in marks.items() if mark.high_bytes}  # 0 and 0: it is taken away
        for name in self.capacity.watermarks.devices:
            lent = self.capacity.lent_bytes(name)
            if self.capacity.neighbours.on(name):
                joined = self.capacity.joined_mark(name)
                if joined.low_bytes > self.capacity.watermarks.of(name).low_bytes:
                    lows[name] = joined.low_bytes
            if lent:
                lows[name] = lows.get(name, 0) + lent
        self.capacity.steered.keep_free(max(lows.values(), default=None))

    def victims(self, device: Device, member: Member | None, cause: Callable[[], str]) -> Iterator[Victim]:
        """Yield the idle components on a device, other than the member, in the policy's order.

        Args:
            cause: called for each victim when it is its turn; returns what needs memory, and how much.
        """
        for victim in self.policy.order(self.capacity.candidates(device, member)):
            yield victim.because(cause())

    def make_room(self, device: Device, need_bytes: int, member: Member | None, *, keeps_bytes: int = 0) -> None:
        """Evict idle components until the high mark is free, if the need would leave less than the low mark free.

        Args:
            keeps_bytes: what else stays free, for the member's forwards. For a hosted member this evicts other hosted
                components only as far as they can still compute.
        """
        mark, asked = self.capacity.mark_of(device.name), self.left_free(device, member)
        self.clear(device, need_bytes, member, max(mark.low_bytes, asked), max(mark.high_bytes, asked))
        if keeps_bytes > 0 and member is not None:
            self.clear(device, need_bytes, member, keeps_bytes, keeps_bytes, allow_unrunnable=not member.is_hosted)

    def clear(
        self,
        device: Device,
        need_bytes: int,
        member: Member | None,
        low: int,
        high: int,
        *,
        allow_unrunnable: bool = True,
    ) -> None:
        """Evict idle components until ``high`` bytes stay free, if the need would leave less than ``low`` free."""
        left = device.free_bytes() - need_bytes
        if left >= low:
            return

        def cause() -> str:
            return short_of_memory(member.id if member else None, need_bytes, device.free_bytes(), low)

        for victim in self.victims(device, member, cause):
            if left >= high:
                return
            left += self.evict_victim(victim, device, high - left, allow_unrunnable=allow_unrunnable)

    def left_free(self, device: Device, member: Member | None) -> int:
        """Return the bytes of a device that the member's profile leaves free."""
        if member is None:
            return 0
        component = member.managed.component
        return member.profile.left_free(device.name, component.name, component.kind, device.total_bytes())

    def clear_left_free(self, member: Member) -> None:
        """Evict idle components until the bytes are free that a loaded member's profile leaves free."""
        if len(self.members) == 1:
            return
        for device in member.managed.accelerators:
            if self.left_free(device, member):
                self.make_room(device, 0, member)

    def give_headroom(self, member: Member, size: Size) -> None:
        """Free what forwards of a size are known to need, for a component that its host has loaded.

        First other components are evicted as far as they can still compute; then the component itself streams more. The
        host is told of both.
        """
        if not member.managed.is_loaded:
            return
        try:
            wanted = self.capacity.replan(member, size=size)
        except (DoesNotFit, InvalidInput):
            return
        for share in wanted.shares:
            missing = share.keeps_bytes - self.capacity.free_bytes(self.devices[share.device])
            if missing > 0 and share.device != "cpu":
                cause = short_beside_weights(member.id, share.keeps_bytes)
                self.free_memory(share.device, missing, cause, exclude=[member.id], allow_unrunnable=False)
        held = self.held_by(member)
        try:
            plan = self.capacity.replan(member, computable(member, held), size=size, evicts=False)
        except (DoesNotFit, InvalidInput):
            return
        member.managed.load(plan)
        self.note_streaming(member, held)

    def held_by(self, member: Member) -> dict[str, int]:
        """Return the bytes that a component has of each of its devices."""
        return {share.device: self.ledger.held(member.id, share.device) for share in member.managed.plan.shares}

    def note_streaming(self, member: Member, held: Mapping[str, int]) -> None:
        """Note what a loaded component gave back by streaming more, so that its host is told."""
        for share in member.managed.plan.shares:
            freed = held[share.device] - self.ledger.held(member.id, share.device)
            if freed > 0:
                kind, to = member.managed.component.kind, member.managed.plan.tier
                self.event_log.note("evict", member.id, freed, share.device, share.why_kept, component_kind=kind, to=to)
        self.measures.sample()

    def keep_budgets(self, device: Device, device_bytes: int, member: Member) -> None:
        """Evict idle siblings if they and ``device_bytes`` of the member exceed the member's budget for a device."""
        component = member.managed.component
        for budget in member.profile.budgets_for(device.name, component.name, component.kind):
            if budget.target == device.name:
                self.keep_budget(budget, device, device_bytes, member)

    def keep_budget(self, budget: BudgetItem, device: Device, device_bytes: int, member: Member) -> None:
        """Evict idle siblings for one budget, as `keep_budgets`; nothing if the budget sets no limit."""
        most = budget.most(device.total_bytes())
        if most is None:
            return
        siblings = {other.id for other in self.members.siblings(member)}
        held = sum(self.ledger.held(sibling, device.name) for sibling in siblings)

        def cause() -> str:
            return over_budget(member.id, device_bytes, held, budget)

        for victim in self.victims(device, member, cause):
            excess = held + device_bytes - most
            if excess > 0 and victim.component in siblings:
                held -= self.evict_for_others(self.members[victim.component], device, excess, victim.reason)

    def free_memory(
        self,
        device_name: str,
        num_bytes: int,
        cause: str,
        *,
        exclude: Collection[str] = (),
        allow_unrunnable: bool = True,
        takes_all: bool = False,
    ) -> int:
        """Evict idle components until ``num_bytes`` of a device are freed; returns the bytes that were freed.

        Args:
            cause: what needs the bytes, for the event log; the policy adds why this component leaves.
            takes_all: all of them leave, so that it was not the policy which chose any.
            exclude: the ids of components that stay because their host is about to load them, or moves them itself.
            allow_unrunnable: whether so much of hosted components may be evicted that they cannot compute.
        """
        freed = 0
        device = self.devices[device_name]
        for victim in self.victims(device, None, lambda: cause):
            if freed >= num_bytes:
                break
            if victim.component not in exclude:
                chosen = replace(victim, reason=cause) if takes_all else victim
                freed += self.evict_victim(chosen, device, num_bytes - freed, allow_unrunnable=allow_unrunnable)
        return freed

    def evict_victim(self, victim: Victim, device: Device, num_bytes: int, *, allow_unrunnable: bool = True) -> int:
        """Evict at least ``num_bytes`` of a victim, or all of it, whether the host moves it or this manager does."""
        num_bytes = min(num_bytes, victim.device_bytes)
        steered = self.capacity.steered.get(victim.component)
        if steered is not None:
            return self.evict_steered(steered, device, num_bytes, victim.reason)
        member = self.members[victim.component]
        return self.evict_for_others(member, device, num_bytes, victim.reason, allow_unrunnable=allow_unrunnable)

    def evict_steered(self, component: SteeredComponent, device: Device, num_bytes: int, reason: str) -> int:
        """Ask the host for bytes of a component that it moves; returns what it freed."""
        return self.note_steered(component, device, component.free_memory(device.name, num_bytes), reason)

    def take_off_steered(self, component: SteeredComponent, device: Device, reason: str) -> int:
        """Ask the host to take all of a component that it moves off a device; returns what it freed."""
        returns = component.returns
        least = returns.least.get(device.name)
        freed = self.note_steered(component, device, component.take_off(device.name), reason)
        returns.excuse(device.name, component.device_bytes().get(device.name, 0), least)
        return freed

    def note_steered(self, component: SteeredComponent, device: Device, freed: int, reason: str) -> int:
        left = component.device_bytes().get(device.name, 0)
        if freed:
            rate = self.capacity.reloads.of_tiers(device.name, component.host_bytes())
            self.event_log.note_eviction(
                component.id,
                device.name,
                freed,
                left,
                reason,
                component_kind=component.kind,
                to="host",
                reload_s=None if rate is None else rate * freed,
            )
        self.measures.sample()
        self.capacity.outdate_plans()
        return freed

    def order_steered(self) -> None:
        """Make the host that moves components evict them in the policy's order when it is short of memory itself."""
        for device in self.devices.values():
            candidates = self.capacity.steered.candidates(device.name, self.capacity.reloads)
            for victim in reversed(self.policy.order(candidates)):
                component = self.capacity.steered.get(victim.component)
                if component is not None:
                    component.leave_first(device.name)

    def evict_for_others(
        self, member: Member, device: Device, num_bytes: int, reason: str, *, allow_unrunnable: bool = True
    ) -> int:
        """As `evict`, because others need the memory: in a run that counts as a loss (`Returns`)."""
        early_bytes = member.managed.early_bytes(device.name)
        freed = self.evict(member, device, num_bytes, reason, allow_unrunnable=allow_unrunnable)
        if self.event_log.is_running:  # what came early was not used yet, and is no loss
            member.returns.note_evicted(freed - early_bytes + member.managed.early_bytes(device.name))
        return freed

    def evict(
        self, member: Member, device: Device, num_bytes: int, reason: str, *, allow_unrunnable: bool = True
    ) -> int:
        """Evict at least ``num_bytes`` of an idle component, or all of it; returns the bytes freed.

        Args:
            reason: why this component leaves, for the event log.
            allow_unrunnable: whether so much of a hosted one may be evicted that it cannot compute.
        """
        if member.leases:
            raise UnsafeState(f"{member.id} computes and cannot be evicted")
        held = self.ledger.held(member.id, device.name)
        lasting = 0 if allow_unrunnable else self.capacity.lasting_bytes(device.name, member.id)
        num_bytes = min(num_bytes, held - lasting)
        if num_bytes <= 0:
            return 0
        member.note_evicted(counts_as_loaded=self.capacity.counts_as_loaded(member))
        freed = member.managed.shrink(device.name, num_bytes, lasting)
        if freed < num_bytes and lasting:
            self.stream_more(member, device, held - num_bytes)
        left = self.ledger.held(member.id, device.name)
        freed = held - left
        rate = self.capacity.reloads.of(member, device.name)
        self.event_log.note_eviction(
            member.id,
            device.name,
            freed,
            left,
            reason,
            component_kind=member.managed.component.kind,
            to=member.managed.plan.tier,
            reload_s=None if rate is None else rate * freed,
        )
        self.measures.sample()
        self.capacity.outdate_plans()
        return freed

    def stream_more(self, member: Member, device: Device, ceiling: int) -> None:
        """Bring a hosted component to a form of ``ceiling`` bytes, or its least: its staging memory shrinks, too."""
        try:
            plan = self.capacity.replan(member, computable(member, {device.name: ceiling}), evicts=False)
        except (DoesNotFit, InvalidInput):
            return  # it is planned when it is entered
        member.managed.load(plan)
        member.note_planned(-1)
