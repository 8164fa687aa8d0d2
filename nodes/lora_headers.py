"""What a LoRA's file changes of a component, from the headers of both: whose weights, and by sums of which ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ..memory.weights.component import Component, TensorSpec
from ..memory.weights.safetensors_header import read_header
from .workflow_reading.description import TEXT, LoadedModel

__all__ = ["LoraChanges", "LoraReader", "changes_by_names", "joined_ranks", "weights_by_path"]

# The ends of the names of the two factors, as the programs that train LoRAs write them: (rows, rank), (rank, columns).
FACTORS = (
    (".lora_up.weight", ".lora_down.weight"),
    (".lora_B.default.weight", ".lora_A.default.weight"),
    (".lora_B.weight", ".lora_A.weight"),
    (".lora.up.weight", ".lora.down.weight"),
    (".lora_linear_layer.up.weight", ".lora_linear_layer.down.weight"),
    ("_lora.up.weight", "_lora.down.weight"),
    (".lora_B", ".lora_A"),
)
# With one of these a layer is no plain sum: DoRA, Tucker's middle matrix, another shape, LoHa, LoKr, OFT, differences.
OTHERS = (
    ".dora_scale", ".lora_mid.weight", ".reshape_weight", ".diff", ".diff_b", ".w_norm", ".b_norm", ".set_weight",
    ".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b", ".hada_t1", ".hada_t2", ".lokr_w1", ".lokr_w2",
    ".lokr_w1_a", ".lokr_w1_b", ".lokr_w2_a", ".lokr_w2_b", ".lokr_t2", ".oft_blocks", ".a1.weight", ".a2.weight",
    ".b1.weight", ".b2.weight",
)  # fmt: skip
# What comes before a layer's path, in LoRAs and in the files of models.
OF_TEXT = ("lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "text_encoders.", "text_encoder.", "text_encoder_2.")
OF_MODELS = (
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
    "base_model.model.",
    "diffusion_model.",
    "transformer.",
    "unet.",
)
OF_FILES = (
    "model.diffusion_model.", "diffusion_model.", "cond_stage_model.transformer.",
    "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model.", "text_encoders.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraChanges:
    """What one LoRA changes of a component."""

    ranks: Mapping[str, int] = field(default_factory=dict)
    """By the names of weights, the ranks of the plain sums that are added to them."""
    others: frozenset[str] = frozenset()
    """The names of the weights that it changes in another way, too."""
    num_layers: int = 0
    """How many layers of the file are meant for such a component."""
    num_unknown: int = 0
    """How many of these are none of the component's, as far as their names tell."""
    file_bytes: int = 0
    remedy: str = ""
    """What would tell more of the unknown ones, for the end of a line."""


LoraReader = Callable[[Component, LoadedModel, Sequence[Path], Path], LoraChanges]
"""Returns what a LoRA's file, the last argument, changes of a component of a loaded model, whose files come before.
Raises `InvalidInput` for a file that cannot be read."""


def changes_by_names(component: Component, model: LoadedModel, _paths: Sequence[Path], lora: Path) -> LoraChanges:
    """Return what a LoRA changes whose layers are called as the component's, however its program writes that.

    ComfyUI knows more names: those of the same model in other libraries.

    Raises:
        InvalidInput: as `read_header`.
    """
    header = read_header(lora)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    is_text = model.kind == TEXT
    layers: dict[str, int | None] = {}
    for name in shapes:
        for up, down in FACTORS:
            if name.endswith(up):
                layer = name.removesuffix(up)
                other = shapes.get(layer + down)
                is_pair = other is not None and len(shapes[name]) == len(other) >= 2 and shapes[name][1] == other[0]
                layers.setdefault(layer, other[0] if is_pair and other is not None else None)
                break
    for name in shapes:
        end = next((end for end in OTHERS if name.endswith(end)), None)
        if end is not None:
            layers[name.removesuffix(end)] = None
    meant = {layer: rank for layer, rank in layers.items() if layer.startswith(OF_TEXT) is is_text}
    known = weights_by_path(component)
    by_path = {name: tensor for path, tensor in known.items() for name in (path, path.replace(".", "_"))}
    ranks: dict[str, int] = {}
    others: set[str] = set()
    num_unknown = 0
    for layer, rank in meant.items():
        path = without_prefix(layer, OF_TEXT if is_text else OF_MODELS)
        weight = by_path.get(path) or by_path.get(path.replace(".", "_"))
        if weight is None:
            num_unknown += 1
        elif rank is None or not fits(weight, layer, shapes):
            others.add(weight.name)
        else:
            ranks[weight.name] = ranks.get(weight.name, 0) + rank
    return LoraChanges(
        ranks=ranks,
        others=frozenset(others),
        num_layers=len(meant),
        num_unknown=num_unknown,
        file_bytes=header.weight_bytes,
        remedy="; in ComfyUI the node Plan knows more names",
    )


def fits(weight: TensorSpec, layer: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether two factors make a change of all of a weight."""
    for up, down in FACTORS:
        if layer + up in shapes:
            rows, columns = shapes[layer + up][0], prod(shapes[layer + down][1:])
            return (rows, columns) == (weight.shape[0], weight.num_elements // max(1, weight.shape[0]))
    return False


def weights_by_path(component: Component) -> dict[str, TensorSpec]:
    """Return the weights of a component's layers by the paths of these, without what files write before them."""
    found: dict[str, TensorSpec] = {}
    for block in (*component.blocks, component.non_block):
        for tensor in block.tensors:
            path = tensor.name.removesuffix(".weight")
            if path != tensor.name and tensor.shape:
                found.setdefault(without_prefix(path, OF_FILES), tensor)
    return found


def without_prefix(name: str, prefixes: Sequence[str]) -> str:
    """Return a name without all that stands before a path, such as ``base_model.model.diffusion_model.``"""
    while (begin := next((prefix for prefix in prefixes if name.startswith(prefix)), None)) is not None:
        name = name.removeprefix(begin)
    return name


def joined_ranks(changes: Sequence[LoraChanges]) -> dict[str, int]:
    """Return the ranks that several LoRAs have together, of the weights to which all that is done is to add sums."""
    ranks: dict[str, int] = {}
    for change in changes:
        for name, rank in change.ranks.items():
            ranks[name] = ranks.get(name, 0) + rank
    others = frozenset().union(*(change.others for change in changes)) if changes else frozenset()
    return {name: rank for name, rank in ranks.items() if name not in others}
