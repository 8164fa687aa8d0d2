"""Compiles what tests load: the simulated devices and optimum-quanto's extension; does nothing where both are there.

Two test processes that meet quanto's extension unbuilt build it in the same folder at once. So one process builds it,
here, before any test runs. A process that is killed while it builds or loads the extension leaves a lock there, for
which all later processes would wait for ever: this script removes it.
"""

import fcntl
import sys
import time
from pathlib import Path

import torch
from optimum.quanto.library.extensions.cpp import ext

from highwater.headless.simdevice.build import load_backend

LOADING_S = 60.0  # loading takes about a second, a few on a busy machine


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr)


def build_quanto() -> None:
    folder = Path(ext.build_directory)
    lock = folder / "lock"
    version = folder / "pytorch_version.txt"  # quanto writes it when the library is complete
    is_built = version.exists() and version.read_text().strip() == torch.__version__
    if lock.exists() and (not is_built or time.time() - lock.stat().st_mtime > LOADING_S):
        lock.unlink(missing_ok=True)
    if not is_built:
        say("compiling optimum-quanto's extension (about a minute, once)")
        _ = ext.lib


def build_simulated_devices() -> None:
    load_backend()


if __name__ == "__main__":
    with open(Path(__file__).parents[1] / ".venv" / ".building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_quanto()
        build_simulated_devices()
