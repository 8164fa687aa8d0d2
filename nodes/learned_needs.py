"""The memory that models needed beside their weights, as learned: listed and deleted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..memory.manager.needs_file import NeedsFile, size_text

__all__ = ["describe_needs", "forget_needs"]


def describe_needs(paths: Sequence[Path], *, are_named: bool = False) -> list[dict[str, Any]]:
    """Return each file with its needs; components and devices are digests, sizes are those of `Size`.

    Raises:
        InvalidInput: a file that the user named is not ours.
    """
    return [
        {
            "path": str(path),
            "needs": [
                {
                    "component": component[:8],
                    "device": device[:8],
                    "size": size_text(size),
                    "seen_bytes": need.seen_bytes,
                    "kept_bytes": None if need.is_open else need.kept().num_bytes,
                }
                for (component, device), size, need in NeedsFile(path, is_named=are_named).listed()
            ],
        }
        for path in paths
    ]


def forget_needs(paths: Sequence[Path], *, are_named: bool = False) -> list[dict[str, Any]]:
    """Delete all needs in the files; a running ComfyUI keeps those that it has read until it ends.

    Raises:
        InvalidInput: a file cannot be changed, or the user named a file that is not ours.
    """
    files = [NeedsFile(path, is_named=are_named) for path in paths]
    return [{"path": str(file.path), "num_forgotten": file.reset()} for file in files]
