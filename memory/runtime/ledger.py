"""The books: who has how many bytes where. Numbers only, never a tensor."""

from __future__ import annotations

import enum
from collections import Counter

__all__ = ["Kind", "Ledger"]


class Kind(enum.Enum):
    """What bytes are for."""

    WEIGHTS = "weights"
    """Fixed tensors and resident blocks on a device; weight stores in host memory."""
    STAGING = "staging"
    """Memory through which streamed blocks pass, and files on their way to a device."""
    SCRATCH = "scratch"
    """Where eight-bit weights are widened."""


class Ledger:
    """Byte-exact entries per place, component and kind; a place is a device or a host tier (``pinned``, ``host``)."""

    def __init__(self) -> None:
        self.entries: Counter[tuple[str, str, Kind]] = Counter()

    def charge(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        """Enter bytes that have been allocated; none make no entry."""
        assert num_bytes >= 0, num_bytes
        if num_bytes:
            self.entries[place, component, kind] += num_bytes

    def credit(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        """Strike bytes that have been freed; never more than were entered."""
        held = self.entries[place, component, kind]
        assert 0 <= num_bytes <= held, (place, component, kind, num_bytes, held)
        if num_bytes == held:
            self.entries.pop((place, component, kind), None)
        else:
            self.entries[place, component, kind] = held - num_bytes

    def change(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        """Charge bytes, or credit them where the number is negative."""
        if num_bytes < 0:
            self.credit(place, component, kind, -num_bytes)
        else:
            self.charge(place, component, kind, num_bytes)

    def settle(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        """Set an entry to the bytes that are there, whatever it was."""
        self.change(place, component, kind, num_bytes - self.entries[place, component, kind])

    def used(self, place: str) -> int:
        """Return the bytes that all components have in a place."""
        entries = list(self.entries.items())  # in one step: other threads may change them
        return sum(num_bytes for (where, _, _), num_bytes in entries if where == place)

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
        """Assert that no entry is empty; run whenever nothing computes."""
        for entry, num_bytes in self.entries.items():
            assert num_bytes > 0, (entry, num_bytes)
