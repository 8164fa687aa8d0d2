"""Compiles ``fake_cuda.c`` once per source, and names the folder of another comfy-aimdo."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

from torch.utils import cpp_extension

from highwater.headless.simdevice.build import check_own, check_private, default_build_directory, make_private

__all__ = ["ensure_driver"]

SOURCE = Path(__file__).with_name("fake_cuda.c")
FLAGS = ("-x", "c", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-lpthread")
NAME = "libcuda.so.1"  # comfy-aimdo looks for a loaded module of this name


def ensure_driver() -> Path:
    """Return the compiled driver; the first time compiles for a second. Any number of processes may do so at once."""
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), platform.machine().encode())
    cache = default_build_directory().parent.parent
    directory = make_private(cache / "fake-cuda" / hashlib.sha256(b"\0".join(parts)).hexdigest()[:16])
    library = directory / NAME
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=directory, prefix="building-") as workspace:
            built = Path(workspace, NAME)
            compiler = shlex.split(cpp_extension.get_cxx_compiler())
            subprocess.run([*compiler, *FLAGS, str(SOURCE), "-o", str(built)], check=True)
            built.chmod(0o700)
            os.replace(built, library)
    check_own(check_private(directory) / NAME)
    return library
