"""Leases on components, and the loading of components for their passes.

[Note: steady forwards] Most forwards find everything as the last one left it. So a pass first checks two things
quickly: whether other code changed its module (`ManagedComponent.is_steady`), and whether the memory to plan with has
changed (`LiveCapacity.epoch`, the settled input sizes). Only after a change it checks fully, plans and loads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch

from ..errors import DoesNotFit, InvalidInput, UnsafeState
from ..planner.plan import ComponentPlan
from ..runtime.forwards.deferring_lock import DeferringLock
from ..runtime.forwards.forward_pass import Guest, Pass
from ..runtime.forwards.input_size import Size
from ..runtime.forwards.recording_pauses import host_recordings
from ..runtime.managed_component import ManagedComponent
from ..units import format_bytes, format_seconds
from .admission import Admission
from .calibration import learn_failed_load, learn_needs, learn_times
from .card_sharing import CardSharing
from .early_loading import EarlyLoading
from .idle_unloading import IdleUnloading
from .live_capacity import computable
from .look_ahead import LookAhead
from .member import Member
from .needs import Needs
from .needs_file import NeedsFile
from .speeds import Speeds
from .speeds_file import SpeedsFile
from .steered import SteeredComponent
from .thrashing import note_return

__all__ = ["Leases", "MemberManager", "write_needs", "write_speeds"]


class Leases:
    """Gives leases on components and takes them back; loads what a lease needs.

    Args:
        needs_file: the file of learned needs of forwards; None: they are kept in memory only.
        speeds_file: that of measured calls.
    """

    def __init__(
        self,
        lock: DeferringLock,
        admission: Admission,
        idle: IdleUnloading,
        sharing: CardSharing,
        needs_file: NeedsFile | None,
        speeds_file: SpeedsFile | None = None,
    ) -> None:
        self.lock = lock
        self.sharing = sharing
        self.idle = idle
        self.admission = admission
        self.capacity = admission.capacity
        self.members = admission.members
        self.event_log = admission.event_log
        self.measures = admission.measures
        self.ledger = admission.ledger
        self.needs_file, self.speeds_file = needs_file, speeds_file
        self.uses = itertools.count(1)
        self.leased: dict[str, Member] = {}
        """The members with leases, by id."""
        self.look_ahead = LookAhead(self.capacity, self.leased, EarlyLoading(lock, self.capacity, self.leased, idle))
        self.pack_anew: Callable[[Member], None] | None = None
        """Describes, plans and packs a component anew whose weights were converted (`Registry.pack_anew`)."""
        self.watchers: list[Callable[[str, int, int], None]] = []
        """Called with component, finished bytes and total bytes while a component is packed or loaded."""

    def pack_with(self, pack_anew: Callable[[Member], None]) -> None:
        """Set what packs a component anew whose weights were converted."""
        self.pack_anew = pack_anew

    def acquire(self, member: Member, holder: object) -> None:
        """Admit a component and hold a lease on it. Loads it as planned, and evicts others for it.

        While another pass of the component runs, nothing is loaded or moved, because it computes with the blocks. A
        hosted component is never loaded here, because its host loads it.

        Args:
            holder: the pass or other object for which the lease is; `give_back` needs it.

        Raises:
            DoesNotFit, InvalidInput: no plan fits the device or the budget; devices keep what they hold.
            torch.OutOfMemoryError, or another error while loading: the component was unloaded from all devices.
            UnsafeState: weights were changed in a way that cannot be taken over; the change was undone.
            In each case no lease is held.
        """
        with self.lock.exclusive():
            self.acquire_locked(member, holder)

    def acquire_locked(self, member: Member, holder: object) -> None:
        """As `acquire`, for callers that hold the lock."""
        try:
            if self.leased.keys() - {member.id}:
                self.recover_abandoned(member)
            self.hold(member, holder)
            self.touch(member)
            is_at_rest = self.is_at_rest(member, holder)
            if is_at_rest:
                self.load_for(member, holder.size if is_own_pass(holder) else None)
            allocated = self.measures.begin_interval(holder, member.managed.device_names)
            if is_at_rest:
                member.note_entry(allocated)
            self.measures.used_by_node(member.id)
        except BaseException:
            self.discard(member, holder)
            raise

    def touch(self, member: Member | SteeredComponent) -> None:
        """Note that a component is used now."""
        member.note_use(next(self.uses), self.event_log.now_s)
        if self.capacity.forecast.note_use(member.id):
            self.look_ahead.follow()

    def hold(self, member: Member, holder: object) -> None:
        """Keep a component from being evicted or replaced. Loads nothing."""
        member.leases.add(holder)
        self.leased[member.id] = member

    def discard(self, member: Member, holder: object) -> None:
        """End a lease without learning from it. Idempotent."""
        member.leases.discard(holder)
        if not member.leases:
            self.leased.pop(member.id, None)

    def is_at_rest(self, member: Member, holder: object) -> bool:
        """Whether no pass of a component other than the holder runs; ends a pass that an interrupt left open."""
        passes = member.managed.passes
        if passes.open is None or passes.open is holder:
            return True
        passes.recover_abandoned()
        return passes.open is None

    def load_for(self, member: Member, size: Size | None) -> None:
        """Load a component at rest, and keep free the memory that its forward needs. Raises as `acquire`.

        Args:
            size: the size of the forward's inputs, if known.
        """
        admission = self.admission
        if self.members.unloading:
            self.idle.unload_used(member.id, moves_hosted=False)
        if member.look is not None:
            member.look()
        if not member.managed.changes.is_steady():
            with host_recordings.paused():
                self.look_closely(member)
        managed = member.managed
        if size is not None and size not in member.settled:
            self.look_ahead.early.make_way(member, size)
        is_settled = size is None or size in member.settled or self.capacity.leaves_enough(member, size)
        if member.is_hosted:
            if member.was_evicted:
                with host_recordings.paused():
                    self.resume(member, size)
            if size is not None and not is_settled:
                with host_recordings.paused():
                    admission.give_headroom(member, size)
        elif not managed.is_loaded or member.planned_in_epoch != self.capacity.epoch or not is_settled:
            with host_recordings.paused():
                self.admit(member, size=size)
        elif member.leaves_free:
            with host_recordings.paused():
                admission.clear_left_free(member)
        if size is not None:
            member.settled.add(size)
        if managed.forwards.check_files is not None:
            managed.forwards.check_files()
        managed.changes.begin_loans()

    def resume(self, member: Member, size: Size | None) -> None:
        """Bring a hosted component, of which blocks were evicted, to a form in which it computes in what it has left.

        Others are evicted if it needs more than it has left. Where not even its least form fits, its host computes with
        it layer by layer, as with its own models. Raises `torch.OutOfMemoryError` as `admit`.
        """
        held = self.admission.held_by(member)
        try:
            self.admit(member, held, size=size)
        except (DoesNotFit, InvalidInput):
            return
        self.admission.note_streaming(member, held)

    def look_closely(self, member: Member) -> None:
        """Take over changes that other code made to a component's module, or refuse them with `UnsafeState`."""
        member.managed.changes.refuse_rivals()
        for lender in member.lenders:  # first, because layers that were added to shared modules belong to the lenders
            if self.members.get(lender.id) is lender and not lender.leases and lender.managed.take_changes():
                self.capacity.outdate_plans()
        if member.managed.take_changes():
            self.capacity.outdate_plans()
        member.managed.changes.tell_undone()
        if member.managed.changes.given_up is not None:
            for holder in [holder for holder in member.leases if isinstance(holder, Pass)]:
                self.discard(member, holder)  # it ends with what managed the component until now
            assert self.pack_anew is not None
            self.pack_anew(member)

    def enter(self, member: Member, asking: MemberManager, current: Pass) -> bool:
        """Acquire a component for a pass; False if its module is now another managed component's, or not managed."""
        with self.lock.exclusive():
            if self.members.get(member.id) is not member or member.managed.manager is not asking:
                return False
            self.acquire_locked(member, current)
            if member.managed.manager is not asking:  # packed anew: the pass begins again there
                self.discard(member, current)
                self.measures.end_interval(current)
                return False
            if member.lenders:
                self.acquire_lenders(member, member.managed)
            return True

    def acquire_lenders(self, member: Member, managed: ManagedComponent) -> None:
        """Load the components whose weights this one borrows, after this one was loaded. Raises as `acquire`."""
        for lender in member.lenders:
            if self.members.get(lender.id) is not lender:
                raise UnsafeState(
                    f"{member.id} uses weights of {lender.id}, which was released: release {member.id}, too"
                )
            for guest in managed.forwards.guests_in(lender.managed.forwards):
                self.acquire_locked(lender, guest)
                member.note_lender_entry(lender)
            if not lender.leases:
                raise UnsafeState(f"{member.id}: {lender.id} got another profile just now; call {member.id} again")

    def recover_abandoned(self, newcomer: Member | None) -> None:
        """End passes that interrupts left open, because their leases would keep unused memory."""
        for member in list(self.leased.values()):
            if member is not newcomer:
                member.managed.passes.recover_abandoned()

    def give_back(self, member: Member, holder: object) -> None:
        """End a lease, and learn how much memory the forward needed beside the weights. Idempotent."""
        with self.lock.exclusive():
            if holder in member.leases:
                self.learn_and_discard(member, holder)
        # During a run this waits for its end, unless the forward failed: the process may exit then.
        if self.capacity.needs.changed or self.capacity.speeds.changed:
            failed = isinstance(holder, Pass) and holder.error is not None
            if failed or not self.event_log.is_running:
                self.remember()

    def learn_and_discard(self, member: Member, holder: object) -> None:
        self.discard(member, holder)
        member.managed.changes.end_loans()
        needed = self.measures.end_interval(holder)
        if isinstance(holder, Guest):  # another component needed that memory
            needed = {}
        for device, num_bytes in needed.items():
            member.note_activations(device, num_bytes)
        if is_own_pass(holder):
            member.note_pass(self.measures.step)
            learn_needs(member, self.capacity, holder, needed)
        if not member.leases:
            learn_times(member, self.capacity)

    @contextmanager
    def lease(self, member: Member) -> Iterator[None]:
        """Hold a lease on a component in the body, for example for a whole sampling run. Loads as `acquire`."""
        holder = object()
        try:
            self.acquire(member, holder)
            yield
        finally:
            member.managed.passes.recover_abandoned()
            self.give_back(member, holder)

    def load_now(self, member: Member) -> None:
        """Load a component for a method that uses its weights, unless this thread runs a pass of it. Keeps no lease.

        Raises as `acquire`. Does nothing if the component was released.
        """
        if self.members.get(member.id) is member and not member.managed.forwards.is_entered():
            with self.lease(member):
                pass

    def admit(self, member: Member, ceilings: Mapping[str, int] | None = None, *, size: Size | None = None) -> None:
        """Plan with the current memory, evict for the plan, and load ([Note: admission]).

        Args:
            ceilings: the most bytes per device that a host allows the component; it takes more only if it could not
                compute otherwise.
            size: the size of the inputs for which it is loaded, if known.
        """
        managed, admission = member.managed, self.admission
        plan = self.sharing.plan(member, computable(member, ceilings or {}), size=size)
        member.settled.clear()
        self.idle.trim(member.id, moves_hosted=False)
        for share in plan.shares:
            if share.device != "cpu":
                device = admission.devices[share.device]
                admission.keep_budgets(device, share.device_bytes, member)
                need_bytes = share.device_bytes - self.ledger.held(member.id, share.device)
                admission.make_room(device, need_bytes, member, keeps_bytes=share.keeps_bytes)
                member.note_foreign(share.device, self.capacity.foreign_bytes(device))
        try:
            to_load = sum(share.to_load(part) for share, part in zip(managed.shares, plan.shares, strict=True))
            self.make_ram(member, plan)
            if managed.source is not None:
                managed.source.keep_pages(self.capacity.has_room_for_pages(plan.file_bytes))
            queued = managed.load(plan, self.show_progress(member, to_load))
        except torch.OutOfMemoryError as error:
            self.event_log.note("error", member.id, 0, plan.shares[0].device, f"out of memory while loading: {error}")
            learn_failed_load(member, self.capacity, plan, error)
            raise
        finally:
            self.note_refusal(member)
            self.measures.sample()
        member.note_planned(self.capacity.epoch)
        if queued:
            note_return(member, self.capacity, plan.shares[0].device)
            where = "&".join(share.device for share in plan.shares)
            resident = sum(len(share.resident) for share in plan.shares)
            reason = f"{resident} of {plan.num_blocks} blocks resident, {plan.precision.name}"
            reason += self.streams_past(member, plan) + self.hidden(member)
            self.event_log.note("load", member.id, queued, where, reason)

    def hidden(self, member: Member) -> str:
        """Return how much of a member was read, and copied to its devices, before it was loaded, and what that took.

        Adds both to the member's totals.
        """
        ahead, early = self.look_ahead.take(member.id), [share.early for share in member.managed.shares]
        copied_bytes, copied_s = sum(each.taken_bytes for each in early), sum(each.taken_s for each in early)
        told = [(ahead.num_bytes, ahead.seconds, "read"), (copied_bytes, copied_s, "on the device")]
        member.note_hidden(ahead.num_bytes + copied_bytes, ahead.seconds + copied_s)
        return "".join(
            f"; {format_bytes(num_bytes)} of it were {done} ahead: {format_seconds(seconds)} hidden"
            for num_bytes, seconds, done in told
            if num_bytes
        )

    def make_ram(self, member: Member, plan: ComponentPlan) -> None:
        """Make room for what rests in its file so far and gets a copy in RAM by this plan, because it streams."""
        before = member.managed.plan
        if plan.in_file == before.in_file:
            return
        self.capacity.make_lockable(max(0, plan.pinned_bytes - before.pinned_bytes), 0)
        reason = "blocks stream now that were resident before: they get a copy in RAM"
        self.event_log.note("plan", member.id, before.file_bytes - plan.file_bytes, "host", reason)

    def streams_past(self, member: Member, plan: ComponentPlan) -> str:
        """Return which idle components a member leaves where they are although it could be resident instead."""
        if all(len(share.resident) == len(share.blocks) for share in plan.shares):
            return ""
        names = dict.fromkeys(idle.component for idle in self.capacity.spared_by(member))
        return f"; streams past {', '.join(names)}, which is needed sooner" if names else ""

    def note_refusal(self, member: Member) -> None:
        """Note, once, that the driver refused to lock as much memory as planned."""
        if member.managed.packing.tell_refusal():
            reason = "the driver refused to page-lock more memory: the rest is pageable, and its copies are synchronous"
            self.event_log.note("plan", member.id, 0, "host", reason)

    def note_read(self, owner: str, num_bytes: int, *, is_written: bool) -> None:
        """Note that a block that rested in its file takes RAM from now on."""
        reason = (
            "a block stays in RAM from now on, not in its file, because other code wrote to its weights"
            if is_written
            else "a block was read into RAM from its file and stays there, because other code uses its weights"
        )
        self.event_log.note("plan", owner, num_bytes, "host", reason)

    def watch(self, watcher: Callable[[str, int, int], None]) -> Callable[[], None]:
        """Call a watcher while components are loaded; returns what ends that, which may be called again."""
        self.watchers.append(watcher)

        def end() -> None:
            if watcher in self.watchers:
                self.watchers.remove(watcher)

        return end

    def show_progress(self, member: Member, total: int) -> Callable[[int], None]:
        """Return a function that is called with the bytes of each step of a loading, and tells the watchers."""
        done = 0

        def show(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            for watcher in list(self.watchers):
                watcher(member.id, done, total)

        return show

    def remember(self) -> None:
        """Write learned needs and times of forwards to their files. If that fails, they are written the next time."""
        if self.needs_file is not None and self.capacity.needs.changed:
            write_needs(self.capacity.needs, self.needs_file)
        if self.speeds_file is not None and self.capacity.speeds.changed:
            write_speeds(self.capacity.speeds, self.speeds_file)

    def learn_all_times(self) -> None:
        """Take what passes have timed of components that do not compute now; the caller holds the lock."""
        for member in list(self.members.values()):
            if not member.leases:
                learn_times(member, self.capacity)


class MemberManager:
    """The manager, as the managed component of one member asks it (`runtime.forward_pass.ComponentManager`)."""

    def __init__(self, leases: Leases, member: Member) -> None:
        self.leases = leases
        self.member = member

    @property
    def lock(self) -> DeferringLock:
        """The manager's lock."""
        return self.leases.lock

    def acquire(self, current: Pass) -> bool:
        """Load the component for a pass and hold a lease; False if another has its module now. Raises as `Leases`."""
        return self.leases.enter(self.member, self, current)

    def give_back(self, current: Pass) -> None:
        """End the lease of a pass. Idempotent."""
        self.leases.give_back(self.member, current)

    def lenders(self) -> Sequence[ManagedComponent]:
        """Return the components whose weights this one borrows, in the same order for all borrowers."""
        member = self.member
        if not member.lenders:
            return ()
        members = self.leases.members
        return [other.managed for other in member.lenders if members.get(other.id) is other]

    def note_read(self, num_bytes: int, *, is_written: bool = False) -> None:
        """Note that a block of ``num_bytes`` stays in RAM because other code uses its weights, or wrote to them."""
        self.leases.note_read(self.member.id, num_bytes, is_written=is_written)


def is_own_pass(holder: object) -> TypeGuard[Pass]:
    """Whether the holder of a lease is a pass of the component's own forward."""
    return isinstance(holder, Pass) and not isinstance(holder, Guest)


def write_needs(needs: Needs, file: NeedsFile) -> None:
    """Write changed needs to their file. If that fails, they stay marked as changed."""
    changed = needs.take_changed()
    if changed and not file.write(changed):
        needs.keep_changed((key, size) for key, size, _ in changed)


def write_speeds(speeds: Speeds, file: SpeedsFile) -> None:
    """Write measured calls to their file. If that fails, they stay marked as changed."""
    changed = speeds.take_changed()
    if changed and not file.write(changed):
        speeds.keep_changed(changed)
