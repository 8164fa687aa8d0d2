"""How much of a device a kept component may hold to the last."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InvalidInput, quoted
from ...options.budget import BudgetItem, parse_size
from ...options.placement import Scanner
from ...units import format_bytes

__all__ = ["EVERYTHING_KEPT", "KeepLimit", "parse_limit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeepLimit:
    """The most bytes of each device that leave last; what a component holds beyond them leaves in the usual order."""

    size: BudgetItem | None = None
    """None: all that it holds leaves last."""

    def most(self, total_bytes: int) -> int | None:
        """Return the bytes that leave last of a device with so many; None: all."""
        return self.size.most(total_bytes) if self.size is not None else None

    def refuse_beyond(self, component: str, device: str, total_bytes: int) -> None:
        """Refuse a limit that exceeds a device. Raises `InvalidInput`."""
        most = self.most(total_bytes)
        if most is not None and most > total_bytes:
            total = format_bytes(total_bytes)
            raise InvalidInput(f"keep {self} of {component}: {device} has {total}; allowed: up to {total}")

    def __str__(self) -> str:
        return str(self.size) if self.size is not None else "all"


EVERYTHING_KEPT = KeepLimit()


def parse_limit(text: object) -> KeepLimit:
    """Return the limit that a text names: ``8GiB``, ``50%``, or ``unlimited``. Raises `InvalidInput`."""
    problem = f"keep at most {quoted(text)} is not an amount to keep; allowed: 6GiB, 80% or unlimited"
    if not isinstance(text, str):
        raise InvalidInput(problem)
    scanner = Scanner(text, what="keep at most")
    try:
        item = parse_size(scanner, "*")
    except InvalidInput as error:
        raise InvalidInput(problem) from error
    if not scanner.at_end or item.leave_bytes is not None or item.leave_share is not None or item.limit_bytes == 0:
        raise InvalidInput(problem)
    return KeepLimit(size=item) if item.most(1) is not None else EVERYTHING_KEPT
