"""The precision in which weights rest, as the user names it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from ..errors import InvalidInput, allowed_values, require

__all__ = ["BY_PROFILE", "DEFAULT_PRECISION", "Precision", "parse_precision", "precision_names"]

# The word that leaves the choice to the profile.
BY_PROFILE = "by profile"


@dataclass(frozen=True, slots=True)
class Precision:
    """The storage form in which weights rest, by its name; they compute in the dtype in which they were stored."""

    name: str

    AS_STORED: ClassVar[Precision]
    """Nothing is encoded."""
    ENCODED: ClassVar[Precision]
    """The storage form that a profile's ``quantize`` chooses."""

    def __post_init__(self) -> None:
        require(self.name, str, what="precision", allowed="the name of a storage form")


Precision.AS_STORED = Precision("as stored")
Precision.ENCODED = Precision("fp8 scaled")

DEFAULT_PRECISION = Precision.AS_STORED
"""What a host's components have where no precision was chosen."""


def precision_names(forms: Iterable[str]) -> tuple[str, ...]:
    """Return all that a user may write where these storage forms are known."""
    return (Precision.AS_STORED.name, *forms, BY_PROFILE)


def parse_precision(text: str | None, *, forms: Iterable[str]) -> Precision | None:
    """Return the precision that a text names; None, for `BY_PROFILE` and for no text, leaves it to the profile.

    Args:
        forms: the names of the storage forms that are known.

    Raises:
        InvalidInput: an unknown precision; lists the known ones.
    """
    if text is None:
        return None
    names = precision_names(forms)
    require(text, str, what="precision", allowed=f"one of {', '.join(names)}")
    if text not in names:
        raise InvalidInput(f"precision {text!r} is unknown; {allowed_values(text, names)}")
    return None if text == BY_PROFILE else Precision(text)
