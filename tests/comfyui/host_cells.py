"""Computes cells (`sweep`) in a process of an unmodified ComfyUI. Knows nothing of pytest."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from highwater.tests.comfyui.host_process import REPOSITORY, HostFiles, bytecode_directory
from highwater.tests.comfyui.simulated import simulated_gpus

__all__ = ["CellProcess", "start_cell_process"]

DEVICE_BYTES = 1844 << 20


class CellProcess:
    """A ComfyUI on two simulated GPUs that computes one cell after the other; starting it takes seconds."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log

    def compute(self, name: str, mode: str) -> str:
        """Return what the row ``name`` says in column ``mode``.

        Raises:
            RuntimeError: the process has ended; with the end of what it wrote.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            print(json.dumps([name, mode]), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"the host ended with {self.process.wait()}:\n{self.log.read_text()[-4000:]}")
        cell: str = json.loads(line)
        return cell


@contextmanager
def start_cell_process(files: HostFiles) -> Iterator[CellProcess]:
    with tempfile.TemporaryDirectory(prefix="highwater-sweep-") as folder:
        Path(folder, "highwater").symlink_to(REPOSITORY)
        environment = {
            **os.environ,
            **simulated_gpus([DEVICE_BYTES, DEVICE_BYTES], f"{folder}/books", import_from=[folder]),
            "PYTHONPYCACHEPREFIX": str(bytecode_directory()),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [str(files.python), "-m", "highwater.tests.comfyui.sweep"]
        log = Path(folder, "log.txt")
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command,
                cwd=files.directory,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            try:
                yield CellProcess(process, log)
            finally:
                process.kill()
