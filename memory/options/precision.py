"""The precision in which weights rest, as the user names it."""

from __future__ import annotations

import enum

from ..errors import InvalidInput, allowed_values, require

__all__ = ["BY_PROFILE", "PRECISION_NAMES", "Precision", "parse_precision"]

# The word that leaves the choice to the profile.
BY_PROFILE = "by profile"


class Precision(enum.Enum):
    """The form in which weights rest; they always compute in the dtype in which they were stored."""

    AS_STORED = "as stored"
    """Nothing is cast."""
    FP8_SCALED = "fp8 scaled"
    """Block weights as float8_e4m3fn with one power-of-two scale each: half the bytes of bf16."""


PRECISION_NAMES = (*(precision.value for precision in Precision), BY_PROFILE)


def parse_precision(text: str | None) -> Precision | None:
    """Return the precision that a text names; None, for `BY_PROFILE` and for no text, leaves it to the profile.

    Raises:
        InvalidInput: an unknown precision; lists the known ones.
    """
    if text is None:
        return None
    require(text, str, what="precision", allowed=f"one of {', '.join(PRECISION_NAMES)}")
    if text not in PRECISION_NAMES:
        raise InvalidInput(f"precision {text!r} is unknown; {allowed_values(text, PRECISION_NAMES)}")
    return None if text == BY_PROFILE else Precision(text)
