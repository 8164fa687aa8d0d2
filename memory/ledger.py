"""The books: who has how many bytes where. Numbers only, never a tensor."""

from __future__ import annotations

import enum
from collections import Counter

__all__ = ["Kind", "Ledger"]


class Kind(enum.Enum):
    """What bytes are for."""

    WEIGHTS = "weights"
    """Fixed tensors and resident blocks on a device; masters in host memory."""
    STAGING = "staging"
    """Memory through which streamed blocks pass, and files on their way to a device."""
    SCRATCH = "scratch"
    """Where eight-bit weights are widened."""


class Ledger:
    """Byte-exact entries per place, component and kind; a place is a device or a host tier (``pinned``, ``host``)."""

    def __init__(self) -> None:
        self.entries: Counter[tuple[str, str, Kind]] = Counter()
        self.totals: Counter[str] = Counter()

    def charge(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        """Enter bytes that have been allocated; none make no entry."""
        assert num_bytes >= 0, num_bytes
        if not num_bytes:
            return
        self.entries[place, component, kind] += num_bytes
        self.totals[place] += num_bytes

    def credit(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        """Strike bytes that have been freed; never more than were entered."""
        assert 0 <= num_bytes <= self.entries[place, component, kind], (place, component, kind, num_bytes)
        self.entries[place, component, kind] -= num_bytes
        self.totals[place] -= num_bytes
        if not self.entries[place, component, kind]:
            del self.entries[place, component, kind]

    def used(self, place: str) -> int:
        """Return the bytes that all components have in a place."""
        return self.totals[place]

    def held(self, component: str, place: str) -> int:
        """Return the bytes that one component has in a place."""
        return sum(self.entries[place, component, kind] for kind in Kind if (place, component, kind) in self.entries)

    def places(self, component: str) -> dict[str, int]:
        """Return the bytes of one component by place; empty once everything is released."""
        return {
            place: self.held(component, place)
            for place, owner, _ in sorted(self.entries, key=str)
            if owner == component
        }

    def by_component(self, place: str) -> dict[str, int]:
        """Return the bytes in one place by component."""
        return {owner: self.held(owner, place) for where, owner, _ in sorted(self.entries, key=str) if where == place}

    def check(self) -> None:
        """Assert that the books agree with themselves; run whenever nothing computes."""
        sums: Counter[str] = Counter()
        for (place, _, _), num_bytes in self.entries.items():
            assert num_bytes > 0, f"an entry of {num_bytes} bytes in {place}"
            sums[place] += num_bytes
        for place, total in self.totals.items():
            assert sums[place] == total, f"{place}: entries sum to {sums[place]}, the total says {total}"
