"""Widgets that several nodes have, and what the texts in them mean: read once, into the engine's frozen values."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from comfy_api.latest import io

from ..memory.errors import require
from ..memory.options.placement import AUTO, Placement, parse_placement
from ..memory.options.precision import (
    DEFAULT_PRECISION,
    Precision,
    PrecisionRequest,
    Precisions,
    fill_precisions,
    parse_precision,
    precision_names,
)
from ..memory.options.profile import OffloadProfile, parse_profile
from ..memory.weights.known_forms import FORMS, numbers_of
from .device_choices import Choices, device_names, missing_devices

__all__ = [
    "precision_input",
    "precisions_input",
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
PRECISION_TOOLTIP = (
    "as stored: no change. fp8 scaled: weights of blocks rest in eight bits with a scale per tensor, half of 16 bits, "
    "at an error of 0.027 in each: of a 23.8 GB Flux 15.2 GB rest, and on an H200 a streamed step takes 0.65 of the "
    "time, one with all on the device 1.12. fp8 plain: without scales, as ComfyUI's fp8_e4m3fn, which loses up to 0.28 "
    "of small weights. fp8 per row: a scale per row. e5m2: twice the error. int8: 255 steps per row: 15.2 GB, an error "
    "of 0.009, 0.68 and 1.30 of the time. qint8, qint4, qfloat8: as optimum-quanto; qint4 loses 0.1, 11.2 GB rest, "
    "0.60 and 1.44 of the time. bf16, fp16: halve 32-bit weights; 16-bit ones stay. by profile: 1 to 5 keep the "
    "diffusion model in eight bits, auto does not."
)
EACH_ITS_OWN = "Each part may have its own: diffusion=fp8 scaled,text=bf16."
MAX_SEED = 0xFFFFFFFFFFFFFFFF
NUM_REMEMBERED = 64


def profile_input(*, optional: bool = False) -> io.Input:
    return io.String.Input("profile", optional=optional, default=AUTO, tooltip=PROFILE_TOOLTIP)


def precision_input(*, optional: bool = False) -> io.Input:
    """Return the input of a loader of one component."""
    return io.Combo.Input(
        "precision",
        optional=optional,
        options=PrecisionWords(precision_names(FORMS)),
        default=DEFAULT_PRECISION.name,
        tooltip=PRECISION_TOOLTIP,
    )


def precisions_input() -> io.Input:
    """Return the input of a loader of several components, which may have one each."""
    return io.String.Input("precision", default=DEFAULT_PRECISION.name, tooltip=f"{PRECISION_TOOLTIP} {EACH_ITS_OWN}")


def seed_input(tooltip: str, **options: Any) -> io.Input:
    return io.Int.Input("seed", default=0, min=0, max=MAX_SEED, tooltip=tooltip, **options)


def read_profile(text: object, components: tuple[str, ...] = ()) -> OffloadProfile:
    """Return the profile that a widget names; it may name devices of another machine.

    Raises:
        InvalidInput: naming the column and what is allowed there.
    """
    here = device_names()
    profile = parse_profile_once(str(text), (*here, *missing_devices(str(text), here)), components)
    numbers_of(Precision(profile.form))  # refuses a form that there is not
    return profile


def read_placement(text: str, components: tuple[str, ...] = ()) -> Placement:
    """Return the placement that a widget names; it may name devices of another machine. Raises as `read_profile`."""
    require(text, str, what="placement", allowed="text")
    here = device_names()
    return parse_placement_once(text, (*here, *missing_devices(text, here)), components)


def read_precision(text: str, options: Precisions | None = None, components: tuple[str, ...] = ()) -> PrecisionRequest:
    """Return the precisions that a widget names; None is what the profile says. Raises `InvalidInput`.

    Args:
        options: what a Precision node says of some parts, or of all; the widget counts for the others.
    """
    require(text, str, what="precision", allowed="text")
    read = parse_precision_once(text, components)
    return read if options is None else fill_precisions(options, read)


class PrecisionWords(Choices):
    """The words of a list; a workflow may name a precision for each part in their place."""

    check = staticmethod(read_precision)


# The host has a widget checked before the run and hands its text to the node again: one reading serves both.
@lru_cache(maxsize=NUM_REMEMBERED)
def parse_profile_once(text: str, devices: tuple[str, ...], components: tuple[str, ...]) -> OffloadProfile:
    return parse_profile(text, devices=devices, components=components)


@lru_cache(maxsize=NUM_REMEMBERED)
def parse_precision_once(text: str, components: tuple[str, ...]) -> PrecisionRequest:
    return parse_precision(text, forms=FORMS, components=components)


@lru_cache(maxsize=NUM_REMEMBERED)
def parse_placement_once(text: str, devices: tuple[str, ...], components: tuple[str, ...]) -> Placement:
    return parse_placement(text, devices=devices, components=components)
