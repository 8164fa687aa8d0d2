"""What the page keeps for its user: settings and saved workflows, as files below one folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ..memory.errors import InvalidInput

__all__ = ["OutsideFolder", "UserDirectory", "below", "default_user_directory"]

SETTINGS_FILE = "comfy.settings.json"


class OutsideFolder(InvalidInput):
    """A name from a request that leads out of the folder it may use."""


def below(folder: Path, name: str) -> Path:
    """Return the path of a name inside a folder, links resolved; touches nothing.

    Raises:
        OutsideFolder: the name is empty, absolute, or leads out of the folder.
    """
    root = folder.resolve()
    try:
        path = (root / name).resolve()
    except ValueError:  # a null byte
        raise OutsideFolder(f"{name!r} is not a file name") from None
    if path == root or not path.is_relative_to(root):
        raise OutsideFolder(f"{name!r} is not inside the folder that it may use")
    return path


def default_user_directory() -> Path:
    """Return the folder of this machine's user: ``$XDG_DATA_HOME`` or ``~/.local/share``, then highwater/user."""
    root = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(root) / "highwater" / "user"


class UserDirectory:
    """Reads and writes one user's files; the folder appears with the first write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # -- settings

    def settings(self) -> dict[str, Any]:
        """Return what was set; a broken file counts as nothing set, so that the page still opens."""
        try:
            found = json.loads((self.folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            return {}
        return found if isinstance(found, dict) else {}

    def change_settings(self, changes: dict[str, Any]) -> None:
        text = json.dumps({**self.settings(), **changes}, indent=2)
        self.write(SETTINGS_FILE, text.encode())

    # -- files

    def path(self, name: str) -> Path:
        return below(self.folder, name)

    def write(self, name: str, content: bytes, *, overwrite: bool = True) -> Path:
        """Write a file whole or not at all.

        Raises:
            FileExistsError: it is there and may not be overwritten.
            OutsideFolder: the name leads out of the folder.
        """
        path = self.path(name)
        if path.exists() and not overwrite:
            raise FileExistsError(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as scratch:
            scratch.write(content)
        os.replace(scratch.name, path)
        return path

    def move(self, source: str, target: str, *, overwrite: bool) -> Path:
        """Rename a file.

        Raises:
            FileNotFoundError, FileExistsError, OutsideFolder: nothing was moved.
        """
        source_path, target_path = self.path(source), self.path(target)
        if not source_path.is_file():
            raise FileNotFoundError(source)
        if target_path.exists() and not overwrite:
            raise FileExistsError(target)
        target_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source_path, target_path)
        return target_path

    def list_files(self, name: str, *, recurse: bool) -> list[Path]:
        """Return the files below a folder in their order; none where there is no such folder."""
        folder = self.path(name)
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
