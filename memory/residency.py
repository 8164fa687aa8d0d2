"""One block's weights: the master in host memory, copies on a device, and which of them the module holds."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .component import TensorSpec
from .leaves import Wrapper, leaves_of
from .transfer import CopyStream, SlabLayout, allocate_host
from .units import pinned_bytes
from .upcast import FP8, find_scale, quantize_fp8, upcast_into

__all__ = ["BlockState", "Entry", "Unit", "find_entries"]


class BlockState(enum.Enum):
    """What the module of a unit holds, and what that costs."""

    HOST = "host"
    """The masters in host memory; no device bytes. A streamed block is here whenever it does not compute."""
    RESIDENT = "resident"
    """Views into the unit's own slab on the device, eight-bit weights unwidened; costs the slab."""
    COMPUTING = "computing"
    """Views that its forward can use: the slab or a staging slot, cast weights in the shared scratch."""


EMPTY = torch.empty(0)


@dataclass(slots=True)
class Entry:
    """One weight and every place in the module tree that holds it (tied weights have several)."""

    spec: TensorSpec
    owners: list[tuple[nn.Module, str]]
    is_buffer: bool
    scale: float | None = None
    """The power of two of a weight that rests in eight bits."""
    wrapper: Wrapper | None = None
    """How a quantized weight is made of its leaves."""

    @property
    def held(self) -> torch.Tensor:
        if not self.owners:  # a buffer that the module has replaced by one of its own
            return EMPTY
        module, name = self.owners[0]
        tensor = (module._buffers if self.is_buffer else module._parameters)[name]
        assert tensor is not None
        return tensor

    def hold(self, tensor: torch.Tensor) -> None:
        """Put a tensor where the module tree looks for it; native dict entries, no attribute hooks."""
        for module, name in self.owners:
            if self.is_buffer:
                module._buffers[name] = tensor
            else:
                assert isinstance(tensor, nn.Parameter)
                module._parameters[name] = tensor


