"""Files of optimum-quanto and mmgp in qint8, read as ComfyUI's own int8 tensors.

Both are the same numbers: codes in int8, and a scale for each row. The codes stay where they are in the file; only the
scales, one for each row, are copied. Core dequantizes them to the bits that optimum-quanto gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import comfy.quant_ops
import comfy.utils
import torch

from ...memory.errors import InvalidInput
from ...memory.hosted_component import is_quanto_file
from .quantizing import CORES_NAME, is_named_as_in_core

__all__ = ["as_own_int8", "is_quanto"]

CODES, SCALE = "._data", "._scale"
# What the format has beside weights: the scales of activations, which are one.
BESIDE = (".input_scale", ".output_scale")


def is_quanto(path: str) -> bool:
    """Whether a file is in optimum-quanto's format; reads the header of a safetensors file."""
    return path.lower().endswith((".safetensors", ".sft")) and is_quanto_file(path)


def as_own_int8(path: str, tensors: dict[str, Any], *, renames: bool) -> dict[str, Any]:
    """Return the tensors of such a file as those of ComfyUI's int8 files.

    Args:
        renames: core looks for another model's names, and renames or joins these, which it does without their scales.

    Raises:
        InvalidInput: it has other codes than qint8's, or core cannot take them.
    """
    where = Path(path).name
    if CORES_NAME not in getattr(comfy.quant_ops, "QUANT_ALGOS", {}):
        raise InvalidInput(f"{where}: is in optimum-quanto's qint8, for which this ComfyUI has no tensors; update it")
    weights = {name.removesuffix(CODES): tensor for name, tensor in tensors.items() if name.endswith(CODES)}
    for name, codes in weights.items():
        scale = tensors.get(name + SCALE)
        is_per_row = codes.dim() == 2 and scale is not None and scale.shape == (codes.shape[0], 1)
        if codes.dtype is not torch.int8 or not is_per_row:
            raise InvalidInput(
                f"{where}: {name} is in another form of optimum-quanto than qint8 with a scale for each row of a "
                "matrix; allowed here: qint8; load_model, Load Pipeline and mmgp read the others"
            )
    layers = {name.removesuffix(".weight") for name in weights}
    made = {}
    for name, tensor in tensors.items():
        if name.endswith(CODES):
            made[name.removesuffix(CODES)] = tensor
        elif name.endswith(SCALE):
            layer = name.removesuffix(SCALE).removesuffix(".weight")
            made[f"{layer}.weight_scale"] = tensor.to(torch.float32)
            told = json.dumps({"format": CORES_NAME}).encode()
            made[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        elif not (name.endswith(BESIDE) and name.rpartition(".")[0] in layers):
            made[name] = tensor
    if renames and not is_named_as_in_core(made):
        raise InvalidInput(
            f"{where}: is quantized under names that ComfyUI renames or does not know; use Load Pipeline"
        )
    return made
