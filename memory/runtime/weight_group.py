"""One block's weights: the master, the copy on a device, and which of them the module holds."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn

from ..errors import InvalidInput, UnsafeState
from ..transfer.bounce_buffers import BounceBuffers
from ..transfer.copy_stream import CopyStream
from ..transfer.slabs import Form, SlabLayout
from ..weights.fp8 import FP8, find_scale, quantize_fp8, upcast_into
from ..weights.quantized import leaves_of
from ..weights.source import WeightsSource
from .computing_parameter import ComputingWeight, note_data
from .eight_bit_weight import EightBits, EightBitWeight, stored_leaf
from .parameter_slots import (
    ParameterSlot,
    add_up,
    as_held,
    assemble,
    become,
    copy_leaves,
    fill_entries,
    read_weights,
    repoint,
)
from .resident_copy import DeviceCopy, Known
from .watched_data import Asked, device_of, plainly, unwatch, watch
from .weight_store import FileStore, HostStore

__all__ = ["BlockState", "WeightGroup"]


Origin: TypeAlias = tuple[torch.Tensor, int, torch.Tensor | None, int]
"""The slab and the scratch from which a unit computes, each with its version at the start of the forward."""


class BlockState(enum.Enum):
    """What the module of a unit holds, and what that costs."""

    HOST = "host"
    """The masters in host memory; no device bytes. A streamed block is here whenever it does not compute."""
    RESIDENT = "resident"
    """Views into the unit's own slab on the device, eight-bit weights unwidened; costs the slab."""
    COMPUTING = "computing"
    """Views that its forward can use: its own slab or staging memory, cast weights in the shared scratch."""


