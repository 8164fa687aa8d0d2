"""Files of workflows in API format: read as JSON, with every name in an object once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from ...memory.errors import InvalidInput

__all__ = ["read_graph", "reject_constant"]


def read_graph(path: str | Path) -> Any:
    """Return what a workflow file holds, unchecked. Raises `InvalidInput` where that is not JSON."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InvalidInput(f"{path}: no such file; expected a workflow in API format (.json)") from None
    except IsADirectoryError:
        raise InvalidInput(f"{path}: is a folder; expected a workflow in API format (.json)") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    try:
        return json.loads(text, object_pairs_hook=reject_duplicates, parse_constant=reject_constant)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"{path}: is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise InvalidInput(f"{path}: is nested too deeply for a workflow") from None
    except ValueError as error:  # from the two hooks
        raise InvalidInput(f"{path}: {error}") from None


def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of two equal names; a node would vanish without a word."""
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} appears twice in one object; node ids and input names must be unique")
    return content


def reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number that JSON allows")
