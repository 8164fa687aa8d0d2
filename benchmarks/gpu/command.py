"""``python -m benchmarks gpu``: runs the parts one after another, each until it is done or its time is up."""

from __future__ import annotations

import math
import shutil
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..case import Result
from ..gpu_streaming import run_worker
from ..gpu_worker import Request, describe
from . import engine_tests, hosts, streaming, two_budgets, widening
from .packages import REMEDY, missing_of_part
from .record import NOT_RUN, Record, RecordedRow, cell, write_tables
from .setting import LIMIT_S, REPOSITORY, Setting

__all__ = ["PARTS", "run_parts"]

RESULTS = Path(__file__).parents[1] / "results"
REHEARSAL = REPOSITORY / ".cache" / "gpu-rehearsal"
LABEL = "REHEARSAL on simulated devices: it shows that the code runs, and its numbers tell nothing of any card."


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a part runs, and the tables of its rows; ``name`` is the file that these go to."""

    name: str
    run: Callable[[Setting], None]
    tabulate: Callable[[Sequence[RecordedRow], Setting], list[Result]]


PARTS = {
    "a": Part(name="gpu_tests", run=engine_tests.run, tabulate=engine_tests.tabulate),
    "b": Part(name="gpu_streaming", run=streaming.run, tabulate=streaming.tabulate),
    "c": Part(name="gpu_comfyui", run=hosts.run, tabulate=hosts.tabulate),
    "d": Part(name="gpu_two_budgets", run=two_budgets.run, tabulate=two_budgets.tabulate),
    "e": Part(name="gpu_precision", run=widening.run, tabulate=widening.tabulate),
}


def run_parts(letters: Sequence[str], *, resume: bool, rehearses: bool, describe_machine: Callable[[], str]) -> int:
    """Run these parts; returns 0, or 1 where something failed or was not run.

    Raises:
        SystemExit: no GPU here, or no compiler to rehearse with: nothing is measured.
    """
    if not rehearses and not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks gpu: no GPU that torch can use; nothing was measured (--rehearse takes simulated devices)"
        )
    if rehearses and not any(shutil.which(name) for name in ("g++", "clang++")):
        raise SystemExit("benchmarks gpu --rehearse: simulated devices need a C++ compiler; install g++")
    asked, problem = run_worker(Request(method="machine", size="tiny", device="sim:0" if rehearses else "cuda:0"), 300)
    if not asked or asked[0].error:
        raise SystemExit(f"benchmarks gpu: the device does not answer: {problem or asked[0].error}")
    card = asked[0].notes
    folder = REHEARSAL if rehearses else RESULTS
    machine = f"{card['name']}, {card['total_bytes'] / 2**30:.0f} GiB, torch {torch.__version__}"
    record = Record(folder / "gpu.jsonl", machine)
    failed = False
    for letter in letters:
        part = PARTS[letter]
        record.begin(letter, resume=resume)
        print(f"part {letter}, {part.name}, on {machine}:", flush=True)
        setting = Setting(record=record, part=letter, rehearses=rehearses, card=card, end_s=time.monotonic() + LIMIT_S)
        missing = missing_of_part(letter)
        try:
            if missing:
                setting.add(part.name, {}, f"{NOT_RUN}: {' and '.join(missing)} not installed; {REMEDY}")
            else:
                part.run(setting)
        except Exception as error:  # such as a package that is there and cannot be imported
            traceback.print_exc()
            setting.add(part.name, {}, f"{NOT_RUN} to its end: {describe(error)}")
        finally:  # also where it is interrupted
            rows = record.rows(letter)
            measured = [row for row in rows if row.key != part.name]
            if measured:  # with a package missing they are an earlier run's, and have their tables
                tables = [] if missing else part.tabulate(measured, setting)
            else:
                tables = [tell_not_run(rows)] if rows else []
            if tables:
                command = f"python -m benchmarks gpu --part {letter}{' --rehearse' if rehearses else ''}"
                path = folder / f"{part.name}.md"
                about = f"{describe_machine()}; {machine}"
                write_tables(path, tables, machine=about, command=command, note=LABEL if rehearses else "")
                print("\n".join(["", *(line for table in tables for line in [*table.markdown(), ""]), f"in {path}"]))
        left = [row.key for row in rows if row.error.startswith(NOT_RUN)]
        if left:
            print(f"part {letter}: {len(left)} not run; the same with --resume goes on")
        failed = failed or any(row.error for row in rows)
    return int(failed)


def tell_not_run(rows: Sequence[RecordedRow]) -> Result:
    return Result(
        question="Nothing of this part was run.",
        rows=[{"part": row.key, "why": cell(row.error, 200)} for row in rows],
        ratio=math.nan,
        meaning="nothing was measured",
    )