class WeightGroup:
    """A block, or the fixed tensors of a device: moves as one slab and is in one `BlockState`.

    Args:
        cast: names of the weights that rest in eight bits.
        shows_wide: whether the module holds those as wide tensors at rest (`EightBitWeight`); a host that reads and
            writes single weights by itself gets the eight bits.
    """

    def __init__(
        self, name: str, entries: Sequence[ParameterSlot], *, cast: frozenset[str], shows_wide: bool = False
    ) -> None:
        self.name = name
        self.entries = list(entries)
        self.cast_names = cast & {entry.spec.name for entry in entries}
        self.shows_wide = shows_wide
        self.asked: Asked | None = None
        """The function that its weights at rest call when asked for their device."""
        self.opened: list[EightBits] = []
        """Weights in eight bits of which others got views, or that were to be converted."""
        self.originals: dict[str, torch.Tensor] = {}
        """The module's own objects for weights that are shown wide."""
        self.wide_dtypes = {entry.spec.name: entry.held.dtype for entry in entries}
        self.num_leaves = [len(self.stored_forms(entry)) for entry in self.entries]
        self.layout = self.lay_out()
        cast_entries = [entry for entry in self.entries if entry.spec.name in self.cast_names]
        self.wide_layout = SlabLayout.of([Form.of(entry.held) for entry in cast_entries])
        self.masters: list[torch.Tensor] = []
        self.charge_host: Callable[[int], None] = lambda num_bytes: None
        """Called with bytes of host memory that the weights take from now on, beside those they were packed into."""
        self.bring: Callable[[WeightGroup], None] | None = None
        """Called to run `read_into_memory` while nothing computes; None while it is not attached."""
        self.master: HostStore | FileStore | None = None
        self.copy: DeviceCopy | None = None
        """While it is resident."""
        self.aliases: list[torch.Tensor] = []
        """For each master whose ``.data`` was read, the tensor that shares a counter with all that was returned."""
        self.past_writes = 0
        """Makes up for the counters of objects that are masters no more."""
        self.shown: weakref.WeakSet[EightBits] = weakref.WeakSet()
        """What the wide tensors show that the module holds, or held, for weights in eight bits."""
        self.bringers: weakref.WeakSet[Bringer] = weakref.WeakSet()
        """What weights without memory, and their ``.data``, call to be read."""
        self.given: list[tuple[ParameterSlot, weakref.ref[torch.Tensor]]] = []
        """What the module held for a weight before, and other code keeps."""
        self.bare: dict[str, torch.Tensor] = {}
        """What the module held for weights that came without memory."""
        self.state = BlockState.HOST
        self.placed: Sequence[torch.Tensor] = []
        """What the module was given last, which it holds at the places of the entries."""
        self.slots: list[tuple[dict[str, torch.Tensor], str, int]] = []
        """Those places, as the dicts of modules, with the number of the entry; empty until first used."""
        self.known: tuple[object, Known] = None, ([], [])
        """Of what the module holds while that is the masters, for who looks where they lie."""
        self.view_cache: dict[int, list[torch.Tensor]] = {}
        self.notes_data = False
        """Whether accesses to ``.data`` in a forward are recorded, which costs a little in every call."""
        self.looked: list[ComputingWeight] = []
        """Weights whose ``.data`` was accessed while they computed."""
        self.origin: Origin | None = None
        """The memory it computes from, if writes to that would be lost; else None."""

    def lay_out(self) -> SlabLayout:
        """Return the layout of a slab for what the module holds now."""
        return SlabLayout.of([form for entry in self.entries for form in self.stored_forms(entry)])

    def stored_forms(self, entry: ParameterSlot) -> list[Form]:
        if entry.spec.name in self.cast_names:
            return [Form.of(entry.held, FP8)]
        return [Form.of(leaf) for leaf in leaves_of(entry.held)]

    def take_strides(self, index: int, given: torch.Tensor) -> bool:
        """Lay a plain weight out as a tensor that takes its place; returns whether that has other strides.

        The bytes are as many and begin where they did. The caller renews what the module holds and the cached views.
        Weights in eight bits and in files keep their strides.
        """
        entry, place = self.entries[index], sum(self.num_leaves[:index])
        form = Form.of(given)
        if self.host_slab is None or entry.wrapper is not None or entry.scale is not None or entry.is_buffer:
            return False
        if form.strides == self.layout.forms[place].strides or form.shape != self.layout.forms[place].shape:
            return False
        slabs = [self.host_slab, *([self.copy.slab] if self.copy is not None else [])]
        with torch.inference_mode(False), torch.no_grad():
            before = [self.layout.views(slab)[place].clone() for slab in slabs]
            forms = list(self.layout.forms)
            forms[place] = replace(forms[place], strides=form.strides)
            self.layout = replace(self.layout, forms=tuple(forms))
            for slab, values in zip(slabs, before, strict=True):
                self.layout.views(slab)[place].copy_(values)
        return True

    @property
    def slab_bytes(self) -> int:
        return self.layout.slab_bytes

    @property
    def buffers_begin(self) -> int:
        """Where the slab has no more weights, but plain buffers, which come last."""
        num_leaves = sum(
            count for entry, count in zip(self.entries, self.num_leaves, strict=True) if not entry.is_plain_buffer
        )
        return self.layout.offsets[num_leaves] if num_leaves < len(self.layout.offsets) else self.slab_bytes

    @property
    def host_slab(self) -> torch.Tensor | None:
        """The masters in host memory, if they are there."""
        return self.master.slab if isinstance(self.master, HostStore) else None

    @property
    def blocks_host(self) -> bool:
        """Whether a copy to a device holds the host until it is done."""
        assert self.master is not None
        return self.master.blocks_host

    @property
    def version(self) -> int:
        """That of the masters; grows when weights are written to, through the slab or through the module's objects."""
        assert self.master is not None
        # An object that came with the module was pointed to the slab and has a counter of its own.
        with plainly():
            own = sum(weight._version for weight in self.masters if not weight.is_inference())
        others = sum(alias._version for alias in self.aliases) if self.aliases else 0
        return self.master.version + own + others + self.past_writes

    def renew(self, masters: Sequence[torch.Tensor]) -> None:
        """Take other objects as the masters, for the same memory; counts as a write, so that no version comes again."""
        before = self.version
        replaced, self.masters = self.masters, list(masters)
        self.note_given(replaced, self.masters)
        self.past_writes += before + 1 - self.version

    @property
    def is_whole(self) -> bool:
        """Whether the module has its own tensors again, while `unpack` was interrupted behind that."""
        return self.master is not None and not self.masters

    def note_given(self, before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> None:
        """Remember what the module held for weights at rest and holds no more, as long as other code keeps it."""
        kept = [
            (entry, weakref.ref(old))
            for entry, old, new in zip(self.entries, before, now, strict=False)
            if old is not new
        ]
        self.given = [(entry, known) for entry, known in (*self.given, *kept) if known() is not None]

    # -- the master in host memory

    def measure(self) -> None:
        """Find the scales of the cast weights that are in memory; one pass over them, changes nothing.

        Raises:
            InvalidInput: a weight holds NaN or infinity.
        """
        for entry in self.entries:
            if entry.spec.name in self.cast_names and not entry.held.is_meta:
                entry.scale = find_scale(entry.held, name=entry.spec.name)

    def pack(
        self, slab: torch.Tensor, source: WeightsSource | None = None, progress: Callable[[int], None] | None = None
    ) -> None:
        """Move the masters into a slab of host memory, cast weights in eight bits.

        Holds the slab and, one tensor at a time, the original. The module keeps its parameter objects. What it has
        on the meta device is read from the source, straight into the slab where it is not cast; ``progress`` is called
        with the bytes packed or read since it was called last, and what it raises ends that.
        """
        self.master = HostStore(slab)
        to_read = []
        copied_bytes = 0
        self.remember_bare()
        for entry, views in zip(self.entries, self.leaf_views(slab), strict=True):
            weight = entry.held
            is_cast = entry.spec.name in self.cast_names
            copied_bytes += 0 if weight.is_meta else entry.spec.weight_bytes
            if weight.is_meta and is_cast:
                (weight,) = read_weights([entry], source, progress=add_up(progress))
                entry.scale = find_scale(weight, name=entry.spec.name)
            if weight.is_meta:
                to_read.append((entry.spec.name, views[0]))
            else:
                copy_leaves(views, weight if entry.scale is None else quantize_fp8(weight.detach(), entry.scale))
            master = repoint(entry, views)
            if self.shows(entry):
                self.originals[entry.spec.name] = master
                master = self.show(entry, views[0])
                entry.hold(master)
            self.masters.append(watch(master, self.asked, aliases=self.aliases))
        if progress is not None and copied_bytes:
            progress(copied_bytes)
        if to_read:
            assert source is not None
            source.read_into(to_read, progress=add_up(progress))
        self.placed = list(self.masters)

    def shows(self, entry: ParameterSlot) -> bool:
        """Whether the module holds a wide tensor at rest for a weight in eight bits."""
        return self.shows_wide and entry.scale is not None

    def show(self, entry: ParameterSlot, leaf: torch.Tensor) -> EightBitWeight:
        """Return what the module holds at rest for eight-bit values."""
        bits = EightBits(leaf, entry, self.wide_dtypes[entry.spec.name], self.opened)
        self.shown.add(bits)
        weight = EightBitWeight(bits)
        weight._is_param = True
        vars(weight)["asked"] = self.asked
        return weight

    def settle(self) -> torch.dtype | None:
        """Take over what was written to eight-bit weights through views; returns what one was to be converted to."""
        dtype = None
        while self.opened:
            bits = self.opened.pop()
            dtype, bits.asked_dtype = bits.asked_dtype or dtype, None
            bits.settle()
        return dtype

    def remember_bare(self) -> None:
        self.bare = {entry.spec.name: entry.held for entry in self.entries if entry.held.is_meta}

    def fill(self, source: WeightsSource | None, progress: Callable[[int], None] | None = None) -> None:
        """Read weights that the module has on the meta device into memory of their own. ``progress`` as in `pack`."""
        self.remember_bare()
        fill_entries(self.entries, source, add_up(progress))

    def rest_in_file(self, source: WeightsSource, bounce: BounceBuffers, *, written: Collection[str] = ()) -> None:
        """Leave the weights in their file, and what it lacks where it is; the module holds shapes without memory.

        Buffers are read into memory of their own: a forward may change them.

        Args:
            written: the weights that are not what the file has any more.
        """
        names: list[str | None] = []
        kept = {}
        self.remember_bare()
        fill_entries([entry for entry in self.entries if entry.is_buffer], source)
        for entry in self.entries:
            if not entry.is_buffer and entry.spec.name not in written and source.holds(entry.spec):
                names.append(entry.spec.name)
                if not entry.held.is_meta:
                    shape = torch.empty(entry.held.shape, dtype=entry.held.dtype, device="meta")
                    entry.hold(as_held(iter([shape]), entry))
            else:
                for leaf in leaves_of(entry.held):
                    kept[len(names)] = leaf.detach()
                    names.append(None)
            self.masters.append(self.watch(entry, entry.held))
        self.layout = self.lay_out()  # files have contiguous weights
        self.master = FileStore(self.layout, names, kept, source, bounce)
        self.placed = list(self.masters)

    def watch(self, entry: ParameterSlot, master: torch.Tensor) -> torch.Tensor:
        """Watch the tensor that the module holds at rest for a weight; returns the same tensor."""
        bring = Bringer(self, entry, master) if master.is_meta else None
        if bring is not None:
            self.bringers.add(bring)
        return watch(master, self.asked, aliases=self.aliases, bring=bring)

    def read_into_memory(self) -> None:
        """Read weights that rest in their file into host memory, where they stay. No pass or copy may be under way.

        Raises:
            InvalidInput: the file has changed. The unit is as before.
        """
        assert isinstance(self.master, FileStore)
        with torch.inference_mode(False), torch.no_grad():
            slab = torch.empty(self.slab_bytes, dtype=torch.uint8)
            self.master.read_whole(slab)
        self.rest_in(slab)
        with self.without_gone_places():  # a weight may be asked for while other code moves it to another name
            self.rest()

    @contextmanager
    def without_gone_places(self) -> Iterator[None]:
        """Leave places of the module alone meanwhile that hold nothing."""
        before = [(entry, entry.owners) for entry in self.entries]
        for entry, owners in before:
            entry.owners = [(part, name) for part, name in owners if entry.slots_of(part).get(name) is not None]
        try:
            yield
        finally:
            for entry, owners in before:
                entry.owners = owners

    def rest_in(self, slab: torch.Tensor) -> None:
        """Make a slab of host memory the master in place of the file."""
        assert isinstance(self.master, FileStore)
        kept_bytes = self.master.kept_bytes
        with torch.inference_mode(False):
            views = self.resting_views(slab)
            self.master = HostStore(slab)
            self.masters = [watch(view, self.asked, aliases=self.aliases) for view in views]
        self.charge_host(self.slab_bytes - kept_bytes)

    def leaf_views(self, slab: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return the views into a slab that make each weight."""
        views = iter(self.layout.views(slab))
        return [list(itertools.islice(views, count)) for count in self.num_leaves]

    @property
    def newest_slab(self) -> torch.Tensor:
        """The slab that has the last word: the one on the device if it was written to there."""
        assert self.host_slab is not None
        return self.copy.slab if self.copy is not None and self.copy.is_written else self.host_slab

    @property
    def resting_slab(self) -> torch.Tensor | None:
        """The slab that the module's weights are views into between computes; None where they rest in their file."""
        return self.copy.slab if self.copy is not None else self.host_slab

    def index_of(self, name: str) -> int:
        return next(index for index, entry in enumerate(self.entries) if entry.spec.name == name)

    def overwrite(self, name: str, weight: torch.Tensor) -> None:
        """Make a weight (wide or quantized alike, on any device) the new version where the unit rests.

        Eight-bit weights get a scale of their own. A host does this for patched weights; what is written to the
        device is saved when the unit leaves it. The caller ended every pass and copy.
        """
        index = self.index_of(name)
        entry = self.entries[index]
        slab = self.resting_slab
        assert slab is not None
        with torch.no_grad():
            if entry.scale is not None:
                entry.scale = find_scale(weight, name=name)
                weight = quantize_fp8(weight, entry.scale)
            copy_leaves(self.leaf_views(slab)[index], weight)

    def wide(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a copy of a weight on a device in the form in which it computes."""
        self.settle()
        index = self.index_of(name)
        entry, leaves = self.entries[index], self.leaf_views(self.newest_slab)[index]
        with torch.no_grad(), torch.inference_mode(False):
            if entry.scale is None:
                return assemble(iter([leaf.to(device, copy=True) for leaf in leaves]), entry.wrapper)
            copy = torch.empty_like(leaves[0], dtype=self.wide_dtypes[name], device=device)
            upcast_into(copy, leaves[0].to(device), entry.scale)
            return copy

    def rename(self, names: Mapping[str, str]) -> None:
        """Call weights what their module calls them by now, by the names that they had."""
        for entry in self.entries:
            entry.spec = replace(entry.spec, name=names.get(entry.spec.name, entry.spec.name))
        self.cast_names = frozenset(names.get(name, name) for name in self.cast_names)
        self.wide_dtypes = {names.get(name, name): dtype for name, dtype in self.wide_dtypes.items()}
        self.bare = {names.get(name, name): held for name, held in self.bare.items()}
        self.originals = {names.get(name, name): held for name, held in self.originals.items()}
        if isinstance(self.master, FileStore):
            self.master.rename(names)

    def keeps_apart(self, entry: ParameterSlot) -> bool:
        """Whether a weight rests in another form, or at another place, than the one in which it computes."""
        return entry.scale is not None or entry.spec.name in self.names_in_file

    @property
    def names_in_file(self) -> frozenset[str]:
        """The weights that rest in their file."""
        names = self.master.names if isinstance(self.master, FileStore) else []
        return frozenset(name for name in names if name is not None)

    def unpack(self, bare: Collection[str] = ()) -> None:
        """Give the module ordinary tensors again and drop the slab; eight-bit weights come back widened.

        Weights that rest in their file are read from it, in one go.

        Args:
            bare: the weights that the module gets without memory.

        Raises:
            InvalidInput: a file is not what it was.
        """
        names = self.names_in_file.difference(bare)
        to_read = [entry for entry in self.entries if entry.spec.name in names and entry.owners]
        source = self.master.source if isinstance(self.master, FileStore) else None
        stored = {
            entry.spec.name: weight
            for entry, weight in zip(to_read, read_weights(to_read, source, drop_pages=True), strict=True)
        }
        masters = itertools.chain(self.masters, itertools.repeat(None))  # fewer where packing failed half way
        for entry, master in zip(self.entries, masters, strict=False):
            name = entry.spec.name
            if master is not None:
                self.given.append((entry, weakref.ref(master)))
            if name in bare:
                entry.hold(unwatch(self.bare.get(name, entry.held)))
            elif not entry.owners:  # what the module has there is its own
                continue
            elif name in stored:
                repoint(entry, [stored[name]], lasting=True)
            elif master is not None:
                own = leaves_of(self.wide(name, torch.device("cpu"))) if self.host_slab is not None else []
                entry.hold(self.originals.get(name, unwatch(master)))
                if own:
                    repoint(entry, own, lasting=True)
        master = None
        self.masters, self.placed, self.known, self.opened = [], [], (None, ([], [])), []
        self.forget_views()
        self.bring_kept_home(source)
        self.forget_masters()
        for entry in self.entries:  # only now: interrupted before, all of it is done again
            entry.scale = None

    def bring_kept_home(self, source: WeightsSource | None) -> None:
        """Make tensors that the module held, and other code keeps, plain ones in host memory.

        Each shares the memory of what the module holds for the weight now; where it holds none, or one without
        memory, the weight is read into memory of its own.
        """
        homes: dict[int, torch.Tensor] = {}

        def find_home(entry: ParameterSlot, form: torch.Tensor) -> torch.Tensor:
            if id(entry) not in homes:
                held = entry.held if entry.owners else None
                if held is not None and not held.is_meta and device_of(held).type == "cpu":
                    homes[id(entry)] = held
                elif self.host_slab is not None:
                    homes[id(entry)] = self.wide(entry.spec.name, torch.device("cpu"))
                elif source is not None and entry.spec.name in self.names_in_file:
                    with torch.inference_mode(False):
                        homes[id(entry)] = home = torch.empty(form.shape, dtype=form.dtype)
                    source.read_into([(entry.spec.name, home)], drop_pages=True)
                else:
                    homes[id(entry)] = form.detach().to("cpu", copy=True)
            return homes[id(entry)]

        for bits in list(self.shown):
            bits.end(find_home(bits.entry, bits.leaf))
        kept = [(entry, tensor) for entry, known in self.given if (tensor := known()) is not None]
        for bring in list(self.bringers):
            if bring.home is None:
                bring.home = find_home(bring.entry, bring.form)
        self.given = []  # what has a weak reference cannot be swapped
        for entry, tensor in kept:
            if not entry.owners or tensor is not entry.held:
                become(tensor, find_home(entry, tensor))

    def discard(self) -> None:
        """Drop the masters, and let the module hold shapes without memory: it is no longer used. Reads nothing."""
        for entry in self.entries:
            entry.wrapper = None
            unwatch(entry.held)
            repoint(entry, [torch.empty(entry.held.shape, dtype=entry.held.dtype, device="meta")])
        self.forget_masters()

    def forget_masters(self) -> None:
        self.masters, self.master, self.placed, self.view_cache, self.originals = [], None, [], {}, {}
        self.known, self.slots, self.opened, self.aliases = (None, ([], [])), [], [], []

    # -- the copy on a device

    def load(self, copies: CopyStream) -> None:
        """Become resident: allocate a slab on the device and queue its copy.

        Raises:
            torch.OutOfMemoryError: nothing changed.
        """
        assert self.master is not None and self.copy is None
        self.rest()  # a buffer that was replaced meanwhile goes to the master, before that is copied
        slab, ready = copies.allocate(self.slab_bytes), copies.event()
        try:
            self.master.copy_to(slab, 0, copies)
            copies.mark_ready(ready)
            self.copy = DeviceCopy(
                slab, self.entries, self.resting_views(slab), ready, buffers_begin=self.buffers_begin
            )
        finally:
            if self.copy is None:
                copies.drain()  # the slab is freed now, and its copy may be under way
        self.put(self.copy.views, BlockState.RESIDENT)

    def drop(self) -> int:
        """Leave the device without copying back; returns the bytes freed. The caller drained the copy stream."""
        assert self.copy is not None
        self.rest()
        self.save_changes(self.copy)
        self.put(self.masters, BlockState.HOST)
        given = [(entry, weakref.ref(view)) for entry, view in zip(self.entries, self.copy.views, strict=True)]
        self.copy = None
        self.given = [(entry, known) for entry, known in (*self.given, *given) if known() is not None]
        return self.slab_bytes

    def save_changes(self, copy: DeviceCopy) -> None:
        """Keep what was written on the device: counters in buffers, weights loaded into a resident module.

        Weights are read-only at inference, so almost always there is nothing, and nothing is copied back. Those that
        rest in their file but are not what it has any more stay in host memory from now on.
        """
        is_written, has_written_buffers = copy.find_written()
        if not is_written and not has_written_buffers:
            return
        with torch.no_grad():
            if self.host_slab is not None:
                self.host_slab.copy_(copy.slab)
            elif isinstance(self.master, FileStore) and not (is_written and self.leave_file(self.master, copy)):
                views = self.layout.views(copy.slab)
                for place, leaf in self.master.kept.items():
                    with torch.inference_mode(leaf.is_inference()):  # one made there is written to there only
                        leaf.copy_(views[place])

    def leave_file(self, master: FileStore, copy: DeviceCopy) -> bool:
        """Take what is on the device for the master if it is not what the file has; returns whether that was so."""
        with torch.inference_mode(False):
            slab = torch.empty(self.slab_bytes, dtype=torch.uint8)
            slab.copy_(copy.slab)
        try:
            if not master.differs(slab):
                return False
        except InvalidInput:  # the file is gone or has changed: these weights are nowhere else
            pass
        self.rest_in(slab)
        return True

    # -- what the module holds

    def compute_from(self, slab: torch.Tensor, scratch: torch.Tensor | None) -> None:
        """Give the module its weights in a slab on the device; widens cast weights into the scratch there."""
        is_resident = self.copy is not None and slab is self.copy.slab
        views = self.copy.views if self.copy is not None and is_resident else self.cached_views(slab, self.layout)
        if self.cast_names:
            assert scratch is not None
            wide = iter(self.cached_views(scratch, self.wide_layout))
            usable = []
            for entry, view in zip(self.entries, views, strict=True):
                if entry.scale is not None:
                    target = next(wide)
                    upcast_into(target, stored_leaf(view), entry.scale)
                    view = target
                usable.append(view)
            views = usable
        self.put(views, BlockState.COMPUTING)
        if self.cast_names and scratch is not None:
            self.origin = slab, slab._version, scratch, scratch._version
        elif not is_resident:
            self.origin = slab, slab._version, None, 0

    def is_written(self) -> bool:
        """Whether a forward wrote to weights, or accessed their ``.data``, since the unit began to compute."""
        if self.origin is not None:
            slab, before, scratch, scratch_before = self.origin
            if slab._version != before or (scratch is not None and scratch._version != scratch_before):
                return True
        return bool(self.looked)

    def save_slab(self, slab: torch.Tensor) -> None:
        """Make the content of staging memory the new version of the weights. The caller has waited for copies."""
        if isinstance(self.master, FileStore):
            before = self.version
            with torch.inference_mode(False), torch.no_grad():
                host = torch.empty(self.slab_bytes, dtype=torch.uint8)
                host.copy_(slab)
            self.rest_in(host)
            self.past_writes += before + 1 - self.version  # the counter of a new slab starts at 0
        else:
            assert self.host_slab is not None
            with torch.no_grad():
                self.host_slab.copy_(slab)

    def rest(self) -> None:
        """Give the module what it holds between computes: its resident views, else the masters."""
        if self.copy is not None:
            self.put(self.copy.views, BlockState.RESIDENT)
        else:
            self.put(self.masters, BlockState.HOST)
        self.origin = None

    def forget_views(self) -> None:
        """Drop the cached views into staging memory and scratch: they would keep freed slabs alive."""
        self.view_cache.clear()

    def cached_views(self, slab: torch.Tensor, layout: SlabLayout) -> list[torch.Tensor]:
        # Building a block's parameters costs microseconds per tensor; every step it lies at the same places.
        if id(slab) not in self.view_cache:
            views = self.held_views(slab, wide=layout is self.wide_layout)
            self.view_cache[id(slab)] = [note_data(view, self.looked) for view in views] if self.notes_data else views
        return self.view_cache[id(slab)]

    def resting_views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return what the module holds at rest for what is in a slab."""
        views = zip(self.entries, self.held_views(slab), strict=True)
        return [self.show(entry, view.detach()) if self.shows(entry) else view for entry, view in views]

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
        self.placed, self.state = tensors, state

    def is_as_placed(self) -> bool:
        """Whether the module holds what it was given, everywhere: others may have put their own there."""
        if not self.slots:
            self.slots = [
                (entry.slots_of(module), name, index)
                for index, entry in enumerate(self.entries)
                for module, name in entry.owners
            ]
        placed = self.placed
        for slots, name, index in self.slots if placed else ():  # noqa: SIM110 - half the time of all()
            if slots.get(name) is not placed[index]:
                return False
        return True

    def own(self, index: int, owner: tuple[nn.Module, str]) -> None:
        """Give the weight to one more place of the module from now on."""
        self.entries[index].owners.append(owner)
        self.slots = []

    def disown(self, index: int, owner: tuple[nn.Module, str]) -> None:
        """Leave a place of the module alone from now on."""
        self.entries[index].owners.remove(owner)
        self.slots = []

    def known_tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield all that the module holds, or may hold, at rest, by the index of its entry."""
        held = [entry.held if entry.owners else None for entry in self.entries]
        views = self.copy.views if self.copy is not None else ()
        for tensors in (held, self.masters, self.placed, views):
            yield from ((index, tensor) for index, tensor in enumerate(tensors) if tensor is not None)

    def take_replaced(self, entry: ParameterSlot, tensor: torch.Tensor) -> None:
        """Take over a buffer that a forward replaced by another tensor; one of another shape is the module's own."""
        replaced = entry.held
        if replaced.shape == tensor.shape and replaced.dtype == tensor.dtype:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(replaced)
        else:
            entry.owners, self.slots = [], []


class Bringer:
    """Brings a weight that rests in its file into host memory, for code that uses more than its form."""

    def __init__(self, unit: WeightGroup, entry: ParameterSlot, form: torch.Tensor) -> None:
        self.unit = weakref.ref(unit)
        self.entry = entry
        self.form = torch.empty(form.shape, dtype=form.dtype, device="meta")
        self.home: torch.Tensor | None = None
        """The weight in plain memory, when its unit has ended."""

    def __call__(self) -> torch.Tensor:
        if self.home is not None:
            return self.home
        unit, entry = self.unit(), self.entry
        index = next((i for i, own in enumerate(unit.entries) if own is entry), None) if unit is not None else None
        if unit is None or index is None or not unit.placed:
            raise UnsafeState(f"{entry.spec.name!r} rests in its file and has no memory")
        if unit.placed[index].is_meta and unit.bring is not None:
            unit.bring(unit)
        held = unit.placed[index]
        if held.is_meta:
            raise UnsafeState(f"{entry.spec.name!r} rests in its file and has no memory")
        return held

    def read_on(self, device: torch.device) -> torch.Tensor:
        """Return a copy on a device; raises `InvalidInput` if the file has changed."""
        unit, entry = self.unit(), self.entry
        if unit is None or not isinstance(unit.master, FileStore) or not entry.held.is_meta:
            return self().detach().to(device, copy=True)
        (weight,) = read_weights([entry], unit.master.source, drop_pages=True)
        return weight.to(device)

    def __deepcopy__(self, memo: object) -> Bringer:
        return self
