"""Components and their blocks in numbers, and how a file's header gives them without reading weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..options.placement import KINDS
from .blocks import find_blocks
from .known_errors import MeasuredFile, read_errors
from .safetensors_header import DTYPE_BITS, TensorHeader, read_header

__all__ = ["Block", "Component", "TensorSpec", "component_from_files", "guess_kind"]


# Files that are called t5xxl, umt5_xxl or ae: words too short to be looked for inside of others.
SHORT_NAMES = {"text": re.compile(r"(?<![a-z])u?m?t5"), "vae": re.compile(r"(?<![a-z])ae(?![a-z])")}


# What a module may hold beyond what a safetensors file may.
BITS = DTYPE_BITS | {"C128": 128}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One weight in numbers.

    ``encodable``: it belongs to a layer whose weight may rest encoded. ``kept_by``: the declaration that keeps it as
    stored nevertheless. ``leaves``: the bytes of each plain tensor inside a quantized weight; dtype and
    shape are then those of the weight that it represents.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    encodable: bool = False
    kept_by: str = ""
    leaves: tuple[int, ...] = ()
    layer_classes: tuple[str, ...] = ()
    """The names of its layer's class and of those that it derives from; none where only a file is known."""
    other_names: tuple[str, ...] = ()
    """The other names of a tied weight."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def weight_bytes(self) -> int:
        if self.leaves:
            return sum(self.leaves)
        return -(-self.num_elements * BITS[self.dtype] // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The smallest movable piece of a component; ``name`` is the module's path, empty for the non-block weights."""

    name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.weight_bytes for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """A loadable model part: its blocks in the order of definition, the non-block weights, and the buffers.

    Buffers are apart: they are few bytes, a forward may change them, and they never stream.
    """

    name: str
    kind: str
    blocks: tuple[Block, ...]
    non_block: Block
    buffers: tuple[TensorSpec, ...] = ()
    has_file: bool = False
    """Whether weights can be read from files as they are: all but those of ``lacking``."""
    can_map: bool = False
    """Whether what the files have can be used where it lies, in a mapping of them."""
    lacking: frozenset[str] = frozenset()
    """The names of the weights that no file has as they are, such as those that a library widened as it loaded them."""
    stored_as: frozenset[tuple[str, str]] = frozenset()
    """The weights that are cast as they are read, each with the dtype that its file has ([Note: casts])."""
    encoded_as: frozenset[tuple[str, str]] = frozenset()
    """The weights of blocks that a file has in a storage form already, each with its name."""
    stays_as_stored: bool = False
    """Whether what rests in its file is used as stored there only: a host reads single weights of it, or its module
    came with weights, which may not be the file's."""
    errors: frozenset[tuple[str, str, float]] = frozenset()
    """What weights were measured to lose in a storage form, relative to their size: weight, form, error."""
    is_in_layers: bool = False
    """Whether its blocks are single layers, whose weights its own code may read without calling them."""
    widens_whole: bool = False
    """Whether encoded weights stay widened from their first use to the end of a call, which takes room for them all."""
    shares: tuple[str, ...] = ()
    """How much of its module other components own, one line each for the plan."""
    from_header: bool = False
    """Whether only its file is known, and not what its class declares."""
    side_ranks: frozenset[tuple[str, int]] = frozenset()
    """The ranks of the low-rank sums that are to be added to weights where these rest encoded, such as a LoRA's, by the
    names of the weights."""

    @property
    def weight_bytes(self) -> int:
        return self.non_block.weight_bytes + sum(block.weight_bytes for block in self.blocks)

    def errors_in(self, form: str) -> dict[str, float]:
        """Return what its weights lose in a storage form, by name, as far as that was measured."""
        return {weight: error for weight, measured, error in self.errors if measured == form}

    def lacking_bytes(self, block: Block) -> int:
        """Return the bytes of a block's weights that no file has as they are."""
        return sum(tensor.weight_bytes for tensor in block.tensors if tensor.name in self.lacking)


def component_from_files(
    paths: Sequence[str | Path], *, name: str | None = None, kind: str | None = None, begins: tuple[str, ...] = ("",)
) -> Component:
    """Describe a safetensors file, or the shards of one model, from the headers alone.

    Args:
        begins: what the names of its weights begin with; others are not its.

    Raises:
        InvalidInput: as `read_header`.
    """
    headers = [read_header(path) for path in paths]
    name = name or headers[0].path.stem
    found = [tensor for header in headers for tensor in header.tensors if tensor.name.startswith(begins)]
    tensors = [spec_from_header(tensor) for tensor in found]
    component = group_tensors(name, kind or guess_kind(name), tensors, lambda path: True)
    errors = frozenset(
        (tensor, form, error)
        for header in headers
        for form, known in read_errors(
            MeasuredFile(path=header.path, version=header.version, tensors=header.tensors)
        ).items()
        for tensor, error in known.items()
    )
    return replace(component, errors=errors, has_file=True, can_map=all(map(is_aligned, found)), from_header=True)


def is_aligned(tensor: TensorHeader) -> bool:
    """Whether a tensor begins in its file where its dtype may lie in memory."""
    return tensor.begin % max(1, BITS[tensor.dtype] // 8) == 0


def spec_from_header(tensor: TensorHeader) -> TensorSpec:
    # A header knows no layer classes; matrices named "weight" are what encodable layers hold.
    encodable = len(tensor.shape) >= 2 and tensor.name.endswith(".weight")
    return TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, encodable=encodable)


def group_tensors(
    name: str,
    kind: str,
    tensors: Sequence[TensorSpec],
    callable_at: Callable[[str], bool],
    *,
    whole: Collection[str] = (),
    kept_out_of_blocks: Collection[str] = (),
    largest_bytes: int | None = None,
    cuts_whole: bool = False,
    pattern: str | None = None,
) -> Component:
    """Sort tensors into blocks and non-block weights (`find_blocks`)."""
    by_name = {tensor.name: tensor for tensor in tensors}
    movable = {tensor.name: tensor.weight_bytes for tensor in tensors if tensor.name not in kept_out_of_blocks}
    blocks = find_blocks(
        movable, callable_at, whole=whole, largest_bytes=largest_bytes, cuts_whole=cuts_whole, pattern=pattern
    )
    in_blocks = {name for names in blocks.values() for name in names}
    return Component(
        name=name,
        kind=kind,
        blocks=tuple(Block(name=path, tensors=tuple(by_name[n] for n in names)) for path, names in blocks.items()),
        non_block=Block(name="", tensors=tuple(tensor for tensor in tensors if tensor.name not in in_blocks)),
    )


def guess_kind(name: str) -> str:
    """Return the kind that a component's name suggests; a name that suggests none is a diffusion model."""
    lowered = name.lower().replace("-", "_")
    for kind in ("vision", "control", "vae", "text", "diffusion"):
        if any(alias in lowered for alias in KINDS[kind] if len(alias) > 2):
            return kind
        if kind in SHORT_NAMES and SHORT_NAMES[kind].search(lowered):
            return kind
    return "diffusion"
