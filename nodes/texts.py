"""Texts that the page shows in the user's language: a key of ``locales/``, and values for its placeholders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["MAX_LENGTH", "Text", "english"]

MAX_LENGTH = 160
ENGLISH = Path(__file__).parent.parent / "locales" / "en" / "main.json"


@dataclass(frozen=True, slots=True)
class Text:
    """A text by its key, such as ``advice.no_change``; as `str` it is English, at most `MAX_LENGTH` characters."""

    key: str
    values: Mapping[str, str]

    def __str__(self) -> str:
        return fit(english(self.key).format_map(self.values))

    def to_json(self) -> dict[str, Any]:
        """Return it for the page, which has the key in the user's language; ``text`` is for who reads English."""
        return {"text": str(self), "key": self.key, "values": {name: fit(self.values[name]) for name in self.values}}


def fit(text: str) -> str:
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 1].rstrip()}…"


def english(key: str) -> str:
    """Return a text with its placeholders.

    Raises:
        KeyError: there is no such text.
    """
    found: Any = english_texts()
    for part in key.split("."):
        found = found[part]
    return str(found)


@cache
def english_texts() -> dict[str, Any]:
    texts: dict[str, Any] = json.loads(ENGLISH.read_text("utf-8"))["highwater"]
    return texts
