"""Compiles ``simdevice.cpp`` once per source and torch version, and loads it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("simdevice.cpp")
# -O1: the kernels are torch's own; more optimization only makes the build longer. -w: torch's headers warn.
FLAGS = ("-O1", "-w")
NAME = "highwater_simdevice"


class CompilerMissing(RuntimeError):
    """No C++ compiler, so no simulated devices. One line, with the remedy."""


def default_build_directory() -> Path:
    """Where compiled backends are kept: one folder per key below the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    parts = (SOURCE.read_bytes(), torch.__version__.encode(), " ".join(FLAGS).encode(), platform.machine().encode())
    return Path(cache, "highwater", "simdevice", hashlib.sha256(b"\0".join(parts)).hexdigest()[:16])


def load_backend(build_directory: Path | None = None) -> None:
    """Load the backend into this process: about 20 s of compiling (1 GB of RAM) the first time, 20 ms after.

    Any number of processes may do this at once: each compiles in a folder of its own and moves the finished
    library into place in one step, so nobody sees a half-built one and a killed build leaves no lock behind.
    Raises `CompilerMissing` when nothing is built yet and there is nothing to build with.
    """
    directory = default_build_directory() if build_directory is None else Path(build_directory)
    library = directory / f"{NAME}.so"
    if library.exists():
        torch.ops.load_library(str(library))
        return
    compiler = cpp_extension.get_cxx_compiler()
    if not shutil.which(shlex.split(compiler)[0]):
        raise CompilerMissing(
            f"simulated devices need a C++ compiler: {compiler!r} was not found; "
            "install g++ or clang++, or name one in CXX"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix="building-") as workspace, _ninja_on_path():
        cpp_extension.load(
            NAME,
            str(SOURCE),
            extra_cflags=list(FLAGS),
            build_directory=workspace,
            with_cuda=False,
            is_python_module=False,
        )
        os.replace(Path(workspace, f"{NAME}.so"), library)


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """torch runs ``ninja`` from PATH, where a virtual environment that was not activated is missing."""
    before = os.environ.get("PATH")
    os.environ["PATH"] = os.pathsep.join(filter(None, (before, sysconfig.get_path("scripts"))))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATH"]
        else:
            os.environ["PATH"] = before
