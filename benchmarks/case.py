"""What every case returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Result"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A table and the one number that sums it up; ``meaning`` says of what it is the ratio, and the target."""

    question: str
    rows: Sequence[Mapping[str, str | float | int]]
    ratio: float
    meaning: str

    def markdown(self) -> list[str]:
        """Return the rows as lines of a Markdown table, padded so that it reads in a terminal too."""
        head = list(self.rows[0])
        cells = [head, *([show(row[column]) for column in head] for row in self.rows)]
        widths = [max(len(row[index]) for row in cells) for index in range(len(head))]
        lines = [
            "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
            for row in cells
        ]
        return [lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]]


def show(value: str | float | int) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
