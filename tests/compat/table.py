"""The table in ``docs/compatibility.md``: rows of cells by mode, written and read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from highwater.tests.compat.modes import MODES

__all__ = ["DOCUMENT", "MODES", "Rows", "ending", "read_rows", "refused_cells", "write_refused", "write_rows"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
Rows = dict[str, dict[str, str]]
"""The cells of each row by mode, by the row's name."""

COLUMNS = ("name", *MODES)
REFUSED = "Refused"
# Whose limit a refusal is, by a part of its line. A refusal that none of them fits is a mistake of the tables.
LIMITS = {
    "is too small": "Highwater: a budget below the minimum that a component needs",
    "a Control-LoRA reads its weights": "Highwater: eight bits in a model whose weights a Control-LoRA reads",
    "is shared by parts on both devices": "Highwater: a split between parts that share a weight or a buffer",
}


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


def refused_cells(text: str) -> list[str]:
    """Return the refused cells of the whole document, each with whose limit it is.

    Raises:
        ValueError: a refusal whose limit is not known.
    """
    refused, section = [], ""
    for line in text.partition(f"## {REFUSED}")[0].splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        if not section or not line.startswith("|"):
            continue
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for mode, cell in zip(MODES, cells, strict=True):
            if cell.startswith("refused"):
                whose = next((limit for part, limit in LIMITS.items() if part in cell), None)
                if whose is None:
                    raise ValueError(f"whose limit is {cell!r}? Name it in tests/compat/table.py, LIMITS")
                refused.append(f"{section}, {name}, {mode}: {whose}")
    return refused


def ending(text: str, limited: Mapping[str, str]) -> str:
    """Return the document's last section: what is refused in the tables above, and what has no row and why."""
    refused = refused_cells(text)
    lines = [f"## {REFUSED}", "", f"{len(refused)} cells of the tables above are refused{':' if refused else '.'}"]
    lines += ["", *(f"- {cell}" for cell in refused)] if refused else []
    lines += ["", f"{len(limited)} pipelines have no row, because Highwater does not support them completely:", ""]
    lines += [f"- {name}: {why}" for name, why in sorted(limited.items())]
    lines += [
        "",
        "`tests/compat/not_built.py` lists all other classes of diffusers without a row, each with the reason.",
    ]
    return "\n".join(lines) + "\n"


def write_refused(limited: Mapping[str, str]) -> None:
    """Put the last section anew at the end of the document."""
    text = DOCUMENT.read_text(encoding="utf-8").partition(f"## {REFUSED}")[0].rstrip()
    DOCUMENT.write_text(f"{text}\n\n{ending(text, limited)}", encoding="utf-8")
