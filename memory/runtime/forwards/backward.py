"""Backward passes through weights whose memory other blocks reuse before the backward pass reads it.

[Note: saved weights] Autograd keeps the tensors that a backward pass will read. A streamed weight lies in staging
memory, and an encoded weight is decoded into scratch memory: the next block overwrites both. So while such a block
computes, autograd saves a reference to the weight instead of its memory. When the backward pass reads the weight, it
gets a copy from where the weight rests, which is freed afterwards. All other tensors are saved as usual.

Torch keeps a stack of such hooks per thread. An interrupt that skips our exit leaves our hooks on the stack, where they
do nothing. They are removed when the block is recovered, if they are on top of the stack then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from ...errors import UnsafeState
from ...weights.quantized_leaves import leaves_of
from ..blocks.weight_group import WeightGroup
from ..blocks.weight_store import FileStore

__all__ = ["SavedWeights", "SavingCalls"]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that autograd saved, with its version counter at that time."""

    tensor: torch.Tensor
    version: int | None


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """A weight that autograd saved, or a view of one, without its memory."""

    group: WeightGroup
    index: int
    version: int
    is_view: bool
    """Whether a view of the weight was saved, not the weight itself."""
    own_stride: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    """From the weight's first element to the view's, in elements."""


Place: TypeAlias = tuple[int, int, WeightGroup, int]
"""A weight's first byte in its storage, its end, its group, and its index in the group."""


PLAIN = (torch.Tensor, torch.nn.Parameter)


class SavedWeights:
    """Replaces the weights that autograd saves while one block computes.

    Args:
        block: the block's name for messages.
        groups: the block's groups.
    """

    def __init__(self, block: str, groups: Iterable[WeightGroup], device: torch.device) -> None:
        self.block = block
        self.groups = list(groups)
        self.device = device
        self.places: dict[int, list[Place]] | None = None
        """The weights by storage."""
        self.is_open = False

    def begin(self) -> SavedWeights:
        self.is_open = True
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
        return self

    def end(self) -> None:
        """Stop replacing saved weights. Idempotent."""
        if self.is_open:
            self.is_open = False
            top: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if top is not None and getattr(top[0], "__self__", None) is self:
                torch._C._autograd._pop_saved_tensors_default_hooks()
        self.places = None

    def pack(self, tensor: torch.Tensor) -> SavedTensor | SavedWeight:
        found = self.find(tensor) if self.is_open else None
        if found is None:
            # Detached, because a function's result that is saved with its graph would keep the graph alive in a cycle.
            # Also because the saved tensor may not be an object that the module holds: these become plain at release.
            plain = tensor.detach() if tensor.requires_grad or type(tensor) in PLAIN else tensor
            return SavedTensor(plain, None if tensor.is_inference() else tensor._version)
        group, index = found
        placed = group.placed.tensors[index]
        is_view = tensor.shape != placed.shape or tensor.stride() != placed.stride()
        offset = int(tensor.storage_offset() - placed.storage_offset()) if is_view else 0
        if is_view and tensor.dtype != placed.dtype:
            raise UnsafeState(
                f"{self.block} computes gradients with a weight viewed as {tensor.dtype}: detach its inputs"
            )
        return SavedWeight(
            group, index, group.at_rest.version, is_view, placed.stride(), tensor.size(), tensor.stride(), offset
        )

    def unpack(self, saved: SavedTensor | SavedWeight) -> torch.Tensor:
        if isinstance(saved, SavedTensor):
            if saved.version is not None and saved.tensor._version != saved.version:
                raise RuntimeError(  # torch's own message; torch skips this check for tensors saved by hooks
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{saved.tensor.type()} {list(saved.tensor.shape)}] is at version {saved.tensor._version}; "
                    f"expected version {saved.version} instead"
                )
            return saved.tensor
        if saved.group.at_rest.store is None:
            raise UnsafeState(f"{self.block} was released before its backward pass: release it after the backward pass")
        if saved.group.at_rest.version != saved.version:
            raise UnsafeState(
                f"a weight of {self.block} was changed before its backward pass: change it after that pass"
            )
        weight = weight_on(saved.group, saved.index, self.device)
        if not saved.is_view:
            return weight
        if weight.stride() != saved.own_stride:
            weight = torch.empty_strided(weight.size(), saved.own_stride, dtype=weight.dtype, device=self.device).copy_(
                weight
            )
        return weight.as_strided(saved.size, saved.stride, saved.offset)

    def find(self, tensor: torch.Tensor) -> tuple[WeightGroup, int] | None:
        """Return the group and index of the weight whose memory a tensor shares, else None."""
        if self.places is None:
            self.places = locate_weights(self.groups)
        leaf = next(iter(leaves_of(tensor)), None)
        if leaf is None or leaf.layout is not torch.strided or not leaf.numel() or leaf.is_meta:
            return None
        begin, end = bytes_of(leaf)
        found = self.places.get(storage_of(leaf), ())
        return next(((group, index) for first, last, group, index in found if first <= begin and end <= last), None)


class SavingCalls:
    """The open calls whose weights' memory is reused, with what autograd saves in them; the outermost first."""

    def __init__(self) -> None:
        self.open: list[tuple[nn.Module, SavedWeights]] = []

    def begin(self, module: nn.Module, saved: SavedWeights) -> None:
        """Replace the weights that autograd saves in a module's call from now on."""
        self.open.append((module, saved))  # before `begin`, because an interrupt may come in between
        saved.begin()

    def end(self, module: nn.Module | None = None) -> None:
        """End a module's call and the calls inside it; without a module, all calls."""
        if module is None or any(module is called for called, _ in self.open):
            while self.open:
                called, saved = self.open.pop()
                saved.end()
                if called is module:
                    break


def locate_weights(groups: Iterable[WeightGroup]) -> dict[int, list[Place]]:
    """Return the current memory ranges of the groups' weights, by storage."""
    places: dict[int, list[Place]] = {}
    for group in groups:
        for index, (slot, placed) in enumerate(zip(group.slots, group.placed.tensors, strict=True)):
            for leaf in leaves_of(placed) if not slot.is_buffer else ():
                places.setdefault(storage_of(leaf), []).append((*bytes_of(leaf), group, index))
    return places


def storage_of(leaf: torch.Tensor) -> int:
    return int(leaf.untyped_storage()._cdata)


def bytes_of(leaf: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor uses, and the byte behind the last."""
    steps = zip(leaf.size(), leaf.stride(), strict=True)
    begin = int(leaf.storage_offset())
    end = begin + 1 + sum(int(size - 1) * int(step) for size, step in steps)
    return begin * leaf.itemsize, end * leaf.itemsize


def weight_on(group: WeightGroup, index: int, device: torch.device) -> torch.Tensor:
    """Return a wide copy of a weight on a device. Reads the file if the weight rests in it."""
    slot = group.slots[index]
    if group.host_slab is not None:
        return group.wide(slot.spec.name, device)
    assert isinstance(group.at_rest.store, FileStore)
    if slot.held.is_meta:
        (weight,) = group.read_as_it_computes([slot], group.at_rest.store.source)
        return weight.to(device)
    with torch.no_grad():
        return slot.held.detach().to(device, copy=True)
