"""The numbers a plan is made from: what of each device and of the host's memory may be taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from ..weights.component import Component

__all__ = ["EVERYTHING", "DeviceCapacity", "KeptFree", "Machine"]

EVERYTHING = sys.maxsize
"""Kept free: all but the least form that can compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptFree:
    """What is kept free of a device for the forwards of one component, as far as it can compute beside that."""

    num_bytes: int
    why: str
    futile_bytes: int = 0
    """With so much free they ran out of memory beside the least form: nothing is kept where no more can be had."""
    is_known: bool = True
    """Whether forwards of this size were seen; else more may be needed."""


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
    lasting_bytes: int = 0
    """What of the idle components' bytes leaves for weights only: a host may enter them without loading them again."""
    unlearned_bytes: int = 0
    """What is kept free for forwards of which nothing is known yet; 0 where the user says what is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The devices, and ``pinned_bytes``: how much host memory may be page-locked."""

    devices: tuple[DeviceCapacity, ...]
    pinned_bytes: int = 0
    needs: Callable[[Component, str], KeptFree | None] | None = field(default=None, compare=False)
    """Returns what is known of the needs of a component's forwards on a device."""

    def device(self, name: str) -> DeviceCapacity:
        return next(device for device in self.devices if device.name == name)

    @property
    def accelerators(self) -> tuple[DeviceCapacity, ...]:
        return tuple(device for device in self.devices if device.name != "cpu")

    @property
    def host_bytes(self) -> int:
        """The RAM that weights may take."""
        return self.device("cpu").available_bytes
