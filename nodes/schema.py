"""Node schemas with the fields that this host knows: an older host refuses newer fields."""

from __future__ import annotations

import dataclasses
from typing import Any

from comfy_api.latest import io

from .prompts import NAME_ENDING

__all__ = ["CATEGORY", "make_schema"]

CATEGORY = "Highwater"

# What hosts since 0.33 know; the nodes work without.
NEWER_FIELDS = ("search_aliases",)


def make_schema(**fields: Any) -> io.Schema:
    """Return the schema of a node of ours, of the fields that this host's ``io.Schema`` has.

    Its display name gets our ending.
    """
    fields = {"category": CATEGORY, **fields, "display_name": f"{fields['display_name']}{NAME_ENDING}"}
    known = {field.name for field in dataclasses.fields(io.Schema)}
    return io.Schema(**{name: value for name, value in fields.items() if name in known or name not in NEWER_FIELDS})
