"""Errors that a user reads: one line that names the value, where it stands, and what is allowed."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable

__all__ = ["DoesNotFit", "InvalidInput", "UnsafeState", "allowed_values", "one_line", "quoted", "require"]

# How many characters of one quoted text, and of one unbroken word such as a path, a line shows; less than 300 together.
LARGEST_QUOTE = 100
LARGEST_WORD = 180
TOO_LONG = re.compile(
    rf"""(?<!\w)'(?:[^'\\]|\\.){{{LARGEST_QUOTE},}}'(?!\w)|"(?:[^"\\]|\\.){{{LARGEST_QUOTE},}}"|\S{{{LARGEST_WORD},}}"""
)

# Writes no more of a value than a line shows, whatever that is.
quoting = reprlib.Repr()
quoting.maxstring = quoting.maxother = quoting.maxlong = LARGEST_QUOTE
quoting.maxlist = quoting.maxdict = 8
quoting.maxlevel = 3


class InvalidInput(ValueError):
    """A value from outside (widget, command line, JSON, file) that cannot be used; nothing was loaded."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class DoesNotFit(RuntimeError):
    """The arithmetic fails: the message carries need, free, kept free and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UnsafeState(RuntimeError):
    """A request that the present state forbids, such as evicting a component that computes."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """Return a message on one line, without control characters and without the middle of what was written at length."""
    line = " ".join(message.splitlines())
    if not line.isprintable():
        line = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)
    return TOO_LONG.sub(lambda match: shortened(match[0]), line)


def shortened(text: str) -> str:
    """Return the two ends of a text that is too long, and its length."""
    most = LARGEST_QUOTE if text[0] in "'\"" else LARGEST_WORD
    return f"{text[: most - 40]}...{text[-20:]} ({len(text)} characters)" if len(text) > most else text


def quoted(value: object) -> str:
    """Return a value of any type as an error line shows it: what Python writes, short, however large it is."""
    try:
        text = " ".join(quoting.repr(value).split())
    except Exception:  # a __repr__ may raise anything, and that of an int of thousands of digits does
        text = f"a {type(value).__name__}"
    return text if len(text) <= LARGEST_WORD else f"{text[:LARGEST_WORD]}..."


def require(value: object, types: type | tuple[type, ...], *, what: str, allowed: str) -> None:
    """Refuse an argument of another type; True and False are no numbers. Raises `InvalidInput`."""
    if not isinstance(value, types) or (isinstance(value, bool) and types is int):
        raise InvalidInput(f"{what} {quoted(value)}: allowed is {allowed}")


def allowed_values(value: str, allowed: Iterable[str]) -> str:
    """Return the end of an error line: the nearest legal value, then all of them."""
    names = list(allowed)
    if not names:
        return "nothing is allowed here"
    near = difflib.get_close_matches(value[:LARGEST_QUOTE], names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(names)}"
