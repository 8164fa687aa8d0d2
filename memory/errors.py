"""Errors for users: one line that names the value, where it was given, and what is allowed."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable

__all__ = [
    "NO_PLAN",
    "DoesNotFit",
    "InvalidInput",
    "UnsafeState",
    "allowed_values",
    "one_line",
    "quoted",
    "reason_of",
    "require",
    "without_folders",
]

NO_PLAN = "no plan leaves more: "
"""How the part of a failure's line begins that says what helps instead of planning again."""

# The most characters of a quoted text, and of an unbroken word such as a path, in a message; less than 300 together.
LARGEST_QUOTE = 100
LARGEST_WORD = 180
# The most characters of what a library says.
LARGEST_REASON = 300
TOO_LONG = re.compile(
    rf"""(?<!\w)'(?:[^'\\]|\\.){{{LARGEST_QUOTE},}}'(?!\w)|"(?:[^"\\]|\\.){{{LARGEST_QUOTE},}}"|\S{{{LARGEST_WORD},}}"""
)

# An absolute path of any system, quoted or up to a space or a mark; not what follows the host of a web address.
ABSOLUTE = r"(?:file:///?|[A-Za-z]:[\\/]|\\\\|(?<!:)/|/(?!/))"
ABSOLUTE_PATH = re.compile(
    rf"""(?P<quote>['"]){ABSOLUTE}(?P<quoted>[^'"]*)(?P=quote)|(?<![\w/\\.~]){ABSOLUTE}(?P<plain>[^\s'":;,()\[\]<>|]+)"""
)

# Writes a value of any type with at most as many characters as a message shows.
quoting = reprlib.Repr()
quoting.maxstring = quoting.maxother = quoting.maxlong = LARGEST_QUOTE
quoting.maxlist = quoting.maxdict = 8
quoting.maxlevel = 3


class InvalidInput(ValueError):
    """A value from a widget, command line, JSON or file is invalid. Nothing was loaded."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class DoesNotFit(RuntimeError):
    """Something does not fit in memory. The message names the needed, free and reserved bytes, and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UnsafeState(RuntimeError):
    """The current state forbids a request, such as evicting a component that computes."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """Return a message on one line, without control characters; long quotes and words lose their middle."""
    line = " ".join(message.splitlines())
    if not line.isprintable():
        line = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)
    return TOO_LONG.sub(lambda match: shortened(match[0]), line)


def shortened(text: str) -> str:
    """Return a text; if it is too long, only its two ends and its length."""
    most = LARGEST_QUOTE if text[0] in "'\"" else LARGEST_WORD
    return f"{text[: most - 40]}...{text[-20:]} ({len(text)} characters)" if len(text) > most else text


def reason_of(error: BaseException | str) -> str:
    """Return what a library says of a failure as one short line; libraries often write paragraphs."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LARGEST_REASON else text[: LARGEST_REASON - 3] + "..."


def without_folders(text: str) -> str:
    """Return a text with only the last name of each absolute path in it: what is told to pages names no folder."""
    return ABSOLUTE_PATH.sub(last_name, text) if "/" in text or "\\" in text else text


def last_name(match: re.Match[str]) -> str:
    quote = match["quote"] or ""
    names = re.split(r"[\\/]+", (match["quoted"] if quote else match["plain"]).rstrip("/\\"))
    return f"{quote}{names[-1]}{quote}"


def quoted(value: object) -> str:
    """Return the shortened ``repr`` of a value of any type, for messages."""
    try:
        text = " ".join(quoting.repr(value).split())
    except Exception:  # a __repr__ may raise any error, for example that of an int with thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= LARGEST_WORD else f"{text[:LARGEST_WORD]}..."


def require(value: object, types: type | tuple[type, ...], *, what: str, allowed: str) -> None:
    """Raise `InvalidInput` if a value has another type. True and False do not count as ints."""
    if not isinstance(value, types) or (isinstance(value, bool) and types is int):
        raise InvalidInput(f"{what} {quoted(value)}; allowed: {allowed}")


def allowed_values(value: str, allowed: Iterable[str]) -> str:
    """Return the end of a message: the nearest allowed value, then all allowed values."""
    names = list(allowed)
    if not names:
        return "no value is allowed here"
    near = difflib.get_close_matches(value[:LARGEST_QUOTE], names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(names)}"
