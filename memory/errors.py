"""Errors that a user reads: one line that names the value, where it stands, and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["DoesNotFit", "InvalidInput", "UnsafeState", "allowed_values"]


class InvalidInput(ValueError):
    """A value from outside (widget, command line, JSON, file) that cannot be used; nothing was loaded."""


class DoesNotFit(RuntimeError):
    """The arithmetic fails: the message carries need, free, kept free and the remedy."""


class UnsafeState(RuntimeError):
    """A request that the present state forbids, such as evicting a component that computes."""


def allowed_values(value: str, allowed: Iterable[str]) -> str:
    """Return the end of an error line: the nearest legal value, then all of them."""
    names = list(allowed)
    if not names:
        return "nothing is allowed here"
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(names)}"
