"""What the memory manager tells is sent to every open page as a message of the host's websocket."""

from __future__ import annotations

from typing import Any

from .report_answers import SERVER_ID

__all__ = ["EVENT", "page_message"]

EVENT = "highwater.memory"
"""The messages' name. `route_schemas.message_schemas` says what they hold."""


def page_message(told: dict[str, Any], **where: str | None) -> dict[str, Any]:
    """Return what is sent of what the manager told: with who tells, as in the report, and where it happened."""
    return {"server_id": SERVER_ID, **where, **told}
