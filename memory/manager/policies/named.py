"""The policies by their names."""

from __future__ import annotations

from collections.abc import Mapping

from .candidate import EvictionPolicy
from .largest_first import LargestFirst
from .least_recently_used import LeastRecentlyUsed
from .next_use import NextUse

__all__ = ["POLICIES"]

POLICIES: Mapping[str, type[EvictionPolicy]] = {
    "next-use": NextUse,
    "lru": LeastRecentlyUsed,
    "size": LargestFirst,
}
