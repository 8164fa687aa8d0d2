"""What comfy-aimdo, the library under core's dynamic VRAM, offers to steer a model; core makes the same calls itself.

Nothing of it is replaced. Where a version lacks a function, what that was for is lost, and `lost` says so.
"""

from __future__ import annotations

import inspect
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from comfy.cli_args import args

from ..dynamic_needs import METHODS, what_is_lost

try:
    import comfy.memory_management
    import comfy_aimdo.control
    import comfy_aimdo.model_vbar
except ImportError:  # ComfyUI 0.8.0 has no dynamic VRAM
    AIMDO: Any = None
else:
    AIMDO = comfy_aimdo

__all__ = [
    "PAGE_BYTES",
    "PINNED",
    "RESIDENT",
    "is_on",
    "is_on_for",
    "keep_free",
    "lost",
    "why_off",
]

PAGE_BYTES = 32 << 20
"""Weights come and go in pages of this size: ``VBAR_PAGE_SIZE`` of comfy-aimdo 0.4.13 and 0.6.0."""
RESIDENT, PINNED = 1, 2
"""The marks of a page: it has memory; a layer uses it now."""
DEFAULT_HEADROOM_BYTES = 256 << 20
"""What it keeps free of every device where core names no number, and its least: measured on the same two versions."""


def is_on() -> bool:
    """Whether core's loaders make dynamic models in this process."""
    return AIMDO is not None and bool(comfy.memory_management.aimdo_enabled)


def is_on_for(index: int) -> bool:
    """Whether models on the accelerator with this number are dynamic."""
    if not is_on():
        return False
    try:
        return AIMDO.control.get_devctx(index) is not None
    except (AttributeError, RuntimeError):  # RuntimeError: this device was not initialized
        return not hasattr(AIMDO.control, "get_devctx")


def why_off() -> str:
    """Return why dynamic VRAM is off, in a few words."""
    if AIMDO is None:
        return "this ComfyUI has none"
    for name in ("cpu", "disable_dynamic_vram", "highvram", "gpu_only", "novram"):
        if getattr(args, name, False):
            return f"ComfyUI was started with --{name.replace('_', '-')}"
    return "ComfyUI turns it on for NVIDIA GPUs with torch 2.8 or newer; --enable-dynamic-vram forces it"


def library_version() -> str:
    try:
        return f"comfy-aimdo {version('comfy-aimdo')}"
    except PackageNotFoundError:
        return "comfy-aimdo"


def lost() -> list[str]:
    """Return what this version of comfy-aimdo cannot do, a line each; usually nothing."""
    if not is_on():
        return []
    vbar = AIMDO.model_vbar.ModelVBAR
    methods = {name for name in METHODS if hasattr(vbar, name)}
    return what_is_lost(library_version(), methods=methods, sets_headroom=sets_headroom())


def sets_headroom() -> bool:
    control = AIMDO.control
    return (
        hasattr(control, "set_simple_vram_headroom")
        or "simple_vram_headroom" in inspect.signature(control.init).parameters
    )


def keep_free(num_bytes: int | None) -> None:
    """Keep so many bytes of every device free, and never less than core does by itself; None: as core does.

    Takes effect at the next allocation or fault of a page.
    """
    if not is_on() or not sets_headroom():
        return
    reserve = getattr(args, "reserve_vram", None)
    own_bytes = DEFAULT_HEADROOM_BYTES if reserve is None else int(reserve * (1 << 30))
    headroom = own_bytes if num_bytes is None else max(num_bytes, own_bytes)
    control = AIMDO.control
    if hasattr(control, "set_simple_vram_headroom"):
        control.set_simple_vram_headroom(headroom)
        return
    more = {}
    if "nvml_pressure" in inspect.signature(control.init).parameters:  # it sets that, too: pass what core passed
        more["nvml_pressure"] = not args.disable_nvml_pressure
    control.init(simple_vram_headroom=headroom, **more)
