"""Folders that no other user can change: who owns them and the folders above them.

On Windows the user's profile is closed to others, and nothing is checked but links.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from pathlib import Path

from .errors import InvalidInput

__all__ = ["make_parents", "make_private_folder", "refuse_foreign", "refuse_open_parents", "refuse_unprivate"]


def make_private_folder(folder: Path, *, purpose: str, variable: str) -> None:
    """Create a folder with mode 0700 and its missing parents, or require that it is one already; changes no mode.

    Args:
        purpose: what the folder is for, the begin of an error: "code is loaded from here".
        variable: the environment variable that names another one.

    Raises:
        InvalidInput: it is a link or no folder, another user can read or change it, or it cannot be created.
    """
    refuse_links_of_others(folder, purpose=purpose, variable=variable)
    try:
        make_parents(folder)
    except OSError as error:
        raise InvalidInput(f"{folder}: cannot be created: {error.strerror}; {advise(variable)}") from None
    refuse_unprivate(folder, purpose=purpose, variable=variable)


def refuse_unprivate(folder: Path, *, purpose: str, variable: str) -> None:
    """Require that a folder is one that `make_private_folder` could have made. Raises `InvalidInput`."""
    refuse_links_of_others(folder, purpose=purpose, variable=variable)
    try:
        status = folder.lstat()
    except OSError as error:
        raise InvalidInput(f"{folder}: {purpose}, but cannot be read: {error.strerror}; {advise(variable)}") from None
    if not stat.S_ISDIR(status.st_mode) or is_reparse_point(status):
        raise InvalidInput(f"{folder}: {purpose}, but it is a link or no folder; remove it, or {advise(variable)}")
    refuse_foreign(folder, purpose=purpose, variable=variable)
    if hasattr(os, "getuid") and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode, name = stat.S_IMODE(status.st_mode), shlex.quote(str(folder))
        raise InvalidInput(f"{folder}: {purpose}, but its mode is {mode:04o}; allowed: 0700; run: chmod 700 {name}")
    refuse_open_parents(Path(os.path.realpath(folder)), purpose=purpose, variable=variable)


def make_parents(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700. Raises `OSError`."""
    for part in [*reversed(folder.parents), folder]:
        with contextlib.suppress(FileExistsError):
            part.mkdir(mode=0o700)


def refuse_links_of_others(folder: Path, *, purpose: str, variable: str) -> None:
    """Require that no part of a path is a link of another user than this one or root. Raises `InvalidInput`."""
    for part in [*reversed(folder.parents), folder] if hasattr(os, "getuid") else []:
        try:
            status = part.lstat()
        except OSError:
            return  # what follows does not exist either
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.getuid(), 0):
            raise InvalidInput(f"{part}: {purpose}, but it is a link of user {status.st_uid}; {advise(variable)}")


def refuse_open_parents(real: Path, *, purpose: str, variable: str) -> None:
    """Require that no other user can change the folders above a path without links. Raises `InvalidInput`."""
    for folder in reversed(real.parents):
        refuse_foreign(folder, purpose=purpose, variable=variable, is_above=True)


def refuse_foreign(path: Path, *, purpose: str, variable: str, is_above: bool = False) -> None:
    """Require that this user (for a parent folder: or root) owns a path, and that no other user can write to it.

    A parent such as /tmp is allowed: there the system keeps users from changing files of others.

    Raises:
        InvalidInput: names the path, and the command that makes it private.
    """
    if not hasattr(os, "getuid"):
        return
    status, told = path.lstat(), f"{path}: {purpose}, but"
    if stat.S_ISLNK(status.st_mode):
        raise InvalidInput(f"{told} it is a link; remove it, or {advise(variable)}")
    if status.st_uid not in ((os.getuid(), 0) if is_above else (os.getuid(),)):
        raise InvalidInput(f"{told} it belongs to user {status.st_uid}; set {variable} to a folder of yours")
    is_kept_apart = is_above and status.st_mode & stat.S_ISVTX and status.st_uid == 0
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_kept_apart:
        command = f"chmod go-w {shlex.quote(str(path))}"
        raise InvalidInput(f"{told} other users can write there; run: {command}, or {advise(variable)}")


def advise(variable: str) -> str:
    return f"set {variable} to another folder"


def is_reparse_point(status: os.stat_result) -> bool:
    """Whether this is one of Windows' junctions, which are no links in the eyes of `stat`."""
    return bool(getattr(status, "st_file_attributes", 0) & getattr(stat, "FILE_ATTRIBUTE_REPARSE_POINT", 0))
