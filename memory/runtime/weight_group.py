"""One block's weights: the weight store, the copy on a device, and which of them the module holds."""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from ..errors import InvalidInput, UnsafeState
from ..transfer.bounce_buffers import BounceBuffers
from ..transfer.copy_stream import CopyStream
from ..transfer.pinned_memory import HostSlab, allocate_slab
from ..transfer.slabs import Form
from ..weights.form_numbers import AS_THEY_CAME, Forms
from ..weights.known_forms import encoded_form
from ..weights.quantized_leaves import leaves_of
from ..weights.source import WeightsSource
from ..weights.storage_form import AS_STORED
from .absent_weight import stand_for
from .computing_views import ComputingViews
from .encoded_weight import EncodedLeaves, EncodedWeight
from .parameter_slots import (
    ParameterSlot,
    add_up,
    as_held,
    become,
    fill_slots,
    put_in_list,
    read_weights,
    repoint,
    store_weight,
)
from .read_on_use import ReadOnUse
from .reported_device import Asked, device_of, plainly
from .resident_copy import DeviceCopy
from .watched_data import unwatch, watch
from .weight_layout import WeightLayout
from .weight_store import FileStore, HostStore

__all__ = ["BlockState", "WeightGroup"]

VERSION: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]


Origin: TypeAlias = tuple[torch.Tensor, int, torch.Tensor | None, int]
"""The slab and the scratch from which a group computes, each with its version at the start of the forward."""


class BlockState(enum.Enum):
    """What the module of a group holds, registered as its parameters and buffers, and what that costs.

    Between forwards a group is in one of the first four. In a forward a block goes to `COMPUTING` and back, unless the
    module already holds tensors that compute: in a quiet pass ([Note: quiet passes] in `forward_blocks.py`), and in
    place on the CPU. Groups outside of blocks keep their state.
    """

    IN_PLACE = "in place"
    """The module's own tensors, in the memory that they came in, from which the CPU computes; costs nothing more.
    The state before packing and after release, and of groups that compute on the CPU as they are stored."""
    HOST = "host"
    """Views into a slab of host memory (`WeightGroup.resting`): costs the slab in RAM, page-locked or not, and no
    device bytes. A streamed block is here whenever it does not compute."""
    IN_FILE = "in file"
    """Shapes without memory; the bytes are in the file. Costs neither RAM nor device bytes; each use reads them."""
    RESIDENT = "resident"
    """Views into the group's own slab on the device, encoded weights as they rest; costs the slab there, beside the
    weight store."""
    COMPUTING = "computing"
    """Views that its forward can use: the resident slab, staging memory, or on the CPU the host slab; encoded weights
    in the scratch. Costs what the share has for that anyway; the module must not be read from outside."""


