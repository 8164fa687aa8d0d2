"""The policy ``next-use``, the default: what is worth least until its next use leaves first.

[Note: next use] A byte of a component is worth the seconds that a reload of it takes, over the time until it is used
again. Where all reload alike that is Belady's rule: the one used last leaves first. What no queue and no running
prompt names is used later than all that they name, as far as is known: such components leave before the others, the
least recently used first. With nothing known the order is that of ``lru``.
"""

from __future__ import annotations

from collections.abc import Iterable

from .candidate import Candidate, Victim
from .least_recently_used import by_recency, recency_text

__all__ = ["USUAL_RELOAD_S_PER_BYTE", "NextUse", "worth_per_byte"]

# Where no copy was measured yet: page-locked memory over PCIe 3.0.
USUAL_RELOAD_S_PER_BYTE = 1e-10


class NextUse:
    """Evicts first what no prompt will use as far as is known, least recently used first; then what is worth least."""

    def order(self, candidates: Iterable[Candidate]) -> list[Victim]:
        ranked = sorted(candidates, key=lambda each: (each.evict_last, worth_per_byte(each), *by_recency(each)))
        return [each.chosen(next_use_text(each)) for each in ranked]


def worth_per_byte(candidate: Candidate) -> float:
    """Return the seconds of reloading that a byte saves by staying, per step until its next use; 0 where unknown."""
    if candidate.next_use is None:
        return 0.0
    reload_s = candidate.reload_s_per_byte
    return (USUAL_RELOAD_S_PER_BYTE if reload_s is None else reload_s) / (candidate.next_use + 1)


def next_use_text(candidate: Candidate) -> str:
    match candidate.next_use:
        case None:
            return f"{recency_text(candidate)}, next use unknown"
        case 0:
            return "used in this step"
        case 1:
            return "next use in the next step"
        case steps:
            return f"next use in {steps} steps"
