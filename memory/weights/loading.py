"""How another library made a module of files: the same again gives the same weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .file_origin import FileIdentity

__all__ = ["Loading"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """The loading of a module by another library. One that is equal gives weights with the same values."""

    made: str
    """A digest of what decides the values beside the files: classes, configs, dtype."""
    files: tuple[FileIdentity, ...]

    def file_at(self, path: str | Path) -> FileIdentity | None:
        """Return the file to which a path leads now, as it was when it was loaded; None for another file."""
        real = os.path.realpath(path)
        return next((file for file in self.files if file.path == real), None)