class WeightGroup:
    """A block, or the fixed tensors of a device: moves as one slab and is in one `BlockState`.

    Args:
        forms: of the weights that rest in an encoded form.
        beside: the group whose block these weights were added to.
        shows_wide: whether the module holds those as wide tensors at rest (`EncodedWeight`); a host that reads and
            writes single weights by itself gets the leaf, where a factor makes that the weight.
    """

    def __init__(
        self,
        name: str,
        slots: Sequence[ParameterSlot],
        *,
        forms: Forms = AS_THEY_CAME,
        shows_wide: bool = False,
        beside: WeightGroup | None = None,
    ) -> None:
        self.name = name
        self.slots = list(slots)
        self.encoded = {
            index: encoded_form(forms[slot.spec.name]) for index, slot in enumerate(slots) if slot.spec.name in forms
        }
        """The encoded forms in which weights rest, by the index of the weight."""
        self.shows_wide = shows_wide
        self.asked: Asked | None = None if beside is None else beside.asked
        """The function that its weights at rest call when asked for their device."""
        self.opened: list[EncodedLeaves] = []
        """Encoded weights of which other code got views, or which it wanted to convert."""
        self.originals: dict[str, torch.Tensor] = {}
        """The module's own objects for weights that are shown wide; it has them again in `BlockState.IN_PLACE`."""
        self.wide_dtypes = {slot.spec.name: slot.held.dtype for slot in slots}
        self.layout = WeightLayout(self.slots, self.encoded)
        self.resting: list[torch.Tensor] = []
        """What the module holds in the states `BlockState.HOST` and `BlockState.IN_FILE`; empty in `IN_PLACE`."""
        self.charge_host: Callable[[int], None] | None = None
        """Called with the bytes of host memory that the weights take beside the slab into which they were packed."""
        self.bring: Callable[[WeightGroup], None] | None = None
        """Called to run `read_into_memory` while nothing computes; None while it is not attached."""
        self.store: HostStore | FileStore | None = None
        self.copy: DeviceCopy | None = None
        """The copy on the device, while the group is resident."""
        self.aliases: list[torch.Tensor] = []
        """For each weight at rest whose ``.data`` was read, a tensor that shares a version counter with the results."""
        self.past_writes = 0
        """The version counts of objects that are no longer weights at rest."""
        self.shown: weakref.WeakSet[EncodedLeaves] = weakref.WeakSet()
        """The leaves behind the wide tensors that the module holds, or held, for encoded weights."""
        self.readers_on_use: weakref.WeakSet[ReadOnUse] = weakref.WeakSet()
        """The readers that weights without memory, and their ``.data``, call."""
        self.given: list[tuple[ParameterSlot, weakref.ref[torch.Tensor]]] = []
        """Tensors that the module held in an earlier state and other code keeps; they get plain memory at the end."""
        self.on_meta: dict[str, torch.Tensor] = {}
        """What the module held in `BlockState.IN_PLACE` for weights that came without memory; for taking them back."""
        self.state = BlockState.IN_PLACE
        self.placed: Sequence[torch.Tensor] = []
        """What the module was given last, in any state: one of `resting`, `copy.views` and those of `views`."""
        self.places: list[tuple[dict[str, torch.Tensor], str, int]] = []
        """The places of the slots: a module's dict, the name in it, and the slot's index; empty until first used."""
        for slot in self.slots:
            slot.clear_with(self.places)
        self.has_buffers = any(slot.is_buffer for slot in self.slots)
        self.has_lists = any(slot.lists for slot in self.slots)
        self.counted: tuple[list[torch.Tensor], int, list[torch.Tensor]] = [], 0, []
        """The weights at rest, how many these were, and those of them that have a version counter."""
        notes_data = beside is not None and beside.views.notes_data
        self.views: ComputingViews = ComputingViews(self.slots, self.encoded, self.layout, notes_data=notes_data)
        """What the module holds in the state `BlockState.COMPUTING`."""
        self.origin: Origin | None = None
        """The memory from which it computes, if writes to that would be lost; else None."""

    def let_read(self, bring: Callable[[WeightGroup], None] | None) -> None:
        """Set the function that runs `read_into_memory` while nothing computes; None: nothing is read any more."""
        self.bring = bring

    def charge_to(self, charge_host: Callable[[int], None] | None) -> None:
        """Set the function that is told of host memory beside the slab into which the weights were packed."""
        self.charge_host = charge_host

    def take_strides(self, index: int, given: torch.Tensor) -> bool:
        """Lay a plain weight out as a tensor that takes its place; returns whether that has other strides.

        The bytes are as many and begin where they did. The caller renews what the module holds and the cached views.
        Encoded weights and those in files keep their strides.
        """
        slot, form = self.slots[index], Form.of(given)
        if self.host_slab is None or slot.form is not AS_STORED or slot.is_buffer:
            return False
        own = self.layout.leaf_form(index)
        if form.strides == own.strides or form.shape != own.shape:
            return False
        slabs = [self.host_slab, *([self.copy.slab] if self.copy is not None else [])]
        with torch.inference_mode(False), torch.no_grad():
            self.layout.take_strides(index, form.strides, slabs)
        return True

    @property
    def slab_bytes(self) -> int:
        return self.layout.at_rest.slab_bytes

    @property
    def host_slab(self) -> torch.Tensor | None:
        """The weight store's slab of host memory; None if it is a file or does not exist."""
        return self.store.slab if isinstance(self.store, HostStore) else None

    @property
    def blocks_host(self) -> bool:
        """Whether a copy to a device holds the host until it is done."""
        assert self.store is not None
        return self.store.blocks_host

    @property
    def version(self) -> int:
        """The version of the weight store: grows with each write to the slab or to an object that the module holds."""
        assert self.store is not None
        # An object that came with the module was pointed to the slab and has a counter of its own.
        resting, number, counted = self.counted
        with plainly():
            if resting is not self.resting or number != len(resting):
                counted = self.find_counted()
            own: int = sum(map(VERSION, counted))
            others: int = sum(map(VERSION, self.aliases)) if self.aliases else 0
        return self.store.version + own + others + self.past_writes

    def find_counted(self) -> list[torch.Tensor]:
        """Find the weights at rest that have a counter; needs `plainly`."""
        counted = [weight for weight in self.resting if not weight.is_inference()]
        self.counted = self.resting, len(self.resting), counted
        return counted

    def renew(self, resting: Sequence[torch.Tensor]) -> None:
        """Replace the weights at rest by objects for the same memory. Counts as a write: versions never repeat."""
        before = self.version
        replaced, self.resting = self.resting, list(resting)
        self.note_given(replaced, self.resting)
        self.past_writes += before + 1 - self.version

    @property
    def is_whole(self) -> bool:
        """Whether the module has its own tensors again although `unpack` was interrupted before it ended."""
        return self.store is not None and not self.resting

    def note_given(self, before: Sequence[torch.Tensor], now: Sequence[torch.Tensor]) -> None:
        """Track tensors that the module held for weights at rest and that other code still references."""
        kept = [
            (slot, weakref.ref(old)) for slot, old, new in zip(self.slots, before, now, strict=False) if old is not new
        ]
        self.given = [(slot, known) for slot, known in (*self.given, *kept) if known() is not None]

    # -- the weight store in host memory

    def measure(self) -> None:
        """Find the forms of the weights in memory that are to be encoded; one pass over them, changes nothing.

        Raises:
            InvalidInput: a weight holds NaN or infinity.
        """
        for index, form in self.encoded.items():
            slot = self.slots[index]
            if not slot.held.is_meta:
                slot.rest_as(form.measure(slot.held, name=slot.spec.name))

    def pack(
        self, slab: HostSlab, source: WeightsSource | None = None, progress: Callable[[int], None] | None = None
    ) -> None:
        """Move the weights into a slab of host memory, encoded in the form in which they rest.

        Holds the slab and, one tensor at a time, the original. The module keeps its parameter objects. What it has
        on the meta device is read from the source, straight into the slab where it is not encoded; ``progress`` is
        called with the bytes packed or read since it was called last, and what it raises ends that.
        """
        self.store = HostStore(slab)
        to_read = []
        copied_bytes = 0
        self.remember_on_meta()
        for index, (slot, views) in enumerate(zip(self.slots, self.layout.leaf_views(slab.data), strict=True)):
            weight, form = slot.held, self.encoded.get(index)
            copied_bytes += 0 if weight.is_meta else slot.spec.weight_bytes
            if weight.is_meta and form is not None:
                (weight,) = read_weights([slot], source, progress=add_up(progress))
                slot.rest_as(form.measure(weight, name=slot.spec.name))
            if weight.is_meta:
                to_read.append((slot.spec.name, views[0]))
            else:
                store_weight(slot, views, weight.detach() if form is not None else weight)
            store = repoint(slot, views if form is None else views[:1])
            if self.shows(slot):
                self.originals[slot.spec.name] = store
                store = self.show(slot, views)
                slot.hold(store)
            self.resting.append(watch(store, self.asked, aliases=self.aliases))
        if progress is not None and copied_bytes:
            progress(copied_bytes)
        if to_read:
            assert source is not None
            source.read_into(to_read, progress=add_up(progress))
        self.placed, self.state = list(self.resting), BlockState.HOST

    def answer_with(self, asked: Asked) -> None:
        """Make the weights at rest call this function when they are asked for their device."""
        self.asked = asked
        for weight in self.resting:
            if "asked" in vars(weight):
                vars(weight)["asked"] = asked

    def shows(self, slot: ParameterSlot) -> bool:
        """Whether the module holds a wide tensor at rest for an encoded weight."""
        encoding = slot.encoding
        return encoding is not None and (self.shows_wide or encoding.factor is None)

    def show(self, slot: ParameterSlot, leaves: Sequence[torch.Tensor]) -> EncodedWeight:
        """Return what the module holds at rest for the leaves of an encoded weight."""
        encoded = EncodedLeaves(leaves, slot, self.layout.wide_form(self.place_of(slot)), self.opened)
        self.shown.add(encoded)
        weight = EncodedWeight(encoded)
        weight._is_param = True
        vars(weight)["asked"] = self.asked
        return weight

    def held_form(self, index: int) -> Form:
        """Return what the module holds at rest for a weight of one leaf, or of an encoded form."""
        slot = self.slots[index]
        return self.layout.wide_form(index) if self.shows(slot) else self.layout.leaf_form(index)

    def settle(self) -> torch.dtype | None:
        """Take over what was written to encoded weights through views; returns what one was to be converted to."""
        dtype = None
        while self.opened:
            encoded = self.opened.pop()
            dtype, encoded.asked_dtype = encoded.asked_dtype or dtype, None
            encoded.settle()
        return dtype

    def remember_on_meta(self) -> None:
        self.on_meta = {slot.spec.name: slot.held for slot in self.slots if slot.held.is_meta}

    def fill(self, source: WeightsSource | None, progress: Callable[[int], None] | None = None) -> None:
        """Read weights that the module has on the meta device into memory of their own. ``progress`` as in `pack`."""
        self.remember_on_meta()
        fill_slots(self.slots, source, add_up(progress))

    def rest_in_file(self, source: WeightsSource, bounce: BounceBuffers, *, written: Collection[str] = ()) -> None:
        """Leave the weights in their file, and what it lacks where it is; the module holds shapes without memory.

        Buffers are read into memory of their own: a forward may change them.

        Args:
            written: the weights that are not what the file has any more.
        """
        names: list[str | None] = []
        kept = {}
        self.remember_on_meta()
        fill_slots([slot for slot in self.slots if slot.is_buffer], source)
        for slot in self.slots:
            if not slot.is_buffer and slot.spec.name not in written and source.holds(slot.spec):
                names.append(slot.spec.name)
                if not slot.held.is_meta:
                    shape = torch.empty(slot.held.shape, dtype=slot.held.dtype, device="meta")
                    slot.hold(as_held(iter([shape]), slot))
            else:
                for leaf in leaves_of(slot.held):
                    kept[len(names)] = leaf.detach()
                    names.append(None)
            self.resting.append(self.watch(slot, slot.held))
        self.layout.renew()  # files have contiguous weights
        self.store = FileStore(self.layout.at_rest, names, kept, source, bounce)
        self.placed, self.state = list(self.resting), BlockState.IN_FILE

    def watch(self, slot: ParameterSlot, store: torch.Tensor) -> torch.Tensor:
        """Watch the tensor that the module holds at rest for a weight; returns the same tensor."""
        if not store.is_meta:
            return watch(store, self.asked, aliases=self.aliases)
        reader = ReadOnUse(self, slot, store)
        self.readers_on_use.add(reader)
        return stand_for(store, reader, self.asked)

    def read_into_memory(self) -> None:
        """Read weights that rest in their file into host memory, where they stay. No pass or copy may be under way.

        Raises:
            InvalidInput: the file has changed. The group is as before.
        """
        assert isinstance(self.store, FileStore)
        with torch.inference_mode(False), torch.no_grad():
            slab = allocate_slab(self.slab_bytes)
            self.store.read_whole(slab.data)
        self.rest_in(slab)
        with self.without_gone_places():  # a weight may be asked for while other code moves it to another name
            self.rest()

    @contextmanager
    def without_gone_places(self) -> Iterator[None]:
        """Leave places of the module alone meanwhile that hold nothing."""
        before = [(slot, slot.owners) for slot in self.slots]
        for slot, owners in before:
            slot.set_owners((part, name) for part, name in owners if slot.tensors_of(part).get(name) is not None)
        try:
            yield
        finally:
            for slot, owners in before:
                slot.set_owners(owners)

    def rest_in(self, slab: HostSlab) -> None:
        """Make a slab of host memory the weight store in place of the file."""
        assert isinstance(self.store, FileStore)
        kept_bytes = self.store.kept_bytes
        with torch.inference_mode(False):
            views = self.resting_views(slab.data)
            self.store = HostStore(slab)
            self.resting = [watch(view, self.asked, aliases=self.aliases) for view in views]
        if self.charge_host is not None:
            self.charge_host(self.slab_bytes - kept_bytes)

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
        return next(index for index, slot in enumerate(self.slots) if slot.spec.name == name)

    def overwrite(self, name: str, weight: torch.Tensor) -> None:
        """Make a weight (wide or quantized alike, on any device) the new version where the group rests.

        Encoded weights are measured anew. A host does this for patched weights; what is written to the
        device is saved when the group leaves it. The caller ended every pass and copy.
        """
        index = self.index_of(name)
        slot = self.slots[index]
        slab = self.resting_slab
        assert slab is not None
        with torch.no_grad():
            if index in self.encoded:
                slot.rest_as(self.encoded[index].measure(weight, name=name))
            store_weight(slot, self.layout.leaf_views(slab)[index], weight)

    def wide(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a copy of a weight on a device in the form in which it computes."""
        self.settle()
        index = self.index_of(name)
        slot, leaves = self.slots[index], self.layout.leaf_views(self.newest_slab)[index]
        with torch.no_grad(), torch.inference_mode(False):
            if slot.encoding is None:
                return slot.form.assemble(iter([leaf.to(device, copy=True) for leaf in leaves]))
            copy = self.layout.wide_form(index).allocate(device)
            slot.encoding.decode_into(copy, [leaf.to(device) for leaf in leaves])
            return copy

    def place_of(self, slot: ParameterSlot) -> int:
        return next(index for index, own in enumerate(self.slots) if own is slot)

    # -- weights that rest in their file, used by other code (`ReadOnUse`)

    def bring_weight(self, slot: ParameterSlot) -> torch.Tensor:
        """Read the group into host memory, and return what the module then holds for a weight.

        Raises:
            UnsafeState: it computes now, or is no longer attached.
            InvalidInput: the file has changed.
        """
        if self.placed:
            index = self.place_of(slot)
            if self.placed[index].is_meta and self.bring is not None:
                self.bring(self)
            if not self.placed[index].is_meta:
                return self.placed[index]
        raise UnsafeState(f"{slot.spec.name!r} rests in its file and has no memory")

    def read_copy(self, slot: ParameterSlot, device: torch.device) -> torch.Tensor | None:
        """Return a copy on a device of a weight that rests in its file, None if it does not.

        Raises `InvalidInput` if the file has changed.
        """
        if not isinstance(self.store, FileStore) or not slot.held.is_meta:
            return None
        (weight,) = read_weights([slot], self.store.source, drop_pages=True)
        return weight.to(device)

    # -- names

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename weights, by their former names: their module has other names for them now."""
        for slot in self.slots:
            slot.describe(replace(slot.spec, name=names.get(slot.spec.name, slot.spec.name)))
        self.wide_dtypes = {names.get(name, name): dtype for name, dtype in self.wide_dtypes.items()}
        self.on_meta = {names.get(name, name): held for name, held in self.on_meta.items()}
        self.originals = {names.get(name, name): held for name, held in self.originals.items()}
        if isinstance(self.store, FileStore):
            self.store.rename(names)

    def keeps_apart(self, slot: ParameterSlot) -> bool:
        """Whether a weight rests in another form, or at another place, than the one in which it computes."""
        return slot.encoding is not None or slot.spec.name in self.names_in_file

    @property
    def names_in_file(self) -> frozenset[str]:
        """The weights that rest in their file."""
        names = self.store.names if isinstance(self.store, FileStore) else []
        return frozenset(name for name in names if name is not None)

    def unpack(self, on_meta: Collection[str] = ()) -> None:
        """Give the module ordinary tensors again and drop the slab; encoded weights come back decoded.

        Weights that rest in their file are read from it, in one go.

        Args:
            on_meta: the weights that the module gets without memory.

        Raises:
            InvalidInput: a file is not what it was.
        """
        names = self.names_in_file.difference(on_meta)
        to_read = [slot for slot in self.slots if slot.spec.name in names and slot.owners]
        source = self.store.source if isinstance(self.store, FileStore) else None
        stored = {
            slot.spec.name: weight
            for slot, weight in zip(to_read, read_weights(to_read, source, drop_pages=True), strict=True)
        }
        resting = itertools.chain(self.resting, itertools.repeat(None))  # fewer where packing failed half way
        for index, (slot, store) in enumerate(zip(self.slots, resting, strict=False)):
            name = slot.spec.name
            if store is not None:
                self.given.append((slot, weakref.ref(store)))
            if name in on_meta:
                slot.hold(unwatch(self.on_meta.get(name, slot.held)))
            elif not slot.owners:  # what the module has there is its own
                continue
            elif name in stored:
                repoint(slot, [stored[name]], lasting=True)
            elif store is not None:
                own = self.own_leaves(index) if self.host_slab is not None else []
                slot.hold(self.originals.get(name, unwatch(store)))
                if own:
                    repoint(slot, own, lasting=True)
        store = None
        self.resting, self.placed, self.opened = [], [], []
        self.counted = [], 0, []
        self.forget_views()
        self.move_kept_to_host(source)
        self.forget_resting()
        for index in self.encoded:  # only now: interrupted before, all of it is done again
            self.slots[index].rest_as(AS_STORED)

    def own_leaves(self, index: int) -> list[torch.Tensor]:
        """Return what makes a weight in memory of its own: where it lies, if that can be, else a copy."""
        assert isinstance(self.store, HostStore)
        layout, first = self.layout.at_rest, self.layout.first_leaf(index)
        if self.slots[index].encoding is None:
            leaves = [self.store.own_leaf(layout, first + number) for number in range(self.layout.num_leaves[index])]
            if all(leaf is not None for leaf in leaves):
                return [leaf for leaf in leaves if leaf is not None]
        return leaves_of(self.wide(self.slots[index].spec.name, torch.device("cpu")))

    def move_kept_to_host(self, source: WeightsSource | None) -> None:
        """Make tensors that the module held, and other code keeps, plain ones in host memory.

        Each shares the memory of what the module holds for the weight now; where it holds none, or one without
        memory, the weight is read into memory of its own.
        """
        homes: dict[int, torch.Tensor] = {}

        def find_home(slot: ParameterSlot, form: torch.Tensor) -> torch.Tensor:
            if id(slot) not in homes:
                held = slot.held if slot.owners else None
                if held is not None and not held.is_meta and device_of(held).type == "cpu":
                    homes[id(slot)] = held
                elif self.host_slab is not None:
                    homes[id(slot)] = self.wide(slot.spec.name, torch.device("cpu"))
                elif source is not None and slot.spec.name in self.names_in_file:
                    with torch.inference_mode(False):
                        homes[id(slot)] = home = torch.empty(form.shape, dtype=form.dtype)
                    source.read_into([(slot.spec.name, home)], drop_pages=True)
                else:
                    homes[id(slot)] = form.detach().to("cpu", copy=True)
            return homes[id(slot)]

        for encoded in list(self.shown):
            encoded.end(find_home(encoded.slot, encoded.leaves[0]))
        kept = [(slot, tensor) for slot, known in self.given if (tensor := known()) is not None]
        for reader in list(self.readers_on_use):
            if reader.home is None:
                reader.settle_in(find_home(reader.slot, reader.form))
        self.given = []  # what has a weak reference cannot be swapped
        for slot, tensor in kept:
            if not slot.owners or tensor is not slot.held:
                become(tensor, find_home(slot, tensor))

    def discard(self) -> None:
        """Drop the weights, and give the module shapes without memory: it is no longer used. Reads nothing."""
        for slot in self.slots:
            slot.rest_as(AS_STORED)
            unwatch(slot.held)
            repoint(slot, [torch.empty(slot.held.shape, dtype=slot.held.dtype, device="meta")])
        self.forget_resting()

    def forget_resting(self) -> None:
        self.resting, self.store, self.placed, self.originals = [], None, [], {}
        self.state = BlockState.IN_PLACE
        self.forget_views()
        self.opened, self.aliases, self.counted = [], [], ([], 0, [])

    # -- the copy on a device

    def load(self, copies: CopyStream) -> None:
        """Become resident: allocate a slab on the device and queue its copy.

        Raises:
            torch.OutOfMemoryError: nothing changed.
        """
        assert self.store is not None and self.copy is None
        self.rest()  # a buffer that was replaced meanwhile goes to the weight store, before that is copied
        slab = copies.allocate(self.slab_bytes)
        try:
            self.store.copy_to(slab, 0, copies)
            self.copy = DeviceCopy(slab, self.slots, self.resting_views(slab), buffers_begin=self.layout.buffers_begin)
        finally:
            if self.copy is None:
                copies.drain()  # the slab is freed now, and its copy may be under way
        self.put(self.copy.views, BlockState.RESIDENT)

    def drop(self) -> int:
        """Leave the device without copying back; returns the bytes freed. The caller drained the copy stream."""
        assert self.copy is not None
        self.rest()
        self.save_changes(self.copy)
        self.put(self.resting, self.resting_state)
        given = [(slot, weakref.ref(view)) for slot, view in zip(self.slots, self.copy.views, strict=True)]
        self.copy = None
        self.forget_views()
        self.given = [(slot, known) for slot, known in (*self.given, *given) if known() is not None]
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
            elif isinstance(self.store, FileStore) and not (is_written and self.leave_file(self.store, copy)):
                views = self.layout.at_rest.views(copy.slab)
                for place, leaf in self.store.kept.items():
                    with torch.inference_mode(leaf.is_inference()):  # one made there is written to there only
                        leaf.copy_(views[place])

    def leave_file(self, store: FileStore, copy: DeviceCopy) -> bool:
        """Make the weights on the device the weight store if they differ from the file; returns whether they do."""
        with torch.inference_mode(False):
            slab = allocate_slab(self.slab_bytes)
            slab.data.copy_(copy.slab)
        try:
            if not store.differs(slab.data):
                return False
        except InvalidInput:  # the file is gone or has changed: these weights are nowhere else
            pass
        self.rest_in(slab)
        return True

    # -- what the module holds

    def compute_from(self, slab: torch.Tensor, scratch: torch.Tensor | None) -> None:
        """Give the module its weights in a slab on the device; decodes encoded weights into the scratch there."""
        is_resident = self.copy is not None and slab is self.copy.slab
        if self.encoded:
            assert scratch is not None
            resident = self.copy.views if self.copy is not None and is_resident else None
            views = self.views.decoded(slab, scratch, resident)
        else:
            views = self.copy.views if self.copy is not None and is_resident else self.views.of(slab)
        self.put(views, BlockState.COMPUTING)
        if self.encoded and scratch is not None:
            self.origin = slab, slab._version, scratch, scratch._version
        elif not is_resident:
            self.origin = slab, slab._version, None, 0

    def is_written(self) -> bool:
        """Whether a forward wrote to weights, or accessed their ``.data``, since the group began to compute."""
        if self.origin is not None:
            slab, before, scratch, scratch_before = self.origin
            if slab._version != before or (scratch is not None and scratch._version != scratch_before):
                return True
        return bool(self.views.looked)

    def save_slab(self, slab: torch.Tensor) -> None:
        """Make the content of staging memory the new version of the weights. The caller has waited for copies."""
        if isinstance(self.store, FileStore):
            before = self.version
            with torch.inference_mode(False), torch.no_grad():
                host = allocate_slab(self.slab_bytes)
                host.data.copy_(slab)
            self.rest_in(host)
            self.past_writes += before + 1 - self.version  # the counter of a new slab starts at 0
        else:
            assert self.host_slab is not None
            with torch.no_grad():
                self.host_slab.copy_(slab)

    @property
    def resting_state(self) -> BlockState:
        """The state of a group that neither computes nor has a copy on a device."""
        if self.store is None:
            return BlockState.IN_PLACE
        return BlockState.IN_FILE if isinstance(self.store, FileStore) else BlockState.HOST

    def rest(self) -> None:
        """Give the module what it holds between computes: its resident views, else the weights at rest."""
        if self.copy is not None:
            self.put(self.copy.views, BlockState.RESIDENT)
        elif self.store is not None:  # else it computes in place, in the memory it came in
            self.put(self.resting, self.resting_state)
        self.origin = None

    def forget_views(self) -> None:
        """Drop the cached views into staging memory and scratch: they would keep freed slabs alive."""
        self.views.forget()

    def resting_views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return what the module holds at rest for what is in a slab."""
        views = zip(self.slots, self.layout.leaf_views(slab), strict=True)
        return [self.show(slot, own) if self.shows(slot) else as_held(iter(own), slot) for slot, own in views]

    def put(self, tensors: Sequence[torch.Tensor], state: BlockState) -> None:
        """Give the module a tensor for each slot; native dict entries, no attribute hooks."""
        if self.has_buffers and self.placed:
            for slot, placed, tensor in zip(self.slots, self.placed, tensors, strict=True):
                if slot.is_buffer and slot.owners and slot.held is not placed:
                    self.take_replaced(slot, tensor)
        for table, name, index in self.places or self.find_places():
            table[name] = tensors[index]
        for slot, tensor in zip(self.slots, tensors, strict=True) if self.has_lists else ():
            for place in slot.lists:
                put_in_list(place, tensor)
        self.placed, self.state = tensors, state

    def find_places(self) -> list[tuple[dict[str, torch.Tensor], str, int]]:
        """Return the places of the slots in the dicts of their modules, with the number of the slot."""
        self.places[:] = [
            (slot.tensors_of(module), name, index)
            for index, slot in enumerate(self.slots)
            for module, name in slot.owners
        ]
        return self.places

    def is_as_placed(self) -> bool:
        """Whether the module holds what it was given, everywhere: others may have put their own there."""
        placed = self.placed
        if placed:
            for table, name, index in self.places or self.find_places():
                if table.get(name) is not placed[index]:
                    return False
        return True

    def own(self, index: int, owner: tuple[nn.Module, str]) -> None:
        """Give the weight to one more place of the module from now on."""
        slot = self.slots[index]
        slot.set_owners((*slot.owners, owner))

    def disown(self, index: int, owner: tuple[nn.Module, str]) -> None:
        """Leave a place of the module alone from now on."""
        slot = self.slots[index]
        slot.set_owners(place for place in slot.owners if place != owner)

    def known_tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield all that the module holds, or may hold, at rest, by the index of its weight."""
        yield from ((index, slot.held) for index, slot in enumerate(self.slots) if slot.owners)
        yield from self.own_tensors()

    def own_tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what the group has given the module, or may give it, at rest, by the index of the weight."""
        views = self.copy.views if self.copy is not None else ()
        for tensors in (self.resting, self.placed, views):
            yield from enumerate(tensors)

    def views_on_device(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what the group has given the module from its copy, also earlier, by the index of the weight."""
        if self.copy is not None:
            yield from enumerate(self.copy.views)
            for slot, known in self.given:
                view = known()
                if view is not None and view.device == self.copy.slab.device:
                    yield self.place_of(slot), view

    def count_references(self, tensor: torch.Tensor) -> int:
        """Return in how many places of its own lists the group has a tensor that the module holds, or held."""
        own = [self.resting, self.placed, self.counted[-1], *self.views.cache.values()]
        own += [self.copy.views, self.copy.buffers] if self.copy is not None else []
        lists = {id(tensors): tensors for tensors in own}.values()  # some are the same
        return sum(each is tensor for tensors in lists for each in tensors)

    def take_replaced(self, slot: ParameterSlot, tensor: torch.Tensor) -> None:
        """Take over a buffer that a forward replaced by another tensor; one of another shape is the module's own."""
        replaced = slot.held
        if replaced.shape == tensor.shape and replaced.dtype == tensor.dtype:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(replaced)
        else:
            slot.set_owners(())
