"""Weights in ComfyUI's own int8 tensors, made as a diffusion model is loaded: as if its file had them.

Core then multiplies in eight bits where it does so with such files, and merges LoRAs into them in its own way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import comfy.model_detection
import comfy.quant_ops
import comfy.utils

from ...memory.hosted_component import Precision, precision_for, quantize_tensors
from .hosted import Request, is_cpu
from .load_device import load_device_for

__all__ = ["CORES_NAME", "OwnInt8", "is_named_as_in_core"]

INT8, CORES_NAME = "int8", "int8_tensorwise"


class OwnInt8:
    """What is asked for of one diffusion model, as far as core has tensors for it; use it around one loading."""

    def __init__(self, request: Request, name: str) -> None:
        precision = precision_for(request.precision, name, "diffusion")
        is_asked = precision is not None and precision.name == INT8 and not is_cpu(load_device_for(request, []))
        self.precision: Precision | None = None
        if is_asked and CORES_NAME in getattr(comfy.quant_ops, "QUANT_ALGOS", {}):
            self.precision = precision
        self.request = request
        self.notes: list[str] = []

    def quantize(self, path: str, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors of a file with those of blocks in int8; as they are if core would rename them."""
        if self.precision is None or not is_named_as_in_core(tensors):
            return tensors
        made = quantize_tensors(path, tensors, self.precision)
        if made.num_weights:
            self.notes = [made.text()]  # once, also where the file is read a second time
            self.request = replace(self.request, precision=Precision.AS_STORED)
        return made.tensors


def is_named_as_in_core(tensors: dict[str, Any]) -> bool:
    """Whether a file has the names of core's own modules: what core renames or joins, it does without their scales."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(tensors)
    own = comfy.utils.state_dict_prefix_replace(dict(tensors), {prefix: ""}, filter_keys=True) or tensors
    try:
        return comfy.model_detection.model_config_from_unet(own, "") is not None
    except Exception:  # core says what it cannot load when it loads it
        return False
