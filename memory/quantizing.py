"""`quantize_file`: a safetensors file from another one, with the weights of its blocks in a storage form.

Two passes, tensor by tensor. The first measures each weight that could be cast, and with that how large the new file
is; the second writes. Memory holds one tensor, and a few rows of it encoded.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .errors import InvalidInput, allowed_values, require
from .model_loading import find_shards
from .options.precision import Precision
from .planner.form_choice import explain_unmatched, limit_of, sort_weights
from .units import MIB, format_bytes
from .weights.component import Component, TensorSpec, component_from_files
from .weights.file_layouts import FILE_FORMS, FileTensor, describe_quantized, file_tensors, in_base64, layout_metadata
from .weights.file_reader import OpenFiles, WeightsFile, bytes_of, torch_dtype
from .weights.file_writer import FileWriter, refuse_existing
from .weights.form_errors import measure_error
from .weights.form_numbers import FormNumbers
from .weights.known_forms import FORMS, encoded_form
from .weights.safetensors_header import TensorHeader, WeightsHeader, read_header
from .weights.storage_form import EncodedForm

__all__ = [
    "KEPT_OF",
    "QuantizedFile",
    "QuantizedTensors",
    "find_layout",
    "quantize_file",
    "quantize_tensors",
]

# What a checkpoint's diffusion model is named by: the other parts of a checkpoint stay as they are.
DIFFUSION = "model.diffusion_model."
# How many elements are encoded at once, and how many bytes copied.
NUM_AT_ONCE = 4 * MIB
COPIED_BYTES = 16 * MIB
KEPT_OF = "kept_of"
CONFIG_NAMES = ("config", "config_base64")

Progress = Callable[[int, int], None]
"""Gets the bytes that are done, and how many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedFile:
    """What became of a file."""

    path: Path
    form: str
    source_bytes: int
    file_bytes: int
    num_weights: int
    """How many weights are in the form."""
    kept_bytes: dict[str, int]
    """By reason: bytes of weights that could have been in it and stayed as they were."""
    largest_error: float
    """The most that one of them loses, relative to its size."""
    notes: tuple[str, ...] = ()
    """What was asked for and had no effect."""

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "form": self.form,
            "source_bytes": self.source_bytes,
            "file_bytes": self.file_bytes,
            "num_weights": self.num_weights,
            "kept_bytes": self.kept_bytes,
            "largest_error": self.largest_error,
            "notes": [*self.notes],
        }

    def text(self) -> str:
        """Return it as a few lines."""
        lines = [
            f"{self.path}: {format_bytes(self.file_bytes)}, of {format_bytes(self.source_bytes)}; {self.num_weights} "
            f"weights in {self.form}, of which each loses {self.largest_error:.2g} at most"
        ]
        lines += [
            f"{format_bytes(num_bytes)} stay as they are: {reason}" for reason, num_bytes in self.kept_bytes.items()
        ]
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True, slots=True)
class EncodedWeight:
    """A weight that is to be encoded, and how."""

    spec: TensorSpec
    form: EncodedForm
    tensors: list[FileTensor]


