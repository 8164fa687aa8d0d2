"""Compiles what tests load: the simulated devices and optimum-quanto's extension; does nothing where both are there.

Two test processes that meet quanto's extension unbuilt build it in the same folder at once, and a build that was
killed leaves a lock there on which the next one waits for ever. So one process builds it, here, before any test runs.
"""

import fcntl
import sys
from pathlib import Path

import torch
from optimum.quanto.library.extensions.cpp import ext

from highwater.headless.simdevice.build import load_backend


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr)


def build_quanto() -> None:
    folder = Path(ext.build_directory)
    version = folder / "pytorch_version.txt"  # quanto writes it when the library is complete
    if version.exists() and version.read_text().strip() == torch.__version__:
        return
    say("compiling optimum-quanto's extension (about a minute, once)")
    (folder / "lock").unlink(missing_ok=True)
    _ = ext.lib


def build_simulated_devices() -> None:
    load_backend()


if __name__ == "__main__":
    with open(Path(__file__).parents[1] / ".venv" / ".building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build_quanto()
        build_simulated_devices()
