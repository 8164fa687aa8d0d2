"""Under what a part runs: on which device, in which size, until when, and where its rows go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from highwater.tests.comfyui.host_process import bytecode_directory

from ..gpu_worker import MARK
from .record import NOT_RUN, Record

__all__ = ["LIMIT_S", "REPOSITORY", "TIME_IS_UP", "Setting", "follow"]

REPOSITORY = Path(__file__).parents[2]
# A part ends within nine minutes: what it has started when this is over is stopped.
LIMIT_S = 510
TIME_IS_UP = f"{NOT_RUN}: the time is up; --resume goes on here"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One run of one part."""

    record: Record
    part: str
    rehearses: bool
    card: Mapping[str, Any]
    """The device's name, its bytes, and the speed of its link."""
    end_s: float
    """By the monotonic clock."""

    @property
    def device(self) -> str:
        return "sim:0" if self.rehearses else "cuda:0"

    @property
    def folder(self) -> Path:
        return self.record.path.parent

    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def add(self, key: str, values: Mapping[str, Any], error: str = "") -> None:
        """Write a row, and print it in one line."""
        self.record.add(self.part, key, values, error)
        shown = error or ", ".join(
            f"{name} {brief(value)}" for name, value in values.items() if value not in (None, "")
        )
        print(f"  {key}: {shown}", flush=True)

    def is_measured(self, key: str) -> bool:
        return key in self.record.measured(self.part)

    def environment(self) -> dict[str, str]:
        """Return the environment of the processes that measure: in a rehearsal they see no GPU."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPYCACHEPREFIX": str(bytecode_directory())}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return {**environment, "CUDA_VISIBLE_DEVICES": ""} if self.rehearses else environment


def brief(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def follow(
    arguments: Sequence[str], environment: Mapping[str, str], left_s: float, use: Callable[[dict[str, Any]], None]
) -> str:
    """Run Python in a process and hand over each of its results as it comes; returns why it failed, or nothing.

    A result is a line of its output that begins with the mark, and then is JSON. What runs when the time is up is
    killed.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(max(1.0, left_s), stop)
    timer.start()
    last = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                use(json.loads(line.removeprefix(MARK)))
            elif line.strip():
                last = line.strip()
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        process.wait()
    if late.is_set():
        return TIME_IS_UP
    if code < 0:
        return f"killed by signal {-code}"
    return f"ended with {code}: {last[:160]}" if code else ""
