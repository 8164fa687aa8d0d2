"""Who leaves first. A policy only orders victims; the manager moves them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["EvictionPolicy", "LeastRecentlyUsed", "Victim"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Victim:
    """An idle component on the device that has to be cleared; ``last_use`` counts leases, larger is later."""

    component: str
    device_bytes: int
    last_use: int
    evict_last: bool = False
    """Its program asked to keep it: it leaves only when nothing else is left."""


class EvictionPolicy(Protocol):
    """Chooses the order in which idle components give up their bytes."""

    def order(self, victims: Iterable[Victim]) -> list[Victim]:
        """Return all victims, the first to leave first."""
        ...


class LeastRecentlyUsed:
    """The component that computed longest ago leaves first; of two never used, the larger. Kept ones are last."""

    def order(self, victims: Iterable[Victim]) -> list[Victim]:
        return sorted(victims, key=lambda victim: (victim.evict_last, victim.last_use, -victim.device_bytes))
