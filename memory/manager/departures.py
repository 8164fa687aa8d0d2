"""Takes one component off a device because its user asks for that, and verifies what it frees."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from ..errors import InvalidInput, UnsafeState, allowed_values
from ..options.placement import parse_device
from ..transfer.devices import Device
from ..units import MIB, format_bytes
from .admission import Admission
from .claims.kept import KeepLimit
from .member import Member
from .steered import SteeredComponent

__all__ = ["Departure", "Departures"]

Resident: TypeAlias = Member | SteeredComponent
"""A component, whether this manager moves it or its host."""

# How much the driver's number may differ: it gives and takes whole segments.
TOLERANCE_BYTES = 16 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """What leaving a device freed: ``left_bytes`` by the books, ``freed_bytes`` by the driver."""

    component: str
    device: str
    left_bytes: int
    freed_bytes: int

    @property
    def is_verified(self) -> bool:
        """Whether the driver counts as much more free memory as the component had."""
        return self.freed_bytes >= self.left_bytes - TOLERANCE_BYTES

    def __str__(self) -> str:
        told = f"released {self.component}: {format_bytes(self.freed_bytes)} of {self.device} are free again"
        if self.is_verified:
            return told
        return f"{told}, though it had {format_bytes(self.left_bytes)}: torch or another program holds the rest"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "text": str(self)}


class Departures:
    """Takes components off devices. The caller holds the manager's lock."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.capacity = admission.capacity

    def find(self, component_id: str) -> Resident:
        """Return a component by its id in the report. Raises `InvalidInput`."""
        members, steered = self.capacity.members, self.capacity.steered
        found = members.get(component_id) or steered.get(component_id)
        if found is None:
            known = [*members, *(component.id for component in steered.components())]
            raise InvalidInput(f"there is no component {component_id!r}; {allowed_values(component_id, known)}")
        return found

    def refuse_limit(self, component: Resident, limit: KeepLimit) -> None:
        """Refuse a limit that exceeds a device of the component. Raises `InvalidInput`."""
        names = component.managed.device_names if isinstance(component, Member) else component.device_bytes()
        for name in names:
            device = self.admission.devices.get(name)
            if device is not None and not device.is_cpu:
                limit.refuse_beyond(component.id, name, device.total_bytes())

    def release(self, component: Resident, named: str | None = None, *, reason: str) -> list[Departure]:
        """Take a component off one device, or off all; nothing where it has nothing there.

        Raises:
            InvalidInput: no such device.
            UnsafeState: it computes.
        """
        devices = self.find_devices(named)
        if is_computing(component):
            raise UnsafeState(f"{component.id}: computes now; release it after that")
        held = {device: num_bytes for device in devices if (num_bytes := self.held(component, device))}
        return [self.leave(component, device, num_bytes, reason) for device, num_bytes in held.items()]

    def release_all(self, named: str | None = None, *, reason: str) -> list[Departure]:
        """Take every component off one device, or off all. Raises as `release`; nothing has left then."""
        self.find_devices(named)
        components: list[Resident] = [*self.capacity.members.values(), *self.capacity.steered.components()]
        busy = [component.id for component in components if is_computing(component)]
        if busy:
            raise UnsafeState(f"{', '.join(busy)}: computes now; release it after that")
        return [departure for component in components for departure in self.release(component, named, reason=reason)]

    def find_devices(self, named: str | None) -> list[Device]:
        accelerators = {name: device for name, device in self.admission.devices.items() if not device.is_cpu}
        if named is None:
            return list(accelerators.values())
        return [accelerators[parse_device(named, list(accelerators))]]

    def held(self, component: Resident, device: Device) -> int:
        """Return the bytes of a device that a component has now."""
        if isinstance(component, Member):
            return self.capacity.ledger.held(component.id, device.name)
        return component.device_bytes().get(device.name, 0)

    def leave(self, component: Resident, device: Device, num_bytes: int, reason: str) -> Departure:
        device.empty_cache()
        before = device.driver_free_bytes()
        if isinstance(component, Member):
            self.admission.evict(component, device, num_bytes, reason)
        else:
            self.admission.take_off_steered(component, device, reason)
        device.empty_cache()
        return Departure(
            component=component.id,
            device=device.name,
            left_bytes=num_bytes - self.held(component, device),
            freed_bytes=max(0, device.driver_free_bytes() - before),
        )


def is_computing(component: Resident) -> bool:
    """Whether a component computes, or something holds a lease on it."""
    if isinstance(component, Member):
        return bool(component.leases) or component.managed.is_computing()
    return component.is_in_use
