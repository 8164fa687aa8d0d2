"""How many components stay loaded, and for how long while nothing uses them, as the user says it."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidInput, quoted, require
from ..units import format_seconds

__all__ = ["LONGEST_IDLE_S", "MOST_LOADED", "IdleLimits", "parse_num_loaded"]

LONGEST_IDLE_S = 7 * 24 * 3600.0
MOST_LOADED = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleLimits:
    """What its user set: at most so many components loaded, unloaded after so many idle seconds. None: no limit."""

    num_loaded: int | None = None
    idle_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_loaded is not None:
            require(self.num_loaded, int, what="keep loaded", allowed=f"a whole number from 1 to {MOST_LOADED}")
            if not 1 <= self.num_loaded <= MOST_LOADED:
                raise InvalidInput(f"keep loaded {quoted(self.num_loaded)}; allowed: 1 to {MOST_LOADED} components")
        if self.idle_s is not None:
            require(self.idle_s, (int, float), what="idle unload", allowed="a number of seconds")
            if not 0 < self.idle_s <= LONGEST_IDLE_S:
                raise InvalidInput(f"idle unload after {quoted(self.idle_s)} s; allowed: more than 0, up to 7 days")

    def __str__(self) -> str:
        loaded = f"at most {self.num_loaded} loaded" if self.num_loaded is not None else "any number loaded"
        idle = f"unloaded after {format_seconds(self.idle_s)} idle" if self.idle_s is not None else "no idle unload"
        return f"{loaded}, {idle}"


def parse_num_loaded(text: object, *, what: str) -> int:
    """Return a number of components from its digits. Raises `InvalidInput` where it is none."""
    if not isinstance(text, str) or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidInput(f"{what} {quoted(text)}; allowed: 1 to {MOST_LOADED} components, or off")
    return int(text)
