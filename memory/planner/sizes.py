"""Bytes of a component in each of its forms: fixed beside the blocks, at rest, and widened.

The plan adds these numbers and the residency engine allocates by the same functions, so the two cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..units import MIB, PAGE_BYTES, align_up, format_bytes, slab_offsets
from ..weights.blocks import LARGEST_REST_SHARE
from ..weights.component import Block, Component, TensorSpec
from ..weights.form_numbers import AS_THEY_CAME, Forms

__all__ = [
    "NUM_BOUNCE_BUFFERS",
    "all_resident_bytes",
    "block_bytes",
    "bounce_buffer_bytes",
    "explain_rest",
    "fixed_tensors",
    "least_bytes",
    "resting_bytes",
    "wide_bytes",
]

# Two per device: the file is read into one while the other is copied.
NUM_BOUNCE_BUFFERS = 2
BOUNCE_BUFFER_BYTES = 64 * MIB
NUMBER = re.compile(r"\d+")
# How many layers of the rest are named, and the least share of the component that a named one has.
NUM_NAMED, NAMED_SHARE = 3, 0.005


def fixed_tensors(component: Component, blocks: Sequence[int], *, first: bool) -> list[TensorSpec]:
    """Return what stays on a device beside its blocks: the rest on the first device, and its blocks' buffers."""
    own = {component.blocks[number].name for number in blocks}
    foreign = {block.name for block in component.blocks} - own

    def lives_in(buffer: TensorSpec, names: set[str]) -> bool:
        return any(buffer.name.startswith(f"{name}.") for name in names)

    buffers = [
        buffer for buffer in component.buffers if lives_in(buffer, own) or (first and not lives_in(buffer, foreign))
    ]
    return [*(component.non_block.tensors if first else ()), *buffers]


def slab_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of a slab that holds tensors of these sizes, each aligned."""
    return slab_offsets(sizes)[1]


def leaf_bytes(tensor: TensorSpec, forms: Forms) -> tuple[int, ...]:
    """Return the bytes that a weight takes at rest, leaf by leaf."""
    numbers = forms.get(tensor.name)
    return numbers.leaf_bytes(tensor) if numbers is not None else tensor.leaves or (tensor.weight_bytes,)


def resting_bytes(tensors: Iterable[TensorSpec], forms: Forms = AS_THEY_CAME) -> int:
    """Return the bytes of a slab that holds tensors as they rest."""
    return slab_bytes(num_bytes for tensor in tensors for num_bytes in leaf_bytes(tensor, forms))


def block_bytes(block: Block, forms: Forms) -> int:
    """Return the bytes of the block's slab at rest."""
    return resting_bytes(block.tensors, forms)


def wide_bytes(block: Block, forms: Forms) -> int:
    """Return the bytes of the block's encoded weights as they compute."""
    return slab_bytes(tensor.weight_bytes for tensor in block.tensors if tensor.name in forms)


def bounce_buffer_bytes(component: Component, blocks: Sequence[int], *, first: bool) -> int:
    """Return how wide each buffer is through which a file reaches the device of these blocks: whole pages.

    As wide as the largest of what moves at once, but no wider than `BOUNCE_BUFFER_BYTES`: more passes in windows.
    """
    sizes = [block_bytes(component.blocks[number], AS_THEY_CAME) for number in blocks]
    largest = max([*sizes, resting_bytes(fixed_tensors(component, blocks, first=first))])
    return min(BOUNCE_BUFFER_BYTES, align_up(largest, PAGE_BYTES))


def least_bytes(component: Component, blocks: Sequence[int], forms: Forms, *, first: bool) -> int:
    """Return the fewest device bytes with which these blocks can compute: the largest, what is fixed, the scratch."""
    parts = [component.blocks[number] for number in blocks]
    largest = max((block_bytes(block, forms) for block in parts), default=0)
    scratch = max((wide_bytes(block, forms) for block in parts), default=0)
    return resting_bytes(fixed_tensors(component, blocks, first=first)) + largest + scratch


def all_resident_bytes(component: Component, forms: Forms) -> int:
    """Return the bytes of the whole component at rest: the rest, all buffers and every block."""
    everything = fixed_tensors(component, range(len(component.blocks)), first=True)
    return resting_bytes(everything) + sum(block_bytes(block, forms) for block in component.blocks)


def explain_rest(component: Component) -> str:
    """Return why more than a twentieth of a component never streams: the largest of what is in no block; else empty."""
    total_bytes, rest_bytes = component.weight_bytes, component.non_block.weight_bytes
    if rest_bytes <= LARGEST_REST_SHARE * total_bytes:
        return ""
    layers: dict[str, int] = {}
    for tensor in component.non_block.tensors:
        layer = NUMBER.sub("*", tensor.name.rpartition(".")[0] or tensor.name)
        layers[layer] = layers.get(layer, 0) + tensor.weight_bytes
    named = sorted(
        (layer for layer in layers if layers[layer] >= NAMED_SHARE * total_bytes), key=lambda at: -layers[at]
    )
    sizes = [f"{layer} {format_bytes(layers[layer])}" for layer in named[:NUM_NAMED]]
    if len(layers) > len(sizes):
        sizes.append("smaller layers")
    share = f"{rest_bytes / total_bytes:.0%} of it, {format_bytes(rest_bytes)}"
    return f"{share}, is in no block and never streams: {', '.join(sizes)}"
