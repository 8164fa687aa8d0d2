"""An idle component that may leave a device, one that was chosen to, and what every policy does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

__all__ = ["Candidate", "EvictionPolicy", "Victim"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An idle component on a device that is short of memory; ``last_use`` counts leases, larger is later."""

    component: str
    device_bytes: int
    last_use: int
    idle_s: float | None = None
    """The seconds since its last use; None where it was never used."""
    evict_last: bool = False
    """Its program asked to keep it: it leaves only when nothing else is left to evict."""
    next_use: int | None = None
    """The steps until its next use, 0 in the step that runs now; None where that is not known (`Forecast`)."""
    reload_s_per_byte: float | None = None
    """How long it takes to copy its weights back, as measured; None where that was not measured yet."""

    def chosen(self, reason: str) -> Victim:
        """Return it as a victim; the reason says, too, when it was to be evicted last."""
        if self.evict_last:
            reason = f"{reason}; marked to be evicted last, but no other component can be evicted"
        return Victim(component=self.component, device_bytes=self.device_bytes, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Victim:
    """A component that is to be evicted, and why this one was chosen."""

    component: str
    device_bytes: int
    reason: str
    """A few words for the event log, such as "least recently used"."""

    def because(self, cause: str) -> Victim:
        """Return the victim with the whole reason: why memory is needed, then why this component was chosen."""
        return replace(self, reason=f"{cause}; {self.reason}")


class EvictionPolicy(Protocol):
    """Chooses the order in which idle components are evicted."""

    def order(self, candidates: Iterable[Candidate]) -> list[Victim]:
        """Return every candidate once, in the order of eviction; those marked ``evict_last`` at the end."""
        ...
