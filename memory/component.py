"""Components and their blocks in numbers, from a file's header or from a module, without moving either.

Blocks are found by structure: the outermost numbered parts of the tensor names (``layers.0``, ``layers.1``)
are the repeated layers of every transformer and UNet we know. What belongs to no block (embedders, norms and
output layers) is the component's *rest* and stays where it computes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from .placement import KINDS
from .weights import DTYPE_BITS, TensorHeader, read_header

__all__ = ["Block", "Component", "TensorSpec", "component_from_files", "component_from_module", "guess_kind"]

# A stack smaller than this part of its component is not worth streaming: it joins the rest.
SMALLEST_STACK_SHARE = 0.05
CASTABLE_CLASSES = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding)
# Early, middle, late: UNets and VAEs (down, mid, up; encoder, decoder) and the two stacks of Flux and its like.
STAGES = (
    re.compile(r"(^|\.)(encoder|down_?blocks?|down|input_blocks|double_?\w*|doubles|transformer_blocks)(\.|$)"),
    re.compile(r"(^|\.)(mid_?\w*|middle_?\w*)(\.|$)"),
    re.compile(r"(^|\.)(decoder|up_?blocks?|up|output_blocks|single_\w*|singles)(\.|$)"),
)
SAFETENSORS_NAMES = {
    "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float64": "F64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.int8": "I8", "torch.uint8": "U8",
    "torch.int16": "I16", "torch.int32": "I32", "torch.int64": "I64", "torch.bool": "BOOL",
    "torch.complex64": "C64", "torch.uint16": "U16", "torch.uint32": "U32", "torch.uint64": "U64",
    "torch.complex128": "C128",
}  # fmt: skip


# What a module may hold beyond what a safetensors file may.
BITS = DTYPE_BITS | {"C128": 128}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One weight in numbers. ``castable``: it belongs to a layer whose weight may rest in fewer bits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    castable: bool = False

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def weight_bytes(self) -> int:
        return -(-self.num_elements * BITS[self.dtype] // 8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The smallest movable piece of a component; ``name`` is the module's path, empty for the rest."""

    name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(tensor.weight_bytes for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """A loadable model part: its blocks in the order of definition, the rest, and the buffers.

    Buffers are apart: they are few bytes, a forward may change them, and they never stream.
    """

    name: str
    kind: str
    blocks: tuple[Block, ...]
    rest: Block
    buffers: tuple[TensorSpec, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return self.rest.weight_bytes + sum(block.weight_bytes for block in self.blocks)


def component_from_files(paths: Sequence[str | Path], *, name: str | None = None, kind: str | None = None) -> Component:
    """Describe a safetensors file, or the shards of one model, from the headers alone.

    Raises:
        InvalidInput: as `read_header`.
    """
    headers = [read_header(path) for path in paths]
    name = name or headers[0].path.stem
    tensors = [spec_from_header(tensor) for header in headers for tensor in header.tensors]
    return group_tensors(name, kind or guess_kind(name), tensors, lambda path: True)


def spec_from_header(tensor: TensorHeader) -> TensorSpec:
    # A header knows no layer classes; matrices named "weight" are what the castable layers hold.
    castable = len(tensor.shape) >= 2 and tensor.name.endswith(".weight")
    return TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, castable=castable)


def component_from_module(module: nn.Module, *, name: str, kind: str | None = None) -> Component:
    """Describe a module's parameters and buffers; weights tied across blocks count once, in the rest."""
    names: dict[int, list[str]] = defaultdict(list)
    for tensor_name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(tensor_name)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    modules = dict(module.named_modules())
    # transformers and diffusers classes declare the parts that lose too much in few bits.
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    specs = []
    for aliases in names.values():
        parameter = parameters[aliases[0]]
        owner = modules[aliases[0].rpartition(".")[0]]
        specs.append(
            TensorSpec(
                name=aliases[0],
                dtype=SAFETENSORS_NAMES[str(parameter.dtype)],
                shape=tuple(parameter.shape),
                castable=(
                    len(aliases) == 1
                    and is_castable(owner, aliases[0].rpartition(".")[2])
                    and not any(part in kept for part in aliases[0].split("."))
                ),
            )
        )
    tied_apart = {aliases[0] for aliases in names.values() if len({outermost_number(alias) for alias in aliases}) > 1}
    component = group_tensors(
        name,
        kind or guess_kind(name),
        specs,
        lambda path: is_callable(modules.get(path)),
        kept_in_rest=tied_apart,
    )
    buffers = tuple(
        TensorSpec(name=name, dtype=SAFETENSORS_NAMES[str(buffer.dtype)], shape=tuple(buffer.shape))
        for name, buffer in module.named_buffers()
    )
    return replace(component, buffers=buffers)


def is_castable(owner: nn.Module, parameter_name: str) -> bool:
    return parameter_name == "weight" and isinstance(owner, CASTABLE_CLASSES)


def is_callable(module: nn.Module | None) -> bool:
    """Whether calling the module is what runs its weights: lists and dicts of modules have no forward to hook.

    Subclasses of ``Sequential`` are passed by, too: ComfyUI's UNet calls the children of its own from outside.
    """
    if isinstance(module, nn.Sequential) and type(module) is not nn.Sequential:
        return False
    return module is not None and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList)


