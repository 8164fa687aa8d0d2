"""What models are called in the books: by their files, where their loader names them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .hosted import PARTS

__all__ = ["name_of"]


def name_of(model: torch.nn.Module, kind: str, source: Sequence[Any] | None) -> str:
    """Return what our own loaders would call a model: by its files, where its loader names them, else its class."""
    first = source[1][0] if source is not None and source[1] else None
    paths = [first] if isinstance(first, str) else first
    if source is None or not paths or not all(isinstance(path, str) for path in paths):
        return type(model).__name__
    name = "+".join(Path(path).stem for path in paths)
    is_checkpoint = "checkpoint" in getattr(source[0], "__name__", "")
    return f"{name}/{PARTS.get(kind, kind)}" if is_checkpoint else name