def find_entries(module: nn.Module, specs: Sequence[TensorSpec]) -> dict[str, Entry]:
    """Return an entry per described weight of a module, by name."""
    by_identity: dict[int, list[str]] = {}
    tensors: dict[str, tuple[torch.Tensor, bool]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tensors[name] = parameter, False
        by_identity.setdefault(id(parameter), []).append(name)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        tensors[name] = buffer, True
        by_identity.setdefault(id(buffer), []).append(name)
    entries = {}
    for spec in specs:
        tensor, is_buffer = tensors[spec.name]
        owners = [split_owner(module, name) for name in by_identity[id(tensor)]]
        entries[spec.name] = Entry(spec, owners, is_buffer, wrapper=Wrapper.of(tensor))
    return entries


def split_owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def as_held(leaves: Iterator[torch.Tensor], entry: Entry) -> torch.Tensor:
    """Return what the module holds for a weight whose next leaves these are."""
    # A wrapper made outside of inference mode cannot be used inside it, one made inside can be used in both.
    with torch.inference_mode(entry.wrapper is not None):
        tensor = assemble(leaves, entry.wrapper)
        if entry.is_buffer:
            return tensor
        if entry.wrapper is not None:
            tensor._is_param = True  # what nn.Parameter() does after a detach(), in which some wrappers copy
            return tensor
        # Weights are read-only at inference: device copies never ask for a gradient.
        return nn.Parameter(tensor, requires_grad=False)


class Unit:
    """A block, or the fixed tensors of a device: moves as one slab and is in one `BlockState`.

    Args:
        cast: names of the weights that rest in eight bits.
    """

    def __init__(self, name: str, entries: Sequence[Entry], *, cast: frozenset[str]) -> None:
        self.name = name
        self.entries = list(entries)
        self.cast_names = cast & {entry.spec.name for entry in entries}
        self.wide_dtypes = {entry.spec.name: entry.held.dtype for entry in entries}
        forms = [self.stored_forms(entry) for entry in self.entries]
        self.num_leaves = [len(leaves) for leaves in forms]
        self.layout = SlabLayout.of([form for leaves in forms for form in leaves])
        cast_entries = [entry for entry in self.entries if entry.spec.name in self.cast_names]
        self.wide_layout = SlabLayout.of([(entry.held.shape, entry.held.dtype) for entry in cast_entries])
        self.masters: list[torch.Tensor] = []
        self.host_slab: torch.Tensor | None = None
        self.device_slab: torch.Tensor | None = None
        self.device_views: list[torch.Tensor] = []
        self.loaded_version = 0
        self.ready: torch.Event | None = None
        self.awaited: set[int] = set()
        """The streams that already wait for the copy."""
        self.state = BlockState.HOST
        self.placed: list[torch.Tensor] = []
        self.view_cache: dict[int, list[torch.Tensor]] = {}

    def stored_forms(self, entry: Entry) -> list[tuple[torch.Size, torch.dtype]]:
        if entry.spec.name in self.cast_names:
            return [(entry.held.shape, FP8)]
        return [(leaf.shape, leaf.dtype) for leaf in leaves_of(entry.held)]

    @property
    def slab_bytes(self) -> int:
        return self.layout.slab_bytes

    @property
    def host_bytes(self) -> dict[str, int]:
        """The bytes of the masters by tier: page-locked ones as the allocator rounds them."""
        if self.host_slab is not None and self.host_slab.is_pinned():
            return {"pinned": pinned_bytes(self.slab_bytes)}
        return {"host": self.slab_bytes}

    # -- the master in host memory

    def measure(self) -> None:
        """Find the scales of the cast weights; one pass over them, changes nothing.

        Raises:
            InvalidInput: a weight holds NaN or infinity.
        """
        for entry in self.entries:
            if entry.spec.name in self.cast_names:
                entry.scale = find_scale(entry.held, name=entry.spec.name)

    def pack(self, *, pinned: bool) -> bool:
        """Move the masters into one host slab, cast weights in eight bits; returns whether it is as asked.

        Holds the slab and, one tensor at a time, the original. The module keeps its parameter objects.
        """
        slab = self.host_slab = allocate_host(self.slab_bytes, pinned=pinned)
        for entry, views in zip(self.entries, self.leaf_views(slab), strict=True):
            source = entry.held if entry.scale is None else quantize_fp8(entry.held.detach(), entry.scale)
            copy_leaves(views, source)
            self.masters.append(repoint(entry, views))
        self.placed = list(self.masters)
        return slab.is_pinned() or not (pinned and slab.numel())

    def leaf_views(self, slab: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return the views into a slab that make each weight."""
        views = iter(self.layout.views(slab))
        return [list(itertools.islice(views, count)) for count in self.num_leaves]

    @property
    def newest_slab(self) -> torch.Tensor:
        """The slab that has the last word: the one on the device if it was written to there."""
        assert self.host_slab is not None
        is_changed = self.device_slab is not None and self.device_slab._version != self.loaded_version
        return self.device_slab if is_changed and self.device_slab is not None else self.host_slab

    def index_of(self, name: str) -> int:
        return next(index for index, entry in enumerate(self.entries) if entry.spec.name == name)

    def overwrite(self, name: str, weight: torch.Tensor) -> None:
        """Make a weight (wide or quantized alike, on any device) the new version where the unit rests.

        Eight-bit weights get a scale of their own. A host does this for patched weights; what is written to the
        device is saved when the unit leaves it. The caller ended every pass and copy.
        """
        index = self.index_of(name)
        entry = self.entries[index]
        slab = self.host_slab if self.device_slab is None else self.device_slab
        assert slab is not None
        with torch.no_grad():
            if entry.scale is not None:
                entry.scale = find_scale(weight, name=name)
                weight = quantize_fp8(weight, entry.scale)
            copy_leaves(self.leaf_views(slab)[index], weight)

    def wide(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a copy of a weight on a device in the form in which it computes."""
        index = self.index_of(name)
        entry, leaves = self.entries[index], self.leaf_views(self.newest_slab)[index]
        with torch.no_grad(), torch.inference_mode(False):
            if entry.scale is None:
                return assemble(iter([leaf.to(device, copy=True) for leaf in leaves]), entry.wrapper)
            copy = torch.empty(leaves[0].shape, dtype=self.wide_dtypes[name], device=device)
            upcast_into(copy, leaves[0].to(device), entry.scale)
            return copy

    def unpack(self) -> None:
        """Give the module ordinary tensors again and drop the slab; eight-bit weights come back widened."""
        for entry, master in zip(self.entries, self.masters, strict=False):  # fewer where packing failed half way
            own = leaves_of(self.wide(entry.spec.name, torch.device("cpu")))
            entry.scale = None
            if entry.owners:
                entry.hold(master)
                repoint(entry, own)
        self.masters, self.host_slab, self.placed, self.view_cache = [], None, [], {}

    # -- copies on a device

    def load(self, copies: CopyStream) -> None:
        """Become resident: allocate a slab on the device and queue its copy.

        Raises:
            torch.OutOfMemoryError: nothing changed.
        """
        assert self.host_slab is not None and self.device_slab is None
        slab = copies.allocate(self.slab_bytes)
        self.device_views = self.held_views(slab)
        self.device_slab, self.ready, self.awaited = slab, copies.copy(slab, self.host_slab), set()
        self.loaded_version = self.device_slab._version  # views share the counter: any write to one shows here
        self.put(self.device_views, BlockState.RESIDENT)

    def drop(self) -> int:
        """Leave the device without copying back; returns the bytes freed. The caller drained the copy stream."""
        assert self.device_slab is not None
        self.rest()
        self.save_changes()
        self.device_slab, self.device_views, self.ready = None, [], None
        self.rest()
        return self.slab_bytes

    def save_changes(self) -> None:
        """Keep what was written on the device: counters in buffers, weights loaded into a resident module.

        Weights are read-only at inference, so almost always there is nothing, and nothing is copied back.
        """
        if self.newest_slab is self.device_slab:
            assert self.host_slab is not None
            with torch.no_grad():
                self.host_slab.copy_(self.device_slab)

    def await_copy(self, copies: CopyStream) -> None:
        """Let the compute stream wait for this unit's own copy, each stream once."""
        stream = copies.compute_stream.stream_id
        if self.ready is not None and stream not in self.awaited:
            copies.await_on_compute(self.ready)
            self.awaited.add(stream)

    # -- what the module holds

    def compute_from(self, slab: torch.Tensor, scratch: torch.Tensor | None) -> None:
        """Let the module compute from a slab on the device; widens cast weights into the scratch there."""
        views = self.device_views if slab is self.device_slab else self.cached_views(slab, self.layout)
        if self.cast_names:
            assert scratch is not None
            wide = iter(self.cached_views(scratch, self.wide_layout))
            usable = []
            for entry, view in zip(self.entries, views, strict=True):
                if entry.scale is not None:
                    target = next(wide)
                    upcast_into(target, view, entry.scale)
                    view = target
                usable.append(view)
            views = usable
        self.put(views, BlockState.COMPUTING)

    def rest(self) -> None:
        """Give the module what it holds between computes: its resident views, else the masters."""
        if self.device_slab is not None:
            self.put(self.device_views, BlockState.RESIDENT)
        else:
            self.put(self.masters, BlockState.HOST)

    def forget_views(self) -> None:
        """Drop the cached views into slots and scratch: they would keep freed slabs alive."""
        self.view_cache.clear()

    def cached_views(self, slab: torch.Tensor, layout: SlabLayout) -> list[torch.Tensor]:
        # Building a block's parameters costs microseconds per tensor; a slot sees the same blocks every step.
        if id(slab) not in self.view_cache:
            self.view_cache[id(slab)] = self.held_views(slab, wide=layout is self.wide_layout)
        return self.view_cache[id(slab)]

    def held_views(self, slab: torch.Tensor, *, wide: bool = False) -> list[torch.Tensor]:
        layout = self.wide_layout if wide else self.layout
        entries = [entry for entry in self.entries if not wide or entry.spec.name in self.cast_names]
        leaves = iter(layout.views(slab))
        return [as_held(leaves, entry) for entry in entries]

    def put(self, tensors: Sequence[torch.Tensor], state: BlockState) -> None:
        for index, (entry, tensor) in enumerate(zip(self.entries, tensors, strict=True)):
            if entry.is_buffer and entry.owners and self.placed and entry.held is not self.placed[index]:
                self.take_replaced(entry, tensor)
            entry.hold(tensor)
        self.placed, self.state = list(tensors), state

    def take_replaced(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Take over a buffer that a forward replaced by another tensor; one of another shape is the module's own."""
        replaced = entry.held
        if replaced.shape == tensor.shape and replaced.dtype == tensor.dtype:
            with torch.no_grad():
                tensor.copy_(replaced)
        else:
            entry.owners = []


def assemble(leaves: Iterator[torch.Tensor], wrapper: Wrapper | None) -> torch.Tensor:
    return wrapper.assemble(leaves) if wrapper else next(leaves)


def copy_leaves(targets: Sequence[torch.Tensor], weight: torch.Tensor) -> None:
    """Write a weight into views, leaf by leaf."""
    with torch.no_grad():
        for target, leaf in zip(targets, leaves_of(weight), strict=True):
            target.copy_(leaf.detach())


def repoint(entry: Entry, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Let the held tensor object show other memory, and return it.

    The object stays the same for whoever else refers to it. Inference tensors cannot be repointed outside
    inference mode, and quantized weights not at all: those are replaced.
    """
    held = entry.held
    if held.is_inference() or entry.wrapper:
        held = as_held(iter(leaves), entry)
        entry.hold(held)
    else:
        (held.data,) = leaves
    return held
