"""Profiles as Python code names them: a text, a number or a profile, with some of its fields replaced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any

from ..errors import InvalidInput, allowed_values, quoted, require
from .budget import as_left_free, read_mmgp_budgets, read_target
from .placement import Scanner
from .profile import ALL_COMPONENTS, NAMES, OffloadProfile, parse_names, parse_profile

__all__ = ["build_profile"]


def build_profile(
    profile: str | int | OffloadProfile,
    *,
    devices: Collection[str],
    components: Sequence[str] = (),
    **overrides: Any,
) -> OffloadProfile:
    """Return the profile that Python code names, with its fields replaced by those overrides that are not None.

    Args:
        profile: a text, the number of a profile, or a profile.
        overrides: any field, which is replaced as a whole: ``budgets`` leaves none of the profile's own.
            ``budgets`` and ``reserve`` in mmgp's form (`read_mmgp_budgets`); ``pinned``, ``quantize`` and
            ``on_demand`` as a bool, a component or a sequence of components.

    Raises:
        InvalidInput: naming the value and what is allowed.
    """
    if isinstance(profile, OffloadProfile):
        profile = resolve_names(profile, devices=devices, components=components)
    else:
        require(profile, (str, int), what="profile", allowed="text, a number 1 to 5 or an OffloadProfile")
        text = profile if isinstance(profile, str) else quoted(profile)
        profile = parse_profile(text, devices=devices, components=components)
    allowed = [field.name for field in fields(OffloadProfile) if field.name != "name"]
    changes: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in allowed:
            raise InvalidInput(f"profile field {name!r} is unknown; {allowed_values(name, allowed)}")
        if value is None:
            continue
        if name in ("budgets", "reserve"):
            value = read_mmgp_budgets(value, devices=devices, components=components, what=name)
            if name == "reserve":
                value = tuple(as_left_free(item) for item in value)
        elif name in NAMES:
            value = read_names(value, components, name)
        changes[name] = value
    return replace(profile, **changes)


def resolve_names(profile: OffloadProfile, *, devices: Collection[str], components: Sequence[str]) -> OffloadProfile:
    """Return a profile with its names as they are called here. Raises `InvalidInput` for an unknown name."""
    named: dict[str, Any] = {field: read_names(getattr(profile, field), components, field) for field in NAMES}
    for field in ("budgets", "reserve"):
        named[field] = tuple(
            replace(item, target=read_target(item.target, devices=devices, components=components, what=field))
            for item in getattr(profile, field)
        )
    return replace(profile, **named)


def read_names(value: Any, components: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the components that a bool, a name or a sequence of names means."""
    if isinstance(value, bool):
        return ALL_COMPONENTS if value else ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"{what} {quoted(value)}; allowed: True, False, a component, or a list of them")
    if not names:
        return ()
    scanner = Scanner("&".join(names), what=what)
    parsed = parse_names(scanner, components, with_language=what == "quantize")
    if not scanner.at_end:
        scanner.fail(f"{scanner.text[scanner.position]!r} is unexpected; allowed: names of components")
    return parsed
