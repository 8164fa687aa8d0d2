"""Shares each card with other processes that have this pack: one watermark, and room for who asks.

[Note: card sharing] Processes tell each other their marks, what they use of a device and what they ask for
(`claims/neighbours.py`). The largest marks hold for all. No process takes memory that another one lends. A process
whose plan would be larger without the idle components of others asks for the difference while it runs. It does not
wait: it goes on with what is free. The process that is asked evicts idle components in the order of its own policy,
between runs and passes or when an alarm rings. Kept components stay. Components that its queue will use, or that it
used just now, leave only as far as it has more than an equal part of the device. So two busy processes do not take
turns in evicting each other.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from ..errors import DoesNotFit, InvalidInput
from ..planner.plan import ComponentPlan
from ..runtime.forwards.input_size import Size
from ..transfer.devices import Device
from ..units import format_bytes
from .admission import Admission
from .claims.neighbours import ProcessUse
from .member import Member
from .policies.candidate import Candidate
from .steered import SteeredComponent
from .watermark import Watermark, default_watermark

__all__ = ["CardSharing"]

# How often a process looks at what others say: while there are some, and while it is alone.
LOOK_S = 0.5
LOOK_ALONE_S = 2.0
# What was used in the last seconds counts as in use: a program may call its model again at once.
LEAST_IDLE_S = 1.0
# A component that began to compute so long ago, and does not now, outside of runs, wants nothing more.
FORGET_S = 10.0


class CardSharing:
    """Tells, asks and helps; does nothing in a process that did not join. The caller holds the manager's lock."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.capacity = admission.capacity
        self.neighbours = admission.capacity.neighbours
        self.event_log = admission.event_log
        self.wanted: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """Device -> component -> the bytes that it would take beyond what it has."""
        self.asked: dict[str, int] = {}
        """What of each device is asked for now."""
        self.requests: Counter[str] = Counter()
        self.given: dict[tuple[str, int], tuple[int, int]] = {}
        """Device and process -> its last request, and the bytes that this process evicted for it."""
        self.told_marks: dict[str, Watermark] = {}
        """The marks of each device that the log tells of."""
        self.short: defaultdict[str, set[str]] = defaultdict(set)
        """Device -> the components whose plans would take more of it if there were more."""
        self.heard: dict[str, tuple[int, int]] = {}
        """What others used of each device, and what of it was idle, when they were heard last."""

    def join(self, folder: Path) -> None:
        """Share the accelerators through files in a folder. Never raises."""
        self.neighbours.join(folder, self.capacity.devices)
        self.exchange()

    def shared(self) -> list[Device]:
        return [device for name, device in self.capacity.devices.items() if name in self.neighbours.shared]

    # -- telling and hearing

    def exchange(self) -> None:
        """Tell the others of every device, and hear them; plans are looked at again if their marks or loans changed."""
        changed = False
        for device in self.shared():
            before = self.reserved_by_others(device.name)
            self.neighbours.exchange(device.name, self.use_of(device))
            after = self.reserved_by_others(device.name)
            if before[:2] != after[:2]:
                self.note_marks(device)
            changed = changed or before != after
        if changed:
            self.admission.keep_free_in_host()
            self.capacity.outdate_plans()

    def reserved_by_others(self, device: str) -> tuple[int, int, int]:
        """Return the largest marks of the others on a device, and what they lend in all."""
        return *self.neighbours.marks(device), self.neighbours.lent_bytes(device)

    def note_marks(self, device: Device) -> None:
        """Enter it in the log when other marks than this process's own hold, or hold no more."""
        own, joined = self.own_mark(device.name), self.capacity.joined_mark(device.name)
        low, high = format_bytes(joined.low_bytes), format_bytes(joined.high_bytes)
        others = [
            other
            for other in self.neighbours.on(device.name)
            if other.low_bytes > own.low_bytes or other.high_bytes > own.high_bytes
        ]
        if joined != self.told_marks.get(device.name, own):
            whose = process_name(others[0]) if others else "no other process keeps more"
            reason = f"keep free: low {low}, high {high}; {whose}"
            self.event_log.note("watermark", "", joined.low_bytes, device.name, reason)
        self.told_marks[device.name] = joined

    def use_of(self, device: Device) -> ProcessUse:
        """Return what this process says of a device now; asks torch's allocator, not the driver."""
        own, name = self.own_mark(device.name), device.name
        wanted = max(self.wanted[name].values(), default=0)
        if wanted > self.asked.get(name, 0):
            self.requests[name] += 1
        self.asked[name] = wanted
        total = self.neighbours.shared[name].total_bytes
        amounts = {
            "low_bytes": own.low_bytes,
            "high_bytes": own.high_bytes,
            "used_bytes": self.used_bytes(device),
            "idle_bytes": self.idle_bytes(device),
            "need_bytes": wanted,
            "lent_bytes": self.capacity.loans.missing_bytes(name),
        }
        bounded = {key: min(max(0, num_bytes), total) for key, num_bytes in amounts.items()}
        return ProcessUse(pid=os.getpid(), request=self.requests[name], **bounded)

    def own_mark(self, device: str) -> Watermark:
        """Return this process's marks; does not ask the driver, which would begin to use a device that is unused."""
        watermarks = self.capacity.watermarks
        if watermarks.is_set(device):
            return watermarks.of(device)
        return default_watermark(self.neighbours.shared[device].total_bytes)

    def used_bytes(self, device: Device) -> int:
        return device.allocator_bytes().reserved + self.capacity.steered.paged_bytes(device.name)

    def idle_bytes(self, device: Device) -> int:
        """Return what this process would give of a device: cached bytes, and components that may leave."""
        torchs = device.allocator_bytes()
        unneeded, others = self.sorted_candidates(device, least_idle_s=0)
        beyond = min(self.beyond_part(device), sum(candidate.device_bytes for candidate in (*unneeded, *others)))
        leaving = sum(candidate.device_bytes for candidate in unneeded)
        return torchs.reserved - torchs.allocated + max(leaving, beyond)

    def beyond_part(self, device: Device) -> int:
        """Return how much more than an equal part of a device this process uses."""
        num_processes = 1 + len(self.neighbours.on(device.name))
        return max(0, self.used_bytes(device) - self.neighbours.shared[device.name].total_bytes // num_processes)

    def sorted_candidates(self, device: Device, least_idle_s: float) -> tuple[list[Candidate], list[Candidate]]:
        """Return the idle components that nothing is known to use again, and the others; kept ones are in neither."""
        found = [c for c in self.capacity.candidates(device, None) if not c.evict_last]
        unneeded = [c for c in found if c.next_use is None and (c.idle_s is None or c.idle_s >= least_idle_s)]
        return unneeded, [c for c in found if c not in unneeded]

    # -- asking

    def plan(self, member: Member, ceilings: Mapping[str, int], *, size: Size | None) -> ComponentPlan:
        """Return the plan for a member with what is free now (`LiveCapacity.replan`); ask the others for what it lacks.

        Raises:
            InvalidInput, DoesNotFit: as `plan_components`.
        """
        if not self.neighbours.shared:
            return self.capacity.replan(member, ceilings, size=size)
        self.exchange()
        try:
            plan = self.capacity.replan(member, ceilings, size=size)
        except DoesNotFit as error:
            self.ask(member, ceilings, size, {})
            holders = [
                f"{process_name(other)} uses {format_bytes(other.used_bytes)} of {device.name}"
                for device in self.shared()
                for other in self.neighbours.on(device.name)
                if other.used_bytes and device.name in member.managed.device_names
            ]
            if not holders:
                raise
            raise DoesNotFit(f"{error}; {', '.join(holders)}, and was asked for what is idle of it") from None
        self.ask(member, ceilings, size, plan.device_bytes if plan.streams else None)
        return plan

    def ask(
        self, member: Member, ceilings: Mapping[str, int], size: Size | None, has: Mapping[str, int] | None
    ) -> None:
        """Ask for what a member would take if the others gave what is idle, beyond what it has; None: all it wants."""
        idle = {
            device.name: num_bytes for device in self.shared() if (num_bytes := self.neighbours.idle_bytes(device.name))
        }
        wanted: Mapping[str, int] = {}
        if idle and has is not None:
            raised = {name: ceiling + idle.get(name, 0) for name, ceiling in ceilings.items()}
            try:
                wanted = self.capacity.replan(member, raised, size=size, given=idle).device_bytes
            except (DoesNotFit, InvalidInput):
                wanted = {}
        before = dict(self.asked)
        for device in self.shared():
            self.wanted[device.name].pop(member.id, None)
            self.short[device.name].discard(member.id)
            if has is not None and device.name in member.managed.device_names:
                self.short[device.name].add(member.id)
            lacks = wanted.get(device.name, 0) - (has or {}).get(device.name, 0)
            if lacks > 0 and device.name in idle:
                self.wanted[device.name][member.id] = min(lacks, idle[device.name])
        if before != {name: max(wants.values(), default=0) for name, wants in self.wanted.items()}:
            self.exchange()

    def note_use(self, component: SteeredComponent) -> None:
        """Ask for what a component that its host moves would have if there were room; its host takes it by itself."""
        for device in self.shared():
            name, held = device.name, component.device_bytes().get(device.name, 0)
            lacks = component.wanted_bytes().get(name, 0) - held
            self.wanted[name].pop(component.id, None)
            if lacks > 0:
                candidates = self.capacity.candidates(device, None)
                idle = sum(other.device_bytes for other in candidates if other.component != component.id)
                room = device.free_bytes() + idle - self.capacity.mark_of(name).low_bytes
                lacks = min(lacks - max(0, room), self.neighbours.idle_bytes(name))
            if lacks > 0:
                self.wanted[name][component.id] = lacks
        self.exchange()

    def end_run(self) -> None:
        """Ask for nothing any more, and help who asks."""
        if self.neighbours.shared:
            self.forget_wants()
            self.exchange()
            self.help()

    def forget_wants(self, unused_s: float = 0.0) -> None:
        """Ask for nothing more for components that were not used for so long, or left."""
        now_s = self.event_log.now_s
        for name in {*self.wanted, *self.short}:
            for component in {*self.wanted[name], *self.short[name]}:
                found = self.capacity.members.get(component) or self.capacity.steered.get(component)
                if found is None or found.last_use_s is None or now_s - found.last_use_s >= unused_s:
                    self.wanted[name].pop(component, None)
                    self.short[name].discard(component)

    # -- helping

    def look(self, *, is_idle: bool) -> float | None:
        """Tell, hear, and help if nothing runs. Returns the seconds until the next look, None if nothing is shared."""
        if not self.neighbours.shared:
            return None
        if is_idle:
            self.forget_wants(unused_s=FORGET_S)
        self.exchange()
        self.note_room()
        if is_idle:
            self.help()
        return LOOK_S if any(self.neighbours.on(device.name) for device in self.shared()) else LOOK_ALONE_S

    def note_room(self) -> None:
        """Have plans that take less than they would looked at again when others use less, or might give more."""
        for device in self.shared():
            name = device.name
            used, idle = self.neighbours.used_bytes(name), self.neighbours.idle_bytes(name)
            used_before, idle_before = self.heard.get(name, (0, 0))
            if self.short[name] and (used < used_before or idle > idle_before):
                self.capacity.outdate_plans()
            self.heard[name] = used, idle

    def help(self) -> None:
        """Evict idle components for the processes that ask, as far as what is free is not enough."""
        helped = False
        for device in self.shared():
            for other in self.neighbours.on(device.name):
                if other.need_bytes:
                    helped = self.give(device, other) or helped
        if helped:
            self.exchange()

    def give(self, device: Device, other: ProcessUse) -> bool:
        """Evict what one process asks for of a device; returns whether that freed anything.

        At most what it asked for, once for each request, and no more than is missing of it now.
        """
        if not self.used_bytes(device):
            return False
        request, given = self.given.get((device.name, other.pid), (0, 0))
        given = given if request == other.request else 0
        reserved = self.capacity.mark_of(device.name).low_bytes
        before = device.driver_free_bytes()
        missing = min(other.need_bytes - given, other.need_bytes + reserved - before)
        if missing <= 0:
            return False
        device.empty_cache()
        cause = f"{process_name(other)} needs {format_bytes(other.need_bytes)}"
        unneeded, others = self.sorted_candidates(device, LEAST_IDLE_S)
        freed = self.evict(device, unneeded, before + missing - device.driver_free_bytes(), cause)
        still = before + missing - device.driver_free_bytes()
        freed += self.evict(device, others, min(still, self.beyond_part(device)), cause)
        gained = device.driver_free_bytes() - before
        self.given[device.name, other.pid] = other.request, given + max(0, gained)
        return bool(freed) or gained > 0

    def evict(self, device: Device, candidates: list[Candidate], num_bytes: int, cause: str) -> int:
        """Evict so much of these components, in the policy's order, and return the driver its memory."""
        freed = 0
        for victim in self.admission.policy.order(candidates):
            if freed >= num_bytes:
                break
            freed += self.admission.evict_victim(victim.because(cause), device, num_bytes - freed)
        if freed:
            device.empty_cache()
        return freed


def process_name(other: ProcessUse) -> str:
    return f"another process (pid {other.pid})"
