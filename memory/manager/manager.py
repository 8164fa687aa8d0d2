"""One manager for all components and devices: the lock, members, leases, runs and nodes, the report."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import DoesNotFit, InvalidInput, UnsafeState, require
from ..planner.capacity import Machine
from ..planner.plan import ComponentPlan, Plan
from ..runtime.devices.ledger import Entry, Ledger
from ..runtime.forwards.deferring_lock import DeferringLock
from ..runtime.forwards.recording_pauses import host_recordings
from ..transfer.devices import Device, list_devices
from ..weights.file_origin import FileIdentity, Origin
from ..weights.loading import Loading
from .admission import Admission
from .attacher import Attacher
from .card_sharing import CardSharing
from .caretaker import RETRY_BUSY_S, Caretaker
from .event_log import EventLog
from .forecast import KnownComponent
from .growth import Growth
from .hosting import Hosting
from .idle_unloading import IdleUnloading
from .known_loadings import KeptOfLoading
from .leases import Leases, write_needs, write_speeds
from .lending import Lending
from .live_capacity import LiveCapacity
from .measures import Measures
from .member import Member
from .members import Members
from .needs_file import NeedsFile
from .observed import Observed
from .policies.candidate import EvictionPolicy
from .policies.next_use import NextUse
from .recovery import Recovery
from .registry import Registry
from .report import DeviceReport
from .reporter import Reporter
from .runs_file import RUNS_FILE_NAME, RunsFile
from .speeds_file import SPEEDS_FILE_NAME, SpeedsFile
from .steered import Steered
from .thrashing import note_uses_of_steered
from .user_commands import UserCommands
from .vae_room import VaeRoom
from .watermark import Watermark, default_watermark

__all__ = ["MemoryManager", "Watermark", "default_watermark"]


class MemoryManager:
    """Admits, evicts and reports; one lock serialises all that changes which component is where.

    `bytes_moved`, `device_reports`, `plans`, `subscribe` and `watch_loading` take no lock: they may be called in the
    middle of anything. Listeners and watchers are called while the lock is held.

    Args:
        needs_file: where what forwards need is remembered; None: only here.
        devices: what is managed; None: the CPU and every accelerator. Two names may stand for one device.
        shared_folder: where processes that use the same devices tell each other what they use and need of them, see
            [Note: card sharing] in `card_sharing.py`; None: others are not seen.
    """

    def __init__(
        self,
        policy: EvictionPolicy | None = None,
        needs_file: NeedsFile | None = None,
        devices: Iterable[Device] | None = None,
        shared_folder: Path | None = None,
    ) -> None:
        self.lock = DeferringLock()
        self.ledger = Ledger(self.count_bytes)
        self.devices: dict[str, Device] = {
            device.name: device for device in (list_devices() if devices is None else devices)
        }
        self.members = Members()
        self.event_log = EventLog()
        self.steered = Steered(self.members, self.event_log)
        self.observed = Observed(self.members)
        self.measures = Measures(
            list(self.devices.values()),
            self.ledger,
            self.steered,
            self.observed,
            self.event_log,
            self.bytes_moved,
            self.seconds_waited,
        )
        policy = policy or NextUse()
        self.capacity = LiveCapacity(self.devices, self.members, self.steered, self.measures, policy)
        self.admission = Admission(self.capacity, policy)
        self.growth = Growth(self.members, self.steered, self.event_log, *stored_runs(needs_file))
        self.idle = IdleUnloading(self.admission)
        self.sharing = CardSharing(self.admission)
        speeds_file = stored_speeds(needs_file)
        self.leases = Leases(self.lock, self.admission, self.idle, self.sharing, needs_file, speeds_file)
        self.kept = self.capacity.kept
        self.attacher = Attacher(self.capacity, self.leases)
        self.registry = Registry(self.capacity, self.leases, self.attacher)
        self.recovery = Recovery(self.leases)
        self.lending = Lending(self.admission)
        self.caretaker = Caretaker(self.lock, self.leases, self.lending, self.idle, self.sharing)
        self.hosting = Hosting(self.leases, self.observed, self.sharing)
        self.commands = UserCommands(self.leases, self.registry, self.caretaker)
        self.vae_room = VaeRoom(self.leases)
        self.reporter = Reporter(self.capacity, self.measures)
        if needs_file is not None:
            self.capacity.needs.restore(needs_file.read())
            weakref.finalize(self, write_needs, self.capacity.needs, needs_file)  # also as the process ends
        if speeds_file is not None:
            self.capacity.speeds.restore(speeds_file.read().items())
            self.capacity.speeds.note_problem(speeds_file.problem)
            weakref.finalize(self, write_speeds, self.capacity.speeds, speeds_file)
        if shared_folder is not None:
            self.sharing.join(shared_folder)
            weakref.finalize(self, self.capacity.neighbours.leave)
            self.caretaker.alarm.set(self.caretaker.look())

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
        return self.attacher.moved_by_released + sum(member.managed.bytes_moved for member in members)

    def seconds_waited(self) -> float:
        """Return the seconds for which computing waited for copies since the start; for the thread that computes."""
        members = list(self.members.values())
        return self.attacher.waited_by_released_s + sum(member.managed.read_waits() for member in members)

    def count_bytes(self) -> Counter[Entry]:
        """Return the bytes of each component in each place as the components count them, for `Ledger.check`."""
        total: Counter[Entry] = Counter()
        for member in list(self.members.values()):
            for place, kind, num_bytes in member.managed.count_bytes():
                if num_bytes:
                    total[place, member.id, kind] += num_bytes
        return total + self.kept.count_bytes()

    def set_watermark(self, device: str, low: int | str, high: int | str) -> None:
        """Set the VRAM watermark (keep free) of one accelerator, of all (``*``) or of the RAM (``host``); at once.

        Args:
            low, high: bytes, or text such as ``512MiB`` or ``10%`` of the total.

        Raises:
            InvalidInput: an unknown device, or marks that are not 0 <= low <= high <= total.
        """
        with self.exclusive():
            self.admission.set_watermark(device, low, high)
            self.sharing.exchange()

    def look(self) -> float | None:
        """Do what is due now, as the alarm does (`Caretaker.look`)."""
        return self.caretaker.look()

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
            self.lock.run_or_defer(partial(self.attacher.detach, member))

    def discard(self, member: Member) -> None:
        """Release a component whose module is not used any more: it gets no weights back, unless it lends some."""
        if not self.is_lent(member):
            member.discard_weights()
        self.remove(member)

    def find_kept(self, file: FileIdentity, taken: Container[int] = ()) -> dict[Origin, torch.Tensor]:
        """Return the weights of a file that are kept (`KeptWeights.find`)."""
        with self.exclusive():
            found = self.kept.find(file, taken)
            self.kept.note_reuse(found)
            return found

    def find_loaded(self, loading: Loading) -> KeptOfLoading:
        """Return the kept weights for a module that another library is about to load (`KnownLoadings.find`)."""
        with self.exclusive():
            return self.attacher.loadings.find(loading)

    def drop_kept(self, reason: str) -> int:
        """Drop all kept weights; returns the bytes of RAM that are free again."""
        with self.exclusive():
            return self.kept.drop_all(reason)

    def follow_free(self, reason: str) -> None:
        """Drop all kept weights as a host frees its memory; once its models are gone, give the heap back.

        What is loaded from now on did not leave for want of memory.
        """
        with self.exclusive():
            self.drop_kept(reason)
            self.steered.returns.forget()
            for member in self.members.values():
                member.returns.forget()
            for component in self.steered.components():
                component.returns.forget()
        self.caretaker.return_heap_soon()

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
        self.attacher.sharing.refuse_lending(members)

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
            self.kept.drop_all("released")

    def plans(self) -> dict[str, ComponentPlan]:
        """Return the plan of every component by its id; takes no lock."""
        return {member.id: member.managed.plan for member in list(self.members.values())}

    def expect(self, activation_bytes: Mapping[Member, int]) -> None:
        """Keep free for components what their forwards to come are predicted to take beside the weights."""
        with self.lock.exclusive():
            for member, num_bytes in activation_bytes.items():
                if self.capacity.expect(member, num_bytes):
                    member.outdate_plan()

    def machine(self, *, freed_bytes: int = 0, is_hosted: bool = False) -> Machine:
        """Return what a newcomer may plan with now, in live numbers (`LiveCapacity.machine`)."""
        with self.exclusive():
            return self.capacity.machine(None, freed_bytes=freed_bytes, is_hosted=is_hosted)

    @property
    def workflow_id(self) -> str | None:
        """The workflow of the open node; None outside of nodes."""
        return self.measures.node.workflow_id if self.measures.node else None

    def known_components(self) -> list[KnownComponent]:
        """Return what hosts find every component by, kept weights and what they move themselves too; takes no lock."""
        return self.reporter.known_components()

    def shown_components(self) -> list[KnownComponent]:
        """As `known_components`, with those that hosts move and that are only counted."""
        return [*self.reporter.known_components(), *self.observed.known_components()]

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

    def computing(self, module: nn.Module) -> Member | None:
        """Return the component whose pass this thread runs and that was entered through a module; takes no lock."""
        return self.recovery.computing(module)

    def make_room_in_pass(self, member: Member, error: BaseException, put_back: Callable[[], None]) -> bool:
        """Make room for another try of this thread's pass of a hosted component (`Recovery.make_room`)."""
        with self.exclusive(), host_recordings.paused():
            return self.recovery.make_room(member, error, put_back)

    def planned_bytes(self, member: Member, device: str) -> int:
        """Return the bytes that a component would take of a device now: of the free, its own and the idle ones."""
        with self.exclusive():
            try:
                return self.capacity.replan(member).device_bytes.get(device, 0)
            except (DoesNotFit, InvalidInput):
                return member.managed.component.weight_bytes

    def free_memory(
        self,
        device: str,
        num_bytes: int,
        reason: str,
        *,
        exclude: Collection[str] = (),
        allow_unrunnable: bool = True,
    ) -> int:
        """Evict idle components until so many bytes of a device are free again, as `Admission.free_memory`."""
        with self.exclusive():
            return self.admission.free_memory(
                device, num_bytes, reason, exclude=exclude, allow_unrunnable=allow_unrunnable
            )

    # -- runs, nodes, report

    def foresee(self, steps: Iterable[Collection[str]], num_running: int = 1) -> None:
        """Take which components the steps to come use, the step that runs now first ([Note: steps] in `forecast.py`).

        Hosts that move components get the new order in which these leave. Moves nothing.

        Args:
            steps: the ids of each step's components; an id that is unknown here is no error.
            num_running: how many of the first steps are of the node that runs now.
        """
        with self.exclusive():
            if self.capacity.forecast.foresee(steps, num_running):
                self.admission.order_steered()
            self.leases.look_ahead.follow()

    def look_ahead(self, is_on: bool) -> None:
        """Load what is used next while others compute (True, as at first), or not (False)."""
        with self.exclusive():
            self.leases.look_ahead.turn(is_on)

    def begin_run(self, run_id: str, name: str) -> None:
        """A prompt execution begins; plans are looked at again with the memory there is now."""
        with self.exclusive():
            self.recover()
            self.sharing.exchange()
            self.capacity.outdate_plans()
            for member in self.members.values():
                self.capacity.end_run(member)
            self.capacity.trim_kept()
            self.measures.begin_run(run_id, name)
            self.admission.keep_marks()

    def end_run(self) -> None:
        with self.exclusive():
            self.recover()
            note_uses_of_steered(self.capacity)
            if self.event_log.is_running:
                self.growth.end_run(self.event_log.runs[-1].name, self.measures.used_in_run)
                self.admission.keep_marks()
            self.measures.end_run()
            self.leases.learn_all_times()
            self.idle.trim(moves_hosted=True)
            self.idle.unload_used(moves_hosted=True)
            self.sharing.end_run()
            self.ledger.check()
            if self.kept.parts:  # from now on they are looked at beside runs, too
                self.caretaker.alarm.set(RETRY_BUSY_S)
        self.leases.remember()

    def recover(self) -> None:
        """End what interrupts left open; called where nothing can be computing."""
        for member in self.members.values():
            member.managed.passes.recover_for(None)
            member.managed.settle_books()

    def begin_node(self, node_id: str, title: str, *, workflow_id: str | None = None) -> None:
        with self.exclusive():
            self.lending.settle()
            self.measures.begin_node(node_id, title, workflow_id)

    def end_node(self) -> dict[str, Any]:
        """Close the open node; returns its report and sends it to the listeners."""
        with self.exclusive():
            if self.measures.node is not None:
                self.capacity.trim_kept()
                note_uses_of_steered(self.capacity)
                self.idle.unload_used(moves_hosted=True)
            return self.reporter.end_node()

    def subscribe(
        self, listener: Callable[[dict[str, Any]], None], *, unless_equal: bool = False
    ) -> Callable[[], None]:
        """Call the listener with every node's report and what moves; returns what ends that.

        Args:
            unless_equal: where a listener that equals this one is subscribed, that one stays the only one.
        """
        require(listener, Callable, what="listener", allowed="a function of one dict")  # type: ignore[arg-type]
        return self.event_log.subscribe(listener, unless_equal=unless_equal)

    def device_reports(self) -> list[DeviceReport]:
        """Return what each device has in all, free, and of managed weights; asks the driver."""
        return self.reporter.devices()

    def report(self, parts: Collection[str] | None = None, *, after_s: float = -1.0) -> dict[str, Any]:
        """Return the versioned report of everything so far, JSON-able. The lock is held only while that is copied.

        Args:
            parts: leave all others empty; what is left out costs nothing.
            after_s: leave out nodes and runs that had ended, and events and samples, until so many seconds after the
                start.
        """
        with self.exclusive():
            report = self.reporter.some(after_s=after_s) if parts is None else self.reporter.some(parts, after_s)
        return report().to_json()

    def recent_report(self, number: int) -> dict[str, Any]:
        """Return the report with only so many of the last nodes, runs and events, and without the timeline.

        Costs the same after one node as after ten thousand.
        """
        with self.exclusive():
            report = self.reporter.recent(number)
        return report().to_json()


def stored_speeds(needs_file: NeedsFile | None) -> SpeedsFile | None:
    """Return the file of measured calls beside that of needs."""
    if needs_file is None:
        return None
    return SpeedsFile(needs_file.path.parent / SPEEDS_FILE_NAME, needs_file.version)


def stored_runs(needs_file: NeedsFile | None) -> tuple[RunsFile | None, dict[str, str]]:
    """Return the file of runs beside that of needs, and the versions that a run is of."""
    if needs_file is None:
        return None, {}
    return RunsFile(needs_file.path.parent / RUNS_FILE_NAME), needs_file.versions()
