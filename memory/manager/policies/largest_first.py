"""The policy ``size``: the component with most bytes leaves first. To compare others with."""

from __future__ import annotations

from collections.abc import Iterable

from .candidate import Candidate, Victim
from .least_recently_used import by_recency

__all__ = ["LargestFirst"]


class LargestFirst:
    """Evicts the component with most bytes on the device first; of equals, the least recently used."""

    def order(self, candidates: Iterable[Candidate]) -> list[Victim]:
        ranked = sorted(candidates, key=lambda each: (each.evict_last, -each.device_bytes, *by_recency(each)))
        return [each.chosen("largest on the device") for each in ranked]
