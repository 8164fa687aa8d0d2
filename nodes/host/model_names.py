"""What models are called in the books: by their files, where their loader names them."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch

from .hosted import PARTS

__all__ = ["content_of", "name_of"]


def paths_of(source: Sequence[Any] | None) -> list[str]:
    """Return the files that a model was loaded from, as its loader names them; empty where it does not."""
    first = source[1][0] if source is not None and source[1] else None
    paths = [first] if isinstance(first, str) else first
    return list(paths) if paths and all(isinstance(path, str) for path in paths) else []


def content_of(kind: str, source: Sequence[Any] | None) -> Hashable | None:
    """Return what is equal for all models of the same files, as long as these are not replaced; None: unknown."""
    try:
        stats = [(os.path.realpath(path), os.stat(path)) for path in paths_of(source)]
    except OSError:
        return None
    return (kind, *((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)) if stats else None


def name_of(model: torch.nn.Module, kind: str, source: Sequence[Any] | None) -> str:
    """Return what our own loaders would call a model: by its files, where its loader names them, else its class."""
    paths = paths_of(source)
    if source is None or not paths:
        return type(model).__name__
    name = "+".join(Path(path).stem for path in paths)
    is_checkpoint = "checkpoint" in getattr(source[0], "__name__", "")
    return f"{name}/{PARTS.get(kind, kind)}" if is_checkpoint else name
