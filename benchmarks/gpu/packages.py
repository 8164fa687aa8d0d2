"""The packages that the parts need, looked for before anything begins."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

__all__ = ["REMEDY", "missing_of_part", "refuse_missing"]

EVERY_PART = ("highwater", "torch", "aiohttp", "psutil", "safetensors")
# It says where the simulated devices are built.
REHEARSALS = ("platformdirs",)
# What a part beside these cannot do without; what only a row of it needs is that row's.
OF_PART = {"a": ("pytest",), "b": ("diffusers",), "c": (), "d": ("diffusers",), "e": ("diffusers",)}
REMEDY = "in the clone: pip install -e '.[headless]' pytest mmgp"


def refuse_missing(*, rehearses: bool) -> None:
    """Raise `SystemExit` that names every package that is not here and that no part can do without."""
    missing = find_missing((*EVERY_PART, *(REHEARSALS if rehearses else ())))
    if missing:
        raise SystemExit(f"benchmarks gpu: not installed: {', '.join(missing)}; {REMEDY}")


def missing_of_part(letter: str) -> list[str]:
    """Return what is not here and only some parts need, this one among them."""
    return find_missing(OF_PART[letter])


def find_missing(packages: Iterable[str]) -> list[str]:
    return [package for package in packages if find_spec(package) is None]
