"""The ledger: how many bytes each component has in each place. Holds numbers only, never tensors."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from ...units import format_bytes

__all__ = ["Entry", "Kind", "Ledger"]


class Kind(enum.Enum):
    """What bytes are for."""

    WEIGHTS = "weights"
    """Fixed tensors and resident blocks on a device; weights at rest in host memory."""
    STAGING = "staging"
    """Staging slots of streamed blocks, and bounce buffers for files."""
    STORED = "stored"
    """Copies of weights on a device from which they stream to the one that computes."""
    SCRATCH = "scratch"
    """Memory into which encoded weights are decoded."""


Entry: TypeAlias = tuple[str, str, Kind]
"""Place, component and kind."""


class Ledger:
    """Byte-exact entries per place, component and kind; a place is a device or a host tier (``pinned``, ``host``).

    Reading one component's bytes takes the same time with any number of components; so does reading an unchanged place
    again. Reading is safe while other threads change entries.

    Args:
        count: for `check`: returns the bytes that exist, counted by the components themselves.
    """

    def __init__(self, count: Callable[[], Mapping[Entry, int]] | None = None) -> None:
        self.count = count
        self.rows: defaultdict[str, dict[tuple[str, Kind], int]] = defaultdict(dict)
        """The entries of each place."""
        self.last_changes: dict[str, object] = {}
        """Each place's last change: an object of its own for each, because threads that counted would lose some."""
        self.summaries: dict[str, tuple[object, dict[str, int], int]] = {}
        """By place: its last change when this was summed, the bytes by component, and their sum."""

    @property
    def entries(self) -> dict[Entry, int]:
        """Every entry with its bytes; empty once everything is released."""
        return {
            (place, component, kind): num_bytes
            for place, row in list(self.rows.items())
            for (component, kind), num_bytes in list(row.items())
        }

    def copy(self) -> Ledger:
        """Return a copy of the ledger, which later changes do not affect."""
        copy = Ledger()
        copy.rows.update((place, dict(row)) for place, row in list(self.rows.items()))
        return copy

    # -- changing entries

    def charge(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        """Add bytes that have been allocated; 0 bytes make no entry."""
        assert num_bytes >= 0, num_bytes
        self.write(place, component, kind, self.entry(place, component, kind) + num_bytes)

    def credit(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        """Subtract bytes that have been freed; never more than the entry has."""
        held = self.entry(place, component, kind)
        assert 0 <= num_bytes <= held, (place, component, kind, num_bytes, held)
        self.write(place, component, kind, held - num_bytes)

    def change(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        """Charge bytes, or credit them if the number is negative."""
        if num_bytes < 0:
            self.credit(place, component, kind, -num_bytes)
        else:
            self.charge(place, component, kind, num_bytes)

    def settle(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        """Set an entry to the bytes that exist, whatever it was before."""
        if self.entry(place, component, kind) != num_bytes:
            self.write(place, component, kind, num_bytes)

    @contextmanager
    def booked(self, component: str, kind: Kind, held: Callable[[], Mapping[str, int]]) -> Iterator[None]:
        """Record the change of held bytes in the body, also after an exception.

        Args:
            held: returns the held bytes by place.
        """
        before = held()
        # The entry is smaller if an interrupt came before bytes were entered.
        booked = {place: min(num_bytes, self.entry(place, component, kind)) for place, num_bytes in before.items()}
        try:
            yield
        finally:
            now = held()
            for place in sorted(before.keys() | now.keys()):
                self.change(place, component, kind, now.get(place, 0) - booked.get(place, 0))

    def write(self, place: str, component: str, kind: Kind, num_bytes: int) -> None:
        self.last_changes[place] = object()  # before and after: a summary read in between counts as outdated
        if num_bytes:
            self.rows[place][component, kind] = num_bytes
        else:
            self.rows[place].pop((component, kind), None)
        self.last_changes[place] = object()

    # -- reading entries

    def entry(self, place: str, component: str, kind: Kind) -> int:
        """Return the bytes of one entry."""
        row = self.rows.get(place)
        return row.get((component, kind), 0) if row else 0

    def used(self, place: str) -> int:
        """Return the bytes of all components in a place."""
        return self.summary(place)[1]

    def held(self, component: str, place: str) -> int:
        """Return the bytes of one component in a place."""
        row = self.rows.get(place)
        return sum([row.get((component, kind), 0) for kind in Kind]) if row else 0

    def passing(self, component: str, place: str) -> int:
        """Return the bytes of one component in a place through which weights only pass: staging memory and scratch."""
        return self.entry(place, component, Kind.STAGING) + self.entry(place, component, Kind.SCRATCH)

    def bytes_by_place(self, component: str) -> dict[str, int]:
        """Return the bytes of one component by place; empty once everything is released."""
        held = ((place, self.held(component, place)) for place in sorted(self.rows))
        return {place: num_bytes for place, num_bytes in held if num_bytes}

    def by_component(self, place: str) -> Mapping[str, int]:
        """Return the bytes in one place by component; the same object until an entry of the place changes."""
        return self.summary(place)[0]

    def summary(self, place: str) -> tuple[dict[str, int], int]:
        last_change = self.last_changes.get(place)
        known = self.summaries.get(place)
        if known is None or known[0] is not last_change:
            held: dict[str, int] = {}
            row = self.rows.get(place)
            for (component, _), num_bytes in list(row.items()) if row else ():
                held[component] = held.get(component, 0) + num_bytes
            self.summaries[place] = known = last_change, held, sum(held.values())
        return known[1:]

    # -- checking entries

    def check(self) -> None:
        """Assert that each entry equals the bytes that exist. Run it only while nothing computes.

        Raises:
            AssertionError: they differ; names each wrong entry, its bytes in the ledger and the bytes that exist.
        """
        written = self.entries
        there = written if self.count is None else self.count()
        wrong = [
            f"{component}'s {kind.value} at {place}: {format_bytes(written.get(entry, 0))} in the ledger, "
            f"{format_bytes(there.get(entry, 0))} exist ({written.get(entry, 0)}, {there.get(entry, 0)} bytes)"
            for entry in dict.fromkeys([*written, *there])
            for place, component, kind in [entry]
            if written.get(entry, 0) != there.get(entry, 0) or written.get(entry, 1) <= 0
        ]
        assert not wrong, "; ".join(wrong)
