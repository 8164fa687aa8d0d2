"""Widgets that several nodes have, and what the texts in them mean: read once, into the engine's frozen values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from comfy_api.latest import io

from ..memory.errors import require
from ..memory.options.placement import AUTO, Placement, parse_placement
from ..memory.options.precision import (
    BY_PROFILE,
    DEFAULT_PRECISION,
    Precision,
    PrecisionRequest,
    parse_precision,
    precision_names,
)
from ..memory.options.profile import OffloadProfile, parse_profile
from ..memory.weights.known_forms import FORMS, numbers_of
from .device_choices import device_names, missing_devices

__all__ = [
    "precision_input",
    "profile_input",
    "read_placement",
    "read_precision",
    "read_profile",
    "seed_input",
]

PROFILE_TOOLTIP = (
    "How much memory the weights may use. auto: all that is free, or what the setting Default profile says. 1 to 5: "
    "ready-made profiles, from much RAM and VRAM (1) to very little of both (5). Or an amount of VRAM: 8GiB, 80%, "
    "-2GiB (leaves 2 GiB free). Or a profile with changes: 4,diffusion=2GiB,prefetch=2."
)
MAX_SEED = 0xFFFFFFFFFFFFFFFF
NUM_REMEMBERED = 64


def profile_input(*, optional: bool = False) -> io.Input:
    return io.String.Input("profile", optional=optional, default=AUTO, tooltip=PROFILE_TOOLTIP)


def precision_input(*, optional: bool = False) -> io.Input:
    return io.Combo.Input(
        "precision",
        optional=optional,
        options=list(precision_names(FORMS)),
        default=DEFAULT_PRECISION.name,
        tooltip=precision_tooltip(),
    )


def precision_tooltip() -> str:
    quantized = numbers_of(Precision.ENCODED)
    assert quantized is not None
    return " ".join(
        [
            f"{Precision.AS_STORED.name}: no change.",
            *(f"{name}: {numbers.effect}." for name, (numbers, _) in FORMS.items()),
            f"{BY_PROFILE}: 1 to 5 keep the diffusion model {quantized.rests}, auto does not.",
        ]
    )


def seed_input(tooltip: str, **options: Any) -> io.Input:
    return io.Int.Input("seed", default=0, min=0, max=MAX_SEED, tooltip=tooltip, **options)


def read_profile(text: object, components: tuple[str, ...] = ()) -> OffloadProfile:
    """Return the profile that a widget names; it may name devices of another machine.

    Raises:
        InvalidInput: naming the column and what is allowed there.
    """
    here = device_names()
    return parse_profile_once(str(text), (*here, *missing_devices(str(text), here)), components)


def read_placement(text: str, components: tuple[str, ...] = ()) -> Placement:
    """Return the placement that a widget names; it may name devices of another machine. Raises as `read_profile`."""
    require(text, str, what="placement", allowed="text")
    here = device_names()
    return parse_placement_once(text, (*here, *missing_devices(text, here)), components)


def read_precision(text: str, components: tuple[str, ...] = ()) -> PrecisionRequest:
    """Return the precisions that a widget names; None is what the profile says. Raises `InvalidInput`."""
    return parse_precision(text, forms=FORMS, components=components)


# The host has a widget checked before the run and hands its text to the node again: one reading serves both.
@lru_cache(maxsize=NUM_REMEMBERED)
def parse_profile_once(text: str, devices: tuple[str, ...], components: tuple[str, ...]) -> OffloadProfile:
    return parse_profile(text, devices=devices, components=components)


@lru_cache(maxsize=NUM_REMEMBERED)
def parse_placement_once(text: str, devices: tuple[str, ...], components: tuple[str, ...]) -> Placement:
    return parse_placement(text, devices=devices, components=components)
