"""Unloads idle components beyond the most that stay loaded, and those idle for too long. Off unless it is set."""

from __future__ import annotations

from ..options.idle_limits import IdleLimits
from ..transfer.devices import Device
from ..units import format_seconds
from .admission import Admission
from .policies.candidate import Candidate

__all__ = ["IdleUnloading"]


class IdleUnloading:
    """Unloads what exceeds the limits, or was used. The caller holds the manager's lock."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.capacity = admission.capacity
        self.event_log = admission.event_log
        self.limits = IdleLimits()

    def take(self, limits: IdleLimits) -> None:
        """Take other limits; nothing moves yet."""
        if limits != self.limits:
            self.limits = limits
            self.event_log.note("limits", "", 0, "*", str(limits))

    def accelerators(self) -> list[Device]:
        return [device for device in self.admission.devices.values() if not device.is_cpu]

    def loaded(self) -> set[str]:
        """Return the components with bytes on any accelerator, whatever moves them."""
        found = {name for device in self.accelerators() for name in self.capacity.ledger.by_component(device.name)}
        held = {
            component.id for component in self.capacity.steered.components() if any(component.device_bytes().values())
        }
        return {name for name in found if self.holds(name)} | held

    def holds(self, component: str) -> bool:
        return any(self.capacity.ledger.held(component, device.name) for device in self.accelerators())

    def trim(self, newcomer: str | None = None, *, moves_hosted: bool) -> None:
        """Unload idle components, in the policy's order, until no more are loaded than may be.

        Args:
            newcomer: a component that is about to be loaded.
            moves_hosted: whether components that a host loads, or moves itself, may be moved now.
        """
        most = self.limits.num_loaded
        if most is None:
            return
        excess = len(self.loaded() | {newcomer} - {None}) - most
        if excess > 0:
            fixed = set() if moves_hosted else set(self.capacity.moved_by_hosts())
            reason = f"at most {most} {'component stays' if most == 1 else 'components stay'} loaded"
            for component in self.in_order({*fixed, newcomer or ""})[:excess]:
                self.unload(component, reason)

    def unload_used(self, newcomer: str | None = None, *, moves_hosted: bool) -> None:
        """Unload idle components whose profile says so after use, but not what is kept, or used in the next step.

        Args:
            newcomer, moves_hosted: as in `trim`.
        """
        members = self.capacity.members
        asked = members.unloading & members.keys()
        leaving = {name for name in asked if members[name].leaves_after_use and self.holds(name)}
        if not leaving:
            return
        fixed = set() if moves_hosted else set(self.capacity.moved_by_hosts())
        coming = members.get(newcomer or "")
        if coming is not None:  # it computes with their weights
            fixed.update(lender.id for lender in coming.lenders)
        for name in self.in_order({*fixed, newcomer or ""}):
            if name in leaving and self.capacity.forecast.use_after(name) != 1:
                self.unload(name, "its profile unloads it after use")

    def in_order(self, fixed: set[str]) -> list[str]:
        """Return the idle components in the order in which they leave, those with parts on several devices once."""
        found: dict[str, Candidate] = {}
        for device in self.accelerators():
            for candidate in self.capacity.candidates(device, None):
                found[candidate.component] = candidate  # the kept part of one comes last, and counts
        idle = [candidate for name, candidate in found.items() if name not in fixed]
        return [victim.component for victim in self.admission.policy.order(idle)]

    def unload_idle(self) -> None:
        """Unload what has been idle for too long."""
        for component in self.overdue():
            assert self.limits.idle_s is not None
            self.unload(component, f"idle for more than {format_seconds(self.limits.idle_s)}")

    def overdue(self) -> list[str]:
        return [name for name, idle_s in self.idle_times().items() if idle_s >= (self.limits.idle_s or 0)]

    def idle_times(self) -> dict[str, float]:
        """Return the seconds since the last use of each idle component; empty without a limit."""
        if self.limits.idle_s is None:
            return {}
        candidates = [c for device in self.accelerators() for c in self.capacity.candidates(device, None)]
        return {c.component: c.idle_s for c in candidates if c.idle_s is not None}

    def due_s(self) -> float | None:
        """Return the seconds until a component will have been idle for too long; None: nothing is loaded and idle."""
        if self.limits.idle_s is None:
            return None
        return min((max(0.0, self.limits.idle_s - idle_s) for idle_s in self.idle_times().values()), default=None)

    def unload(self, component: str, reason: str) -> None:
        """Take an idle component off every device."""
        for device in self.accelerators():
            for candidate in self.capacity.candidates(device, None):
                if candidate.component == component:
                    self.take_off(component, device, candidate.device_bytes, reason)

    def take_off(self, component: str, device: Device, num_bytes: int, reason: str) -> None:
        steered = self.capacity.steered.get(component)
        if steered is not None:
            self.admission.take_off_steered(steered, device, reason)
        elif component in self.capacity.members:
            self.admission.evict(self.capacity.members[component], device, num_bytes, reason)
