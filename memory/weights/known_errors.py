"""What weights of files lose in storage forms, measured once and kept in the user's cache: a small file for each.

It holds tensors' names and numbers. If it cannot be read or written, what was measured is known to this process alone.
A file of weights is another one when its path, inode, size, time of its last change or header is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..user_folders import cache_folder
from .safetensors_header import FileVersion, TensorHeader

__all__ = ["MeasuredFile", "note_errors", "read_errors", "remember_errors_in"]

# The numbers mean something else when this changes, such as how errors are measured.
VERSION = 2
MAX_FILE_BYTES = 8 << 20
MAX_FILES = 200

errors_folder: list[Path | None] = []
"""The folder of measured errors, if one was set; otherwise the user's cache folder is used."""
measured_here: dict[str, dict[str, dict[str, float]]] = {}
"""What this process has measured or read: by file, form and tensor."""


def remember_errors_in(folder: Path | None) -> None:
    """Keep measured errors in this folder; None: in this process alone."""
    errors_folder[:] = [folder]
    measured_here.clear()


def folder_of_errors() -> Path | None:
    if errors_folder:
        return errors_folder[0]
    folder = cache_folder()
    return folder / "errors" if folder is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredFile:
    """A file of weights as it was when its header was read."""

    path: Path
    version: FileVersion
    tensors: Collection[TensorHeader]

    @property
    def key(self) -> str:
        """What tells it from every other file, and from what it was before."""
        tensors = sorted((each.name, each.dtype, each.shape, each.begin) for each in self.tensors)
        version = self.version
        told = VERSION, os.path.realpath(self.path), version.inode, version.file_bytes, version.mtime_ns, tensors
        return hashlib.sha256(repr(told).encode()).hexdigest()[:32]


def read_errors(file: MeasuredFile) -> dict[str, dict[str, float]]:
    """Return the errors that are known of a file, by form and tensor; nothing that is damaged."""
    key, folder = file.key, folder_of_errors()
    if key not in measured_here:
        measured_here[key] = {} if folder is None else read_kept(folder / f"{key}.json", file)
    return measured_here[key]


def read_kept(path: Path, file: MeasuredFile) -> dict[str, dict[str, float]]:
    try:
        with path.open("rb") as opened:
            found: Any = json.loads(opened.read(MAX_FILE_BYTES))
        os.utime(path)  # those that are not used leave first
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    names = {tensor.name for tensor in file.tensors}
    return {
        form: {
            name: error
            for name, error in errors.items()
            if name in names and isinstance(error, float) and 0 <= error < float("inf")
        }
        for form, errors in found.items()
        if isinstance(errors, dict)
    }


def note_errors(file: MeasuredFile, form: str, errors: Mapping[str, float]) -> None:
    """Keep what tensors of a file lose in a form, beside what is known; never raises for want of room or rights."""
    known = read_errors(file)
    known[form] = {**known.get(form, {}), **errors}
    folder = folder_of_errors()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        drop_oldest(folder)
        handle, written = tempfile.mkstemp(dir=folder, suffix=".new")
        try:
            with os.fdopen(handle, "w") as opened:
                json.dump(known, opened)
            os.replace(written, folder / f"{file.key}.json")
        except OSError:
            os.unlink(written)
            raise


def drop_oldest(folder: Path) -> None:
    """Remove the files that were not used for the longest time, so that one more has room."""
    found = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in found[MAX_FILES - 1 :]:
        path.unlink(missing_ok=True)
