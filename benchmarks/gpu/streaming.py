"""Part b: `gpu_streaming` beside the others' offloading; its rows are kept as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from .. import gpu_streaming
from ..case import Result
from ..gpu_worker import Row
from .record import RecordedRow
from .setting import Setting

__all__ = ["run", "tabulate"]

SIZES = {False: "12B", True: "tiny"}


def run(setting: Setting) -> None:
    """Measure what is missing; our own side runs each time, as it follows the peaks of the others."""
    known = {key: Row(**row.values) for key, row in setting.record.measured(setting.part).items()}

    def note(key: str, row: Row) -> None:
        values = asdict(row)
        setting.add(key, values, values["error"])

    gpu_streaming.measure(
        SIZES[setting.rehearses],
        setting.device,
        folder=setting.folder,
        known=known,
        note=note,
    )


def tabulate(rows: Sequence[RecordedRow], setting: Setting) -> list[Result]:
    found = {row.key: Row(**{**row.values, "error": row.error}) for row in rows}
    return [gpu_streaming.tabulate(found, SIZES[setting.rehearses], setting.card)]
