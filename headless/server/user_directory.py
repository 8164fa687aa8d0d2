"""What the page keeps for its user: settings and saved workflows, as files below one folder."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ...memory.errors import InvalidInput
from ...memory.user_folders import data_folder
from ...nodes.file_names import path_problem, shown
from .page_requests import parse_json

__all__ = ["OutsideFolder", "UserDirectory", "below", "default_user_directory"]

SETTINGS_FILE = "comfy.settings.json"
MAX_SETTINGS_BYTES = 4 << 20


class OutsideFolder(InvalidInput):
    """A name from a request that leads out of the folder it may use."""


def below(folder: Path, name: str) -> Path:
    """Return the path of a name inside a folder, links resolved; judged by its letters before a path is made of it.

    Raises:
        OutsideFolder: the name is empty, absolute, or leads out of the folder.
    """
    problem = path_problem(name)
    if problem is not None:
        raise OutsideFolder(f"{shown(name)} {problem}; allowed: a relative path such as folder/name")
    root = folder.resolve()
    path = (root / name).resolve()
    if path == root or not path.is_relative_to(root):
        raise OutsideFolder(f"{shown(name)} leads out of the allowed folder")
    return path


def default_user_directory() -> Path:
    """Return the folder of this machine's user, such as ``~/.local/share/highwater/user``.

    Raises:
        InvalidInput: the user has none.
    """
    folder = data_folder()
    if folder is None:
        raise InvalidInput("no folder found for workflows and settings; name one in XDG_DATA_HOME")
    return folder / "user"


class UserDirectory:
    """Reads and writes one user's files; the folder appears with the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # -- settings

    def settings(self) -> dict[str, Any]:
        """Return what was set; a broken or unreadable file counts as nothing set, so that the page still opens."""
        try:
            return self.read_settings()
        except OSError:
            return {}

    def read_settings(self) -> dict[str, Any]:
        """Return what was set; nothing where the file is broken or not there. Raises OSError if it cannot be read."""
        try:
            found = parse_json((self.folder / SETTINGS_FILE).read_bytes())
        except (FileNotFoundError, InvalidInput):
            return {}
        return found if isinstance(found, dict) else {}

    def change_settings(self, changes: dict[str, Any]) -> None:
        """Set some of the settings.

        Raises:
            InvalidInput: they would be more than a page has.
            OSError: those that are set cannot be read, and would be lost; or the file cannot be written.
        """
        text = json.dumps({**self.read_settings(), **changes}, indent=2, allow_nan=False)
        if len(text) > MAX_SETTINGS_BYTES:
            raise InvalidInput(f"the settings would have {len(text)} bytes; allowed: at most {MAX_SETTINGS_BYTES}")
        self.write(SETTINGS_FILE, text.encode())

    # -- files

    def path(self, name: str) -> Path:
        return below(self.folder, name)

    def write(self, name: str, content: bytes, *, overwrite: bool = True) -> Path:
        """Write a file whole or not at all: an error, such as a full disk, leaves what was there, and nothing beside.

        Raises:
            FileExistsError: it is there and may not be overwritten.
            InvalidInput: the name leads out of the folder, or is that of a folder.
        """
        path = self.path_for_file(name)
        if path.exists() and not overwrite:
            raise FileExistsError(name)
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        except BaseException:
            os.unlink(scratch)
            raise
        return path

    def path_for_file(self, name: str) -> Path:
        """Return where a file may be put; makes the folders above it."""
        path = self.path(name)
        if path.is_dir():
            raise InvalidInput(f"{shown(name)} is a folder; allowed: the name of a file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise InvalidInput(f"{shown(name)} lies below a file; allowed: the name of a file in a folder") from None
        return path

    def delete(self, name: str) -> None:
        """Remove a file. Raises FileNotFoundError where there is none."""
        path = self.path(name)
        if not path.is_file():
            raise FileNotFoundError(name)
        path.unlink()

    def move(self, source: str, target: str, *, overwrite: bool) -> Path:
        """Rename a file.

        Raises:
            FileNotFoundError, FileExistsError, InvalidInput: nothing was moved.
        """
        source_path = self.path(source)
        if not source_path.is_file():
            raise FileNotFoundError(source)
        target_path = self.path_for_file(target)
        if target_path.exists() and not overwrite:
            raise FileExistsError(target)
        os.replace(source_path, target_path)
        return target_path

    def list_files(self, name: str, *, recurse: bool) -> list[Path]:
        """Return the files below a folder in their order; none where there is no such folder."""
        folder = self.path(name.rstrip("/"))
        found = folder.rglob("*") if recurse else folder.glob("*")
        return sorted(path for path in found if path.is_file() and not path.name.startswith("."))

    def describe(self, path: Path, *, below: Path | None = None) -> dict[str, Any]:
        """Return a file as the page lists it: its name below a folder, bytes and times in milliseconds."""
        stat = path.stat()
        return {
            "path": path.relative_to((below or self.folder).resolve()).as_posix(),
            "size": stat.st_size,
            "modified": stat.st_mtime_ns // 1_000_000,
            "created": stat.st_ctime_ns // 1_000_000,
        }
