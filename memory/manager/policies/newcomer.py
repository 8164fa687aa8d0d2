"""What a byte of a component that is about to compute is worth, beside a byte of an idle one.

[Note: streaming past] A component that streams copies each of its bytes once in every pass, one that is loaded first
copies it once: being resident saves a copy in each pass but the first. An idle component that is evicted costs one
copy at its next use. So where a use has a single pass, as of most text encoders and VAEs, it costs nothing to stream
past a component that the next step needs, and evicting that one does. What later steps need may be evicted before
those in any case: streaming past it, too, moves more bytes in `python -m benchmarks eviction`, 1.12 times the bound on
average instead of 1.07.
"""

from __future__ import annotations

from dataclasses import dataclass

from .candidate import Candidate
from .next_use import USUAL_RELOAD_S_PER_BYTE, worth_per_byte

__all__ = ["Newcomer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Newcomer:
    """A component that is about to compute."""

    num_passes: int | None
    """How many passes its use in this step still has, as far as the last one tells; None where none was seen."""
    next_use: int | None
    """The steps until its use after this one; None where that is not known."""
    reload_s_per_byte: float | None

    def streams_past(self, idle: Candidate) -> bool:
        """Whether the next step needs an idle component whose bytes are worth more than its own."""
        if self.num_passes is None or idle.next_use is None or idle.next_use > 1:
            return False
        own_s, other_s = (
            USUAL_RELOAD_S_PER_BYTE if rate is None else rate
            for rate in (self.reload_s_per_byte, idle.reload_s_per_byte)
        )
        later = 0.0 if self.next_use is None else own_s / (self.next_use + 1)
        return other_s > (self.num_passes - 1) * own_s and worth_per_byte(idle) > later
