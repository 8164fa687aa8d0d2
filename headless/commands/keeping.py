"""``highwater keep``, ``release`` and ``limits``: asked of the ComfyUI or Highwater server that runs."""

from __future__ import annotations

from typing import Any

from ...memory.errors import InvalidInput
from ...memory.manager.claims.kept import parse_limit
from ...memory.manager.claims.loans import parse_seconds
from ...memory.options.idle_limits import LONGEST_IDLE_S, IdleLimits, parse_num_loaded
from .running_host import ask, given

__all__ = ["keep", "kept_text", "limits_text", "release", "released_text", "set_limits"]

OFF = "off"


def keep(url: str, component: str, at_most: str | None, *, kept: bool) -> dict[str, Any]:
    """Make a host evict a component last, up to an amount, or in the usual order again; returns its report.

    Raises:
        InvalidInput: not an amount or an address, or the host has no such component.
        HostFailed: as `ask`.
    """
    if at_most is not None:
        if not kept:
            raise InvalidInput("--off takes no --at-most")
        parse_limit(at_most)
    return ask(url, "/highwater/keep", given(component=component, at_most=at_most, keep=kept))


def kept_text(answer: dict[str, Any]) -> str:
    """Return what a host says of a component that is kept, as text."""
    if not answer["keep"]:
        return f"{answer['component']} is evicted in the usual order"
    limit = f", up to {answer['at_most']} of a device" if answer["at_most"] != "all" else ""
    return f"{answer['component']} is evicted last{limit}"


def release(url: str, component: str | None, device: str | None) -> dict[str, Any]:
    """Make a host take a component, or all, off a device, or off all, now; returns its report.

    Raises:
        InvalidInput: neither is named, no address, or the host has no such component or device.
        HostFailed: as `ask`.
    """
    if component is None and device is None:
        raise InvalidInput("name a component, or --device, such as: highwater release --device gpu:0")
    return ask(url, "/highwater/release", given(component=component, device=device))


def released_text(answer: dict[str, Any]) -> str:
    """Return what a host released, as text: a line for each component and device."""
    return "\n".join(departure["text"] for departure in answer["released"]) or "nothing was there to release"


def set_limits(url: str, max_loaded: str | None, idle: str | None) -> dict[str, Any]:
    """Set a host's limits for idle components, those that are named; returns all that count now.

    Raises:
        InvalidInput: no number, duration or address.
        HostFailed: as `ask`.
    """
    body: dict[str, Any] = {}
    if max_loaded is not None:
        number = None if max_loaded == OFF else parse_num_loaded(max_loaded, what="--max-loaded")
        body["keep_loaded"] = IdleLimits(num_loaded=number).num_loaded
    if idle is not None:
        if idle != OFF:
            parse_seconds(idle, what="--idle", most_s=LONGEST_IDLE_S)
        body["idle"] = None if idle == OFF else idle
    return ask(url, "/highwater/limits", body)


def limits_text(answer: dict[str, Any]) -> str:
    """Return the limits of a host, as text."""
    return str(IdleLimits(num_loaded=answer["keep_loaded"], idle_s=answer["idle_s"]))
