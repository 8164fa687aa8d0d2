"""How much of a device is kept free, and when memory is short enough to evict."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidInput, quoted, require
from ..units import GIB, LARGEST_SIZE, MIB, format_bytes

__all__ = ["Watermark", "default_watermark", "unlearned_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Watermark:
    """When less than ``low_bytes`` of a device would stay free, evict until ``high_bytes`` are."""

    low_bytes: int = 512 * MIB
    high_bytes: int = 768 * MIB

    def __post_init__(self) -> None:
        for name in ("low_bytes", "high_bytes"):
            require(getattr(self, name), int, what=f"watermark {name}", allowed="a whole number of bytes")
            if not 0 <= getattr(self, name) <= LARGEST_SIZE:
                raise InvalidInput(f"watermark {name} {quoted(getattr(self, name))}: allowed is 0 to 2**63 - 1")
        if self.low_bytes > self.high_bytes:
            low, high = format_bytes(self.low_bytes), format_bytes(self.high_bytes)
            raise InvalidInput(f"watermark low={low} high={high}: allowed is low <= high")


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
