"""Checks names of files from untrusted sources as text, before they become a path.

Under Windows a look at a path is enough to do harm: one that begins with two backslashes is asked of that host, with
this user's name. So a name is judged as text, the same on every system. Imports nothing but the standard library.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "check_file_name",
    "check_relative_path",
    "name_problem",
    "naming_path",
    "path_problem",
    "prefix_problem",
    "shown",
]

MAX_LENGTH = 255
# Raised digits count there, too.
WINDOWS_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[0-9¹²³])", re.IGNORECASE)


def name_problem(name: str) -> str | None:
    """Return why a text cannot be the name of a file or folder on every system; None for a good name."""
    if not name or name in (".", ".."):
        return "is not a file name"
    if len(name) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    if not name.isprintable():
        return "contains unprintable characters"
    if any(mark in name for mark in "/\\:"):
        return "leads to another folder, drive or host"
    if name[-1] in ". " or name[0] == " ":
        return "begins with a space, or ends with a space or a dot, which some systems drop"
    if WINDOWS_DEVICE.fullmatch(name.partition(".")[0].rstrip()):
        return "is the name of a device on Windows"
    return None


def path_problem(path: str) -> str | None:
    """Return why a text cannot be a relative path with slashes; None for a good path."""
    return next(filter(None, map(name_problem, path.split("/"))), None)


def prefix_problem(prefix: str) -> str | None:
    """Return why a text cannot begin the names of files below a folder; None for a good prefix.

    Text such as ``%year%``, which the host replaces, counts as it stands; a number follows the prefix.
    """
    path = posixpath.normpath(prefix)
    if path.startswith("/") or path.partition("/")[0] == "..":
        return "leads out of the output folder"
    if path.rpartition("/")[2] in ("", ".", ".."):
        return "is not a file name"
    return path_problem(f"{path}_")


def check_file_name(name: object, where: str) -> str:
    """Return the name of a file in one folder; ``where`` begins the line that refuses another.

    Raises:
        InvalidInput: it is no text, or leads out of the folder.
    """
    from ..memory.errors import InvalidInput

    problem = name_problem(name) if isinstance(name, str) else "is not a file name"
    if problem is not None:
        raise InvalidInput(f"{where}: {shown(name)} {problem}; allowed: the name of a file in the same folder")
    assert isinstance(name, str)
    return name


def check_relative_path(path: object, where: str) -> str:
    """Return a path below a folder, such as ``workflows/a.json``.

    Raises:
        InvalidInput: it is no text, or leads out of the folder.
    """
    from ..memory.errors import InvalidInput

    problem = path_problem(path) if isinstance(path, str) else "is not a file name"
    if problem is not None:
        raise InvalidInput(f"{where}{shown(path)} {problem}; allowed: a relative path such as folder/name")
    assert isinstance(path, str)
    return path


@contextmanager
def naming_path(path: object) -> Iterator[None]:
    """Give an `OSError` this path if it names none: a full disk is reported without a file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from error


def shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 100 else f"{text[:97]}..."
