"""What the pack writes to ComfyUI's log as it starts: one line of what it found, and warnings of hidden GPUs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .visible_devices import Sight

__all__ = ["hidden_lines", "start_line"]


def start_line() -> str:
    """Return version, devices with their watermarks, whether models outlive a prompt, and ComfyUI's dynamic VRAM.

    Asks the driver for the names and sizes of devices; allocates nothing on them.
    """
    from .. import __version__
    from ..memory.manager.watermark import default_watermark
    from ..memory.transfer.devices import list_devices
    from ..memory.units import format_bytes

    devices = []
    for device in list_devices():
        if not device.is_cpu:
            model, total_bytes = device.model_and_size()
            low = format_bytes(default_watermark(total_bytes).low_bytes)
            devices.append(f"{device.name} ({model}{model and ', '}{format_bytes(total_bytes)}, {low} reserved)")
    is_dynamic = getattr(sys.modules.get("comfy.memory_management"), "aimdo_enabled", False)
    options = getattr(sys.modules.get("comfy.cli_args"), "args", None)
    return "; ".join(
        [
            f"Highwater {__version__}: {', '.join(devices) or 'no accelerator, models compute on the CPU'}",
            f"dynamic VRAM is {'on' if is_dynamic else 'off'}",
            what_stays(options),
        ]
    )


def hidden_lines(sight: Sight) -> list[str]:
    """Return one line for each GPU of the driver that torch does not see or numbers otherwise, with the remedy."""
    from .visible_devices import explain_sight

    return [f"Highwater: {found.text}: {found.remedy}" for found in explain_sight(sight) if found.is_warning]


def what_stays(options: Any) -> str:
    """Return whether models outlive a prompt, by the command line of ComfyUI: it drops the results of loaders."""
    if getattr(options, "cache_none", False):
        return "models are dropped after each prompt (--cache-none)"
    if getattr(options, "cache_lru", 0) > 0:
        return f"models stay while their loader is among the last {options.cache_lru} nodes (--cache-lru)"
    thresholds = getattr(options, "cache_ram", None) or []
    if len(thresholds) > 1 and not getattr(options, "cache_classic", False):
        return f"models stay while {thresholds[1]:g} GB of RAM are free (--cache-ram)"
    return "models stay until a prompt does not name their loader (--cache-lru or --cache-ram change that)"
