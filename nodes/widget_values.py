"""Widgets that several nodes have, and what the texts in them mean: read once, into the engine's frozen values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from comfy_api.latest import io

from ..memory.errors import require
from ..memory.options.placement import AUTO, Placement, parse_placement
from ..memory.options.precision import PRECISION_NAMES, Precision
from ..memory.options.profile import OffloadProfile, parse_profile
from .device_choices import device_names

__all__ = [
    "DEFAULT_PRECISION",
    "precision_input",
    "profile_input",
    "read_placement",
    "read_profile",
    "seed_input",
]

DEFAULT_PRECISION = Precision.AS_STORED.value
PROFILE_TOOLTIP = (
    "How much memory the weights may use. auto: all that is free. 1 to 5: ready-made profiles, from much RAM and VRAM "
    "(1) to very little of both (5). Or an amount of VRAM: 8GiB, 80%, -2GiB (leaves 2 GiB free). Or a profile with "
    "changes: 4,diffusion=2GiB,prefetch=2."
)
PRECISION_TOOLTIP = (
    "as stored: no change. fp8 scaled: keeps block weights in eight bits with a scale per tensor, which halves 16-bit "
    "weights and is slightly lossy. by profile: 1 to 5 keep the diffusion model in eight bits, auto does not."
)
MAX_SEED = 0xFFFFFFFFFFFFFFFF
NUM_REMEMBERED = 64


def profile_input(*, optional: bool = False) -> io.Input:
    return io.String.Input("profile", optional=optional, default=AUTO, tooltip=PROFILE_TOOLTIP)


def precision_input(*, optional: bool = False) -> io.Input:
    return io.Combo.Input(
        "precision",
        optional=optional,
        options=list(PRECISION_NAMES),
        default=DEFAULT_PRECISION,
        tooltip=PRECISION_TOOLTIP,
    )


def seed_input(tooltip: str, **options: Any) -> io.Input:
    return io.Int.Input("seed", default=0, min=0, max=MAX_SEED, tooltip=tooltip, **options)


def read_profile(text: object, components: tuple[str, ...] = ()) -> OffloadProfile:
    """Return the profile that a widget names on this machine.

    Raises:
        InvalidInput: naming the column and what is allowed there.
    """
    return parse_profile_once(str(text), tuple(device_names()), components)


def read_placement(text: str, components: tuple[str, ...] = ()) -> Placement:
    """Return the placement that a widget names on this machine. Raises as `read_profile`."""
    require(text, str, what="placement", allowed="text")
    return parse_placement_once(text, tuple(device_names()), components)


# The host has a widget checked before the run and hands its text to the node again: one reading serves both.
@lru_cache(maxsize=NUM_REMEMBERED)
def parse_profile_once(text: str, devices: tuple[str, ...], components: tuple[str, ...]) -> OffloadProfile:
    return parse_profile(text, devices=devices, components=components)


@lru_cache(maxsize=NUM_REMEMBERED)
def parse_placement_once(text: str, devices: tuple[str, ...], components: tuple[str, ...]) -> Placement:
    return parse_placement(text, devices=devices, components=components)
