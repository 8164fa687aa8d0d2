# ruff: noqa: E402 - the folder and the flags of the host come first
"""Writes a Flux in each of ComfyUI's quantized layouts, by its own quantizers: a script for its Python, not a test.

    python quantized_files.py COMFYUI_DIRECTORY SOURCE.safetensors FOLDER

FOLDER gets a file for each layout that this ComfyUI can make; each name is printed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])

import comfy.cli_args

comfy.cli_args.args.cpu = True

import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from safetensors.torch import load_file, save_file

# By the file's name: the format, what its quantizer gets, and what its layers say beside the format.
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float8_e4m3fn": ("float8_e4m3fn", {"scale": "recalculate"}, {}),
    "float8_e5m2": ("float8_e5m2", {"scale": "recalculate"}, {}),
    "mxfp8": ("mxfp8", {}, {}),
    "nvfp4": ("nvfp4", {"scale": "recalculate"}, {}),
    "int8_tensorwise": ("int8_tensorwise", {"scale": "recalculate", "per_channel": True}, {}),
    "int8_tensorwise_convrot": (
        "int8_tensorwise",
        {"scale": "recalculate", "per_channel": True, "convrot": True, "convrot_groupsize": 256},
        {"convrot": True, "convrot_groupsize": 256},
    ),
    "convrot_w4a4": ("convrot_w4a4", {"convrot_groupsize": 256}, {"convrot_groupsize": 256}),
    "asym_w4a8_int8": (
        "asym_w4a8_int8",
        {"group_size": 16, "convrot_groupsize": 256},
        {"group_size": 16, "convrot_groupsize": 256},
    ),
}


def quantize(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Return a state in a layout: the matrices of its blocks, with what their quantizer makes of them."""
    word, options, said = LAYOUTS[name]
    layout = QUANT_ALGOS[word]["comfy_tensor_layout"]
    quantized = {}
    for key, weight in state.items():
        if weight.dim() != 2 or "blocks" not in key or not key.endswith(".weight") or weight.shape[1] % 256:
            quantized[key] = weight
            continue
        layer = key.removesuffix("weight")
        packed = QuantizedTensor.from_float(weight.bfloat16(), layout, **options)
        for part, leaf in packed.state_dict(key).items():
            quantized[part] = leaf.detach().contiguous().clone()
        told = json.dumps({"format": word, **said}).encode()
        quantized[f"{layer}comfy_quant"] = torch.tensor(list(told), dtype=torch.uint8)
    return quantized


def main(source: str, folder: str) -> None:
    state = load_file(source)
    for name, (word, _, _) in LAYOUTS.items():
        if word not in QUANT_ALGOS:
            continue
        path = Path(folder, f"flux_{name}.safetensors")
        if not path.exists():
            written = path.with_suffix(f".{os.getpid()}")
            with torch.no_grad():
                save_file(quantize(state, name), written)
            os.replace(written, path)
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[2], sys.argv[3])