def quantize_file(
    source: str | Path | Sequence[str | Path],
    target: str | Path,
    form: str,
    *,
    exclude: Iterable[str] = (),
    error_limit: float | None = None,
    replaces: bool = False,
    progress: Progress | None = None,
    kept_of: str = "",
) -> QuantizedFile:
    """Write a safetensors file with the weights of a model's blocks in a storage form.

    Of a checkpoint the diffusion model is encoded; its text encoder and VAE stay as they are. So does all that is not
    in blocks, that is no matrix, or that would lose too much. Private memory: the largest tensor, and 100 MiB.

    Args:
        source: a safetensors file, one of the shards of a model, which stands for all, or a list of files.
        form: ``fp8-scaled`` or ``int8``, which ComfyUI's own loaders read; ``qint8``, ``qint4`` or ``qfloat8``, in
            optimum-quanto's tensors, with mmgp's map of the layers.
        exclude: regular expressions; weights in whose names they are found stay as they are.
        error_limit: what a weight may lose, relative to its size; by default the form's own limit.
        replaces: whether a file that is there already is replaced.
        progress: called with bytes done and bytes in all; what it raises leaves no new file.
        kept_of: for the metadata, of which content the file is kept; only `load_quantized` says so.

    Raises:
        InvalidInput: a file is missing, damaged, changed meanwhile or quantized already, no weight can be encoded, a
            weight holds NaN, or the target exists.
        OSError: the system cannot write, as where a disk is full. There is no new file then.
    """
    numbers = find_layout(form)
    paths = find_shards(source)
    require(target, (str, Path), what="target", allowed="the path of a file")
    target = Path(target)
    if target.exists() and any(path.exists() and target.samefile(path) for path in paths):
        raise InvalidInput(f"{target}: is the file that is read; name another one")
    target = Path(os.path.realpath(target))  # of a link, the file that it names
    refuse_existing(target, replaces)
    headers = [read_header(path) for path in paths]
    quantized = describe_quantized(tensor.name for header in headers for tensor in header.tensors)
    if quantized:
        raise InvalidInput(f"{headers[0].path}: {quantized}; quantize the file from which it was made")
    seen: set[str] = set()
    for header in headers:
        twice = seen & {tensor.name for tensor in header.tensors}
        if twice:
            raise InvalidInput(f"{header.path}: has {min(twice)!r}, as another of the files does")
        seen |= {tensor.name for tensor in header.tensors}
    if isinstance(exclude, str):
        raise InvalidInput(f"exclude {exclude!r}; allowed: a list of them, such as ['norm']")
    precision = Precision(numbers.name, exclude=tuple(exclude), error_limit=error_limit)
    component = described(paths, headers)
    job = Job(headers, component, precision, numbers, progress)
    config = find_config(paths, headers)
    with OpenFiles() as opened:
        job.measure(opened)
        if not job.encoded:
            raise InvalidInput(f"{headers[0].path}: no weight of its blocks can be in {form}: {job.why_none()}")
        tensors, metadata = job.layout(config, kept_of)
        with FileWriter(target, tensors, metadata, replaces=replaces) as writer:
            job.write(writer, opened)
    return QuantizedFile(
        path=target,
        form=numbers.name,
        source_bytes=sum(header.version.file_bytes for header in headers),
        file_bytes=writer.file_bytes,
        num_weights=len(job.encoded),
        kept_bytes=dict(job.kept.most_common()),
        largest_error=job.largest_error,
        notes=tuple(explain_unmatched(component, precision)),
    )


def find_layout(form: str) -> FormNumbers:
    """Return the form of a name, with a hyphen or a space. Raises `InvalidInput`."""
    require(form, str, what="form", allowed="text")
    name = FILE_FORMS.get("-".join(form.lower().split()))
    if name is None:
        raise InvalidInput(f"form {form!r} is none in which files are written; {allowed_values(form, FILE_FORMS)}")
    return FORMS[name][0]


