"""`highwater serve` in a process of its own, on a simulated device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LOG", "serving"]

LOG = "server.log"


@contextmanager
def serving(folder: Path, python_path: Path | None = None) -> Iterator[str]:
    """Yield the address of a server that keeps its images, its pipelines and its log in a folder.

    Args:
        python_path: a folder of packages that it takes before the installed ones.
    """
    command = [sys.executable, "-m", "highwater", "serve", "--port", "0", "--out", str(folder / "output")]
    environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data")}
    if python_path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(python_path), os.environ.get("PYTHONPATH"))))
    with (
        (folder / LOG).open("w") as log,
        subprocess.Popen(
            [*command, "--devices", "gpu:0=64MiB"], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as server,
    ):
        try:
            assert server.stdout is not None
            address = next((line.split()[3] for line in server.stdout if line.startswith("Highwater runs at ")), None)
            assert address, (folder / LOG).read_text()
            yield address.rstrip("/")
        finally:
            server.terminate()
