"""Bytes of a component in each of its forms: fixed (non-block weights and buffers), at rest, and decoded.

Plans add these numbers, and the engine allocates by the same functions, so the two cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from ..units import MIB, PAGE_BYTES, align_up, format_bytes, slab_offsets
from ..weights.blocks import LARGEST_NON_BLOCK_SHARE
from ..weights.component import Block, Component, TensorSpec
from ..weights.form_numbers import AS_THEY_CAME, Forms
from ..weights.known_forms import forms_in_file

__all__ = [
    "NUM_BOUNCE_BUFFERS",
    "Sizes",
    "all_resident_bytes",
    "block_bytes",
    "bounce_buffer_bytes",
    "explain_non_block",
    "fixed_tensors",
    "least_bytes",
    "resting_bytes",
    "side_factors",
    "wide_bytes",
]

# Two per device: the file is read into one while the other is copied.
NUM_BOUNCE_BUFFERS = 2
# Both together, and what else a load takes, are at most 64 MiB: so much RAM may a model cost that fits its device.
BOUNCE_BUFFER_BYTES = 24 * MIB
NUMBER = re.compile(r"\d+")
# How many layers of the non-block weights are named, and the least share of the component that a named one has.
NUM_NAMED, NAMED_SHARE = 3, 0.005


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


class Sizes:
    """The bytes of one component in the forms in which its weights rest; each sum is computed once, when needed.

    Args:
        decodes: how many micro-batches decode weights at the same time, each into scratch of its own.
    """

    def __init__(self, component: Component, forms: Forms, *, decodes: int = 1) -> None:
        self.alone = component
        """The component without what is added to its encoded weights."""
        self.component = with_side_factors(component, forms)
        self.forms = forms
        self.decodes = decodes
        self.known_fixed: dict[tuple[Sequence[int], bool], int] = {}

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Of each block, the bytes of its slab at rest."""
        return tuple(block_bytes(block, self.forms) for block in self.component.blocks)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Of each block, the bytes of its encoded weights as they compute."""
        if not self.forms:
            return (0,) * len(self.component.blocks)
        return tuple(wide_bytes(block, self.forms) for block in self.component.blocks)

    @cached_property
    def in_file(self) -> tuple[int, ...]:
        """Of each block, the bytes of a slab with what its file has of it: what a load reads."""
        lacking, stored = self.component.lacking, dict(self.component.stored_as)
        if not lacking and not stored:
            return self.as_they_came.blocks
        encoded = forms_in_file(self.component)
        return tuple(
            slab_bytes(
                num_bytes
                for each in block.tensors
                if each.name not in lacking
                for num_bytes in leaf_bytes(replace(each, dtype=stored.get(each.name, each.dtype)), encoded)
            )
            for block in self.component.blocks
        )

    @cached_property
    def as_they_came(self) -> Sizes:
        """The sizes of the same component with all weights as they came."""
        stored = forms_in_file(self.component)
        return self if len(self.forms) == len(stored) else Sizes(self.alone, stored)

    @cached_property
    def homes(self) -> tuple[frozenset[int], ...]:
        """Of each buffer, the blocks that contain it: none or one, or more where blocks are nested."""
        numbers = {block.name: number for number, block in enumerate(self.component.blocks)}
        return tuple(
            frozenset(numbers[path] for path in paths_above(buffer.name) if path in numbers)
            for buffer in self.component.buffers
        )

    def fixed_tensors(self, blocks: Collection[int], *, first: bool) -> list[TensorSpec]:
        """Return what stays on a device: its blocks' buffers; on the first one non-block weights and buffers, too."""
        own = frozenset(blocks)
        buffers = [
            buffer
            for buffer, homes in zip(self.component.buffers, self.homes, strict=True)
            if not homes.isdisjoint(own) or (first and not homes)
        ]
        return [*(self.component.non_block.tensors if first else ()), *buffers]

    def fixed_bytes(self, blocks: Sequence[int], *, first: bool) -> int:
        """Return the bytes of the slab that holds `fixed_tensors`."""
        if (blocks, first) not in self.known_fixed:
            self.known_fixed[blocks, first] = resting_bytes(self.fixed_tensors(blocks, first=first))
        return self.known_fixed[blocks, first]

    @cached_property
    def buffer_bytes(self) -> tuple[int, ...]:
        """Of each block, the bytes of a slab of its buffers alone."""
        lists: list[list[TensorSpec]] = [[] for _ in self.component.blocks]
        for buffer, homes in zip(self.component.buffers, self.homes, strict=True):
            for number in homes:
                lists[number].append(buffer)
        return tuple(map(resting_bytes, lists))

    def bounce_buffer_bytes(self, blocks: Sequence[int], *, first: bool) -> int:
        """Return the bytes of each buffer through which a file reaches the device of these blocks: whole pages.

        As large as the largest block, but at most `BOUNCE_BUFFER_BYTES`: larger blocks pass in pieces.
        """
        stored = self.as_they_came
        largest = max(map(stored.blocks.__getitem__, blocks), default=0)
        largest = max(largest, stored.fixed_bytes(blocks, first=first))
        return min(BOUNCE_BUFFER_BYTES, align_up(largest, PAGE_BYTES))

    def scratch_bytes(self, blocks: Iterable[int]) -> int:
        """Return the bytes in which encoded weights of these blocks are widened: one block's at a time, or all.

        One block's for each micro-batch; those that stay widened are in the same place for all of them.
        """
        widths = [self.widths[number] for number in blocks]
        return sum(widths) if self.component.widens_whole else self.decodes * max(widths, default=0)

    def decoding(self, decodes: int) -> Sizes:
        """Return the sizes of the same component with scratch for so many micro-batches."""
        return self if decodes == self.decodes else Sizes(self.alone, self.forms, decodes=decodes)

    def least_bytes(self, blocks: Sequence[int], *, first: bool) -> int:
        """Return the fewest device bytes with which blocks can compute: the largest, what is fixed, the scratch."""
        largest = max((self.blocks[number] for number in blocks), default=0)
        scratch = self.scratch_bytes(blocks)
        return self.fixed_bytes(blocks, first=first) + largest + scratch

    @cached_property
    def all_resident_bytes(self) -> int:
        """The bytes of the whole component at rest: non-block weights, buffers and blocks."""
        return self.fixed_bytes(range(len(self.component.blocks)), first=True) + sum(self.blocks)


