"""How much of a device is kept free, and when memory is short enough to evict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from ..errors import InvalidInput, quoted, require
from ..options.marks import ALL, HOST, Marks, read_mark
from ..options.placement import parse_device
from ..units import GIB, LARGEST_SIZE, MIB, format_bytes

if TYPE_CHECKING:  # nodes read the default without loading torch
    from ..transfer.devices import Device

__all__ = [
    "Watermark",
    "WatermarkReport",
    "Watermarks",
    "default_host_watermark",
    "default_watermark",
    "in_bytes",
    "unlearned_bytes",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Watermark:
    """When less than ``low_bytes`` of a device would stay free, evict until ``high_bytes`` are."""

    low_bytes: int = 512 * MIB
    high_bytes: int = 768 * MIB

    def __post_init__(self) -> None:
        for name in ("low_bytes", "high_bytes"):
            require(getattr(self, name), int, what=f"watermark {name}", allowed="a whole number of bytes")
            if not 0 <= getattr(self, name) <= LARGEST_SIZE:
                raise InvalidInput(f"watermark {name} {quoted(getattr(self, name))}; allowed: 0 to 2**63 - 1")
        if self.low_bytes > self.high_bytes:
            low, high = format_bytes(self.low_bytes), format_bytes(self.high_bytes)
            raise InvalidInput(f"watermark low={low} high={high}; allowed: low <= high")


class WatermarkReport(TypedDict):
    """The marks of a device or of the RAM, and what they come from (`Watermarks.source_of`)."""

    low_bytes: int
    high_bytes: int
    low_text: str
    """As a user wrote it, such as ``8GB`` or ``10%``; empty for one that no user wrote."""
    high_text: str
    source: str


def unlearned_bytes(total_bytes: int) -> int:
    """Return what is kept free on a device for forwards whose needs are unknown: 15% of it, 512 MiB to 4 GiB.

    Below 1 GiB, as on simulated devices, it is 15% without a minimum: half a GiB would leave nothing for weights.
    """
    least_bytes = GIB // 2 if total_bytes >= GIB else 0
    return min(max(total_bytes * 3 // 20, least_bytes), 4 * GIB)


def default_watermark(total_bytes: int) -> Watermark:
    """Return 512 and 768 MiB, but at most 10 and 15% of a small device."""
    default = Watermark()
    return Watermark(
        low_bytes=min(default.low_bytes, total_bytes // 10), high_bytes=min(default.high_bytes, total_bytes * 3 // 20)
    )


def default_host_watermark(total_bytes: int) -> Watermark:
    """Return an eighth of the RAM, 2.5 to 12 GiB but at most a quarter, and a quarter more for the high mark.

    ComfyUI drops results of its own below a tenth of the RAM, 2 to 10 GiB: kept weights are to leave before that.
    """
    low = min(max(total_bytes // 8, 5 * GIB // 2), 12 * GIB, total_bytes // 4)
    return Watermark(low_bytes=low, high_bytes=low * 5 // 4)


def in_bytes(marks: Marks, device: str, total_bytes: int) -> Watermark:
    """Return marks in bytes of a device with so many. Raises `InvalidInput`: not low <= high <= total."""
    low, high = (f"{name}={mark.says(total_bytes)}" for name, mark in (("low", marks.low), ("high", marks.high)))
    found = marks.low.of(total_bytes), marks.high.of(total_bytes)
    if found[0] > found[1]:
        raise InvalidInput(f"watermark {low} {high} of {device}; allowed: low <= high")
    if found[1] > total_bytes:
        raise InvalidInput(f"watermark {high} exceeds {device}; allowed: up to {format_bytes(total_bytes)}")
    return Watermark(low_bytes=found[0], high_bytes=found[1])


class Watermarks:
    """The marks of each accelerator and of the RAM.

    What was set for a device (`set`, as nodes do) counts; else what is set by default (`set_defaults`, as settings and
    command lines do); else `default_watermark`, by the device's size.
    """

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self.devices = devices
        """The accelerators, by name."""
        self.marks: dict[str, Watermark] = {}
        """The marks that were set, of accelerators."""
        self.defaults: dict[str, Watermark] = {}
        """The marks that are set by default, of accelerators."""
        self.written: dict[str, Marks] = {}
        """As users wrote the marks that were set, of accelerators."""
        self.written_defaults: dict[str, Marks] = {}
        """As users wrote those that are set by default."""
        self.host_marks: Marks | None = None
        """The marks of the RAM, if they were set. A percentage follows the limit of a container, which may change."""
        self.host_defaults: Marks | None = None
        """The marks of the RAM that are set by default."""

    def of(self, device: str) -> Watermark:
        """Return the marks of an accelerator; asks the driver for its size where none were set."""
        found = self.marks.get(device) or self.defaults.get(device)
        return found or default_watermark(self.devices[device].total_bytes())

    def of_host(self, total_bytes: int) -> Watermark:
        """Return the marks of the RAM, by its size where none were set; never more than all of it."""
        asked = self.host_marks or self.host_defaults
        if asked is None:
            return default_host_watermark(total_bytes)
        high = min(asked.high.of(total_bytes), total_bytes)
        return Watermark(low_bytes=min(asked.low.of(total_bytes), high), high_bytes=high)

    def is_set(self, device: str) -> bool:
        """Whether someone said what stays free of an accelerator."""
        return device in self.marks or device in self.defaults

    def source_of(self, device: str) -> str:
        """Return what the marks of a device, or of the RAM, come from: ``set``, ``setting`` or ``default``."""
        is_host = device == HOST
        if self.host_marks is not None if is_host else device in self.marks:
            return "set"
        return "setting" if (self.host_defaults is not None if is_host else device in self.defaults) else "default"

    def report(self, device: str, marks: Watermark) -> WatermarkReport:
        """Return the report of the marks of a device, or of the RAM (``host``); they are passed in bytes."""
        if device == HOST:
            written = self.host_marks or self.host_defaults
        else:
            written = self.written.get(device) or self.written_defaults.get(device)
        return WatermarkReport(
            low_bytes=marks.low_bytes,
            high_bytes=marks.high_bytes,
            low_text=written.low.text if written else "",
            high_text=written.high.text if written else "",
            source=self.source_of(device),
        )

    def all_set(self) -> dict[str, Watermark]:
        """Return the marks of the accelerators for which someone set some."""
        return self.defaults | self.marks

    def set(self, device: str, low: int | str, high: int | str) -> list[str]:
        """Set the marks of one accelerator, of all (``*``) or of the RAM (``host``); returns the changed ones.

        Args:
            low, high: bytes, or text such as ``512MiB`` or ``10%`` of the total.

        Raises:
            InvalidInput: an unknown device, or marks that are not 0 <= low <= high <= total; nothing is set then.
        """
        require(device, str, what="watermark device", allowed="text, such as gpu:0 or *")
        marks = Marks(low=read_mark(low, what="watermark low"), high=read_mark(high, what="watermark high"))
        found = self.resolve(device, marks)
        changed = [name for name, mark in found.items() if name != HOST and self.marks.get(name) != mark]
        self.marks |= {name: found[name] for name in changed}
        self.written |= {name: marks for name in found if name != HOST}
        if HOST in found and self.host_marks != marks:
            self.host_marks = marks
            changed.append(HOST)
        return changed

    def set_defaults(self, asked: Mapping[str, Marks]) -> list[str]:
        """Set what counts for devices without marks of their own, replacing what was set so; returns the changed ones.

        Args:
            asked: the marks by device, ``*`` for accelerators that it does not name, ``host`` for the RAM.

        Raises:
            InvalidInput: as `set`; nothing is set then.
        """
        before, ram = self.all_set(), self.host_marks or self.host_defaults
        defaults: dict[str, Watermark] = {}
        written: dict[str, Marks] = {}
        for device in sorted(asked, key=lambda name: name != ALL):
            found = self.resolve(device, asked[device])
            defaults |= found
            written |= dict.fromkeys(found, asked[device])
        defaults.pop(HOST, None)
        self.defaults, self.written_defaults, self.host_defaults = defaults, written, asked.get(HOST)
        now = self.all_set()
        changed = [name for name in self.devices if before.get(name) != now.get(name)]
        return changed if ram == (self.host_marks or self.host_defaults) else [*changed, HOST]

    def resolve(self, device: str, marks: Marks) -> dict[str, Watermark]:
        """Return marks in bytes, by accelerator; those of the RAM as ``host``. Raises `InvalidInput`."""
        if device.strip().lower() == HOST:
            from ..transfer.devices import HostMemory

            return {HOST: in_bytes(marks, HOST, HostMemory.now().total_bytes)}
        name = parse_device(device, [ALL, *self.devices, HOST], what="watermark")
        targets = list(self.devices) if name == ALL else [name]
        return {target: in_bytes(marks, target, self.devices[target].total_bytes()) for target in targets}
