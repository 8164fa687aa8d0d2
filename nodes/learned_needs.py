"""The memory that models needed beside their weights, as learned: listed and deleted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from ..memory.manager.needs_file import NeedsFile, size_text

__all__ = ["ForgottenFile", "NeedsOfFile", "describe_needs", "forget_needs"]


class LearnedNeed(TypedDict):
    """What one component needed of one device with inputs of one size, beside its weights."""

    component: str
    """The first characters of a digest."""
    device: str
    """The last characters of a digest: its first ones are the same for all devices of a type."""
    size: str
    seen_bytes: int
    """The peak of completed forwards."""
    kept_bytes: int | None
    """What the next plan keeps free; None: everything, since a forward failed and none has completed since."""


class NeedsOfFile(TypedDict):
    """The needs that a file holds."""

    path: str
    needs: list[LearnedNeed]


class ForgottenFile(TypedDict):
    """How many needs were deleted from a file."""

    path: str
    num_forgotten: int


def describe_needs(paths: Sequence[Path], *, are_named: bool = False) -> list[NeedsOfFile]:
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
                    "device": device[-8:],
                    "size": size_text(size),
                    "seen_bytes": need.seen_bytes,
                    "kept_bytes": None if need.is_open else need.kept().num_bytes,
                }
                for (component, device), size, need in NeedsFile(path, is_named=are_named).listed()
            ],
        }
        for path in paths
    ]


def forget_needs(paths: Sequence[Path], *, are_named: bool = False) -> list[ForgottenFile]:
    """Delete all needs in the files; a running ComfyUI keeps those that it has read until it ends.

    Raises:
        InvalidInput: a file cannot be changed, or the user named a file that is not ours.
    """
    files = [NeedsFile(path, is_named=are_named) for path in paths]
    return [{"path": str(file.path), "num_forgotten": file.reset()} for file in files]
