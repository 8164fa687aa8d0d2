"""One manager for all components and devices: the lock, members, leases, runs and nodes, the report."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any

from torch import nn

from ..errors import DoesNotFit, InvalidInput, UnsafeState, require
from ..planner.capacity import Machine
from ..planner.plan import ComponentPlan, Plan
from ..runtime.devices.ledger import Entry, Ledger
from ..runtime.forwards.deferring_lock import DeferringLock
from ..transfer.devices import Device, list_devices
from .admission import Admission
from .event_log import EventLog
from .eviction import UNLOADED_BY_HOST, EvictionPolicy, LeastRecentlyUsed
from .leases import Leases, write_needs
from .live_capacity import LiveCapacity
from .measures import Measures
from .member import Member, Members
from .needs_file import NeedsFile
from .registry import Registry
from .report import (
    ComponentState,
    DeviceReport,
    Event,
    NodeReport,
    Report,
    RunReport,
    component_report,
    device_report,
)
from .watermark import Watermark, default_watermark

__all__ = ["MemoryManager", "Watermark", "default_watermark"]


class MemoryManager:
    """Admits, evicts and reports; one lock serialises all that changes which component is where.

    `bytes_moved`, `device_reports`, `plans`, `subscribe` and `watch_loading` take no lock: they may be called in the
    middle of anything. Listeners and watchers are called while the lock is held.

    Args:
        needs_file: where what forwards need is remembered; None: only here.
    """

    def __init__(self, policy: EvictionPolicy | None = None, needs_file: NeedsFile | None = None) -> None:
        self.lock = DeferringLock()
        self.ledger = Ledger(self.count_bytes)
        self.devices: dict[str, Device] = {device.name: device for device in list_devices()}
        self.members = Members()
        self.event_log = EventLog()
        self.measures = Measures(list(self.devices.values()), self.ledger, self.event_log, self.bytes_moved)
        self.capacity = LiveCapacity(self.devices, self.members, self.measures)
        self.admission = Admission(self.capacity, policy or LeastRecentlyUsed())
        self.leases = Leases(self.lock, self.admission, needs_file)
        self.registry = Registry(self.capacity, self.leases)
        if needs_file is not None:
            self.capacity.needs.restore(needs_file.read())
            weakref.finalize(self, write_needs, self.capacity.needs, needs_file)  # also as the process ends

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the lock; on leaving it, remove what was released meanwhile."""
        return self.lock.exclusive()

    @property
    def is_busy_here(self) -> bool:
        """Whether this thread is in the middle of a load, an eviction or an entry in the ledger."""
        return self.lock.is_held_here()

    def bytes_moved(self) -> int:
        """Return the bytes of weights copied to devices since the start."""
        members = list(self.members.values())  # in one step: another thread may add or remove some
        return self.registry.moved_by_released + sum(member.managed.bytes_moved for member in members)

    def count_bytes(self) -> Counter[Entry]:
        """Return the bytes of each component in each place as the components count them, for `Ledger.check`."""
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
            self.leases.recover_abandoned(None)
            return self.registry.replace(members, **choices)

    def remove(self, member: Member) -> None:
        """Release a component: nothing of it stays on a device, in the ledger or in hooks. Idempotent.

        Never waits: a garbage collection may call this in a thread that the holder of the lock waits for. Then the
        component is removed when the lock is released, before another thread gets it.
        """
        if not sys.is_finalizing():  # else torch cannot be called any more, and all memory goes with the process
            self.lock.run_or_defer(partial(self.registry.detach, member))

    def discard(self, member: Member) -> None:
        """Release a component whose module is not used any more: it gets no weights back, unless it lends some."""
        if not self.is_lent(member):
            member.discard_weights()
        self.remove(member)

    def has(self, member: Member) -> bool:
        """Whether a component is under management, and not released."""
        return self.members.has(member)

    def refuse_computing(self, members: Iterable[Member]) -> None:
        """Raise `UnsafeState` if any of these computes now; the caller holds the lock."""
        busy = [member.id for member in members if member.managed.is_computing()]
        if busy:
            raise UnsafeState(f"{', '.join(busy)}: computes now; release it after that")

    def refuse_lending(self, members: Collection[Member]) -> None:
        """Refuse to release components while others borrow their weights (`SharedWeights.refuse_lending`)."""
        self.registry.sharing.refuse_lending(members)

    def is_lent(self, member: Member) -> bool:
        """Whether other components borrow weights of this one."""
        return bool(self.members.borrowers(member))

    def release_all(self) -> None:
        """Release every component.

        Raises:
            UnsafeState: one of them computes; none is released.
        """
        with self.exclusive():
            self.refuse_computing(self.members.values())
            for member in sorted(self.members.values(), key=lambda member: member.rank, reverse=True):
                self.remove(member)

    def plans(self) -> dict[str, ComponentPlan]:
        """Return the plan of every component by its id; takes no lock."""
        return {member.id: member.managed.plan for member in list(self.members.values())}

    def machine(self, *, freed_bytes: int = 0, is_hosted: bool = False) -> Machine:
        """Return what a newcomer may plan with now, in live numbers (`LiveCapacity.machine`)."""
        with self.exclusive():
            return self.capacity.machine(None, freed_bytes=freed_bytes, is_hosted=is_hosted)

    # -- leases

    def acquire(self, member: Member, holder: object) -> None:
        """Admit a component and hold a lease on it (`Leases.acquire`)."""
        self.leases.acquire(member, holder)

    def give_back(self, member: Member, holder: object) -> None:
        """Return a lease. Idempotent."""
        self.leases.give_back(member, holder)

    def lease(self, member: Member) -> AbstractContextManager[None]:
        """Hold a component for a while, such as a whole sampling run, and loaded as `acquire` does it."""
        return self.leases.lease(member)

    def hold(self, member: Member, holder: object) -> None:
        """Keep a component from being evicted or replaced until `let_go`. Loads nothing."""
        with self.exclusive():
            self.leases.hold(member, holder)

    def let_go(self, member: Member, holder: object) -> None:
        """End what `hold` began. Idempotent."""
        with self.exclusive():
            self.leases.discard(member, holder)

    def load_now(self, member: Member) -> None:
        """Load a component for a method that uses its weights (`Leases.load_now`)."""
        self.leases.load_now(member)

    def watch_loading(self, watcher: Callable[[str, int, int], None]) -> Callable[[], None]:
        """Call the watcher with component, bytes done and bytes in all; returns a function that ends this.

        It is called for each block that is loaded. When a module is managed or gets another profile, it is called for
        each block that is packed into host memory, and while files are read for that, at least every 4 MiB. An error
        that the watcher raises cancels the loading or packing. The forward or the call that needed it raises the same
        error; the module is then as it was before, or has its old profile. Encoded weights come back decoded.
        """
        require(watcher, Callable, what="watcher", allowed="a function of component, bytes done and bytes in all")  # type: ignore[arg-type]
        return self.leases.watch(watcher)

    def load(self, member: Member, ceilings: Mapping[str, int] | None = None) -> None:
        """Load a hosted component now, within the ceilings that its host gives.

        Raises as `acquire`.
        """
        with self.exclusive():
            self.leases.touch(member)
            self.leases.admit(member, ceilings)

    def planned_bytes(self, member: Member, device: str) -> int:
        """Return the bytes that a component would take of a device now: of the free, its own and the idle ones."""
        with self.exclusive():
            try:
                return self.capacity.replan(member).device_bytes.get(device, 0)
            except (DoesNotFit, InvalidInput):
                return member.managed.component.weight_bytes

    def unload(self, member: Member) -> None:
        """Take a hosted component off every device; it stays packed in host memory."""
        with self.exclusive():
            held = self.ledger.bytes_by_place(member.id)
            if member.managed.unload():
                for share in member.managed.shares:
                    name = share.device.name
                    self.event_log.note("evict", member.id, held.get(name, 0), name, UNLOADED_BY_HOST)
            self.capacity.outdate_plans()
            self.measures.sample()

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

    def free_idle(self, reason: str) -> dict[str, int]:
        """Evict every idle component and return the driver its memory; returns the bytes freed of each accelerator."""
        freed = {}
        for device in self.devices.values():
            if not device.is_cpu:
                freed[device.name] = self.free_memory(device.name, device.total_bytes(), reason)
                device.empty_cache()
        return freed

    # -- runs, nodes, report

    def begin_run(self, run_id: str, name: str) -> None:
        """A prompt execution begins; plans are looked at again with the memory there is now."""
        with self.exclusive():
            self.recover()
            self.capacity.outdate_plans()
            for member in self.members.values():
                self.capacity.end_run(member)
            self.measures.begin_run(run_id, name)

    def end_run(self) -> None:
        with self.exclusive():
            self.recover()
            self.measures.end_run()
            self.ledger.check()
        self.leases.remember()

    def recover(self) -> None:
        """End what interrupts left open; called where nothing can be computing."""
        for member in self.members.values():
            member.managed.passes.recover_for(None)
            member.managed.settle_books()

    def begin_node(self, node_id: str, title: str, *, workflow_id: str | None = None) -> None:
        with self.exclusive():
            self.measures.begin_node(node_id, title, workflow_id)

    def end_node(self) -> dict[str, Any]:
        """Close the open node; returns its report and sends it to the listeners."""
        with self.exclusive():
            node = self.measures.node
            if node is None:
                return {}
            tiers: Counter[str] = Counter()
            for member in self.members.values():
                # Equal node ids in two workflows are two nodes.
                if (member.node_id, member.workflow_id) == (node.node_id, node.workflow_id):
                    tiers.update(self.ledger.bytes_by_place(member.id))
            report = self.measures.end_node(node, dict(tiers))
            told = asdict(report)
            devices = [asdict(device) for device in self.device_reports()]
            self.event_log.tell({"type": "node", **told, "devices": devices})
            return told

    def subscribe(
        self, listener: Callable[[dict[str, Any]], None], *, unless_equal: bool = False
    ) -> Callable[[], None]:
        """Call the listener with every node's report and every eviction; returns what ends that.

        Args:
            unless_equal: where a listener that equals this one is subscribed, that one stays the only one.
        """
        require(listener, Callable, what="listener", allowed="a function of one dict")  # type: ignore[arg-type]
        return self.event_log.subscribe(listener, unless_equal=unless_equal)

    def device_reports(self) -> list[DeviceReport]:
        """Return what each device has in all, free, and of managed weights; asks the driver."""
        none = Watermark(low_bytes=0, high_bytes=0)
        return [
            device_report(
                device,
                none if device.is_cpu else self.capacity.watermarks.of(name),
                self.ledger,
                self.measures.peaks[name],
            )
            for name, device in self.devices.items()
        ]

    def report(self) -> dict[str, Any]:
        """Return the versioned report of everything so far, JSON-able. The lock is held only while that is copied."""
        with self.exclusive():
            log = self.event_log
            now, timeline = self.report_now(log.nodes, log.runs, log.events), log.timeline.copy()
        return replace(now(), samples=timeline.samples()).to_json()

    def recent_report(self, number: int) -> dict[str, Any]:
        """Return the report with only so many of the last nodes, runs and events, and without the timeline.

        Costs the same after one node as after ten thousand.
        """
        with self.exclusive():
            log = self.event_log
            now = self.report_now(*(newest(entries, number) for entries in (log.nodes, log.runs, log.events)))
        return now().to_json()

    def report_now(
        self, nodes: Iterable[NodeReport], runs: Iterable[RunReport], events: Iterable[Event]
    ) -> Callable[[], Report]:
        """Copy what changes, and return what makes the report of it without the lock. The caller holds the lock."""
        states = [ComponentState(member) for member in self.members.values()]
        ledger, devices = self.ledger.copy(), self.device_reports()
        copied = {"nodes": list(nodes), "runs": list(runs), "events": list(events)}

        def report() -> Report:
            components = [component_report(state, ledger) for state in states]
            return Report(devices=devices, components=components, samples=[], **copied)  # type: ignore[arg-type]

        return report


def newest(entries: deque[Any], number: int) -> list[Any]:
    """Return the last ``number`` entries, the oldest first."""
    found = list(islice(reversed(entries), number))
    found.reverse()
    return found
