"""The policy ``lru``: the least recently used component leaves first."""

from __future__ import annotations

from collections.abc import Iterable

from .candidate import Candidate, Victim

__all__ = ["LeastRecentlyUsed", "by_recency", "recency_text"]


class LeastRecentlyUsed:
    """Evicts the least recently used component first; of two that were never used, the larger."""

    def order(self, candidates: Iterable[Candidate]) -> list[Victim]:
        ranked = sorted(candidates, key=lambda each: (each.evict_last, *by_recency(each)))
        return [each.chosen(recency_text(each)) for each in ranked]


def by_recency(candidate: Candidate) -> tuple[int, int, str]:
    """Return what sorts the least recently used first; no two components are equal."""
    return candidate.last_use, -candidate.device_bytes, candidate.component


def recency_text(candidate: Candidate) -> str:
    return "never used" if candidate.idle_s is None else f"least recently used, {candidate.idle_s:.1f} s ago"
