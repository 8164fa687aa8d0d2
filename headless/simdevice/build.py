"""Compiles ``simdevice.cpp`` once per source and torch version, and loads it.

[Note: whose library] The loaded code runs as this user, so it is loaded only from a folder into which no other user can
write: the folder belongs to this user and is private, and other users cannot change its parent folders. A parent such
as /tmp is allowed: there the system keeps users from changing files of others.
"""

from __future__ import annotations

import contextlib
import errno
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

from ...memory.errors import InvalidInput
from ...memory.private_folders import make_parents, refuse_foreign, refuse_open_parents
from ...memory.units import MIB, format_bytes
from ...memory.user_folders import cache_folder

SOURCE = Path(__file__).with_name("simdevice.cpp")
# -O1: the kernels are torch's own, so more optimization only makes the build longer. -w: torch's headers cause
# warnings.
FLAGS = ("-O1", "-w")
NAME = "highwater_simdevice"
# The folder of the library takes 2 MiB, that of the compiler's own files 5 MiB.
ROOM_BYTES = 16 * MIB
DISK_FULL = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
PURPOSE, VARIABLE = "code is loaded from here", "XDG_CACHE_HOME"


class CompilerMissing(RuntimeError):
    """There is no C++ compiler to build the simulated devices. The message is one line with the remedy."""


def default_build_directory() -> Path:
    """Return the folder of the compiled backend in the user's cache, one per source, torch, flags and machine.

    Raises:
        InvalidInput: XDG_CACHE_HOME is relative, so the folder would depend on the working directory, which another
            user may own; or there is no cache folder.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if named and not os.path.isabs(named):
        raise InvalidInput(f"XDG_CACHE_HOME is {named[:200]!r}; allowed: an absolute path, or unset for ~/.cache")
    cache = cache_folder()
    if cache is None:
        raise InvalidInput("found no cache folder for the compiled simulated devices; set XDG_CACHE_HOME to a folder")
    parts = (SOURCE.read_bytes(), torch.__version__.encode(), " ".join(FLAGS).encode(), platform.machine().encode())
    return Path(cache, "simdevice", hashlib.sha256(b"\0".join(parts)).hexdigest()[:16])


def load_backend(build_directory: Path | None = None) -> None:
    """Load the backend into this process. The first time compiles for about 20 s (1 GB of RAM); later loads take 20 ms.

    Several processes may do this at once: each compiles in its own folder and moves the finished library into place in
    one step. So no process sees a partial library, and a killed build leaves no lock behind.

    Raises:
        CompilerMissing: nothing is built yet, and there is no compiler.
        InvalidInput: other users can write to the folder ([Note: whose library]).
        OSError: a disk is full.
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
            "install g++ or clang++, or set CXX to a compiler"
        )
    directory = make_private(directory)
    library = directory / library.name
    with tempfile.TemporaryDirectory(dir=directory, prefix="building-") as workspace, _build_environment():
        try:
            cpp_extension.load(
                NAME,
                str(SOURCE),
                extra_cflags=list(FLAGS),
                build_directory=workspace,
                with_cuda=False,
                is_python_module=False,
            )
        except (OSError, RuntimeError) as error:
            refuse_full_disk(error, directory)
            raise
        Path(workspace, f"{NAME}.so").chmod(0o700)  # independent of the umask
        os.replace(Path(workspace, f"{NAME}.so"), library)


def make_private(directory: Path) -> Path:
    """Create a folder and its missing parents, private to this user. Returns it as `check_private`."""
    try:
        make_parents(directory)
    except OSError as error:
        raise InvalidInput(
            f"{directory}: cannot be created: {error.strerror}; set XDG_CACHE_HOME to another folder"
        ) from None
    return check_private(directory)


def check_private(directory: Path) -> Path:
    """Require that no other user can change a folder or its parents. Makes it private; returns it without links.

    Raises:
        InvalidInput: names the folder, and the command that makes it private.
    """
    real = Path(os.path.realpath(directory))
    if hasattr(os, "getuid"):  # under Windows the user's profile is closed to others
        refuse_open_parents(real, purpose=PURPOSE, variable=VARIABLE)
        check_own(real)
        real.chmod(0o700)
    return real


def check_own(path: Path) -> None:
    """Require that this user owns a path, and that no other user can write to it."""
    refuse_foreign(path, purpose=PURPOSE, variable=VARIABLE)


def refuse_full_disk(error: Exception, directory: Path) -> None:
    """Raise an `OSError` of one line if a disk is full, which compilers say in many lines and linkers not at all."""
    folders = [str(directory), os.environ.get("TMPDIR") or "/tmp"]
    reasons = [os.strerror(number) for number in DISK_FULL]
    named = next((reason for reason in reasons if reason in str(error)), None)
    if named is None and any(os.path.isdir(f) and shutil.disk_usage(f).free < ROOM_BYTES for f in folders):
        named = os.strerror(errno.ENOSPC)
    if named is not None:
        raise OSError(
            errno.ENOSPC,
            f"{named}: compiling the simulated devices needs {format_bytes(ROOM_BYTES)} in {' and in '.join(folders)}; "
            "free some there, or set XDG_CACHE_HOME and TMPDIR to other folders",
        ) from error


@contextlib.contextmanager
def _build_environment() -> Iterator[None]:
    """Add this environment's scripts to PATH for torch, which runs ``ninja``; without activation they are missing.

    Compilers speak English meanwhile, as `refuse_full_disk` reads it.
    """
    path = os.pathsep.join(filter(None, (os.environ.get("PATH"), sysconfig.get_path("scripts"))))
    wanted = {"PATH": path, "LC_ALL": "C"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
