"""The device that computes a model of ComfyUI's: the placement's first part, else core's own choice."""

from __future__ import annotations

import comfy.model_management
import torch

from ...memory.hosted_component import device_name
from .hosted import Request, is_cpu

__all__ = ["load_device_for", "placement_without_effect"]


def load_device_for(request: Request, notes: list[str]) -> torch.device:
    """Return the torch device that computes a placement's first part; core's own choice where it names none."""
    if request.devices == ("cpu",):
        return torch.device("cpu")
    default = comfy.model_management.get_torch_device()
    if not request.devices:
        return default
    if is_cpu(default):
        notes.append(f"placement {request.placement}: ignored, because ComfyUI runs on the CPU (--cpu)")
        return default
    return comfy.model_management.get_all_torch_devices()[int(request.devices[0].partition(":")[2])]


def placement_without_effect(request: Request, device: torch.device) -> str:
    """Return what is said of a placement that a model which we do not move cannot follow; nothing if it does."""
    if not request.devices or request.devices == (device_name(device),):
        return ""
    return (
        f"; placement {request.placement} is not in effect: it computes on {device_name(device)}; "
        "choose another device in its own loader, or with ComfyUI's Select Model Device"
    )
