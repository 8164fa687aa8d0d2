"""Which idle components leave a device first, and why. A policy only chooses; the manager moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Candidate", "EvictionPolicy", "LeastRecentlyUsed", "Victim"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An idle component on the device that has to be cleared; ``last_use`` counts leases, larger is later."""

    component: str
    device_bytes: int
    last_use: int
    idle_s: float | None = None
    """The seconds since then; None where it was never used."""
    evict_last: bool = False
    """Its program asked to keep it: it leaves only when nothing else is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Victim:
    """A component whose turn it is to leave, and why it is."""

    component: str
    device_bytes: int
    reason: str
    """A few words for the event log, such as "least recently used"."""


class EvictionPolicy(Protocol):
    """Chooses the order in which idle components give up their bytes."""

    def order(self, candidates: Iterable[Candidate]) -> list[Victim]:
        """Return every candidate once, the first to leave first; those to evict last come behind all others."""
        ...


class LeastRecentlyUsed:
    """The component that computed longest ago leaves first; of two never used, the larger."""

    def order(self, candidates: Iterable[Candidate]) -> list[Victim]:
        ranked = sorted(candidates, key=lambda each: (each.evict_last, each.last_use, -each.device_bytes))
        return [
            Victim(component=each.component, device_bytes=each.device_bytes, reason=self.reason(each))
            for each in ranked
        ]

    def reason(self, candidate: Candidate) -> str:
        reason = "never used" if candidate.idle_s is None else f"least recently used, {candidate.idle_s:.1f} s ago"
        return f"{reason}; set to be kept, but nothing else is left" if candidate.evict_last else reason
