"""How much of a device is kept free, and when memory is short enough to evict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InvalidInput, allowed_values, quoted, require
from ..options.placement import canonical_device
from ..units import GIB, LARGEST_SIZE, MIB, format_bytes

if TYPE_CHECKING:  # nodes read the default without loading torch
    from ..transfer.devices import Device

__all__ = ["HOST", "Watermark", "Watermarks", "default_host_watermark", "default_watermark", "unlearned_bytes"]

# The RAM, as in a description of hardware.
HOST = "host"


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


class Watermarks:
    """The marks of each accelerator: those that were set, else the default for its size."""

    def __init__(self, devices: Mapping[str, Device]) -> None:
        self.devices = devices
        """The accelerators, by name."""
        self.marks: dict[str, Watermark] = {}
        """The marks that were set."""
        self.host_mark: Watermark | None = None
        """The marks of the RAM, if they were set."""

    def of(self, device: str) -> Watermark:
        """Return the marks of an accelerator; asks the driver for its size where none were set."""
        if device not in self.marks:
            return default_watermark(self.devices[device].total_bytes())
        return self.marks[device]

    def of_host(self, total_bytes: int) -> Watermark:
        """Return the marks of the RAM, by its size where none were set."""
        return self.host_mark or default_host_watermark(total_bytes)

    def set_host(self, mark: Watermark) -> list[str]:
        """Set the marks of the RAM. Raises `InvalidInput` for marks above its size."""
        from ..transfer.devices import HostMemory

        total_bytes = HostMemory.now().total_bytes
        if mark.high_bytes > total_bytes:
            high, total = format_bytes(mark.high_bytes), format_bytes(total_bytes)
            raise InvalidInput(f"watermark high={high} exceeds {HOST}; allowed: up to {total}")
        changed, self.host_mark = self.host_mark != mark, mark
        return [HOST] if changed else []

    def is_set(self, device: str) -> bool:
        return device in self.marks

    def set(self, device: str, low_bytes: int, high_bytes: int) -> list[str]:
        """Set the marks of one accelerator, of all (``*``) or of the RAM (``host``); returns the changed ones.

        Raises:
            InvalidInput: an unknown device, or marks that are not 0 <= low <= high <= total; nothing is set then.
        """
        require(device, str, what="watermark device", allowed="text, such as gpu:0 or *")
        if device.strip().lower() == HOST:
            return self.set_host(Watermark(low_bytes=low_bytes, high_bytes=high_bytes))
        name = canonical_device(device)
        if name != "*" and name not in self.devices:
            allowed = allowed_values(name, ["*", *self.devices, HOST])
            raise InvalidInput(f"watermark: this machine has no device {device!r}; {allowed}")
        mark = Watermark(low_bytes=low_bytes, high_bytes=high_bytes)
        targets = list(self.devices) if name == "*" else [name]
        for target in targets:
            total_bytes = self.devices[target].total_bytes()
            if mark.high_bytes > total_bytes:
                raise InvalidInput(
                    f"watermark high={format_bytes(mark.high_bytes)} exceeds {target}; "
                    f"allowed: up to {format_bytes(total_bytes)}"
                )
        changed = [target for target in targets if self.marks.get(target) != mark]
        self.marks |= dict.fromkeys(changed, mark)
        return changed
