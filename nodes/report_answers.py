"""What pages and programs get of the report and its events: the parts that they ask for, newest entries, no folders."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..memory.errors import InvalidInput, allowed_values, quoted, without_folders

if TYPE_CHECKING:
    from ..memory import MemoryManager

__all__ = ["REPORT_BYTES", "REPORT_WORDS", "SERVER_ID", "check_words", "make_report", "select_events"]

# The parts that grow with every prompt; of each the oldest entries come first.
LISTS = ("nodes", "runs", "events", "samples", "loaders")
REPORT_BYTES = 64_000
"""How much of these lists a report has in all, as JSON, where its reader sets no limit."""
NUM_ENTRIES = 200
"""From so many of the last nodes and events the advice is made where the report is asked for in parts."""
SERVER_ID = uuid.uuid4().hex
"""Tells this process from the one before it at the same address: what that told of is gone."""
ALL = "all"
LARGEST_LIMIT = 1_000_000
REPORT_WORDS = ("only", "limit", "after")
EVENT_WORDS = ("run", "node", "kind", "after", "limit")
# What the report finds its entries by, or what a user has written: stays as it is.
NAMES = frozenset({"id", "name", "component", "components", "node_id", "workflow_id", "run_id", "title"})


def make_report(
    manager: MemoryManager | None,
    host_features: Mapping[str, bool | str],
    only: str | None = None,
    find_loaders: Callable[[], list[dict[str, Any]]] = list,
    limit: str | None = None,
    after: str | None = None,
) -> dict[str, Any]:
    """Return the manager's report, empty without a manager, what of it this host keeps up to date, and who tells.

    Where older entries of a list are left out, ``left_out`` says how many. No text names a folder.

    Args:
        only: comma-separated names of the wanted parts.
        limit: how many entries of each list, or ``all``; by default as many as `REPORT_BYTES` have room for.
        after: a time in seconds as ``now_s`` of an earlier report, for what has come since: of nodes and runs those
            that had not ended then. The report repeats it as ``after_s``.

    Raises:
        InvalidInput: a name is no part of the report, or the limit or the time is none.
    """
    from ..memory.manager.report import empty_report, parts_of
    from .advice import advise

    most, after_s = read_limit(limit), read_seconds(after)
    parts = None if only is None else frozenset(only.split(","))
    report = empty_report() if manager is None else manager.report(parts, after_s=after_s)
    loaders = find_loaders() if parts is None or "loaders" in parts else []
    made: dict[str, Any] = {"host_features": dict(host_features), "loaders": loaders, "advice": []}
    if parts is None or "advice" in parts:
        whole = report if manager is None or (parts is None and after is None) else manager.recent_report(NUM_ENTRIES)
        made["advice"] = [text.to_json() for text in advise(whole)]
    report = parts_of(report | made, only) | {"server_id": SERVER_ID}
    lists = [name for name in LISTS if name in report]
    left_out, room = {}, REPORT_BYTES
    # The shortest first: what it leaves of its part is for the others.
    for turn, name in enumerate(sorted(lists, key=lambda name: len(report[name]))):
        entries = report[name]
        report[name], used = newest(entries, most, room // (len(lists) - turn))
        room -= used
        if len(report[name]) < len(entries):
            left_out[name] = len(entries) - len(report[name])
    for name in report.keys() & {"devices", "components", "host_features", "advice"}:
        report[name] = texts_without_folders(report[name])
    said = {} if after is None else {"after_s": after_s}
    return report | said | ({"left_out": left_out} if left_out else {})


def select_events(manager: MemoryManager | None, words: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``events`` of a ``run``, a ``node``, some kinds or ``after`` a time, and how many are ``left_out``.

    Args:
        words: each of them may be missing; ``kind`` are kinds with commas between, ``after`` is in seconds as ``t_s``,
            ``limit`` as of `make_report`.

    Raises:
        InvalidInput: a word is unknown, or its value none.
    """
    from ..memory.manager.report import EVENT_KINDS

    check_words(words, EVENT_WORDS)
    kinds = words["kind"].split(",") if "kind" in words else EVENT_KINDS
    for kind in kinds:
        if kind not in EVENT_KINDS:
            raise InvalidInput(f"kind={quoted(kind)}; {allowed_values(kind, EVENT_KINDS)}")
    after_s, most = read_seconds(words.get("after")), read_limit(words.get("limit"))
    found = [
        event
        for event in (manager.report(frozenset({"events"}))["events"] if manager is not None else [])
        if event["kind"] in kinds
        and event["t_s"] > after_s
        and words.get("run", event["run_id"]) == event["run_id"]
        and words.get("node", event["node_id"]) == event["node_id"]
    ]
    events, _ = newest(found, most, REPORT_BYTES)
    return {"events": events, "left_out": len(found) - len(events)}


def check_words(words: Iterable[str], known: Collection[str]) -> None:
    """Raise `InvalidInput` where an address has a word that nothing reads."""
    for name in words:
        if name not in known:
            raise InvalidInput(f"{quoted(name)} is unknown; {allowed_values(name, known)}")


def read_limit(text: str | None) -> float | None:
    """Return how many entries are asked for; infinite for all, None if the request does not say."""
    if text is None or text == ALL:
        return None if text is None else math.inf
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and int(text) <= LARGEST_LIMIT):
        raise InvalidInput(f"limit={quoted(text)}; allowed: a whole number from 0 to {LARGEST_LIMIT}, or {ALL}")
    return int(text)


def read_seconds(text: str | None) -> float:
    """Return the time after which entries are asked for; -1, before all of them, if the request does not say."""
    if text is None:
        return -1.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 <= seconds < math.inf):
        raise InvalidInput(
            f"after={quoted(text)}; allowed: seconds, such as 12.5, as a report's now_s or an event's t_s"
        )
    return seconds


def newest(entries: list[Any], most: float | None, num_bytes: int) -> tuple[list[Any], int]:
    """Return the last entries, the oldest first: ``most`` of them, or if that is None as many as fit as JSON.

    With them what they take of these bytes; 0 where ``most`` says how many there are.
    """
    if most is not None:
        return entries[max(0, len(entries) - int(min(most, len(entries)))) :], 0
    number = used = 0
    for entry in reversed(entries):
        entry_bytes = len(json.dumps(entry)) + 2  # a comma and a space
        if used + entry_bytes > num_bytes:
            break
        used += entry_bytes
        number += 1
    return entries[len(entries) - number :], used


def texts_without_folders(value: Any) -> Any:
    """Return a part of the report with no absolute path in it, but where it only names things (`NAMES`)."""
    if isinstance(value, str):
        return without_folders(value)
    if isinstance(value, dict):
        return {name: part if name in NAMES else texts_without_folders(part) for name, part in value.items()}
    return [texts_without_folders(part) for part in value] if isinstance(value, list | tuple) else value
