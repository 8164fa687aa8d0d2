"""Bytes of devices that are lent to other programs, for a while.

[Note: lent] Lent bytes count as kept free, so every plan leaves them alone. What the borrower has taken of them is no
longer free in the driver's eyes, and must not count twice. Nothing tells whose memory it is, so what others than this
process took since the loan began counts as the borrower's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidInput, UnsafeState, quoted
from ...units import format_bytes, format_seconds

__all__ = ["LONGEST_LOAN_S", "Loan", "Loans", "parse_seconds"]

LONGEST_LOAN_S = 24 * 3600.0
SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
TIME = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]+)\s*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loan:
    """Bytes of a device that are lent until a time of the event log; ``foreign_bytes`` others had when it began."""

    device: str
    num_bytes: int
    until_s: float
    foreign_bytes: int

    def missing_bytes(self, foreign_bytes: int) -> int:
        """Return the bytes that the borrower has not taken yet, where others have so many of the device now."""
        return self.num_bytes - min(max(0, foreign_bytes - self.foreign_bytes), self.num_bytes)


class Loans:
    """The loans that run: at most one for each device. The caller holds the manager's lock.

    Args:
        foreign_bytes: the bytes of a device that others than this process have, and may be the borrower.
        now_s: the time of the event log.
    """

    def __init__(self, foreign_bytes: Callable[[str], int], now_s: Callable[[], float]) -> None:
        self.foreign_bytes = foreign_bytes
        self.now_s = now_s
        self.loans: dict[str, Loan] = {}

    def of(self, device: str) -> Loan | None:
        """Return the loan of a device that runs now."""
        loan = self.loans.get(device)
        return loan if loan is not None and loan.until_s > self.now_s() else None

    def running(self) -> list[Loan]:
        """Return the loans that run now; takes no lock."""
        return [loan for device in list(self.loans) if (loan := self.of(device)) is not None]

    def describe(self, device: str) -> dict[str, Any] | None:
        """Return what of a device is lent, for the report; None: nothing."""
        loan = self.of(device)
        if loan is None:
            return None
        left_s = round(max(0.0, loan.until_s - self.now_s()), 3)
        return {"num_bytes": loan.num_bytes, "missing_bytes": self.missing_bytes(device), "left_s": left_s}

    def missing_bytes(self, device: str) -> int:
        """Return the lent bytes of a device that are to stay free. Asks the driver only while there is a loan."""
        loan = self.of(device)
        return loan.missing_bytes(self.foreign_bytes(device)) if loan is not None else 0

    def begin(self, device: str, num_bytes: int, seconds: float) -> Loan:
        """Enter a loan that begins now.

        Raises:
            UnsafeState: the device is lent already.
        """
        before = self.of(device)
        if before is not None:
            left = format_seconds(before.until_s - self.now_s())
            raise UnsafeState(
                f"{format_bytes(before.num_bytes)} of {device} are lent already, for {left} more; give them back first"
            )
        loan = Loan(
            device=device,
            num_bytes=num_bytes,
            until_s=self.now_s() + seconds,
            foreign_bytes=self.foreign_bytes(device),
        )
        self.loans[device] = loan
        return loan

    def end(self, device: str) -> Loan | None:
        """Remove the loan of a device; returns it, None where there was none."""
        return self.loans.pop(device, None)

    def end_overdue(self) -> Iterable[Loan]:
        """Remove and return the loans whose time is up."""
        over = [loan for loan in self.loans.values() if loan.until_s <= self.now_s()]
        for loan in over:
            del self.loans[loan.device]
        return over


def parse_seconds(text: object, *, what: str, most_s: float) -> float:
    """Return the seconds of a duration such as ``60s``, ``5min`` or ``1.5h``.

    Raises:
        InvalidInput: not a duration with a unit, or none of 1 s to ``most_s``.
    """
    match = TIME.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in SECONDS:
        raise InvalidInput(f"{what} {quoted(text)} is not a duration; allowed: a number with s, min or h, such as 60s")
    seconds = float(match[1]) * SECONDS[match[2].lower()]
    if not 1 <= seconds <= most_s:
        raise InvalidInput(f"{what} {quoted(text)}; allowed: 1s to {most_s / 3600:g}h")
    return seconds
