"""The file of measured calls, beside that of learned needs, so that plans of the next process know them.

It holds digests, shapes, dtypes and seconds: no name, path or prompt. If it cannot be used, only that is lost. Entries
hold for one version of what computes, as needs do ([Note: version] in `needs_file.py`); others stay in the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..tracing.trace import Work
from .speeds import MAX_CALLS, CallKey, MeasuredCall, can_take

__all__ = ["SPEEDS_FILE_NAME", "SpeedsFile"]

SPEEDS_FILE_NAME = "speeds.json"
FORMAT = 1
MAX_FILE_BYTES = 4 << 20
LONGEST_DTYPE = 60
MOST_NUMBERS = 100
DIGEST = re.compile(r"[0-9a-f]{32}")


class SpeedsFile:
    """Reads and writes one small JSON file; never raises for what it finds on the disk.

    Args:
        version: of what computes.
    """

    def __init__(self, path: Path, version: str) -> None:
        self.path = path
        self.version = hashlib.sha256(version.encode()).hexdigest()[:32]
        self.problem = ""
        """Why the file could not be read the last time, in a line; empty if it could, or there is none."""

    def read(self) -> dict[CallKey, MeasuredCall]:
        """Return the calls of this version; what is not ours is left out."""
        return {key: call for row in self.rows() if row.get("version") == self.version for key, call in read_row(row)}

    def rows(self) -> list[dict[str, Any]]:
        """Return the entries of all versions, the oldest first; none where the file cannot be read."""
        self.problem = ""
        try:
            if self.path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(stored, dict) or stored.get("format") != FORMAT:
                raise ValueError("not a file of measured calls")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, RecursionError) as error:
            reason = str(error).partition("\n")[0]
            self.problem = f"{self.path}: cannot be read ({reason}); measured seconds are not in this plan"
            return []
        rows = stored.get("calls")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    def write(self, calls: Mapping[CallKey, MeasuredCall]) -> bool:
        """Add calls, in place of earlier ones of the same keys; returns whether that succeeded.

        The file is moved into place in one step. Of two processes that write at once, one may lose its calls.
        """
        new = [row_of(key, call, self.version) for key, call in calls.items()]
        taken = {identity(row) for row in new}
        rows = [*(row for row in self.rows() if identity(row) not in taken), *new][-MAX_CALLS:]
        text = json.dumps({"format": FORMAT, "calls": rows})
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.path.parent) as workspace:
                finished = Path(workspace, self.path.name)
                finished.write_text(text, encoding="utf-8")
                os.replace(finished, self.path)
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Delete the file, if there is one. Raises OSError."""
        self.path.unlink(missing_ok=True)


def row_of(key: CallKey, call: MeasuredCall, version: str) -> dict[str, Any]:
    return {
        **key._asdict(),
        "version": version,
        "seconds": call.seconds,
        "of_blocks": call.of_blocks,
        "work": call.work,
        "used": call.used_s,
    }


def identity(row: Mapping[str, Any]) -> str:
    return json.dumps([row.get(name) for name in (*CallKey._fields, "version")])


def read_row(row: Mapping[str, Any]) -> list[tuple[CallKey, MeasuredCall]]:
    """Return the call in an entry; none for what this program does not write."""
    digests = [row.get("component"), row.get("device")]
    shapes, dtype, seconds, work = row.get("shapes"), row.get("dtype"), row.get("seconds"), row.get("work")
    are_digests = all(isinstance(digest, str) and DIGEST.fullmatch(digest) for digest in digests)
    if (
        not are_digests
        or not isinstance(shapes, list)
        or not shapes
        or not all(isinstance(shape, list) for shape in shapes)
    ):
        return []
    edges = [edge for shape in shapes for edge in shape]
    if work is not None and (not isinstance(work, list) or len(work) != len(Work._fields)):
        return []
    numbers = [*edges, row.get("entry"), row.get("used"), *(work or ())]
    if len(edges) > MOST_NUMBERS or not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        return []
    if work is not None and min(work) < 1:
        return []
    if type(seconds) is not float or not can_take(seconds) or type(row.get("of_blocks")) is not bool:
        return []
    if not isinstance(dtype, str) or len(dtype) > LONGEST_DTYPE:
        return []
    key = CallKey(str(digests[0]), str(digests[1]), dtype, int(row["entry"]), tuple(map(tuple, shapes)))
    done = Work(*work) if work is not None else None
    return [(key, MeasuredCall(seconds=seconds, of_blocks=row["of_blocks"], work=done, used_s=int(row["used"])))]
