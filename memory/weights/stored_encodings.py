"""Weights that a file has in a storage form already: which, in which form, and the names of their leaves there.

A source knows each leaf by the name of its weight and its number (`leaf_name`), whatever its file calls it. Layouts of
files: `file_layouts.py`. What is in a form that has no class here is refused, with who reads it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidInput
from .component import TensorSpec
from .file_layouts import describe_foreign
from .form_numbers import WIDE_DTYPES, FormNumbers
from .known_forms import INT8, QFLOAT8, QINT4, QINT8, ROW_E5M2, ROW_FP8, SCALED_E5M2, SCALED_FP8
from .safetensors_header import TensorHeader

__all__ = ["StoredEncoding", "find_encodings", "leaf_name", "renamed", "weight_name"]

# By what ComfyUI calls a format: the form with one scale for the whole weight, that with one for each row, the codes.
COMFY: dict[str, tuple[FormNumbers | None, FormNumbers, str]] = {
    "float8_e4m3fn": (SCALED_FP8, ROW_FP8, "F8_E4M3"),
    "float8_e5m2": (SCALED_E5M2, ROW_E5M2, "F8_E5M2"),
    "int8_tensorwise": (None, INT8, "I8"),
}
OLDER = {codes: kind for kind, (per_tensor, _, codes) in COMFY.items() if per_tensor is not None}
"""The formats of the older layout, which says none, by the dtype of its codes."""
COMFY_BESIDE = ("comfy_quant", "scale_weight", "weight_scale", "scale_input", "input_scale")
QUANTO_BESIDE = ("input_scale", "output_scale")
LEAF = " leaf "
BESIDE_ENDINGS = (*(f".{each}" for each in (*COMFY_BESIDE, *QUANTO_BESIDE)), "._scale", "._shift")
MOST_TOLD_BYTES = 1 << 16
QUANTO = {"I8": QINT8, "F8_E4M3": QFLOAT8}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEncoding:
    """How a file has one weight."""

    numbers: FormNumbers
    dtype: str
    """The dtype in which it computes, as safetensors calls it."""
    leaves: tuple[TensorHeader, ...]
    scale: TensorHeader | None = None
    """What has the one scale of a weight whose form has it beside the leaves."""

    @property
    def num_tensors(self) -> int:
        """How many tensors a source knows of it."""
        return len(self.leaves) + (self.scale is not None)

    def misfit(self, name: str, shape: tuple[int, ...]) -> str:
        """Return how the leaves differ from those of a weight of a shape; empty where they do not."""
        spec = TensorSpec(name=name, dtype=self.dtype, shape=shape, encodable=True)
        if not self.numbers.takes(spec):
            return f"{self.numbers.name} is not defined for {list(shape)}"
        is_packed = self.numbers is QINT4
        if is_packed and 4 * self.leaves[0].weight_bytes == spec.num_elements:
            return f"{name} has two bits for each weight: qint2 is not supported"
        has_shape = self.leaves[0].shape == shape or is_packed
        if has_shape and tuple(leaf.weight_bytes for leaf in self.leaves) == self.numbers.leaf_bytes(spec):
            return ""
        found = ", ".join(f"{leaf.dtype} {list(leaf.shape)}" for leaf in self.leaves)
        return f"{name} is {found} in {self.numbers.name}, which does not fit {list(shape)}"


Read = Callable[[str], bytes]


def leaf_name(name: str, number: int) -> str:
    """Return the name by which a source knows a leaf of a weight; no module has a weight of that name."""
    return f"{name}{LEAF}{number}"


def weight_name(name: str) -> str:
    """Return the name of the weight that a name of a source is for, which may be that of a leaf."""
    return name.partition(LEAF)[0]


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Return a name of a source where weights are called by other names, by their former ones."""
    weight, mark, number = name.partition(LEAF)
    return f"{names.get(weight, weight)}{mark}{number}"


def find_encodings(
    tensors: Mapping[str, TensorHeader], metadata: Iterable[Mapping[str, str]], read: Read, path: Path, prefix: str = ""
) -> tuple[dict[str, StoredEncoding], set[str]]:
    """Return the weights that are in a storage form, and the names of all tensors that belong to them.

    Args:
        tensors: by name, without the prefix that names have in the file.
        metadata: of each file.
        read: returns the bytes of a small tensor.

    Raises:
        InvalidInput: a tensor of one is missing or has another shape, or its format has no form here.
    """
    found: dict[str, StoredEncoding] = {}
    used: set[str] = set()
    told = {name.removeprefix(prefix): dtype for each in metadata for name, dtype in told_dtypes(each).items()}
    usual = usual_dtype(tensors.values())
    for name in tensors:
        if name.endswith((".comfy_quant", ".scale_weight")):
            weight, encoding, own = comfy_encoding(name, tensors, read, path, told, usual)
        elif name.endswith("._data"):
            weight, encoding, own = quanto_encoding(name, tensors, path)
        else:
            continue
        found[weight] = encoding
        used |= own
    if found:
        used |= {name for name in tensors if name.rpartition(".")[2] == "scaled_fp8"}
    foreign = describe_foreign(tensors)
    if foreign:
        raise InvalidInput(f"{path}: {foreign}")
    return found, used


