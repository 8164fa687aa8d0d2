"""One manager for all components and devices: who is there, who computes, and what is told of it."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeGuard
from weakref import WeakSet

import torch
from torch import nn

from ..errors import DoesNotFit, InvalidInput, UnsafeState, require
from ..planner.plan import Plan
from ..runtime.forward_pass import Guest, Pass
from ..runtime.input_size import Size
from ..runtime.ledger import Entry, Ledger
from ..runtime.managed_component import ManagedComponent
from ..transfer.devices import Device, list_devices
from .admission import Admission, computable
from .calibration import learn_failed_load, learn_needs, learn_times
from .event_log import EventLog
from .eviction import EvictionPolicy, LeastRecentlyUsed
from .member import Member
from .needs import Needs
from .needs_file import NeedsFile
from .registry import Registry
from .report import ComponentState, DeviceReport, Report, component_report, device_report
from .watermark import Watermark, default_watermark

__all__ = ["MemoryManager", "Watermark", "default_watermark"]


class Inside:
    """Marks the lock of `MemoryManager.exclusive` as held; weakly referenced, so an interrupt cannot leak it."""


class MemoryManager:
    """Admits, evicts and reports; what changes who is there, and where, is serialised by one lock.

    `bytes_moved`, `device_reports`, `subscribe` and `watch_loading` take no lock: they may be called in the middle of
    anything. Listeners and watchers are called while the lock is held.

    Args:
        needs_file: where what forwards need is remembered; None: only here.
    """

    def __init__(self, policy: EvictionPolicy | None = None, needs_file: NeedsFile | None = None) -> None:
        self.lock = threading.RLock()
        self.inside: WeakSet[Inside] = WeakSet()
        self.released: list[Member] = []
        self.ledger = Ledger(self.count_bytes)
        self.devices: dict[str, Device] = {device.name: device for device in list_devices()}
        self.members: dict[str, Member] = {}
        self.watchers: list[Callable[[str, int, int], None]] = []
        self.event_log = EventLog(list(self.devices.values()), self.ledger, self.bytes_moved)
        self.admission = Admission(
            self.devices, self.members, policy or LeastRecentlyUsed(), self.ledger, self.event_log
        )
        self.registry = Registry(
            self.admission,
            exclusive=self.exclusive,
            enter=self.enter,
            give_back=self.give_back,
            show_progress=self.show_progress,
        )
        self.uses = itertools.count(1)
        self.needs_file = needs_file
        if needs_file is not None:
            self.admission.needs.restore(needs_file.read())
            weakref.finalize(self, write_needs, self.admission.needs, needs_file)  # also as the process ends

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock; on leaving it, remove what was released meanwhile.

        A garbage collection may release a component in the middle of anything, in the thread that holds the lock:
        such a release waits until the books are in a state to take it.
        """
        with self.lock:
            self.remove_released()
            inside = Inside()
            try:
                self.inside.add(inside)
                yield
            finally:
                self.inside.discard(inside)
                self.remove_released()

    def remove_released(self) -> None:
        """Detach all that was released. Raises the first `InvalidInput` of them when it is through."""
        errors = []
        while not self.inside and self.released:
            try:
                self.registry.detach(self.released.pop())
            except InvalidInput as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def bytes_moved(self) -> int:
        """Return the bytes of weights copied to devices since the start."""
        members = list(self.members.values())  # in one step: another thread may add or remove some
        return self.registry.moved_by_released + sum(member.managed.bytes_moved for member in members)

    def count_bytes(self) -> Counter[Entry]:
        """Return what components have where, counted by them, not read from the books; for `Ledger.check`."""
        total: Counter[Entry] = Counter()
        for member in list(self.members.values()):
            for place, kind, num_bytes in member.managed.count_bytes():
                if num_bytes:
                    total[place, member.id, kind] += num_bytes
        return total

    def set_watermark(self, device: str, low_bytes: int, high_bytes: int) -> None:
        """Set the VRAM watermark (keep free) of one accelerator, or of all with ``*``; takes effect at once.

        Raises:
            InvalidInput: an unknown device, or marks that are not 0 <= low <= high <= total.
        """
        with self.exclusive():
            self.admission.set_watermark(device, low_bytes, high_bytes)

    # -- members

    def add(self, modules: dict[str, nn.Module], **choices: Any) -> tuple[list[Member], Plan]:
        """Take modules under management: plan, pack in host memory, hook; all of them or none (`Registry.add`)."""
        with self.exclusive():
            return self.registry.add(modules, **choices)

    def replace(self, members: Sequence[Member], **choices: Any) -> Plan:
        """Give components another profile, placement or precision, where they are (`Registry.replace`)."""
        with self.exclusive():
            self.recover_abandoned(None)
            return self.registry.replace(members, **choices)

    def remove(self, member: Member) -> None:
        """Release a component: nothing of it stays on a device, in the books or in hooks. Idempotent.

        Never waits: a garbage collection may call this in a thread that the holder of the lock waits for. Then the
        component is removed when the lock is released, before another thread gets it.
        """
        if sys.is_finalizing():  # torch cannot be called any more, and all memory goes with the process
            return
        self.released.append(member)
        if self.lock.acquire(blocking=False):
            try:
                self.remove_released()
            finally:
                self.lock.release()

    def has(self, member: Member) -> bool:
        """Whether a component is under management, and not released."""
        return self.members.get(member.id) is member

    def refuse_computing(self, members: Iterable[Member]) -> None:
        """Raise `UnsafeState` if any of these computes now; the caller holds the lock."""
        busy = [member.id for member in members if member.managed.passes.is_busy()]
        if busy:
            raise UnsafeState(f"{', '.join(busy)}: computes now; release it after that")

    def refuse_lending(self, members: Collection[Member]) -> None:
        """Refuse to release components while others borrow their weights (`Registry.refuse_lending`)."""
        self.registry.refuse_lending(members)

    def is_lent(self, member: Member) -> bool:
        """Whether other components borrow weights of this one."""
        return bool(self.admission.borrowers(member))

    def release_all(self) -> None:
        """Release every component.

        Raises:
            UnsafeState: one of them computes; none is released.
        """
        with self.exclusive():
            self.refuse_computing(self.members.values())
            for member in sorted(self.members.values(), key=lambda member: member.rank, reverse=True):
                self.remove(member)

    # -- leases

    def acquire(self, member: Member, holder: object) -> None:
        """Admit a component and hold a lease on it; loads what its plan wants and evicts for that.

        Where a pass is under way that is not the holder, it stays as it is: blocks do not move under what computes. So
        does a hosted component, whose host loads it.

        Args:
            holder: for what; gives the lease back.

        Raises:
            DoesNotFit, InvalidInput: no plan fits the device, or the budget; what was on devices stays there.
            torch.OutOfMemoryError, or whatever ends the loading: nothing of the component is on a device.
            UnsafeState: the dtype of the weights was changed; that is undone.
            In each case no lease is held.
        """
        with self.exclusive():
            try:
                member.leases.add(holder)
                member.last_use, member.last_use_s = next(self.uses), self.event_log.now_s
                self.recover_abandoned(member)
                is_at_rest = self.is_at_rest(member, holder)
                if is_at_rest:
                    self.load_for(member, holder.size if is_own_pass(holder) else None)
                allocated = self.event_log.begin_interval(holder, member.managed.device_names)
                if is_at_rest:
                    member.allocated_at_entry = allocated
                self.event_log.used_by_node(member.id)
            except BaseException:
                member.leases.discard(holder)
                raise

    def is_at_rest(self, member: Member, holder: object) -> bool:
        """Whether no pass of a component is under way but the holder; ends one that an interrupt left open."""
        passes = member.managed.passes
        if passes.open is not holder:
            passes.recover_abandoned()
        return passes.open is None or passes.open is holder

    def load_for(self, member: Member, size: Size | None) -> None:
        """Load what a component at rest will compute with, and keep free what it needs. Raises as `acquire`.

        Args:
            size: that of its input, where it is known.
        """
        if member.look is not None:
            member.look()
        if member.managed.moves is not None:
            member.managed.refuse_rivals()
        for lender in member.lenders:  # first: layers that were added to shared parts belong to them
            is_here = self.members.get(lender.id) is lender
            if is_here and not lender.leases and lender.managed.take_changes():
                self.admission.epoch += 1
        if member.managed.take_changes():
            self.admission.epoch += 1
        if member.managed.moves is not None:
            member.managed.moves.tell_undone()
        is_settled = size is None or size in member.settled or self.admission.leaves_enough(member, size)
        if member.is_hosted:
            if size is not None and not is_settled:
                self.admission.give_headroom(member, size)
        elif not member.managed.is_loaded or member.planned_in_epoch != self.admission.epoch or not is_settled:
            self.admit(member, size=size)
        else:
            self.admission.clear_left_free(member)
        if size is not None:
            member.settled.add(size)
        if member.managed.moves is not None:
            member.managed.moves.swaps.begin()

    def enter(self, member: Member, managed: ManagedComponent, current: Pass) -> bool:
        """Acquire a component for a pass; False if another managed component has it now, or none."""
        with self.exclusive():
            if self.members.get(member.id) is not member or member.managed is not managed:
                return False
            self.acquire(member, current)
            self.acquire_lenders(member, managed)
            return True

    def acquire_lenders(self, member: Member, managed: ManagedComponent) -> None:
        """Load the components that a pass of this one borrows from, after this one was loaded. Raises as `acquire`."""
        for lender in member.lenders:
            if self.members.get(lender.id) is not lender:
                raise UnsafeState(f"{member.id} has weights of {lender.id}, which was released: release it, too")
            forwards = lender.managed.forwards
            for guest in (guest for host, guest in managed.forwards.guests if host is forwards):
                self.acquire(lender, guest)
                member.allocated_at_entry |= lender.allocated_at_entry  # the lender takes some of what was free
            if not lender.leases:
                raise UnsafeState(f"{member.id}: {lender.id} got another profile just now; call it again")

    def recover_abandoned(self, newcomer: Member | None) -> None:
        """End passes that interrupts left open: their leases would keep memory that is no longer used."""
        for member in self.members.values():
            if member is not newcomer and member.leases:
                member.managed.passes.recover_abandoned()

    def give_back(self, member: Member, holder: object) -> None:
        """Return the lease and learn what the forward needed beside the weights. Idempotent."""
        self.learn_and_give_back(member, holder)
        # In a run at its end; but a process whose forward failed may end here.
        failed = isinstance(holder, Pass) and holder.error is not None
        if failed or not self.event_log.is_running:
            self.remember()

    def learn_and_give_back(self, member: Member, holder: object) -> None:
        with self.exclusive():
            if holder not in member.leases:
                return
            member.leases.discard(holder)
            if member.managed.moves is not None:
                member.managed.moves.swaps.end()
            needed = self.event_log.end_interval(holder)
            if isinstance(holder, Guest):  # another component needed that memory
                needed = {}
            for device, num_bytes in needed.items():
                member.activation_bytes[device] = max(member.activation_bytes[device], num_bytes)
                self.event_log.needed_by_node(device, num_bytes)
            if is_own_pass(holder):
                learn_needs(member, self.admission, holder, needed)
            if not member.leases:
                learn_times(member, self.admission)

    @contextmanager
    def lease(self, member: Member) -> Iterator[None]:
        """Hold a component for a while, such as a whole sampling run, and loaded as `acquire` does it."""
        holder = object()
        try:
            self.acquire(member, holder)
            yield
        finally:
            member.managed.passes.recover_abandoned()
            self.give_back(member, holder)

    def load_now(self, member: Member) -> None:
        """Load a component for a method that uses its weights, unless this thread has a pass open; keeps no lease.

        Raises as `acquire`; does nothing where it was released.
        """
        if self.members.get(member.id) is member and not member.managed.forwards.is_entered():
            with self.lease(member):
                pass

    def admit(self, member: Member, ceilings: Mapping[str, int] | None = None, *, size: Size | None = None) -> None:
        """Plan with what there is now, clear room, load ([Note: admission]).

        Args:
            ceilings: the most that the component should take of a device, where a host says so; it takes more only
                if it could not compute otherwise.
            size: that of the input that it comes for, where it is known.
        """
        managed = member.managed
        plan = self.admission.replan(member, computable(member, ceilings or {}), size=size)
        member.settled.clear()
        for share in plan.shares:
            if share.device != "cpu":
                device = self.devices[share.device]
                self.admission.keep_budget(device, share.device_bytes, member)
                need_bytes = share.device_bytes - self.ledger.held(member.id, share.device)
                self.admission.make_room(device, need_bytes, member, keeps_bytes=share.keeps_bytes)
                member.foreign_at_plan[share.device] = self.admission.foreign_bytes(device)
        try:
            to_load = sum(share.to_load(part) for share, part in zip(managed.shares, plan.shares, strict=True))
            queued = managed.load(plan, self.show_progress(member, to_load))
        except torch.OutOfMemoryError as error:
            self.event_log.note("error", member.id, 0, plan.shares[0].device, f"out of memory while loading: {error}")
            learn_failed_load(member, self.admission, plan, error)
            raise
        finally:
            self.registry.note_refusal(member)
            self.event_log.sample()
        member.planned_in_epoch = self.admission.epoch
        if queued:
            where = "&".join(share.device for share in plan.shares)
            resident = sum(len(share.resident) for share in plan.shares)
            reason = f"{resident} of {plan.num_blocks} blocks resident, {plan.precision.value}"
            self.event_log.note("load", member.id, queued, where, reason)

    def watch_loading(self, watcher: Callable[[str, int, int], None]) -> Callable[[], None]:
        """Call the watcher with component, bytes done and bytes in all, and return what ends that.

        It hears of each block that is loaded, and, as a module comes under management or gets another profile, of each
        that is packed into host memory, every 4 MiB or sooner of what is read from files for that. What it raises
        cancels it and comes out of the forward that needed the loading, or out of the call, after which the module is
        as it was, or has its old profile. Weights that were packed in eight bits by then come back widened.
        """
        require(watcher, Callable, what="watcher", allowed="a function of component, bytes done and bytes in all")  # type: ignore[arg-type]
        self.watchers.append(watcher)
        return partial(discard, self.watchers, watcher)

    def show_progress(self, member: Member, total: int) -> Callable[[int], None]:
        """Return what is called with the bytes of each step, and tells the watchers."""
        done = 0

        def show(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            for watcher in list(self.watchers):
                watcher(member.id, done, total)

        return show

    def load(self, member: Member, ceilings: Mapping[str, int] | None = None) -> None:
        """Load a hosted component now, within the ceilings that its host gives.

        Raises as `acquire`.
        """
        with self.exclusive():
            member.last_use, member.last_use_s = next(self.uses), self.event_log.now_s
            self.admit(member, ceilings)

    def planned_bytes(self, member: Member, device: str) -> int:
        """Return the bytes that a component would take of a device now: of the free, its own and the idle ones."""
        with self.exclusive():
            try:
                return self.admission.replan(member).device_bytes.get(device, 0)
            except (DoesNotFit, InvalidInput):
                return member.managed.component.weight_bytes

    def unload(self, member: Member) -> None:
        """Take a hosted component off every device; it stays packed in host memory."""
        with self.exclusive():
            held = self.ledger.places(member.id)
            if member.managed.unload():
                for share in member.managed.shares:
                    name = share.device.name
                    self.event_log.note("evict", member.id, held.get(name, 0), name, "its host took it off the device")
            self.admission.epoch += 1
            self.event_log.sample()

    def free_memory(
        self,
        device: str,
        num_bytes: int,
        reason: str,
        *,
        exclude: Collection[Member] = (),
        allow_unrunnable: bool = True,
    ) -> int:
        """Evict idle components until so many bytes of a device are free again, as `Admission.free_memory`."""
        with self.exclusive():
            return self.admission.free_memory(
                device, num_bytes, reason, exclude=exclude, allow_unrunnable=allow_unrunnable
            )

    # -- runs, nodes, report

    def begin_run(self, run_id: str, name: str) -> None:
        """A prompt execution begins; plans are looked at again with the memory there is now."""
        with self.exclusive():
            self.recover()
            self.admission.epoch += 1
            for member in self.members.values():
                self.admission.turn(member)
            self.event_log.begin_run(run_id, name)

    def end_run(self) -> None:
        with self.exclusive():
            self.recover()
            self.event_log.end_run()
            self.ledger.check()
        self.remember()

    def remember(self) -> None:
        """Write down what was learned of the needs of forwards; where that is not possible now, the next time."""
        if self.needs_file is not None and self.admission.needs.changed:
            write_needs(self.admission.needs, self.needs_file)

    def recover(self) -> None:
        """End what interrupts left open; called where nothing can be computing."""
        for member in self.members.values():
            member.managed.passes.recover_for(None)
            member.managed.settle_books()

    def begin_node(self, node_id: str, title: str, *, workflow_id: str | None = None) -> None:
        with self.exclusive():
            self.event_log.begin_node(node_id, title, workflow_id)

    def end_node(self) -> dict[str, Any]:
        """Close the open node; returns its report and sends it to the listeners."""
        with self.exclusive():
            node = self.event_log.node
            if node is None:
                return {}
            tiers: Counter[str] = Counter()
            for member in self.members.values():
                # Equal node ids in two workflows are two nodes.
                if (member.node_id, member.workflow_id) == (node.node_id, node.workflow_id):
                    tiers.update(self.ledger.places(member.id))
            report = self.event_log.end_node(node, dict(tiers))
            told = asdict(report)
            devices = [asdict(device) for device in self.device_reports()]
            self.event_log.tell({"type": "node", **told, "devices": devices})
            return told

    def subscribe(self, listener: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Call the listener with every node's report and every eviction; returns what ends that."""
        require(listener, Callable, what="listener", allowed="a function of one dict")  # type: ignore[arg-type]
        self.event_log.listeners.append(listener)
        return partial(discard, self.event_log.listeners, listener)

    def device_reports(self) -> list[DeviceReport]:
        """Return what each device has in all, free, and of managed weights; asks the driver."""
        none = Watermark(low_bytes=0, high_bytes=0)
        return [
            device_report(
                device,
                none if device.is_cpu else self.admission.watermark(name),
                self.ledger,
                self.event_log.peaks[name],
            )
            for name, device in self.devices.items()
        ]

    def report(self) -> dict[str, Any]:
        """Return the versioned report of everything so far, JSON-able. The lock is held only while that is copied."""
        with self.exclusive():
            states = [ComponentState(member) for member in self.members.values()]
            books, devices, log = self.ledger.copy(), self.device_reports(), self.event_log
            nodes, runs, events, timeline = list(log.nodes), list(log.runs), list(log.events), log.timeline.copy()
        return Report(
            devices=devices,
            components=[component_report(state, books) for state in states],
            nodes=nodes,
            runs=runs,
            events=events,
            samples=timeline.samples(),
        ).to_json()


def is_own_pass(holder: object) -> TypeGuard[Pass]:
    """Whether the holder of a lease is a pass of the component's own forward."""
    return isinstance(holder, Pass) and not isinstance(holder, Guest)


def write_needs(needs: Needs, file: NeedsFile) -> None:
    """Write down what has changed; what cannot be written now stays to be written."""
    changed = needs.take_changed()
    if changed and not file.write(changed):
        needs.changed |= {(key, size) for key, size, _ in changed}


def discard(listeners: list[Any], listener: object) -> None:
    """Remove a listener; once is enough."""
    if listener in listeners:
        listeners.remove(listener)
