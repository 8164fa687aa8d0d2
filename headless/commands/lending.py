"""``highwater lend``: asks the ComfyUI or Highwater server that runs for memory of its device."""

from __future__ import annotations

from typing import Any

from ...memory.manager.claims.loans import LONGEST_LOAN_S, parse_seconds
from ...memory.units import format_bytes, format_seconds, parse_bytes
from .running_host import ask, given

__all__ = ["give_back", "given_back_text", "lend", "lent_text"]


def lend(url: str, size: str, duration: str, device: str | None) -> dict[str, Any]:
    """Borrow memory of a host's device for a while; returns its report.

    Raises:
        InvalidInput: not an amount, a time, an address or a device.
        HostFailed: as `ask`.
    """
    parse_bytes(size, what="size")
    parse_seconds(duration, what="--for", most_s=LONGEST_LOAN_S)
    return ask(url, "/highwater/lend", {"size": size, "for": duration, **given(device=device)})


def give_back(url: str, device: str | None) -> dict[str, Any]:
    """Give the memory of a device back before the time is up. Raises as `lend`."""
    return ask(url, "/highwater/lend/give-back", given(device=device))


def lent_text(answer: dict[str, Any]) -> str:
    """Return what a host's answer says, as text."""
    text = (
        f"{format_bytes(answer['lent_bytes'])} of {answer['device']} are lent for {format_seconds(answer['seconds'])}: "
        f"{format_bytes(answer['freed_bytes'])} were freed, {format_bytes(answer['free_bytes'])} are free now"
    )
    missing = answer["missing_bytes"]
    return f"{text}; {format_bytes(missing)} follow when the node that runs ends" if missing else text


def given_back_text(answer: dict[str, Any]) -> str:
    """Return what a host says when memory is given back, as text."""
    return f"{format_bytes(answer['lent_bytes'])} of {answer['device']} are given back"
