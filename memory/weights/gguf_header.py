"""GGUF files as components, by the header that the ``gguf`` package reads; no weight is read.

A file in this format has most weights in blocks of numbers that share scales, each in a form of its own. They rest and
move as these bytes, and are computed with as 16 bits: what decodes them belongs to the loader, such as ComfyUI-GGUF.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput, reason_of
from .component import Component, TensorSpec, group_tensors, guess_kind

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

__all__ = ["component_from_gguf", "is_gguf"]

MAGIC = b"GGUF"
# The types of the format that are a number each, as a safetensors file would call them.
PLAIN = {"F64": "F64", "F32": "F32", "F16": "F16", "BF16": "BF16", "I8": "I8", "I16": "I16", "I32": "I32", "I64": "I64"}
WIDENED = "F16"
"""In which dtype a weight of any other type computes."""
# The shapes that a converter had to flatten, as ComfyUI-GGUF's writes them.
SHAPES = "comfy.gguf.orig_shape."
# ``general.architecture`` of text encoders; those of diffusion models are called as their family.
TEXT_ARCHITECTURES = (
    "t5",
    "t5encoder",
    "llama",
    "clip",
    "gemma",
    "gemma2",
    "gemma3",
    "qwen2",
    "qwen2vl",
    "qwen3",
    "bert",
)
# Of the reader, each of a number or a text: 100 for each token of the largest vocabularies.
MAX_READS = 30_000_000
READ_ERRORS = (
    AttributeError,
    ArithmeticError,
    LookupError,
    MemoryError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


def is_gguf(path: str | Path) -> bool:
    """Whether a file begins as one in this format, whatever its name; False for one that cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def component_from_gguf(path: str | Path, *, name: str | None = None, kind: str | None = None) -> Component:
    """Describe a GGUF file from its header alone; a text encoder with its vocabulary takes some seconds.

    Raises:
        InvalidInput: ``gguf`` is not installed, or the header is not one, names weights twice, or more bytes than the
            file has.
    """
    path = Path(path)
    reader = open_reader(path)
    try:
        tensors = [spec_of(tensor, reader) for tensor in reader.tensors]
        num_bytes = sum(int(tensor.n_bytes) for tensor in reader.tensors)
        architecture = text_field(reader, "general.architecture")
    except READ_ERRORS as error:
        raise InvalidInput(f"{path}: is a damaged GGUF file ({reason_of(error)})") from error
    if num_bytes > len(reader.data):
        raise InvalidInput(f"{path}: is a damaged GGUF file: {num_bytes} bytes of weights in {len(reader.data)} bytes")
    name = name or path.stem
    if kind is None:
        kind = "text" if architecture in TEXT_ARCHITECTURES else guess_kind(name)
    return replace(group_tensors(name, kind, tensors, lambda module: True), from_header=True)


def open_reader(path: Path) -> GGUFReader:
    """Return the header of a file. Raises `InvalidInput`, as `component_from_gguf`."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InvalidInput(f"{path}: reading a GGUF file takes the package gguf; run: pip install gguf") from None

    class BoundedReader(GGUFReader):  # type: ignore[misc, valid-type, unused-ignore]
        """Ends where the file does: of what lies behind, its base reads empty arrays, as many as the header says."""

        num_reads = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **more: Any) -> Any:
            self.num_reads += 1
            found = super()._get(offset, dtype, count, *args, **more)
            if len(found) < int(count):
                raise ValueError(f"it ends before byte {offset}")
            if self.num_reads > MAX_READS:
                raise ValueError(f"its header has more than {MAX_READS} entries")
            return found

    if not is_gguf(path):
        raise InvalidInput(f"{path}: is not a GGUF file, or cannot be read")
    import numpy as np

    try:
        with np.errstate(over="ignore"):  # an offset that wraps leads to other bytes of the file
            return BoundedReader(path)
    except READ_ERRORS as error:
        raise InvalidInput(f"{path}: is a damaged GGUF file ({reason_of(error)})") from error


def spec_of(tensor: ReaderTensor, reader: GGUFReader) -> TensorSpec:
    """Return one weight in numbers; the format has its shape from the last dimension to the first."""
    field = reader.fields.get(f"{SHAPES}{tensor.name}")
    given = tensor.shape.tolist()[::-1] if field is None else [field.parts[index].tolist()[0] for index in field.data]
    shape = tuple(int(edge) for edge in given)
    dtype = PLAIN.get(tensor.tensor_type.name)
    spec = TensorSpec(name=tensor.name, dtype=dtype or WIDENED, shape=shape)
    if spec.num_elements != int(tensor.n_elements):
        raise ValueError(f"{tensor.name} has another number of elements than its shape {shape}")
    if dtype is None:
        return replace(spec, leaves=(int(tensor.n_bytes),))
    return replace(spec, encodable=len(shape) >= 2 and tensor.name.endswith(".weight"))


def text_field(reader: GGUFReader, name: str) -> str:
    field: Any = reader.fields.get(name)
    value = None if field is None else field.contents()
    return value if isinstance(value, str) else ""
