"""The table in ``docs/compatibility.md``: rows of cells by mode, written and read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from highwater.tests.compat.modes import MODES

__all__ = ["DOCUMENT", "Rows", "read_rows", "write_rows"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
Rows = dict[str, dict[str, str]]
"""The cells of each row by mode, by the row's name."""

COLUMNS = ("name", *MODES)


def read_rows(section: str, text: str | None = None) -> Rows:
    """Return the rows below a heading of the document."""
    text = DOCUMENT.read_text(encoding="utf-8") if text is None else text
    rows: Rows = {}
    inside = False
    for line in text.splitlines():
        if line.startswith("## "):
            inside = line.removeprefix("## ") == section
        elif inside and line.startswith("|") and not line.startswith("| name") and not line.startswith("|--"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name] = dict(zip(MODES, cells, strict=True))
    return rows


def write_rows(section: str, rows: Mapping[str, Mapping[str, str]]) -> None:
    """Put rows in place of those below a heading; what stands around the table stays."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    begin = lines.index(f"## {section}")
    end = next((n for n in range(begin + 1, len(lines)) if lines[n].startswith("## ")), len(lines))
    first = next((n for n in range(begin, end) if lines[n].startswith("|")), end)
    last = next((n for n in range(first, end) if not lines[n].startswith("|")), end)
    table = [as_line(COLUMNS), "|---" * len(COLUMNS) + "|"]
    table += [as_line([name, *(rows[name].get(mode, "-") for mode in MODES)]) for name in sorted(rows, key=str.lower)]
    DOCUMENT.write_text("\n".join([*lines[:first], *table, *lines[last:]]) + "\n", encoding="utf-8")


def as_line(cells: Mapping[str, str] | tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
