"""What the page and the command line ask of the running manager: lend, keep, release, limits, and watermarks.

Each takes the words of an address, and returns what is sent back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..memory.errors import InvalidInput, allowed_values, quoted

if TYPE_CHECKING:
    from ..memory import MemoryManager

__all__ = ["give_back", "keep", "lend", "release", "set_limits", "set_watermarks"]

OFF = "off"
SWITCH = {"true": True, "false": False}


def lend(manager: MemoryManager, words: Mapping[str, str]) -> dict[str, Any]:
    """Lend ``size`` of a ``device`` ``for`` some time. Raises as `MemoryManager.lend`."""
    from ..memory.manager.claims.loans import LONGEST_LOAN_S, parse_seconds
    from ..memory.units import parse_bytes

    found = read_words(words, needed=("size", "for"), others=("device",))
    num_bytes = parse_bytes(found["size"], what="size")
    seconds = parse_seconds(found["for"], what="for", most_s=LONGEST_LOAN_S)
    return manager.lend(num_bytes, seconds, found.get("device")).to_json()


def give_back(manager: MemoryManager, words: Mapping[str, str]) -> dict[str, Any]:
    """End the loan of a ``device``. Raises as `MemoryManager.take_back`."""
    loan = manager.take_back(read_words(words, others=("device",)).get("device"))
    return {"device": loan.device, "lent_bytes": loan.num_bytes}


def keep(manager: MemoryManager, words: Mapping[str, str]) -> dict[str, Any]:
    """Evict a ``component`` last, ``at_most`` up to an amount, or with ``keep=false`` in the usual order."""
    from ..memory.manager.claims.kept import EVERYTHING_KEPT, parse_limit

    found = read_words(words, needed=("component",), others=("keep", "at_most"))
    kept = found.get("keep", "true")
    if kept not in SWITCH:
        raise InvalidInput(f"keep={quoted(kept)}; {allowed_values(kept, SWITCH)}")
    limit = parse_limit(found["at_most"]) if "at_most" in found else EVERYTHING_KEPT
    component = manager.find(found["component"])
    manager.keep([component], SWITCH[kept], limit)
    return {"component": component.id, "keep": SWITCH[kept], "at_most": str(limit)}


def release(manager: MemoryManager, words: Mapping[str, str]) -> dict[str, Any]:
    """Take a ``component`` off a ``device``, or off all, or everything off a ``device``, now.

    Raises as `MemoryManager.release_between_runs`.
    """
    found = read_words(words, others=("component", "device"))
    named, device = found.get("component"), found.get("device")
    if not named and not device:
        raise InvalidInput("component= is missing; needed: component or device, or both")
    component = manager.find(named) if named else None
    departures = manager.release_between_runs(component, device, reason="released on request")
    return {"released": [departure.to_json() for departure in departures]}


def set_limits(manager: MemoryManager, words: Mapping[str, str]) -> dict[str, Any]:
    """Set how many components stay loaded (``keep_loaded``), and after how long idle ones leave (``idle``).

    ``off`` sets no limit; a word that is missing leaves its limit as it is. Returns the limits that count now.
    """
    from ..memory.manager.claims.loans import parse_seconds
    from ..memory.options.idle_limits import LONGEST_IDLE_S, parse_num_loaded

    found = read_words(words, others=("keep_loaded", "idle"))
    changes: dict[str, Any] = {}
    if "keep_loaded" in found:
        word = found["keep_loaded"]
        changes["num_loaded"] = None if word == OFF else parse_num_loaded(word, what="keep_loaded")
    if "idle" in found:
        word = found["idle"]
        changes["idle_s"] = None if word == OFF else parse_seconds(word, what="idle", most_s=LONGEST_IDLE_S)
    with manager.exclusive():  # the page sets both at once, by two requests
        limits = replace(manager.idle.limits, **changes)
        if changes:
            manager.set_idle_limits(limits)
    return {"keep_loaded": limits.num_loaded, "idle_s": limits.idle_s}


def set_watermarks(manager: MemoryManager, words: Mapping[str, str]) -> dict[str, Any]:
    """Set ``marks`` for devices without a Watermark node, such as ``gpu:0=5%:10%,host=4GiB:6GiB``; empty: none.

    Returns the marks of all devices and of the RAM as they are now. Raises as `MemoryManager.set_default_watermarks`.
    """
    from ..memory.options.marks import parse_watermarks

    found = read_words(words, others=("marks",))
    if "marks" not in found:
        raise InvalidInput("marks= is missing; needed: marks, such as 1GiB:2GiB, or nothing for the default ones")
    return {"watermarks": manager.set_default_watermarks(parse_watermarks(found["marks"]))}


def read_words(
    words: Mapping[str, str], *, needed: tuple[str, ...] = (), others: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return the words of an address. Raises `InvalidInput` where one is missing or unknown."""
    for name in words:
        if name not in (*needed, *others):
            raise InvalidInput(f"{quoted(name)} is unknown; {allowed_values(name, [*needed, *others])}")
    for name in needed:
        if not words.get(name):
            raise InvalidInput(f"{name}= is missing; needed: {', '.join(needed)}")
    return dict(words)
