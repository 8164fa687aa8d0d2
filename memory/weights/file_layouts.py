"""How files hold weights in storage forms: ComfyUI's ``comfy_quant`` files, and those of optimum-quanto and mmgp.

ComfyUI: a weight has its codes under its own name, and beside it, for its layer, ``weight_scale`` and ``comfy_quant``,
the bytes of a JSON object that names the format (`comfy/ops.py` of ComfyUI 0.33).

optimum-quanto: a weight's tensors have its name and ``._data``, ``._scale`` and ``._shift``, its layer the scales of
activations, which are one where these are not quantized. mmgp keeps the metadata beside them: a map of the layers, as
JSON in base64 (`safetensors2.py` of mmgp 3.8).

Files of other libraries are named where they are refused.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .component import TensorSpec
from .form_numbers import FormNumbers
from .known_forms import INT8, QFLOAT8, QINT4, QINT8, SCALED_FP8, quanto_group

__all__ = [
    "FILE_FORMS",
    "FileTensor",
    "describe_for_host",
    "describe_foreign",
    "describe_quantized",
    "file_tensors",
    "in_base64",
    "is_quanto",
    "layout_metadata",
]

COMFY_FORMATS = {SCALED_FP8.name: "float8_e4m3fn", INT8.name: "int8_tensorwise"}
QUANTO_TYPES = {QINT8.name: "qint8", QINT4.name: "qint4", QFLOAT8.name: "qfloat8_e4m3fn"}
CODES = {SCALED_FP8.name: "F8_E4M3", INT8.name: "I8", QINT8.name: "I8", QINT4.name: "U8", QFLOAT8.name: "F8_E4M3"}
FILE_FORMS = {name.replace(" ", "-"): name for name in CODES}
"""The forms in which files are written, by the words that have no blank."""

# What the names of quantized files' tensors end with, what they are called, and what loads them.
SIGNS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    ((".comfy_quant", "scaled_fp8", ".scale_weight"), "ComfyUI's quantized format", "ComfyUI's own loaders and ours"),
    (("._data", "._data._data"), "optimum-quanto's format", "our loaders, optimum-quanto and mmgp"),
    ((".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", ".weight.absmax", ".SCB"),
     "bitsandbytes' format", "bitsandbytes, through diffusers or transformers"),
    ((".wscales",), "SVDQuant's format", "ComfyUI-nunchaku"),
    ((".qzeros",), "the format of AWQ or GPTQ", "transformers with gptqmodel or autoawq"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class FileTensor:
    """One of the tensors that a file has of an encoded weight."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    leaf: int | None = None
    """Which leaf it is; None for what is beside the leaves."""
    content: bytes = b""
    """What is beside the leaves, where it is the same for every weight of a form."""


def file_tensors(numbers: FormNumbers, weight: TensorSpec) -> list[FileTensor]:
    """Return the tensors that a file has of a weight in a form, which is one of `FILE_FORMS`."""
    layer = weight.name.removesuffix(".weight")
    codes = CODES[numbers.name]
    if numbers.name in COMFY_FORMATS:
        told = json.dumps({"format": COMFY_FORMATS[numbers.name]}).encode()
        per_row = len(numbers.leaves) > 1
        shape = (weight.shape[0], *[1] * (len(weight.shape) - 1)) if per_row else ()
        return [
            FileTensor(name=weight.name, dtype=codes, shape=weight.shape, leaf=0),
            FileTensor(name=f"{layer}.weight_scale", dtype="F32", shape=shape, leaf=1 if per_row else None),
            FileTensor(name=f"{layer}.comfy_quant", dtype="U8", shape=(len(told),), content=told),
        ]
    beside = [
        FileTensor(name=f"{layer}.{name}", dtype=weight.dtype, shape=(), content=ONES[weight.dtype])
        for name in ("input_scale", "output_scale")
    ]
    if numbers.name == QINT4.name:
        width = quanto_group(weight) or weight.num_elements // weight.shape[0]
        num_groups = weight.num_elements // width
        return [
            FileTensor(name=f"{weight.name}._data._data", dtype=codes, shape=(-(-num_groups // 2), width), leaf=0),
            FileTensor(name=f"{weight.name}._scale", dtype=weight.dtype, shape=(num_groups, 1), leaf=1),
            FileTensor(name=f"{weight.name}._shift", dtype=weight.dtype, shape=(num_groups, 1), leaf=2),
            *beside,
        ]
    # Of a weight of one row optimum-quanto has one scale for all of it.
    shape = () if weight.shape[0] == 1 else (weight.shape[0], *[1] * (len(weight.shape) - 1))
    return [
        FileTensor(name=f"{weight.name}._data", dtype=codes, shape=weight.shape, leaf=0),
        FileTensor(name=f"{weight.name}._scale", dtype=weight.dtype, shape=shape, leaf=1),
        *beside,
    ]


ONES = {"F32": b"\0\0\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\0\x3c"}
"""The number one in each dtype, in little-endian bytes."""


def layout_metadata(numbers: FormNumbers, weights: Sequence[TensorSpec]) -> dict[str, str]:
    """Return what the metadata of a file says of its weights in a form."""
    if numbers.name in COMFY_FORMATS:
        return {"quantization_format": "comfy_quant"}
    qtype = {"weights": QUANTO_TYPES[numbers.name], "activations": "none"}
    layers = {weight.name.removesuffix(".weight"): qtype for weight in weights}
    return {"quantization_format": "quanto", "quantization_map_base64": in_base64(layers)}


def in_base64(value: Mapping[str, object]) -> str:
    return binascii.b2a_base64(json.dumps(value).encode(), newline=False).decode()


def describe_foreign(names: Iterable[str]) -> str:
    """Return in which quantized format of other libraries a file is, by its tensors' names, and what loads it."""
    return describe(names, SIGNS[2:])


def describe_for_host(names: Iterable[str]) -> str:
    """Return the same of formats that ComfyUI's own models cannot be loaded from."""
    return describe(names, SIGNS[1:])


def is_quanto(names: Iterable[str]) -> bool:
    """Whether a file is in optimum-quanto's format, by its tensors' names."""
    return bool(describe(names, SIGNS[1:2]))


def describe_quantized(names: Iterable[str]) -> str:
    """Return the same of all formats that are known."""
    return describe(names, SIGNS)


def describe(names: Iterable[str], signs: Sequence[tuple[tuple[str, ...], str, str]]) -> str:
    """Return the first of these formats that a name shows, and what loads it; empty where there is none."""
    known = list(names)
    for endings, called, loaders in signs:
        if any(name.endswith(endings) for name in known):
            return f"is in {called}, which is for {loaders}"
    return ""