def outermost_number(name: str, callable_at: Callable[[str], bool] = lambda path: True) -> str | None:
    """Return the path to the outermost numbered part that can be called: ``layers.3`` of ``layers.3.q.bias``."""
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        path = ".".join(parts[: index + 1])
        if part.isdigit() and callable_at(path):
            return path
    return None


def group_tensors(
    name: str,
    kind: str,
    tensors: Sequence[TensorSpec],
    callable_at: Callable[[str], bool],
    *,
    kept_in_rest: Collection[str] = (),
) -> Component:
    """Sort tensors into blocks and rest; blocks in the order in which such models run them.

    A file has no order of definition and a UNet defines its middle last, so stacks go by what their names say
    (down before mid before up), then by appearance; within a stack the numbers decide.
    """
    stacks: dict[str, dict[str, list[TensorSpec]]] = {}
    rest: list[TensorSpec] = []
    for tensor in tensors:
        path = None if tensor.name in kept_in_rest else outermost_number(tensor.name, callable_at)
        if path is None:
            rest.append(tensor)
        else:
            stacks.setdefault(stack_of(path), {}).setdefault(path, []).append(tensor)
    total_bytes = sum(tensor.weight_bytes for tensor in tensors)
    blocks: list[Block] = []
    for members in (stacks[stack] for stack in sorted(stacks, key=stage_of)):
        stack_bytes = sum(tensor.weight_bytes for block in members.values() for tensor in block)
        if len(members) < 2 or stack_bytes < SMALLEST_STACK_SHARE * total_bytes:
            rest += [tensor for block in members.values() for tensor in block]
            continue
        blocks += [Block(name=path, tensors=tuple(members[path])) for path in sorted(members, key=numbers_of)]
    return Component(name=name, kind=kind, blocks=tuple(blocks), rest=Block(name="", tensors=tuple(rest)))


def stack_of(path: str) -> str:
    """Return what stands before the first number of a block's path: ``input_blocks`` of ``input_blocks.4.0``."""
    parts = path.split(".")
    return ".".join(parts[: next(index for index, part in enumerate(parts) if part.isdigit())])


def numbers_of(path: str) -> list[int]:
    return [int(part) for part in path.split(".") if part.isdigit()]


def stage_of(stack: str) -> int:
    """Return 0, 1 or 2 for a stack that runs early, in the middle or late, by the words in its name."""
    for stage, words in enumerate(STAGES):
        if words.search(stack):
            return stage
    return 1


def guess_kind(name: str) -> str:
    """Return the kind that a component's name suggests; a name that suggests none is a diffusion model."""
    lowered = name.lower().replace("-", "_")
    for kind in ("vision", "control", "vae", "text", "diffusion"):
        if any(alias in lowered for alias in KINDS[kind] if len(alias) > 2):
            return kind
    return "diffusion"
