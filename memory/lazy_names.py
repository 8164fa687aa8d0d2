"""A room's public names, each imported from its file when it is first used: so a room costs no torch by itself.

The only file that imports what a variable names: files of this package, and two libraries of models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["import_library", "lazy_names"]

LIBRARIES = ("diffusers", "transformers")


def lazy_names(package: str, names_of: Mapping[str, Sequence[str]]) -> tuple[list[str], Callable[[str], Any]]:
    """Return ``__all__`` and ``__getattr__`` of a package, from the names that each of its files gives to others."""
    file_of = {name: file for file, names in names_of.items() for name in names}

    def get(name: str) -> Any:
        if name not in file_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f".{file_of[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(file_of), get


def import_library(name: str) -> ModuleType:
    """Return a library that has classes of models; raises ModuleNotFoundError where it is not installed."""
    assert name in LIBRARIES, name
    return import_module(name)
