"""What the page and the command line ask of the running manager: lend, keep, release, move, limits, and watermarks.

Each takes the body of a request, checked against its schema (`route_schemas.py`), and returns what is sent back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..memory.errors import InvalidInput

if TYPE_CHECKING:
    from ..memory import MemoryManager
    from ..memory.manager import Member, SteeredComponent

__all__ = ["NotThere", "give_back", "keep", "lend", "look_ahead", "move", "release", "set_limits", "set_watermarks"]

Body = Mapping[str, Any]


class NotThere(InvalidInput):
    """This process has no component or device of that name."""


def lend(manager: MemoryManager, body: Body) -> dict[str, Any]:
    """Lend ``size`` of a ``device`` ``for`` some time. Raises as `UserCommands.lend`."""
    from ..memory.manager.claims.loans import LONGEST_LOAN_S, parse_seconds
    from ..memory.units import parse_bytes

    num_bytes = parse_bytes(body["size"], what="size")
    seconds = parse_seconds(body["for"], what="for", most_s=LONGEST_LOAN_S)
    return manager.commands.lend(num_bytes, seconds, find_device(manager, body, lends=True)).to_json()


def give_back(manager: MemoryManager, body: Body) -> dict[str, Any]:
    """End the loan of a ``device``. Raises as `UserCommands.take_back`."""
    loan = manager.commands.take_back(find_device(manager, body, lends=True))
    return {"device": loan.device, "lent_bytes": loan.num_bytes}


def keep(manager: MemoryManager, body: Body) -> dict[str, Any]:
    """Evict a ``component`` last, ``at_most`` up to an amount, or with ``keep`` false in the usual order."""
    from ..memory.manager.claims.kept import EVERYTHING_KEPT, parse_limit

    limit = parse_limit(body["at_most"]) if "at_most" in body else EVERYTHING_KEPT
    component, kept = find_component(manager, body["component"]), body.get("keep", True)
    manager.commands.keep([component], kept, limit)
    return {"component": component.id, "keep": kept, "at_most": str(limit)}


def release(manager: MemoryManager, body: Body) -> dict[str, Any]:
    """Take a ``component`` off a ``device``, or off all, or everything off a ``device``, now.

    Raises as `UserCommands.release_between_runs`.
    """
    if not body:
        raise InvalidInput("component is missing; needed: component or device, or both")
    component = find_component(manager, body["component"]) if "component" in body else None
    device = find_device(manager, body)
    departures = manager.commands.release_between_runs(component, device, reason="released on request")
    return {"released": [departure.to_json() for departure in departures]}


def move(manager: MemoryManager, body: Body) -> dict[str, Any]:
    """Give a ``component`` another ``placement``; its node keeps its own.

    Raises as `UserCommands.move_between_runs`, and `NotThere` for a device.
    """
    from ..memory.options.placement import no_device, parse_placement
    from .device_choices import missing_devices

    component, here = find_component(manager, body["component"]), list(manager.devices)
    missing = missing_devices(body["placement"], here)
    if missing:
        parse_placement(body["placement"], devices=[*here, *missing], components=[component.name])
        raise NotThere(no_device(missing[0], here))
    plan = manager.commands.move_between_runs(component, body["placement"])
    text = f"{component.id} is placed at {plan.placement} from its next use on; the node that loads it is not changed"
    return {"component": component.id, "placement": str(plan.placement), "text": text}


def set_limits(manager: MemoryManager, body: Body) -> dict[str, Any]:
    """Set how many components stay loaded (``keep_loaded``), and after how long idle ones leave (``idle``).

    None sets no limit; what is missing leaves its limit as it is. Returns the limits that count now.
    """
    from ..memory.manager.claims.loans import parse_seconds
    from ..memory.options.idle_limits import LONGEST_IDLE_S

    changes: dict[str, Any] = {}
    if "keep_loaded" in body:
        changes["num_loaded"] = body["keep_loaded"]
    if "idle" in body:
        idle = body["idle"]
        changes["idle_s"] = None if idle is None else parse_seconds(idle, what="idle", most_s=LONGEST_IDLE_S)
    with manager.exclusive():  # the page sets both at once, by two requests
        limits = replace(manager.idle.limits, **changes)
        if changes:
            manager.commands.set_idle_limits(limits)
    return {"keep_loaded": limits.num_loaded, "idle_s": limits.idle_s}


def look_ahead(manager: MemoryManager, body: Body) -> dict[str, Any]:
    """Read files of models that are used next while others compute, if ``on``, or only when they are loaded."""
    manager.look_ahead(body["on"])
    return {"on": body["on"]}


def set_watermarks(manager: MemoryManager, body: Body) -> dict[str, Any]:
    """Set ``marks`` for devices without a Watermark node, such as ``gpu:0=5%:10%,host=4GiB:6GiB``; empty: none.

    Marks that this machine cannot keep are left out, as those of a device that it lacks: the text may be from another
    machine. Returns what to say of these, and the marks of all devices and of the RAM as they are now.

    Raises:
        InvalidInput: the text is none on any machine; nothing is set then.
    """
    from ..memory.options.marks import parse_watermarks
    from .device_choices import fit_marks

    fitting, notes = fit_marks(parse_watermarks(body["marks"]), manager.devices, instead=", so that is left out")
    return {"watermarks": manager.commands.set_default_watermarks(fitting), "notes": notes}


def find_component(manager: MemoryManager, id: str) -> Member | SteeredComponent:
    """Return a component by its id in the report. Raises `NotThere`."""
    try:
        return manager.commands.find(id)
    except InvalidInput as error:
        raise NotThere(str(error)) from None


def find_device(manager: MemoryManager, body: Body, *, lends: bool = False) -> str | None:
    """Return the device of a request, of those that lend memory or of all; None where it names none.

    Raises `NotThere`.
    """
    from ..memory.options.placement import parse_device

    named = body.get("device")
    if named is None:
        return None
    try:
        return parse_device(named, [name for name, device in manager.devices.items() if not (lends and device.is_cpu)])
    except InvalidInput as error:
        raise NotThere(str(error)) from None
