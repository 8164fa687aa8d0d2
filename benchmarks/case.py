"""What every case returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Result", "Rows"]


Rows = Sequence[Mapping[str, str | float | int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A table and the one number that sums it up; ``meaning`` says of what it is the ratio, and the target."""

    question: str
    rows: Rows
    ratio: float
    meaning: str
    more: Mapping[str, Rows] = field(default_factory=dict)
    """Further tables, each below a sentence that says what it shows."""

    def markdown(self) -> list[str]:
        """Return the rows as lines of Markdown tables, padded so that they read in a terminal too."""
        lines = table(self.rows)
        for sentence, rows in self.more.items():
            lines += ["", sentence, "", *table(rows)]
        return lines


def table(rows: Rows) -> list[str]:
    head = list(rows[0])
    cells = [head, *([show(row[column]) for column in head] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(head))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return [lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]]


def show(value: str | float | int) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
