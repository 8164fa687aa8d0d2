"""What weights of files lose in storage forms, measured once and kept in the user's cache: a small file for each.

It holds tensors' names and numbers. If it cannot be read or written, only what was measured is lost. A file of weights
is another one when its size, the time of its last change or its header is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..user_folders import cache_folder
from .safetensors_header import FileVersion, TensorHeader

__all__ = ["note_errors", "read_errors"]

FOLDER = "errors"
# The numbers mean something else when this changes, such as how errors are measured.
VERSION = 1
MAX_FILE_BYTES = 8 << 20
MAX_FILES = 200


def path_of(file: FileVersion, tensors: Collection[TensorHeader]) -> Path | None:
    """Return where a file's errors are kept; None where the user has no home."""
    folder = cache_folder()
    if folder is None:
        return None
    told = repr(
        (VERSION, file.file_bytes, file.mtime_ns, *sorted((each.name, each.dtype, each.begin) for each in tensors))
    )
    return folder / FOLDER / f"{hashlib.sha256(told.encode()).hexdigest()[:32]}.json"


def read_errors(file: FileVersion, tensors: Collection[TensorHeader]) -> dict[str, dict[str, float]]:
    """Return the errors that are known of a file, by form and tensor; nothing that is damaged."""
    path = path_of(file, tensors)
    if path is None:
        return {}
    try:
        with path.open("rb") as opened:
            found: Any = json.loads(opened.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    known = {tensor.name for tensor in tensors}
    return {
        form: {
            name: float(error)
            for name, error in errors.items()
            if name in known and type(error) in (int, float) and math.isfinite(error) and error >= 0
        }
        for form, errors in found.items()
        if isinstance(errors, dict)
    }


def note_errors(file: FileVersion, tensors: Collection[TensorHeader], form: str, errors: Mapping[str, float]) -> None:
    """Keep what tensors of a file lose in a form, beside what is known; never raises for want of room or rights."""
    path = path_of(file, tensors)
    if path is None:
        return
    known = read_errors(file, tensors)
    known.setdefault(form, {}).update(errors)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_oldest(path.parent)
        handle, written = tempfile.mkstemp(dir=path.parent, suffix=".new")
        try:
            with os.fdopen(handle, "w") as opened:
                json.dump(known, opened)
            os.replace(written, path)
        except OSError:
            os.unlink(written)
            raise


def drop_oldest(folder: Path) -> None:
    """Remove the files that were not written for the longest time, so that one more has room."""
    found = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in found[MAX_FILES - 1 :]:
        path.unlink(missing_ok=True)
