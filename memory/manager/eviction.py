"""Which idle components leave a device first, and why. A policy only chooses; `Admission.evict` moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from ..options.budget import BudgetItem
from ..units import format_bytes

__all__ = [
    "UNLOADED_BY_HOST",
    "Candidate",
    "EvictionPolicy",
    "LeastRecentlyUsed",
    "Victim",
    "over_budget",
    "short_beside_weights",
    "short_of_memory",
]


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


class LeastRecentlyUsed:
    """Evicts the least recently used component first; of two that were never used, the larger."""

    def order(self, candidates: Iterable[Candidate]) -> list[Victim]:
        ranked = sorted(candidates, key=lambda each: (each.evict_last, each.last_use, -each.device_bytes))
        return [
            Victim(component=each.component, device_bytes=each.device_bytes, reason=self.reason(each))
            for each in ranked
        ]

    def reason(self, candidate: Candidate) -> str:
        reason = "never used" if candidate.idle_s is None else f"least recently used, {candidate.idle_s:.1f} s ago"
        if candidate.evict_last:
            return f"{reason}; marked to be evicted last, but no other component can be evicted"
        return reason


# -- why bytes have to be freed

UNLOADED_BY_HOST = "ComfyUI unloaded it"


def short_of_memory(newcomer: str | None, need_bytes: int, free_bytes: int, reserved_bytes: int) -> str:
    """Say that a device has too little free memory for a newcomer, or for a watermark that was raised."""
    need = f"{newcomer} needs {format_bytes(max(0, need_bytes))}" if newcomer else "the watermark was raised"
    return f"{need}; {format_bytes(free_bytes)} free, {format_bytes(reserved_bytes)} reserved"


def short_beside_weights(component: str, keeps_bytes: int) -> str:
    """Say that a component's forwards need more memory beside its weights than is free."""
    return f"{component} needs more beside its weights, {format_bytes(keeps_bytes)}"


def over_budget(newcomer: str, need_bytes: int, held_bytes: int, budget: BudgetItem) -> str:
    """Say that a newcomer and its idle siblings exceed the budget that they share."""
    return (
        f"{newcomer} needs {format_bytes(need_bytes)}, others {format_bytes(held_bytes)}; "
        f"budget {budget} is for all of them together"
    )
