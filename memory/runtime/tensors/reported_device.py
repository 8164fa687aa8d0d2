"""The device that a weight at rest reports.

[Note: asked] A forward may read a weight's ``device``, to create a tensor there, while the weight's block is not
loaded. During the forward the weight at rest reports the device of the activations. At all other times, for example
when a LoRA is added, it reports the device that holds it. Torch's operators do not read this attribute, so they are not
affected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Asked", "answer_device", "device_in_backward", "device_of", "plainly"]

Asked = Callable[[], torch.device | None]
"""Returns the device that a weight at rest reports: in a forward that of the activations, in a recomputation by a
backward pass that on which its block computes; None at all other times.
"""
DEVICE: Any = torch.Tensor.device  # the descriptor
plainly = torch._C.DisableTorchFunctionSubclass
"""A context in which watched weights behave like plain tensors; checking many of them is faster in it."""


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device that holds a tensor, whatever its ``device`` reports."""
    with plainly():
        return DEVICE.__get__(tensor)  # type: ignore[no-any-return]


def answer_device(tensor: torch.Tensor) -> torch.device:
    """Return what the ``device`` of a weight at rest reports ([Note: asked])."""
    asked: Asked | None = vars(tensor).get("asked")
    device = (asked() if asked is not None else None) or device_of(tensor)
    # Libraries create added layers on the weight's device; on the meta device they would lose their values.
    return torch.device("cpu") if device.type == "meta" else device


def device_in_backward(tensor: torch.Tensor) -> torch.device | None:
    """As `RestingWeight.device_in_backward`."""
    asked: Asked | None = vars(tensor).get("asked")
    device = asked() if asked is not None else None
    return device if device != device_of(tensor) else None
