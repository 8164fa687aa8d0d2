"""Compiles ``simdevice.cpp`` once per source and torch version, and loads it.

[Note: whose library] What is loaded runs as this user, so it is loaded only from where no other user can have put it:
the folder is this user's and private, and none of those above it can be changed by others. A folder such as /tmp is
fine above it: there the system keeps users from touching the files of others.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import stat
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils import cpp_extension

from ...memory.errors import InvalidInput
from ...memory.user_folders import cache_folder

SOURCE = Path(__file__).with_name("simdevice.cpp")
# -O1: the kernels are torch's own; more optimization only makes the build longer. -w: torch's headers warn.
FLAGS = ("-O1", "-w")
NAME = "highwater_simdevice"


class CompilerMissing(RuntimeError):
    """No C++ compiler, so no simulated devices. One line, with the remedy."""


def default_build_directory() -> Path:
    """Where compiled backends are kept: one folder per key below the user's cache.

    Raises:
        InvalidInput: XDG_CACHE_HOME depends on the working directory, which may be anybody's, or nothing names a cache.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if named and not os.path.isabs(named):
        raise InvalidInput(f"XDG_CACHE_HOME is {named[:200]!r}; allowed: an absolute path, or nothing for ~/.cache")
    cache = cache_folder()
    if cache is None:
        raise InvalidInput("no cache folder found for the compiled simulated devices; name one in XDG_CACHE_HOME")
    parts = (SOURCE.read_bytes(), torch.__version__.encode(), " ".join(FLAGS).encode(), platform.machine().encode())
    return Path(cache, "simdevice", hashlib.sha256(b"\0".join(parts)).hexdigest()[:16])


def load_backend(build_directory: Path | None = None) -> None:
    """Load the backend into this process: about 20 s of compiling (1 GB of RAM) the first time, 20 ms after.

    Any number of processes may do this at once: each compiles in a folder of its own and moves the finished
    library into place in one step, so no process sees a half-built one and a killed build leaves no lock behind.

    Raises:
        CompilerMissing: nothing is built yet, and there is nothing to build with.
        InvalidInput: others can write where it is kept ([Note: whose library]).
    """
    directory = default_build_directory() if build_directory is None else Path(build_directory).absolute()
    library = directory / f"{NAME}.so"
    if library.is_symlink() or library.exists():
        library = check_private(directory) / library.name
        check_own(library)
        torch.ops.load_library(str(library))
        return
    compiler = cpp_extension.get_cxx_compiler()
    if not shutil.which(shlex.split(compiler)[0]):
        raise CompilerMissing(
            f"simulated devices need a C++ compiler: {compiler!r} was not found; "
            "install g++ or clang++, or name one in CXX"
        )
    directory = make_private(directory)
    library = directory / library.name
    with tempfile.TemporaryDirectory(dir=directory, prefix="building-") as workspace, _ninja_on_path():
        cpp_extension.load(
            NAME,
            str(SOURCE),
            extra_cflags=list(FLAGS),
            build_directory=workspace,
            with_cuda=False,
            is_python_module=False,
        )
        Path(workspace, f"{NAME}.so").chmod(0o700)  # whatever the umask is
        os.replace(Path(workspace, f"{NAME}.so"), library)


def make_private(directory: Path) -> Path:
    """Make a folder and those above it for this user alone, and return it as `check_private` does."""
    try:
        for folder in [*reversed(directory.parents), directory]:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
    except OSError as error:
        raise InvalidInput(
            f"{directory}: cannot be made: {error.strerror}; name another cache in XDG_CACHE_HOME"
        ) from None
    return check_private(directory)


def check_private(directory: Path) -> Path:
    """Require that no other user can change a folder or what leads to it; close it to others, return it without links.

    Raises:
        InvalidInput: naming the folder, and the command that closes it.
    """
    real = Path(os.path.realpath(directory))
    if hasattr(os, "getuid"):  # under Windows the user's profile is closed to others
        for folder in [*reversed(real.parents), real]:
            check_own(folder, is_above=folder != real)
        real.chmod(0o700)
    return real


def check_own(path: Path, *, is_above: bool = False) -> None:
    """Require that a file or folder is this user's, or the system's where it is above, and that no other may write."""
    if not hasattr(os, "getuid"):
        return
    status = path.lstat()
    told = f"{path}: code is loaded from here, but"
    if stat.S_ISLNK(status.st_mode):
        raise InvalidInput(f"{told} it is a link; remove it, or name another cache in XDG_CACHE_HOME")
    if status.st_uid not in ((os.getuid(), 0) if is_above else (os.getuid(),)):
        raise InvalidInput(f"{told} it belongs to user {status.st_uid}; name a cache of your own in XDG_CACHE_HOME")
    is_kept_apart = is_above and status.st_mode & stat.S_ISVTX and status.st_uid == 0
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_kept_apart:
        raise InvalidInput(
            f"{told} other users can write there; run: chmod go-w {shlex.quote(str(path))}, or name another cache in "
            "XDG_CACHE_HOME"
        )


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
