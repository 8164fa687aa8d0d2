"""Gives memory that a host freed back to the system, once what the host drops is gone."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["HeapReturn"]

# A host that was asked to free memory drops its models one after the other, in a thread of its own.
SETTLE_S = 0.5


class HeapReturn:
    """Tells when to give the heap back: nothing was dropped since the last look. The caller holds the manager's lock.

    Args:
        count: how many components and kept weights there are.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        self.count = count
        self.is_asked = False
        self.seen: int | None = None

    def ask(self) -> None:
        """Give the heap back as soon as nothing is dropped any more."""
        self.is_asked, self.seen = True, None

    def look(self) -> float | None:
        """Return the seconds until the next look; None: the heap is to be given back now, or nothing is asked."""
        if not self.is_asked:
            return None
        before, self.seen = self.seen, self.count()
        if before != self.seen:
            return SETTLE_S
        self.is_asked = False
        return None
