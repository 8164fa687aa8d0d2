"""The weights of a group at rest: their weight store, what the module holds for it, and the version of both.

What rests in host memory is watched for writes, what rests encoded is shown in the form in which it computes, and what
rests in its file is read when other code uses it ([Note: data] in `watched_data.py`, [Note: encoded at rest] in
`encoded_weight.py`, [Note: absent] in `absent_weight.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn

from ...errors import InvalidInput
from ...transfer.bounce_buffers import BounceBuffers
from ...transfer.pinned_memory import HostSlab
from ...transfer.slabs import Form
from ...weights.file_origin import Origin
from ...weights.quantized_leaves import leaves_of
from ...weights.source import WeightsSource
from ...weights.storage_form import EncodedForm
from ...weights.stored_encodings import leaf_name, weight_name
from ..tensors.absent_weight import stand_for
from ..tensors.encoded_weight import EncodedLeaves, EncodedWeight
from ..tensors.parameter_slots import ParameterSlot, add_up, as_held, fill_slots, read_weights, repoint, store_weight
from ..tensors.recomputing import RestingWeight
from ..tensors.reported_device import Asked, plainly
from ..tensors.watched_data import Aliases, WatchedTensor, end_sharing, take_own_memory, watch
from .converted_leaves import ConvertedLeaf
from .kept_tensors import KeptTensors
from .read_on_use import Readable, ReadOnUse
from .slab_sharing import SlabSharing
from .weight_layout import WeightLayout
from .weight_store import FileStore, HostStore, SharedStore

__all__ = ["WeightsAtRest"]

VERSION: Any = torch.Tensor._version.__get__  # type: ignore[attr-defined]


class WeightsAtRest:
    """The weight store of a group, and a tensor for each weight that the module holds between computes.

    Args:
        encoded: by the index of each weight that rests in an encoded form, which.
        shows_wide: as in `WeightGroup`.
        asked: the function that the weights call when asked for their device.
        kept: gets the tensors that other code may keep.
    """

    def __init__(
        self,
        slots: Sequence[ParameterSlot],
        encoded: Mapping[int, type[EncodedForm]],
        layout: WeightLayout,
        kept: KeptTensors,
        *,
        shows_wide: bool,
        asked: Asked | None,
    ) -> None:
        self.slots = slots
        self.encoded = encoded
        self.layout = layout
        self.kept = kept
        self.shows_wide = shows_wide
        self.asked = asked
        self.store: HostStore | FileStore | None = None
        self.tensors: list[torch.Tensor] = []
        """What the module holds in the states `BlockState.HOST` and `BlockState.IN_FILE`; empty in `IN_PLACE`."""
        self.on_meta: dict[str, torch.Tensor] = {}
        """What the module held in `BlockState.IN_PLACE` for weights that came without memory; for taking them back."""
        self.mapped: dict[str, torch.Tensor] = {}
        """What the module held of weights that rest in their file and came in a mapping of it, which costs nothing."""
        self.originals: dict[str, torch.Tensor] = {}
        """The module's own objects for weights that are shown wide; it has them again in `BlockState.IN_PLACE`."""
        self.opened: list[EncodedLeaves] = []
        """Encoded weights of which other code got views, or which it wanted to convert."""
        self.aliases = Aliases()
        """For each weight whose ``.data`` was read, a tensor that shares a version counter with the results."""
        self.past_writes = 0
        """The version counts of objects that are no longer weights at rest."""
        self.counted: tuple[list[torch.Tensor], int, list[torch.Tensor]] = [], 0, []
        """The weights at rest, how many these were, and those of them that have a version counter."""
        self.origins: tuple[Origin | None, ...] = ()
        """What each leaf of the slab was read from, unchanged, as it was packed; None where no file has it as it is."""
        self.sharing: SlabSharing | None = None
        """Set while other components have the slab, too."""
        self.charge_host: Callable[[int], None] | None = None
        """Called with the bytes of host memory that the weights take beside the slab into which they were packed."""

    def charge_to(self, charge_host: Callable[[int], None] | None) -> None:
        """Set the function that is told of host memory beside the slab into which the weights were packed."""
        self.charge_host = charge_host

    def answer_with(self, asked: Asked) -> None:
        """Make the weights at rest call this function when they are asked for their device."""
        self.asked = asked
        for weight in self.tensors:
            if isinstance(weight, RestingWeight):
                weight.answer_with(asked)

    # -- where they rest

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
    def names_in_file(self) -> frozenset[str]:
        """The weights that rest in their file."""
        names = self.store.names if isinstance(self.store, FileStore) else []
        return frozenset(weight_name(name) for name in names if name is not None)

    @property
    def has_given_back(self) -> bool:
        """Whether the module has its own tensors again although `WeightGroup.unpack` was interrupted before its end."""
        return self.store is not None and not self.tensors

    # -- their version

    @property
    def version(self) -> int:
        """The version of the weight store: grows with each write to the slab or to an object that the module holds."""
        assert self.store is not None
        # An object that came with the module was pointed to the slab and has a counter of its own.
        tensors, number, counted = self.counted
        with plainly():
            if tensors is not self.tensors or number != len(tensors):
                counted = self.find_counted()
            own: int = sum(map(VERSION, counted))
            others: int = sum(map(VERSION, self.aliases)) if self.aliases else 0
        return self.store.version + own + others + self.past_writes

    def find_counted(self) -> list[torch.Tensor]:
        """Find the weights at rest that have a counter; needs `plainly`."""
        counted = [weight for weight in self.tensors if not weight.is_inference()]
        self.counted = self.tensors, len(self.tensors), counted
        return counted

    def renew(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace the weights at rest by objects for the same memory. Counts as a write: versions never repeat."""
        before = self.version
        replaced, self.tensors = self.tensors, list(tensors)
        self.kept.note_replaced(self.slots, replaced, self.tensors)
        self.past_writes += before + 1 - self.version

    # -- coming to rest

    def note_origins(self, origins: tuple[Origin | None, ...]) -> None:
        """Note what each leaf of the weights that are about to be packed was read from."""
        self.origins = origins

    def pack(
        self,
        slab: HostSlab,
        source: WeightsSource | None,
        progress: Callable[[int], None] | None,
        *,
        is_filled: bool = False,
        reads_mapped: bool = False,
        sharing: SlabSharing | None = None,
    ) -> None:
        """Move the weights into a slab of host memory, encoded in the form in which they rest.

        Holds the slab and, one tensor at a time, the original. The module keeps its parameter objects. What it has
        on the meta device, or in a mapping of its file, is read from the source, straight into the slab where it is not
        encoded; ``progress`` is called with the bytes packed or read since it was called last, and what it raises ends
        that.

        Args:
            is_filled: most of the weights lie in this slab already: only the others are copied.
            reads_mapped: what the source found in mappings of its files lies there still.
            sharing: others have this slab, too, and all of the weights are in it: nothing is copied.
        """
        self.store = HostStore(slab)
        if sharing is not None:
            self.share(sharing)
        to_read = []
        copied_bytes = 0
        self.remember_on_meta()
        filled = self.read_mapped(slab, source) if source is not None and reads_mapped else set()
        for index, (slot, views) in enumerate(zip(self.slots, self.layout.leaf_views(slab.data), strict=True)):
            weight, form = slot.held, self.encoded.get(index)
            copied_bytes += 0 if weight.is_meta else slot.spec.weight_bytes
            if weight.is_meta and form is not None and source is not None and source.has_encoded(slot.spec, form):
                slot.rest_as(source.stored_form(slot.spec.name, weight.shape))
                to_read += [(leaf_name(slot.spec.name, number), view) for number, view in enumerate(views)]
            elif weight.is_meta and form is not None:
                (weight,) = read_weights([slot], source, progress=add_up(progress))
                slot.rest_as(form.measure(weight, name=slot.spec.name))
            if weight.is_meta and form is None:
                to_read.append((slot.spec.name, views[0]))
            elif not weight.is_meta and sharing is None and slot.spec.name not in filled:
                store_weight(slot, views, weight.detach() if form is not None else weight, may_lie_there=is_filled)
            end_sharing(slot.held)
            resting = repoint(slot, views if form is None else views[:1])
            if self.shows(slot):
                self.originals[slot.spec.name] = resting
                resting = self.show(index, views)
                slot.hold(resting)
            self.tensors.append(watch(resting, self.asked, aliases=self.aliases))
        if progress is not None and copied_bytes:
            progress(copied_bytes)
        if to_read:
            assert source is not None
            source.read_into(to_read, progress=add_up(progress))

    def read_mapped(self, slab: HostSlab, source: WeightsSource) -> set[str]:
        """Read weights that lie in a mapping of their file into a slab, and return their names.

        That is faster than copying them, which brings page after page of the file. None where the file has changed: the
        mapping still has what it had.
        """
        targets = [
            (slot.spec.name, views[0])
            for index, (slot, views) in enumerate(zip(self.slots, self.layout.leaf_views(slab.data), strict=True))
            if slot.spec.name in source.mapped and index not in self.encoded and not slot.held.is_meta
        ]
        try:
            if targets:
                source.read_into(targets)
        except InvalidInput:
            return set()
        return {name for name, _ in targets}

    # -- in memory that other components have, too

    @property
    def is_shared(self) -> bool:
        """Whether other components have the slab, too."""
        return self.sharing is not None

    def share(self, sharing: SlabSharing) -> None:
        """Share the slab from now on: nothing is written to it."""
        assert isinstance(self.store, HostStore)
        self.store = SharedStore(self.store.memory, sharing.owner)
        self.sharing = sharing
        known = ref(self)

        def leave(tensor: WatchedTensor) -> None:
            at_rest = known()
            if at_rest is not None:
                at_rest.leave_shared()
            sharing.follow(tensor)

        self.aliases.leave_by(leave)

    def leave_shared(self) -> None:
        """Take a slab of its own, with what is in the shared one: something is about to be written. Copies the block.

        Views that other code has follow when they are written to.
        """
        sharing, self.sharing = self.sharing, None
        if sharing is None or not isinstance(self.store, SharedStore):
            return
        before = self.version
        slab = sharing.take_slab(self.store)
        self.store = HostStore(slab)
        for tensor, (own,) in zip(self.tensors, self.layout.leaf_views(slab.data), strict=True):
            sharing.point(tensor, own)
        self.past_writes += before - self.version  # nothing has changed yet

    def give_up_sharing(self) -> None:
        """Give the weights up without a slab of their own: unpacking copies them."""
        self.sharing = None

    def remember_on_meta(self) -> None:
        """Remember what the module has on the meta device, for taking it back."""
        self.on_meta = {slot.spec.name: slot.held for slot in self.slots if slot.held.is_meta}

    def rest_in_file(
        self, source: WeightsSource, bounce: BounceBuffers, reader: Readable, *, written: Collection[str]
    ) -> None:
        """Leave the weights in their file, and what it lacks where it is; the module holds shapes without memory.

        Buffers are read into memory of their own: a forward may change them.

        Args:
            reader: what reads a weight that other code uses; referred to weakly.
            written: the weights that are not what the file has any more.
        """
        names: list[str | None] = []
        kept, converted, shown = {}, {}, {}
        self.remember_on_meta()
        fill_slots([slot for slot in self.slots if slot.is_buffer], source)
        # What a file has in a storage form in which it does not rest is decoded once, and stays in RAM.
        decoded = [
            slot
            for index, slot in enumerate(self.slots)
            if source.is_encoded(slot.spec) and not source.has_encoded(slot.spec, self.encoded.get(index))
        ]
        fill_slots(decoded, source)
        names_decoded = {slot.spec.name for slot in decoded}
        stand_ins = {
            index: self.stand_in_for(slot.held)
            for index, slot in enumerate(self.slots)
            if not slot.is_buffer
            and slot.spec.name not in names_decoded
            and slot.spec.name not in written
            and source.holds(slot.spec)
        }
        for index, slot in enumerate(self.slots):
            if index in stand_ins and source.has_encoded(slot.spec, self.encoded.get(index)):
                slot.rest_as(source.stored_form(slot.spec.name, slot.held.shape))
                shown[len(names)] = Form.of(slot.held)
                names += [leaf_name(slot.spec.name, number) for number in range(self.layout.num_leaves[index])]
            elif index in stand_ins:
                if (conversion := self.conversion(index, source)) is not None:
                    converted[len(names)] = conversion
                names.append(slot.spec.name)
            else:
                assert index not in self.encoded, "rests in RAM (`Packing.leave_in_file`)"
                for leaf in leaves_of(slot.held):
                    kept[len(names)] = leaf.detach()
                    names.append(None)
        replaced = {
            index: slot.held for index, slot in enumerate(self.slots) if index in stand_ins and not slot.held.is_meta
        }
        came = {self.slots[index].spec.name: held for index, held in replaced.items()}
        try:
            for index in replaced:
                self.slots[index].hold(stand_ins[index])
            self.layout.renew()  # files have contiguous weights
            self.mapped = {name: held for name, held in came.items() if name in source.mapped}
            self.store = FileStore(self.layout.at_rest, names, kept, source, bounce, self.mapped, converted, shown)
        except BaseException:  # an interrupt: the module keeps what it had
            for index, held in replaced.items():
                self.slots[index].hold(held)
            raise
        for slot in self.slots:
            self.tensors.append(self.watch(slot, slot.held, reader))

    def conversion(self, index: int, source: WeightsSource) -> ConvertedLeaf | None:
        """Return how a weight is made of what its file has; None where the file has it as it rests."""
        slot, kind = self.slots[index], self.encoded.get(index)
        stored, wide = source.torch_dtype_of(slot.spec.name), slot.held.dtype
        if stored is None or (kind is None and stored is wide):
            return None
        leaf = wide if kind is None else self.layout.leaf_form(index).dtype
        return ConvertedLeaf(slot, stored=stored, wide=wide, leaf=leaf, kind=kind)

    @staticmethod
    def stand_in_for(held: torch.Tensor) -> torch.Tensor:
        """Return what a module holds in place of a weight: one that has no memory stands for itself."""
        if held.is_meta:
            return held
        with torch.inference_mode(False):
            shape = torch.empty(held.shape, dtype=held.dtype, device="meta")
            return nn.Parameter(shape, requires_grad=held.requires_grad)

    def rest_in(self, slab: HostSlab) -> None:
        """Make a slab of host memory the weight store in place of the file."""
        assert isinstance(self.store, FileStore)
        kept_bytes = self.store.kept_bytes
        with torch.inference_mode(False):
            views = [
                self.point_original(slot, view) for slot, view in zip(self.slots, self.views(slab.data), strict=True)
            ]
            self.store = HostStore(slab)
            self.tensors = [watch(view, self.asked, aliases=self.aliases) for view in views]
            self.mapped = {}
        if self.charge_host is not None:
            self.charge_host(self.layout.at_rest.slab_bytes - kept_bytes)

    def point_original(self, slot: ParameterSlot, view: torch.Tensor) -> torch.Tensor:
        """Return the object that the module came with, pointed to a view of a slab; the view where it came without."""
        original = self.mapped.get(slot.spec.name)
        if self.shows(slot):
            without_memory = nn.Parameter(torch.empty(view.shape, dtype=view.dtype, device="meta"), requires_grad=False)
            self.originals[slot.spec.name] = without_memory if original is None else original
            return view
        if original is None or original.is_inference() or slot.is_quantized:
            return view
        original.data = view.detach()
        return original

    def rest_as_written(self, slab: HostSlab) -> None:
        """As `rest_in`, for weights that were written to: counts as a write."""
        before = self.version
        self.rest_in(slab)
        self.past_writes += before + 1 - self.version  # the counter of a new slab starts at 0

    def give_back(self) -> None:
        """Forget what the module held: it has its own tensors again. The weight store stays for what others keep."""
        self.tensors, self.opened, self.counted = [], [], ([], 0, [])

    def forget(self) -> None:
        """Drop the weight store and what shows it; the module keeps what it holds.

        What has shared memory is watched on: it gets memory of its own when it is written to.
        """
        if self.sharing is not None:
            self.aliases.leave_by(take_own_memory)
            self.sharing = None
        self.tensors, self.store, self.originals, self.origins, self.mapped = [], None, {}, (), {}
        self.opened, self.aliases, self.counted = [], Aliases(), ([], 0, [])

    # -- what the module holds for them

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return what the module holds at rest for what is in a slab, in host memory or on a device."""
        return [
            self.show(index, own) if self.shows(slot) else as_held(iter(own), slot)
            for index, (slot, own) in enumerate(zip(self.slots, self.layout.leaf_views(slab), strict=True))
        ]

    def watch(self, slot: ParameterSlot, tensor: torch.Tensor, reader: Readable) -> torch.Tensor:
        """Watch a tensor that the module holds at rest for a weight; returns the same tensor."""
        if not tensor.is_meta:
            return watch(tensor, self.asked, aliases=self.aliases)
        read_on_use = ReadOnUse(reader, slot, tensor)
        self.kept.note_reader(read_on_use)
        return stand_for(tensor, read_on_use, self.asked)

    def shows(self, slot: ParameterSlot) -> bool:
        """Whether the module holds a wide tensor at rest for an encoded weight."""
        encoding = slot.encoding
        return encoding is not None and (self.shows_wide or encoding.factor is None)

    def show(self, index: int, leaves: Sequence[torch.Tensor]) -> EncodedWeight:
        """Return what the module holds at rest for the leaves of an encoded weight."""
        wide = self.layout.wide_form(index)
        encoded = EncodedLeaves(leaves, self.slots[index], wide, self.opened, self.kept.shown)
        weight = EncodedWeight(encoded)
        weight._is_param = True
        weight.answer_with(self.asked)
        return weight

    def held_form(self, index: int) -> Form:
        """Return what the module holds at rest for a weight of one leaf, or of an encoded form."""
        if index in self.encoded and isinstance(self.store, FileStore):
            return self.layout.wide_form(index)
        return self.layout.wide_form(index) if self.shows(self.slots[index]) else self.layout.leaf_form(index)

    def settle(self) -> None:
        """Take over what was written to encoded weights through views."""
        while self.opened:
            self.opened.pop().settle()

    # -- giving them back

    def own_leaves(self, index: int) -> list[torch.Tensor] | None:
        """Return the leaves of a weight with memory of their own, where they lie; None where that cannot be."""
        if not isinstance(self.store, HostStore) or self.slots[index].encoding is not None:
            return None
        layout, first = self.layout.at_rest, self.layout.first_leaf(index)
        leaves = [self.store.own_leaf(layout, first + number) for number in range(self.layout.num_leaves[index])]
        own = [leaf for leaf in leaves if leaf is not None]
        return own if len(own) == len(leaves) else None

    def rename(self, names: Mapping[str, str]) -> None:
        """Call weights by other names, by their former ones."""
        self.on_meta = {names.get(name, name): held for name, held in self.on_meta.items()}
        self.originals = {names.get(name, name): held for name, held in self.originals.items()}
        self.mapped = {names.get(name, name): held for name, held in self.mapped.items()}
        if isinstance(self.store, FileStore):
            self.store.rename(names)
