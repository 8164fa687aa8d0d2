"""The rows of the GPU benchmark: one line of JSON each, written as soon as it is measured, and the tables of them.

A run that is killed keeps its rows; another with ``--resume`` measures what is missing, and what had an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..case import Result

__all__ = ["Record", "RecordedRow", "cell", "write_tables"]

NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRow:
    """What was measured under a key, or why it was not."""

    part: str
    key: str
    machine: str
    error: str = ""
    values: dict[str, Any] = field(default_factory=dict)


class Record:
    """The file of all rows.

    Args:
        machine: what they are measured on; rows of another machine are never taken for this one's.
    """

    def __init__(self, path: Path, machine: str) -> None:
        self.path = path
        self.machine = machine
        self.lines = read_rows(path)

    def begin(self, part: str, *, resume: bool) -> None:
        """Drop the rows of an earlier run of this part, or go on with those of what was run.

        Raises:
            SystemExit: they are to be kept, and are another machine's.
        """
        others = {row.machine for row in self.rows(part)} - {self.machine}
        if resume and others:
            raise SystemExit(
                f"benchmarks gpu --resume: {self.path} has rows of part {part} from {min(others)}, and this is "
                f"{self.machine}; without --resume they are replaced"
            )
        # What was not run may run now, and under another key.
        self.lines = [row for row in self.lines if row.part != part or (resume and not row.error.startswith(NOT_RUN))]
        self.rewrite()  # without the line that a kill cut off, which the next row would continue

    def add(self, part: str, key: str, values: Mapping[str, Any], error: str = "") -> RecordedRow:
        """Write a row to the file at once; it takes the place of an earlier one with its key."""
        row = RecordedRow(part=part, key=key, machine=self.machine, error=error, values=dict(values))
        self.lines = [line for line in self.lines if (line.part, line.key) != (part, key)] + [row]
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return row

    def remove(self, part: str, key: str) -> None:
        """Drop a row, if it is there."""
        self.lines = [line for line in self.lines if (line.part, line.key) != (part, key)]
        self.rewrite()

    def rewrite(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text("".join(json.dumps(asdict(row)) + "\n" for row in self.lines), encoding="utf-8")
        os.replace(new, self.path)

    def rows(self, part: str) -> list[RecordedRow]:
        """Return a part's rows, in the order in which they were last measured."""
        return [row for row in self.lines if row.part == part]

    def measured(self, part: str) -> dict[str, RecordedRow]:
        """Return those of a part's rows that need no other run, by key."""
        return {row.key: row for row in self.rows(part) if not row.error}


def read_rows(path: Path) -> list[RecordedRow]:
    """Return the rows of a file, the last one of each key. A line that a kill cut off is left out."""
    rows: dict[tuple[str, str], RecordedRow] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = RecordedRow(**json.loads(line))
        except (ValueError, TypeError):
            continue
        rows.pop((row.part, row.key), None)
        rows[row.part, row.key] = row
    return list(rows.values())


def cell(error: str, length: int = 50) -> str:
    """Return the part of an error that a table has room for; all of it is in the file of rows."""
    return error.replace("|", "/")[:length]


def write_tables(path: Path, results: Sequence[Result], *, machine: str, command: str, note: str = "") -> None:
    """Write tables below each other; ``note`` stands above them."""
    lines = [f"# {path.stem}", ""]
    lines += [note, ""] if note else []
    for result in results:
        lines += [result.question, "", *result.markdown(), "", f"ratio: {result.ratio:.4f} ({result.meaning})", ""]
    lines += [f"- machine: {machine}", f"- command: `{command}`", ""]
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines), encoding="utf-8")
    os.replace(new, path)
