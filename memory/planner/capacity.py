"""The numbers that plans are made from: how much of each device and of host memory may be taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from ..weights.component import Component

__all__ = ["EVERYTHING", "DeviceCapacity", "KeptFree", "Machine", "PeerLink"]

EVERYTHING = sys.maxsize
"""As an amount to keep free: all but the least form that can compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptFree:
    """What is kept free of a device for the forwards of one component, as far as it can compute beside that."""

    num_bytes: int
    why: str
    futile_bytes: int = 0
    """What was free when they ran out of memory beside the least form: keeping no more than that free is in vain."""
    is_known: bool = True
    """Whether forwards of this input size were seen; otherwise they may need more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerLink:
    """How weights that rest on another device reach this one."""

    device: str
    """The other device."""
    is_direct: bool
    """Whether the hardware copies from one to the other; otherwise copies pass through page-locked RAM."""
    bytes_per_s: float | None = None
    """How fast such copies are, by whichever way they take; None where that was not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCapacity:
    """What one component may take of a device: bytes free now, its own, and those of idle components."""

    name: str
    total_bytes: int
    available_bytes: int
    kept_free_bytes: int = 0
    lent_bytes: int = 0
    """What of that is lent to another program."""
    link_bytes_per_s: float | None = None
    """How fast copies from page-locked host memory are; None where that is not known."""
    ceiling_bytes: int | None = None
    """The most that the component's host allows, where a host sets a limit."""
    sibling_bytes: int = 0
    """What components of the same call hold while they compute: it counts towards a device's budget."""
    pageable_bytes_per_s: float | None = None
    """How fast copies from pageable host memory are."""
    lasting_bytes: int = 0
    """The part of the idle components' bytes that only weights may take: a host may enter them without loading them."""
    computing: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    """The other components that compute now, and the bytes that each holds: they cannot leave."""
    unlearned_bytes: int = 0
    """What is kept free for forwards whose needs are not known yet; 0 where the user says what stays free."""
    held_bytes: int = 0
    """What the component holds there now."""
    has_float8: bool = True
    """Whether float8 can be widened there."""
    is_integrated: bool = False
    """Whether it has no memory of its own: ``auto`` leaves it alone beside a device that has."""
    speed: float | None = None
    """How fast it computes beside the other devices; None where that is not known."""
    band_bytes: int = 0
    """The distance of the watermark's marks, where a component in place keeps its size while free memory changes by
    less: nothing idle could leave for it, and no host says what it may take."""
    idle_bytes: int = 0
    """The part of the available bytes that idle components hold."""
    peers: tuple[PeerLink, ...] = ()
    """The devices from whose memory weights can come here."""

    def peer(self, device: str) -> PeerLink | None:
        """Return the link from another device; None where nothing is known of one."""
        return next((link for link in self.peers if link.device == device), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The devices, and what of the host memory weights may take.

    ``pinned_bytes`` may be page-locked, if enough stays free beside them (`lockable_bytes`).
    """

    devices: tuple[DeviceCapacity, ...]
    pinned_bytes: int = 0
    lock_limit_bytes: int | None = None
    """What all components of a plan together may page-lock, where others of it have taken some; None where none has."""
    host_kept_bytes: int = 0
    """What the RAM's watermark keeps free."""
    freed_bytes: int = 0
    """The bytes of RAM that newcomers' weights take already: packing gives them back."""
    needs: Callable[[Component, str], KeptFree | None] | None = field(default=None, compare=False)
    """Returns what is known of the needs of a component's forwards on a device."""
    held: Callable[[Component, str], int] | None = field(default=None, compare=False)
    """Returns the bytes of a device that a run to come holds beside weights as a component's forward begins."""

    def device(self, name: str) -> DeviceCapacity:
        return next(device for device in self.devices if device.name == name)

    @property
    def accelerators(self) -> tuple[DeviceCapacity, ...]:
        return tuple(device for device in self.devices if device.name != "cpu")

    @property
    def chosen_from(self) -> tuple[DeviceCapacity, ...]:
        """The accelerators from which ``auto`` chooses: integrated ones only where there are no others."""
        return tuple(device for device in self.accelerators if not device.is_integrated) or self.accelerators

    @property
    def host_bytes(self) -> int:
        """The bytes of RAM that weights may take, beside those that stay free."""
        return max(0, self.device("cpu").available_bytes - self.host_kept_bytes)

    @property
    def lockable_bytes(self) -> int:
        """The bytes of RAM that may be page-locked: no more than what stays free allows."""
        if not self.host_kept_bytes:
            return self.pinned_bytes
        room = self.device("cpu").available_bytes + self.freed_bytes - self.host_kept_bytes
        return max(0, min(self.pinned_bytes, room))