def described(paths: Sequence[Path], headers: Sequence[WeightsHeader]) -> Component:
    """Return the component whose weights are encoded; layouts of files have room for matrices alone."""
    names = [tensor.name for header in headers for tensor in header.tensors]
    begins = (DIFFUSION,) if any(name.startswith(DIFFUSION) for name in names) else ("",)
    component = component_from_files(paths, begins=begins)
    blocks = tuple(
        replace(block, tensors=tuple(spec for spec in block.tensors if len(spec.shape) == 2))
        for block in component.blocks
    )
    return replace(component, blocks=blocks, errors=frozenset())


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The tensors of a file, with weights of its blocks in a storage form, as a file would have them."""

    tensors: dict[str, torch.Tensor]
    form: str
    num_weights: int
    before_bytes: int
    after_bytes: int

    def text(self) -> str:
        sizes = f"{format_bytes(self.before_bytes)} -> {format_bytes(self.after_bytes)}"
        return f"{self.num_weights} weights in {self.form}, in ComfyUI's own tensors: {sizes}"


def quantize_tensors(path: str | Path, tensors: Mapping[str, torch.Tensor], precision: Precision) -> QuantizedTensors:
    """Return the tensors of a file with those weights in a form that `quantize_file` would write in it.

    Nothing is changed where the file is quantized already. Takes memory for the codes, and some 100 MiB.

    Args:
        tensors: all of the file's by name, in RAM or in a mapping of the file.

    Raises:
        InvalidInput: as `quantize_file`.
    """
    header, numbers = read_header(path), find_layout(precision.name)
    made = dict(tensors)
    num_weights = before_bytes = after_bytes = 0
    if not describe_quantized(tensor.name for tensor in header.tensors):
        kind, limit = encoded_form(numbers), limit_of(precision, numbers)
        for spec, reason in sort_weights(described([header.path], [header]), precision, numbers):
            weight = made.get(spec.name)
            if reason or weight is None or tuple(weight.shape) != spec.shape or str(weight.dtype) != wide_name(spec):
                continue
            form = kind.measure(weight, name=spec.name)
            if not measure_error(kind, weight, name=spec.name) <= limit:
                continue
            own = tensors_of(form, weight, file_tensors(numbers, spec))
            del made[spec.name]
            made |= own
            num_weights += 1
            before_bytes += spec.weight_bytes
            after_bytes += sum(tensor.nbytes for tensor in own.values())
    return QuantizedTensors(made, numbers.name, num_weights, before_bytes, after_bytes)


def wide_name(spec: TensorSpec) -> str:
    """Return the dtype of a weight as torch writes it."""
    return str(torch_dtype(spec.dtype))


def tensors_of(form: EncodedForm, weight: torch.Tensor, entries: Sequence[FileTensor]) -> dict[str, torch.Tensor]:
    """Return what a file has of a weight as tensors."""
    made = {entry.name: torch.empty(entry.shape, dtype=torch_dtype(entry.dtype)) for entry in entries}
    by_leaf = {entry.leaf: made[entry.name].view(-1) for entry in entries if entry.leaf is not None}
    for number, begin, part in form.encoded_parts(weight.detach(), NUM_AT_ONCE):
        by_leaf[number][begin : begin + part.numel()] = part.reshape(-1)
    for entry in entries:
        if entry.leaf is None:
            content = entry.content or scale_bytes(form)
            made[entry.name].view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return made


class Job:
    """One file on its way into another."""

    def __init__(
        self,
        headers: Sequence[WeightsHeader],
        component: Component,
        precision: Precision,
        numbers: FormNumbers,
        progress: Progress | None,
    ) -> None:
        self.headers = headers
        self.numbers = numbers
        self.limit = limit_of(precision, numbers)
        self.files = {tensor.name: (WeightsFile(header), tensor) for header in headers for tensor in header.tensors}
        self.candidates: list[TensorSpec] = []
        self.kept: Counter[str] = Counter()
        for spec, reason in sort_weights(component, precision, numbers):
            if reason:
                self.kept[reason] += spec.weight_bytes
            else:
                self.candidates.append(spec)
        self.encoded: dict[str, EncodedWeight] = {}
        self.largest_error = 0.0
        largest = max((tensor.weight_bytes for _, tensor in self.files.values()), default=0)
        self.room = torch.empty(largest, dtype=torch.uint8)
        self.tell = progress or (lambda done, total: None)
        self.num_done = 0
        self.total_bytes = sum(spec.weight_bytes for spec in self.candidates)
        self.total_bytes += sum(tensor.weight_bytes for _, tensor in self.files.values())

    def read(self, name: str, opened: OpenFiles) -> torch.Tensor:
        """Return a tensor of the source, in memory that the next one takes."""
        file, tensor = self.files[name]
        dtype = torch_dtype(tensor.dtype)
        assert dtype is not None
        weight = self.room[: tensor.weight_bytes].view(dtype).view(tensor.shape)
        file.read_into([(name, weight)], files=opened)
        return weight

    def done(self, num_bytes: int) -> None:
        self.num_done += num_bytes
        self.tell(self.num_done, self.total_bytes)

    def measure(self, opened: OpenFiles) -> None:
        """Find the form of each weight, and leave out those that would lose too much."""
        kind = encoded_form(self.numbers)
        for spec in self.candidates:
            weight = self.read(spec.name, opened)
            form = kind.measure(weight, name=spec.name)
            error = measure_error(kind, weight, name=spec.name)
            if error <= self.limit:
                self.encoded[spec.name] = EncodedWeight(spec, form, file_tensors(self.numbers, spec))
                self.largest_error = max(self.largest_error, error)
            else:
                self.kept[f"would lose more than {self.limit:.2g}"] += spec.weight_bytes
            self.done(spec.weight_bytes)

    def why_none(self) -> str:
        """Return what keeps every weight as it is."""
        if self.kept:
            return ", ".join(f"{reason} {format_bytes(num_bytes)}" for reason, num_bytes in self.kept.most_common())
        return "it has no blocks with matrices of 16 or 32 bits"

    def layout(
        self, config: Mapping[str, str], kept_of: str
    ) -> tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, str]]:
        """Return the tensors of the new file, and its metadata."""
        tensors: list[tuple[str, str, tuple[int, ...]]] = []
        for name, (_, tensor) in self.files.items():
            if name in self.encoded:
                tensors += [(own.name, own.dtype, own.shape) for own in self.encoded[name].tensors]
            else:
                tensors.append((name, tensor.dtype, tensor.shape))
        seen = Counter(name for name, _, _ in tensors)
        twice = next((name for name, count in seen.items() if count > 1), None)
        if twice is not None:
            raise InvalidInput(f"{self.headers[0].path}: has a tensor {twice!r} already, which the form needs")
        return tensors, self.metadata(config, kept_of)

    def metadata(self, config: Mapping[str, str], kept_of: str) -> dict[str, str]:
        """Return the source's metadata, the form of each weight, and the config that lies beside the source."""
        metadata: dict[str, str] = {"format": "pt"}
        for header in self.headers:
            metadata |= header.metadata
        specs = [weight.spec for weight in self.encoded.values()]
        told: dict[str, Any] = {"form": self.numbers.name, "weights": {spec.name: spec.dtype for spec in specs}}
        told |= {KEPT_OF: kept_of} if kept_of else {}
        return metadata | dict(config) | layout_metadata(self.numbers, specs) | {"highwater": json.dumps(told)}

    def write(self, writer: FileWriter, opened: OpenFiles) -> None:
        """Write every tensor, in the order of the source."""
        for name, (file, tensor) in self.files.items():
            if name in self.encoded:
                self.write_encoded(self.encoded[name], self.read(name, opened), writer)
                self.done(tensor.weight_bytes)
            else:
                self.copy(file, tensor, writer, opened)

    def write_encoded(self, weight: EncodedWeight, values: torch.Tensor, writer: FileWriter) -> None:
        by_leaf = {own.leaf: own for own in weight.tensors if own.leaf is not None}
        for number, begin, part in weight.form.encoded_parts(values, NUM_AT_ONCE):
            writer.write(by_leaf[number].name, bytes_of(part.contiguous()), begin * part.element_size())
        for own in weight.tensors:
            if own.leaf is None:
                writer.write(own.name, own.content or scale_bytes(weight.form))

    def copy(self, file: WeightsFile, tensor: TensorHeader, writer: FileWriter, opened: OpenFiles) -> None:
        """Copy a tensor that stays as it is, piece by piece."""
        for begin in range(0, tensor.weight_bytes, COPIED_BYTES):
            piece = self.room[: min(COPIED_BYTES, tensor.weight_bytes - begin)]
            file.read_into([(tensor.name, piece, begin)], files=opened)
            writer.write(tensor.name, bytes_of(piece), begin)
            self.done(piece.numel())


def scale_bytes(form: EncodedForm) -> bytes:
    """Return the one scale of a weight."""
    return bytes(bytes_of(torch.tensor([form.factor], dtype=torch.float32)))


def find_config(paths: Sequence[Path], headers: Sequence[WeightsHeader]) -> dict[str, str]:
    """Return the config that lies beside a model alone in its folder, as metadata; empty where its file has one."""
    folder = paths[0].parent
    if any(name in header.metadata for header in headers for name in CONFIG_NAMES):
        return {}
    others = [path for path in folder.glob("*.safetensors") if not any(path.samefile(own) for own in paths)]
    config = folder / "config.json"
    return {} if others or not config.is_file() else {"config_base64": in_base64(read_json(config))}


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{path}: is not valid JSON ({error}); mend it, or move it away from the file") from None
