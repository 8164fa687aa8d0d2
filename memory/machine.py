"""The numbers a plan is made from: what of each device and of the host's memory may be taken."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DeviceCapacity", "Machine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCapacity:
    """What one component may take of a device: bytes free now, its own, and those of idle components."""

    name: str
    total_bytes: int
    available_bytes: int
    kept_free_bytes: int = 0
    link_bytes_per_s: float | None = None
    """How fast page-locked host memory reaches the device; None is not known."""
    ceiling_bytes: int | None = None
    """The most that the component's host allows it, where one does."""
    sibling_bytes: int = 0
    """What others that were managed together with the component hold while they compute: a device's budget has it."""
    pageable_bytes_per_s: float | None = None
    """How fast other host memory does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The devices, and ``pinned_bytes``: how much host memory may be page-locked."""

    devices: tuple[DeviceCapacity, ...]
    pinned_bytes: int = 0

    def device(self, name: str) -> DeviceCapacity:
        return next(device for device in self.devices if device.name == name)

    @property
    def accelerators(self) -> tuple[DeviceCapacity, ...]:
        return tuple(device for device in self.devices if device.name != "cpu")

    @property
    def host_bytes(self) -> int:
        """The RAM that weights may take."""
        return self.device("cpu").available_bytes
