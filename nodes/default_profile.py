"""The profile of loaders whose own is left at ``auto``: a setting of the page, for the whole process.

A loader reads it when it runs. It is part of what makes the host run a loader again: a setting that was changed counts
from the next run on, also where the host has the loader's result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..memory.options.placement import AUTO

if TYPE_CHECKING:
    from ..memory.options.profile import OffloadProfile

__all__ = ["chosen_profile", "from_setting", "profile_fingerprint", "profile_text", "set_default_profile"]

ORIGIN = "profile {}: from the setting Default profile"
# The setting's text, the only item.
setting = [AUTO]


def set_default_profile(body: Mapping[str, Any]) -> dict[str, Any]:
    """Set the profile of loaders that are left at ``auto``; an empty text is ``auto``. Returns it, and its title.

    Raises:
        InvalidInput: it is no profile; names the column and what is allowed there.
    """
    from .widget_values import read_profile  # importable only where a host, or its stand-in, is

    text = body["profile"].strip() or AUTO
    profile = read_profile(text)
    setting[0] = text
    return {"profile": text, "title": profile.title}


def profile_fingerprint(text: object) -> str:
    """Return what a loader's result depends on beside its own inputs: the setting, where its profile is ``auto``."""
    return setting[0] if text == AUTO and setting[0] != AUTO else ""


def profile_text(text: str) -> str:
    """Return the text that counts for a loader's widget: the setting's for ``auto``."""
    return profile_fingerprint(text) or text


def from_setting(profile: OffloadProfile, text: str) -> OffloadProfile:
    """Return the profile that was read for a loader's widget, with where it is from if the widget leaves it open."""
    found = profile_fingerprint(text)
    return replace(profile, origin=ORIGIN.format(found)) if found else profile


def chosen_profile(text: str, components: tuple[str, ...] = ()) -> tuple[OffloadProfile, str]:
    """Return the profile that a loader's widget names, the setting's for ``auto``, and the text that it is read from.

    Raises as `read_profile`.
    """
    from .widget_values import read_profile

    found = profile_text(text)
    return from_setting(read_profile(found, components), text), found