def with_side_factors(component: Component, forms: Forms) -> Component:
    """Return a component with the factors that are added to its encoded weights, as weights beside these.

    No file has them in the dtype in which they compute.
    """
    found = side_factors(component, forms)
    if not found:
        return component
    blocks = tuple(
        replace(
            block, tensors=(*block.tensors, *(each for tensor in block.tensors for each in found.get(tensor.name, ())))
        )
        for block in component.blocks
    )
    added = frozenset(each.name for pair in found.values() for each in pair)
    lacking = component.lacking | added if component.has_file else component.lacking
    return replace(component, blocks=blocks, lacking=lacking, side_ranks=frozenset())


def side_factors(component: Component, forms: Forms) -> dict[str, tuple[TensorSpec, TensorSpec]]:
    """Return the factors that are added to encoded weights of blocks, by the names of these.

    What rests as it came has none: a LoRA is merged into that. So it is where factors would be larger than the weight
    at rest (`HostedWeight.takes_factors`).
    """
    ranks = {name: rank for name, rank in component.side_ranks if name in forms}
    found = {}
    for tensor in (tensor for block in component.blocks if ranks for tensor in block.tensors):
        rank, rows = ranks.get(tensor.name, 0), max(1, tensor.shape[0] if tensor.shape else 1)
        if not rank:
            continue
        up = TensorSpec(name=f"{tensor.name} (up)", dtype=tensor.dtype, shape=(rows, rank))
        down = TensorSpec(name=f"{tensor.name} (down)", dtype=tensor.dtype, shape=(rank, tensor.num_elements // rows))
        if up.weight_bytes + down.weight_bytes <= sum(leaf_bytes(tensor, forms)):
            found[tensor.name] = up, down
    return found


def paths_above(path: str) -> Iterator[str]:
    """Yield the paths of the modules that contain a tensor, except the root."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def fixed_tensors(component: Component, blocks: Collection[int], *, first: bool) -> list[TensorSpec]:
    """Return what stays on a device, as `Sizes.fixed_tensors`."""
    return Sizes(component, AS_THEY_CAME).fixed_tensors(blocks, first=first)


def bounce_buffer_bytes(component: Component, blocks: Sequence[int], *, first: bool) -> int:
    """Return the bytes of each buffer of a file, as `Sizes.bounce_buffer_bytes`."""
    return Sizes(component, AS_THEY_CAME).bounce_buffer_bytes(tuple(blocks), first=first)


def least_bytes(component: Component, blocks: Sequence[int], forms: Forms, *, first: bool) -> int:
    """Return the fewest device bytes with which blocks can compute, as `Sizes.least_bytes`."""
    return Sizes(component, forms).least_bytes(blocks, first=first)


def all_resident_bytes(component: Component, forms: Forms) -> int:
    """Return the bytes of the whole component at rest."""
    return Sizes(component, forms).all_resident_bytes


def explain_non_block(component: Component) -> str:
    """Return which layers never stream, where these are more than a twentieth of a component; else empty."""
    total_bytes, non_block_bytes = component.weight_bytes, component.non_block.weight_bytes
    if non_block_bytes <= LARGEST_NON_BLOCK_SHARE * total_bytes:
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
    share = f"{format_bytes(non_block_bytes)} ({non_block_bytes / total_bytes:.0%})"
    return f"non-block weights have {share} and are never streamed: {', '.join(sizes)}"
