"""Part a: the tests of `tests/gpu`, each file in a process of its own: what one does to the card harms no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..case import Result
from .record import RecordedRow, cell
from .setting import REPOSITORY, TIME_IS_UP, Setting, follow

__all__ = ["run", "tabulate"]

FOLDER = "tests/gpu"
FIRST = ("test_equal.py", "test_streams.py", "test_page_locking.py", "test_out_of_memory.py", "test_peak.py")
ONE_TEST_S = 120
CARDS = {False: "cuda", True: "simulated"}


def run(setting: Setting) -> None:
    """Run what has not passed yet."""
    found = {path.name for path in (REPOSITORY / FOLDER).glob("test_*.py")}
    for name in [*FIRST, *sorted(found - set(FIRST))]:
        if setting.left_s() < 5:
            setting.add(f"{FOLDER}/{name}", {}, TIME_IS_UP)
        else:
            run_file(setting, f"{FOLDER}/{name}")


def run_file(setting: Setting, path: str) -> None:
    started: list[str] = []

    def use(told: dict[str, Any]) -> None:
        if "started" in told:
            started.append(told["started"])
            return
        started.remove(told["ended"])
        values = {"outcome": told["outcome"], "s": told["seconds"], **told["measured"]}
        setting.add(told["ended"], values, "" if told["outcome"] == "passed" else told["reason"])

    def is_here(key: str) -> bool:
        file, _, test = key.partition("::")
        return bool(test) and Path(file).name == Path(path).name

    passed = [key for key in setting.record.measured(setting.part) if is_here(key)]
    setting.record.remove(setting.part, path)  # why none of its tests ran the last time
    arguments = [
        *("-m", "pytest", path, "-m", f"on_{CARDS[setting.rehearses]}", "-q", "-p", "no:cacheprovider"),
        *("-p", "highwater.benchmarks.gpu.pytest_rows", "-o", f"timeout={ONE_TEST_S}", "--tb=short"),
        *(argument for key in passed for argument in ("--deselect", key)),
    ]
    problem = follow(arguments, setting.environment(), setting.left_s(), use)
    for key in started:  # it was running when the process ended
        setting.add(key, {"outcome": "failed"}, problem or "the process ended")
    nothing_left = problem.startswith("ended with 5") and passed
    told = any(is_here(row.key) for row in setting.record.rows(setting.part))
    if problem and not nothing_left and (not told or problem == TIME_IS_UP):
        setting.add(path, {}, problem)


def tabulate(rows: Sequence[RecordedRow], setting: Setting) -> list[Result]:
    tests = [row for row in rows if "::" in row.key]
    passed = sum(not row.error for row in tests)
    return [
        Result(
            question=f"The tests of `{FOLDER}` on {setting.card['name']}, and what they measured.",
            rows=[
                {
                    "test": row.key.removeprefix(f"{FOLDER}/"),
                    "outcome": row.values.get("outcome", "-"),
                    "s": float(row.values.get("s", 0.0)),
                    "measured": "; ".join(
                        f"{name}: {value}" for name, value in row.values.items() if name not in ("outcome", "s")
                    )
                    or "-",
                    "why": cell(row.error, 200) or "-",
                }
                for row in rows
            ],
            ratio=passed / max(1, len(tests)),
            meaning=f"{passed} of {len(tests)} passed",
        )
    ]
