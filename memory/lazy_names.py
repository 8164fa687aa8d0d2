"""Imports a package's public names when they are first used, so importing the package does not import torch.

The only file that imports modules by variable names: files of this package, and two model libraries.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["LIBRARIES", "import_library", "lazy_names"]

LIBRARIES = ("diffusers", "transformers")
"""The model libraries: modules of nothing else are imported, and classes of nothing else are taken, by name."""


def lazy_names(package: str, names_of: Mapping[str, Sequence[str]]) -> tuple[list[str], Callable[[str], Any]]:
    """Return ``__all__`` and ``__getattr__`` for a package. ``names_of`` lists the public names of each file."""
    file_of = {name: file for file, names in names_of.items() for name in names}

    def get(name: str) -> Any:
        if name not in file_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f".{file_of[name]}", package), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(file_of), get


def import_library(name: str) -> ModuleType:
    """Import a model library. Raises ModuleNotFoundError if it is not installed."""
    assert name in LIBRARIES, name
    return import_module(name)