def comfy_encoding(
    name: str,
    tensors: Mapping[str, TensorHeader],
    read: Read,
    path: Path,
    told: Mapping[str, str],
    usual: str,
) -> tuple[str, StoredEncoding, set[str]]:
    """Return a weight of ComfyUI's layouts: the one with ``comfy_quant``, and the older one with ``scale_weight``."""
    is_older = name.endswith(".scale_weight")
    layer = name.rpartition(".")[0]
    weight, scale_name = f"{layer}.weight", f"{layer}.scale_weight" if is_older else f"{layer}.weight_scale"
    codes, scale = tensors.get(weight), tensors.get(scale_name)
    for missing, found in ((weight, codes), (scale_name, scale)):
        if found is None:
            raise InvalidInput(f"{path}: {layer} is in ComfyUI's quantized format and lacks {missing!r}")
    assert codes is not None and scale is not None
    kind = OLDER.get(codes.dtype, codes.dtype) if is_older else read_format(name, tensors[name], read, path)
    per_tensor, per_row, dtype = COMFY.get(kind, (None, None, ""))
    if per_row is None:
        raise InvalidInput(f"{path}: {layer} is in ComfyUI's format {kind!r}, which is for ComfyUI's own loaders")
    if codes.dtype != dtype or len(codes.shape) < 2:
        raise InvalidInput(f"{path}: {weight!r} is {codes.dtype} {list(codes.shape)}, and its format is {kind!r}")
    if scale.dtype != "F32":
        raise InvalidInput(f"{path}: {scale_name!r} is {scale.dtype}, expected F32")
    rows = codes.shape[0]
    is_single = scale.shape in ((), (1,), (1, 1)) and not (per_tensor is None and rows == 1)
    if not is_single and scale.shape not in ((rows,), (rows, *[1] * (len(codes.shape) - 1))):
        raise InvalidInput(f"{path}: {scale_name!r} is {list(scale.shape)}, and {weight!r} has {rows} rows")
    numbers = per_tensor if is_single else per_row
    if numbers is None:
        raise InvalidInput(f"{path}: {layer} is {kind} with one scale for all rows, which is for ComfyUI's own loaders")
    bias = tensors.get(f"{layer}.bias")
    wide = told.get(weight) or (bias.dtype if bias is not None and bias.dtype in WIDE_DTYPES else usual)
    encoding = StoredEncoding(
        numbers=numbers,
        dtype=wide,
        leaves=(codes,) if is_single else (codes, scale),
        scale=scale if is_single else None,
    )
    beside = (f"{layer}.{each}" for each in COMFY_BESIDE)
    return weight, encoding, {weight, *(each for each in beside if each in tensors)}


def read_format(name: str, told: TensorHeader, read: Read, path: Path) -> str:
    """Return the format that a ``comfy_quant`` tensor names."""
    if told.weight_bytes > MOST_TOLD_BYTES:
        raise InvalidInput(f"{path}: {name!r} has {told.weight_bytes} bytes, allowed: up to {MOST_TOLD_BYTES}")
    try:
        content = json.loads(read(name))
        kind = content["format"]
        params = content.get("params", {})
        is_rotated = content.get("convrot", params.get("convrot", False) if isinstance(params, dict) else False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidInput(f"{path}: {name!r} is no JSON object with a format") from None
    return f"{kind} with convrot" if is_rotated else str(kind)


def quanto_encoding(name: str, tensors: Mapping[str, TensorHeader], path: Path) -> tuple[str, StoredEncoding, set[str]]:
    """Return a weight of optimum-quanto's tensors."""
    codes = tensors[name]
    is_packed = name.endswith("._data._data")
    weight = name.removesuffix("._data._data" if is_packed else "._data")
    numbers = (QINT4 if codes.dtype == "U8" else None) if is_packed else QUANTO.get(codes.dtype)
    if numbers is None:
        raise InvalidInput(f"{path}: {weight!r} is in optimum-quanto's {codes.dtype}; allowed: qint8, qfloat8, qint4")
    names = [name, *(f"{weight}.{ending}" for ending in (("_scale", "_shift") if is_packed else ("_scale",)))]
    for missing in names:
        if missing not in tensors:
            raise InvalidInput(f"{path}: {weight!r} is in optimum-quanto's format and lacks {missing!r}")
    leaves = tuple(tensors[each] for each in names)
    dtype = leaves[1].dtype
    if dtype not in WIDE_DTYPES or any(leaf.dtype != dtype for leaf in leaves[1:]):
        given = " and ".join(leaf.dtype for leaf in leaves[1:])
        raise InvalidInput(f"{path}: scales of {weight!r} are {given}; allowed: F32, F16 or BF16, all the same")
    if not is_packed and leaves[1].shape not in ((), (codes.shape[0], *[1] * (len(codes.shape) - 1))):
        raise InvalidInput(f"{path}: {names[1]!r} is {list(leaves[1].shape)}, and {name!r} {list(codes.shape)}")
    layer = weight.removesuffix(".weight")
    beside = (f"{layer}.{each}" for each in QUANTO_BESIDE)
    own = {*names, *(each for each in beside if each in tensors)}
    return weight, StoredEncoding(numbers=numbers, dtype=dtype, leaves=leaves), own


def told_dtypes(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """Return in which dtypes the weights of a file of ours compute, as its metadata say."""
    try:
        weights = json.loads(metadata["highwater"])["weights"]
        return {str(name): dtype for name, dtype in weights.items() if dtype in WIDE_DTYPES}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def usual_dtype(tensors: Iterable[TensorHeader]) -> str:
    """Return the dtype that most tensors of 16 or 32 bits have, without what belongs to encoded weights."""
    counts = Counter(
        tensor.dtype
        for tensor in tensors
        if tensor.dtype in WIDE_DTYPES and not tensor.name.endswith(BESIDE_ENDINGS) and tensor.shape
    )
    return max(counts, key=lambda dtype: counts[dtype], default="BF16")
