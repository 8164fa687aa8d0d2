"""What `doctor.py` and its checks find, and how they read the command line of a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Finding", "flag_value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at; ``remedy`` says what to do about a warning."""

    check: str
    text: str
    is_warning: bool = False
    remedy: str = ""


def flag_value(flags: Sequence[str] | None, name: str) -> str | None:
    """Return what follows a flag, as ``--flag value`` or ``--flag=value``; None without it."""
    for index, flag in enumerate(flags or ()):
        found, equals, value = flag.partition("=")
        if found == name:
            return value if equals else next(iter((flags or ())[index + 1 : index + 2]), "")
    return None
