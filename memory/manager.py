"""One manager for all components and devices: who may come in, and who has to leave for it.

[Note: admission] A component is admitted when it is entered, never before. It may plan with what is free now,
with its own bytes, and with those of idle components, less what the watermark keeps free. If loading it would
leave less than ``low`` free, idle components leave, least recently used first and block by block, until ``high``
is free. Between the marks nobody moves. A component that computes holds a lease and is never a victim.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn

from .attachment import Attachment
from .books import Recorder
from .component import Component
from .devices import Device, HostMemory, list_devices
from .errors import DoesNotFit, InvalidInput, UnsafeState, allowed_values
from .footprint import least_bytes
from .ledger import Ledger
from .link import known_link, link_bytes_per_s
from .machine import DeviceCapacity, Machine
from .membership import Member, Watermark, default_watermark, refuse_shared_split, refuse_unsuitable
from .modules import bytes_in_ram, plan_modules
from .packing import Ending
from .pinning import pin_limit_bytes
from .placement import Placement, canonical_device
from .plan import ComponentPlan, Plan, replan
from .policy import EvictionPolicy, LeastRecentlyUsed, Victim
from .profile import OffloadProfile
from .report import DeviceReport, Report
from .reporting import component_report, device_report
from .source import WeightsSource
from .units import format_bytes
from .upcast import Precision

__all__ = ["MemoryManager", "Watermark", "default_watermark"]


class MemoryManager:
    """Admits, evicts and reports; every public call is serialised by one lock."""

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self.policy = policy or LeastRecentlyUsed()
        self.lock = threading.RLock()
        self.depth = 0
        self.released: list[Member] = []
        self.ledger = Ledger()
        self.devices: dict[str, Device] = {device.name: device for device in list_devices()}
        self.watermarks: dict[str, Watermark] = {}
        self.links = {
            name: speed
            for name, device in self.devices.items()
            if not device.is_cpu and (speed := known_link(device)) is not None
        }
        """Bytes per second from page-locked memory, as far as they were ever measured."""
        self.members: dict[str, Member] = {}
        self.moved_by_released = 0
        self.watchers: list[Callable[[str, int, int], None]] = []
        self.recorder = Recorder(list(self.devices.values()), self.ledger, self.bytes_moved)
        # Counts changes of what there is to share; a plan of an older epoch is looked at again.
        self.epoch = 0
        self.uses = itertools.count(1)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock; on leaving it, remove what was released meanwhile.

        A garbage collection may release a component in the middle of anything, in the thread that holds the lock:
        such a release waits until the books are in a state to take it.
        """
        with self.lock:
            self.remove_released()
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
                self.remove_released()

    def remove_released(self) -> None:
        """Detach all that was released. Raises the first `InvalidInput` of them when it is through."""
        errors = []
        while self.depth == 0 and self.released:
            try:
                self.detach(self.released.pop())
            except InvalidInput as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def bytes_moved(self) -> int:
        """Return the bytes of weights copied to devices since the start."""
        return self.moved_by_released + sum(member.attachment.bytes_moved for member in self.members.values())

    # -- watermarks

    def set_watermark(self, device: str, low_bytes: int, high_bytes: int) -> None:
        """Set the VRAM watermark (keep free) of one accelerator, or of all with ``*``; takes effect at once.

        Raises:
            InvalidInput: an unknown device, or marks that are not 0 <= low <= high <= total.
        """
        with self.exclusive():
            accelerators = [name for name, found in self.devices.items() if not found.is_cpu]
            name = canonical_device(device)
            if name != "*" and name not in accelerators:
                raise InvalidInput(
                    f"watermark device {device!r} is not here; {allowed_values(name, ['*', *accelerators])}"
                )
            mark = Watermark(low_bytes=low_bytes, high_bytes=high_bytes)
            targets = accelerators if name == "*" else [name]
            for target in targets:
                total = self.devices[target].total_bytes()
                if high_bytes > total:
                    raise InvalidInput(
                        f"watermark high={format_bytes(high_bytes)} exceeds {target}, "
                        f"allowed is up to {format_bytes(total)}"
                    )
            for target in targets:
                if self.watermarks.get(target) == mark:
                    continue
                self.watermarks[target] = mark
                reason = f"keep free: low {format_bytes(low_bytes)}, high {format_bytes(high_bytes)}"
                self.recorder.note("watermark", "", low_bytes, target, reason)
                self.make_room(self.devices[target], 0, None)
                self.epoch += 1

    def watermark(self, device: str) -> Watermark:
        """Return the marks of a device: those set, else the default for its size."""
        if device not in self.watermarks:
            return default_watermark(self.devices[device].total_bytes())
        return self.watermarks[device]

    # -- members

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
        unknown = sorted(set(sources or {}) - set(modules))
        if unknown:
            raise InvalidInput(
                f"files of {unknown[0]!r}: no such component; {allowed_values(unknown[0], list(modules))}"
            )
        with self.exclusive():
            components, plan = plan_modules(
                modules,
                self.machine(None, freed_bytes=sum(map(bytes_in_ram, modules.values()))),
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
            for component, module in zip(components, modules.values(), strict=True):
                member_id = self.free_name(prefix + component.name)
                member = Member(member_id, component.name, node_id, workflow_id, profile)
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
            self.epoch += 1
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
        with self.exclusive():
            self.heal_abandoned(None)
            busy = [member.id for member in members if member.leases or member.id not in self.members]
            if busy:
                raise UnsafeState(f"{', '.join(busy)}: computes or was released; profiles change between passes")
            modules = {member.name: member.attachment.module for member in members}
            sources = {m.name: m.attachment.source for m in members if m.attachment.source is not None}
            kinds = {member.name: member.attachment.component.kind for member in members}
            locked = sum(member.attachment.packing.host_bytes["pinned"] for member in members)
            components, plan = plan_modules(
                modules,
                self.machine(None, freed_bytes=locked),
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
                    if member.attachment is not attachment or member.id not in self.members:
                        self.detach(member, Ending.HANDED_OVER)
                        self.give(member, old_profile)
                        old = attachment.component, attachment.plan, attachment.source
                        self.prepare(member, attachment.module, *old, after=member.attachment)
                        self.attach(member)
                raise
            self.epoch += 1
            return plan

    def give(self, member: Member, profile: OffloadProfile) -> None:
        member.profile, member.block_seconds, member.planned_in_epoch = profile, None, -1

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
        member.attachment = Attachment(
            member.id,
            module,
            component,
            plan,
            self.devices,
            self.ledger,
            acquire=lambda: self.acquire(member),
            give_back=lambda: self.give_back(member),
            guards_state=not member.is_hosted,
            source=source,
            compiles=member.profile.compile,
            after=after,
        )
        member.attachment.packing.measure()

    def attach(self, member: Member) -> None:
        attachment, plan = member.attachment, member.attachment.plan
        if not member.is_hosted:  # once more: parts that were prepared together may share weights
            refuse_unsuitable(attachment.module, attachment.component, self.members.values(), attachment.source)
        attachment.attach(self.show_progress(member, attachment.packing.to_read()))
        self.members[member.id] = member
        for reason in plan.reasons:
            self.recorder.note("plan", member.id, 0, plan.shares[0].device, reason)
        self.note_refusal(member)

    def note_refusal(self, member: Member) -> None:
        if member.attachment.packing.tell_refusal():
            reason = "the driver refused more page-locked memory: the rest is pageable, its copies block the host"
            self.recorder.note("plan", member.id, 0, "host", reason)

    def free_name(self, wanted: str) -> str:
        """Return a name that no component, and no group before a slash, has yet."""
        taken = set(self.members) | {member_id.partition("/")[0] for member_id in self.members}
        candidates = itertools.chain([wanted], (f"{wanted}#{number}" for number in itertools.count(2)))
        return next(candidate for candidate in candidates if candidate not in taken)

    def remove(self, member: Member) -> None:
        """Release a component: nothing of it stays on a device, in the books or in hooks. Idempotent.

        Waits for nobody: a garbage collection may have brought us here in the very thread that the holder of the lock
        waits for. Then the component is gone when that one lets go, and in any case before anyone else comes in.
        """
        self.released.append(member)
        if self.lock.acquire(blocking=False):
            try:
                self.remove_released()
            finally:
                self.lock.release()

    def detach(self, member: Member, ending: Ending | None = None) -> None:
        if self.members.get(member.id) is not member:
            return
        freed = self.ledger.places(member.id)
        del self.members[member.id]
        self.epoch += 1
        try:
            member.attachment.detach(ending or (Ending.RESTORED if member.restores else Ending.DISCARDED))
        finally:
            self.moved_by_released += member.attachment.bytes_moved
            for place, num_bytes in freed.items():
                self.recorder.note("release", member.id, num_bytes, place, "released")
            self.recorder.sample()
        assert not self.ledger.places(member.id), self.ledger.places(member.id)

    def release_all(self) -> None:
        """Release every component."""
        with self.exclusive():
            for member in list(self.members.values()):
                self.remove(member)

    # -- leases

    def acquire(self, member: Member) -> None:
        """Admit a component and hold a lease on it; loads what its plan wants and evicts for that.

        Raises:
            DoesNotFit, torch.OutOfMemoryError: no lease is held, nothing of the component is on a device.
            UnsafeState: somebody changed the dtype of the weights; that is undone.
        """
        with self.exclusive():
            member.leases += 1
            member.last_use, member.last_use_s = next(self.uses), self.recorder.now_s
            try:
                self.recorder.sample()
                self.heal_abandoned(member)
                if member.attachment.guard is not None:
                    member.attachment.guard.put_back()
                    member.attachment.guard.refuse_changed_dtype()
                outdated = not member.attachment.is_loaded or member.planned_in_epoch != self.epoch
                if outdated and not member.is_hosted:
                    self.admit(member)
                self.recorder.used_by_node(member.id)
                member.allocated_at_entry = {name: found.allocated_bytes() for name, found in self.devices.items()}
            except BaseException:
                member.leases -= 1
                raise

    def heal_abandoned(self, newcomer: Member | None) -> None:
        """End passes that interrupts left open: their leases would keep memory that nobody computes with."""
        for member in self.members.values():
            if member is not newcomer and member.leases and member.attachment.passes.is_abandoned():
                member.attachment.passes.abandon()

    def give_back(self, member: Member) -> None:
        """Return the lease and learn what the forward needed beside the weights."""
        with self.exclusive():
            member.leases = max(0, member.leases - 1)

            def learn(device: str, peak_bytes: int) -> None:
                activation_bytes = max(0, peak_bytes - member.allocated_at_entry.get(device, peak_bytes))
                member.activation_bytes[device] = max(member.activation_bytes[device], activation_bytes)
                self.recorder.needed_by_node(device, activation_bytes)

            self.recorder.sample(learn)
            if not member.leases:
                self.learn_times(member)

    def learn_times(self, member: Member) -> None:
        """Take what was timed of a component's passes; a streamed one is planned again with it."""
        seconds: dict[int, float] = {}
        for share in member.attachment.shares:
            seconds |= share.take_times() or {}
            link = share.take_link()
            if link is not None and share.device.name not in self.links:
                self.links[share.device.name] = link_bytes_per_s(share.device, partial(float, link))
        if seconds.keys() == member.attachment.share_of.keys():
            member.block_seconds = seconds
            member.planned_in_epoch = -1

    @contextmanager
    def lease(self, member: Member) -> Iterator[None]:
        """Hold a component loaded for a while, such as a whole sampling run."""
        self.acquire(member)
        try:
            yield
        finally:
            member.attachment.passes.heal_for(None)
            self.give_back(member)

    def admit(self, member: Member, ceilings: Mapping[str, int] | None = None) -> None:
        """Plan with what there is now, clear room, load ([Note: admission]).

        Args:
            ceilings: the most that the component should take of a device, where a host says so; it takes more only
                if it could not compute otherwise.
        """
        attachment = member.attachment
        machine = self.machine(member, self.computable(member, ceilings or {}))
        plan = replan(attachment.component, attachment.plan, machine, member.profile, member.block_seconds)
        for share in plan.shares:
            if share.device != "cpu":
                need_bytes = share.device_bytes - self.ledger.held(member.id, share.device)
                self.make_room(self.devices[share.device], need_bytes, member)
        try:
            to_load = sum(share.to_load(part) for share, part in zip(attachment.shares, plan.shares, strict=True))
            queued = attachment.load(plan, self.show_progress(member, to_load))
        except torch.OutOfMemoryError as error:
            self.recorder.note("error", member.id, 0, plan.shares[0].device, f"out of memory while loading: {error}")
            raise
        finally:
            self.note_refusal(member)
            self.recorder.sample()
        member.planned_in_epoch = self.epoch
        if queued:
            where = "&".join(share.device for share in plan.shares)
            resident = sum(len(share.resident) for share in plan.shares)
            reason = f"{resident} of {plan.num_blocks} blocks resident, {plan.precision.value}"
            self.recorder.note("load", member.id, queued, where, reason)

    def watch_loading(self, watcher: Callable[[str, int, int], None]) -> Callable[[], None]:
        """Call the watcher with component, bytes done and bytes in all, and return what ends that.

        It hears of each block of a loading, and every 4 MiB or sooner of what is read from files into RAM as a module
        comes under management or gets another profile. What it raises cancels that and comes out of the forward that
        needed the loading, or out of the call, after which the module is as it was.
        """
        self.watchers.append(watcher)
        return lambda: self.watchers.remove(watcher)

    def show_progress(self, member: Member, total: int) -> Callable[[int], None]:
        """Return what is called with the bytes of each step, and tells the watchers."""
        done = 0

        def show(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            for watcher in list(self.watchers):
                watcher(member.id, done, total)

        return show

    def kept_free(self, device: str, member: Member | None) -> tuple[int, int]:
        """Return the low and high mark, raised to what the member's forwards were seen to need."""
        mark = self.watermark(device)
        needed = max(member.activation_bytes[device], member.activation_before[device]) if member else 0
        return max(mark.low_bytes, needed), max(mark.high_bytes, needed)

    def machine(
        self, member: Member | None, ceilings: Mapping[str, int] | None = None, *, freed_bytes: int = 0
    ) -> Machine:
        """Return what a member (or a newcomer) may plan with, in live numbers.

        ``freed_bytes``: the host memory that a newcomer's weights take now, and give back as they are packed.
        """
        capacities = []
        for device in self.devices.values():
            low = 0 if device.is_cpu else self.kept_free(device.name, member)[0]
            others = sum(victim.device_bytes for victim in self.victims(device, member))
            own = self.ledger.held(member.id, device.name) if member else 0
            available = device.free_bytes() + own + others - low
            capacities.append(
                DeviceCapacity(
                    name=device.name,
                    total_bytes=device.total_bytes(),
                    available_bytes=max(0, min(available, (ceilings or {}).get(device.name, available))),
                    kept_free_bytes=low,
                    link_bytes_per_s=self.links.get(device.name),
                )
            )
        # What a member keeps in host memory is decided when it is added.
        pinned = 0
        if member is None and len(self.devices) > 1:
            pinned = pin_limit_bytes(HostMemory.now(), freed_bytes=freed_bytes)
        return Machine(devices=tuple(capacities), pinned_bytes=pinned)

    # -- eviction

    def victims(self, device: Device, member: Member | None) -> list[Victim]:
        """Return the idle components with bytes on a device, other than the member."""
        return [
            Victim(component=other.id, device_bytes=held, last_use=other.last_use, is_kept=other.is_kept)
            for other in self.members.values()
            if other is not member and not other.leases and (held := self.ledger.held(other.id, device.name))
        ]

    def make_room(self, device: Device, need_bytes: int, member: Member | None) -> None:
        """Evict idle components if the need would leave less than the low mark free, until the high mark is."""
        low, high = self.kept_free(device.name, member)
        left = device.free_bytes() - need_bytes
        if left >= low:
            return
        need = f"{member.id} needs {format_bytes(need_bytes)}" if member else "the watermark was raised"
        for victim in self.policy.order(self.victims(device, member)):
            if left >= high:
                return
            other = self.members[victim.component]
            idle_s = self.recorder.now_s - (other.last_use_s or 0.0)
            reason = (
                f"{need}, {format_bytes(device.free_bytes())} are free of which {format_bytes(low)} are kept; "
                f"idle longest, {idle_s:.1f} s"
            )
            if other.is_kept:
                reason += "; it was to be kept, but nothing else is left"
            left += self.evict(other, device, high - left, reason)

    def bring(self, member: Member, ceilings: Mapping[str, int] | None = None) -> None:
        """Load a hosted component now, within the ceilings that its host gives.

        Raises as `acquire`.
        """
        with self.exclusive():
            member.last_use, member.last_use_s = next(self.uses), self.recorder.now_s
            self.admit(member, ceilings)

    def planned_bytes(self, member: Member, device: str) -> int:
        """Return the bytes that a component would take of a device now: of the free, its own and the idle ones."""
        with self.exclusive():
            attachment = member.attachment
            try:
                plan = replan(attachment.component, attachment.plan, self.machine(member), member.profile)
            except (DoesNotFit, InvalidInput):
                return attachment.component.weight_bytes
            return plan.device_bytes.get(device, 0)

    def leave(self, member: Member) -> None:
        """Take a hosted component off every device; it stays packed in host memory."""
        with self.exclusive():
            held = self.ledger.places(member.id)
            if member.attachment.unload():
                for share in member.attachment.shares:
                    name = share.device.name
                    self.recorder.note("evict", member.id, held.get(name, 0), name, "its host took it off the device")
            self.epoch += 1
            self.recorder.sample()

    def give_up(
        self, device_name: str, num_bytes: int, reason: str, *, spare: Collection[Member] = (), whole: bool = True
    ) -> int:
        """Evict idle components until so many bytes of a device are free again; returns what really was freed.

        Args:
            spare: components that their host is about to load. The room is for them; they may be idle longest.
            whole: whether hosted components may lose the form in which they can compute.
        """
        freed = 0
        with self.exclusive():
            device = self.devices[device_name]
            for victim in self.policy.order(self.victims(device, None)):
                if freed >= num_bytes:
                    break
                member = self.members[victim.component]
                if member not in spare:
                    freed += self.evict(member, device, num_bytes - freed, reason, whole=whole)
        return freed

    def evict(self, member: Member, device: Device, num_bytes: int, reason: str, *, whole: bool = True) -> int:
        """Drop at least so many bytes of an idle component if it has them; returns the bytes freed.

        Args:
            whole: whether it may lose the form in which it can compute.
        """
        if member.leases:
            raise UnsafeState(f"{member.id} computes and cannot be evicted")
        held = self.ledger.held(member.id, device.name)
        if not (member.is_hosted and self.stream_more(member, device, held - num_bytes, whole=whole)):
            member.attachment.shrink(device.name, num_bytes)
        left = self.ledger.held(member.id, device.name)
        freed = held - left
        rest = f"{format_bytes(left)} of it stay" if left else "nothing of it stays"
        self.recorder.note("evict", member.id, freed, device.name, f"{reason}; {rest}")
        self.recorder.sample()
        self.epoch += 1
        return freed

    def stream_more(self, member: Member, device: Device, ceiling: int, *, whole: bool) -> bool:
        """Bring a component down to so many bytes in a form that can compute; False if it has none so small.

        Its host believes it loaded and may enter it without loading it again. Not ``whole``: its least form will do.
        """
        ceilings = {device.name: ceiling}
        try:
            machine = self.machine(member, ceilings if whole else self.computable(member, ceilings))
            plan = replan(member.attachment.component, member.attachment.plan, machine, member.profile)
        except (DoesNotFit, InvalidInput):
            return not whole
        member.attachment.load(plan)
        return True

    def computable(self, member: Member, ceilings: Mapping[str, int]) -> dict[str, int]:
        """Return a host's ceilings, none of them under what the component needs to compute at all."""
        component, plan = member.attachment.component, member.attachment.plan
        least = {
            share.device: least_bytes(component, share.blocks, plan.cast, first=index == 0)
            for index, share in enumerate(plan.shares)
        }
        return {device: max(ceiling, least.get(device, 0)) for device, ceiling in ceilings.items()}

    # -- runs, nodes, report

    def begin_run(self, run_id: str, name: str) -> None:
        """A prompt execution begins; plans are looked at again with the memory there is now."""
        with self.exclusive():
            self.heal()
            self.epoch += 1
            for member in self.members.values():
                if member.activation_bytes:  # it ran: an older, larger run is no reason any more
                    member.activation_before, member.activation_bytes = member.activation_bytes, Counter()
            self.recorder.begin_run(run_id, name)

    def end_run(self) -> None:
        with self.exclusive():
            self.heal()
            self.recorder.end_run()
            self.ledger.check()

    def heal(self) -> None:
        """End what interrupts left open; called where nothing can be computing."""
        for member in self.members.values():
            member.attachment.passes.heal_for(None)

    def begin_node(self, node_id: str, title: str, *, workflow_id: str | None = None) -> None:
        with self.exclusive():
            self.recorder.begin_node(node_id, title, workflow_id)

    def end_node(self) -> dict[str, Any]:
        """Close the open node; returns its report and sends it to the listeners."""
        with self.exclusive():
            node = self.recorder.node
            if node is None:
                return {}
            tiers: Counter[str] = Counter()
            for member in self.members.values():
                # Equal node ids in two workflows are two nodes.
                if (member.node_id, member.workflow_id) == (node.node_id, node.workflow_id):
                    tiers.update(self.ledger.places(member.id))
            report = self.recorder.end_node(node, dict(tiers))
            told = asdict(report)
            devices = [asdict(device) for device in self.device_reports()]
            self.recorder.tell({"type": "node", **told, "devices": devices})
            return told

    def subscribe(self, listener: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Call the listener with every node's report and every eviction; returns what ends that."""
        self.recorder.listeners.append(listener)
        return lambda: self.recorder.listeners.remove(listener)

    def device_reports(self) -> list[DeviceReport]:
        none = Watermark(low_bytes=0, high_bytes=0)
        return [
            device_report(device, none if device.is_cpu else self.watermark(name), self.ledger)
            for name, device in self.devices.items()
        ]

    def report(self) -> dict[str, Any]:
        """Return the versioned report of everything so far, JSON-able."""
        with self.exclusive():
            components = [component_report(member, self.ledger) for member in self.members.values()]
            recorder = self.recorder
            return Report(
                devices=self.device_reports(),
                components=components,
                nodes=list(recorder.nodes),
                runs=list(recorder.runs),
                events=list(recorder.events),
                samples=list(recorder.samples),
            ).to_json()
