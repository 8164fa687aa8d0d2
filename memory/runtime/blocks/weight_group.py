"""The weights of one block: moves them between where they rest, their copy on a device, and the module."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from ...errors import InvalidInput, UnsafeState
from ...transfer.bounce_buffers import BounceBuffers
from ...transfer.copy_stream import CopyStream
from ...transfer.pinned_memory import HostSlab, allocate_slab
from ...transfer.slabs import Form
from ...weights.form_numbers import AS_THEY_CAME, Forms
from ...weights.known_forms import encoded_form
from ...weights.source import WeightsSource
from ...weights.storage_form import AS_STORED, StorageForm
from ..tensors.parameter_slots import ParameterSlot, add_up, fill_slots, read_weights, store_weight
from .block_state import BlockState
from .computing_views import ComputingViews
from .kept_tensors import KeptTensors
from .placed_tensors import PlacedTensors
from .resident_copy import ResidentCopy
from .slab_sharing import SlabSharing
from .stored_copy import StoredCopy
from .weight_layout import WeightLayout
from .weight_store import FileStore
from .weights_at_rest import WeightsAtRest

__all__ = ["WeightGroup"]

Origin: TypeAlias = tuple[torch.Tensor, int, torch.Tensor | None, int]
"""The slab and the scratch from which a group computes, each with its version at the start of the forward."""


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
        self.wide_dtypes = {slot.spec.name: slot.held.dtype for slot in slots}
        """The dtypes in which weights compute, by name."""
        self.layout = WeightLayout(self.slots, self.encoded)
        self.kept = KeptTensors()
        """Tensors that the module held in an earlier state, as far as other code keeps them."""
        self.at_rest: WeightsAtRest = WeightsAtRest(
            self.slots,
            self.encoded,
            self.layout,
            self.kept,
            shows_wide=shows_wide,
            asked=None if beside is None else beside.at_rest.asked,
        )
        """The weight store, and what the module holds for it between computes."""
        self.copy: ResidentCopy | None = None
        """The copy on the device, while the group is resident."""
        self.stored: StoredCopy | None = None
        """The copy on another device that it streams from; None: it streams from its weight store."""
        notes_data = beside is not None and beside.views.notes_data
        self.views: ComputingViews = ComputingViews(self.slots, self.encoded, self.layout, notes_data=notes_data)
        """What the module holds in the state `BlockState.COMPUTING`."""
        self.origin: Origin | None = None
        """The memory from which it computes, if writes to that would be lost; else None."""
        self.placed = PlacedTensors(self.slots)
        """What the module was given last: `at_rest.tensors`, `copy.views` or those of `views`."""
        self.read_idle: Callable[[WeightGroup], None] | None = None
        """Reads the group into memory (`group_reading.py`) while nothing computes; None while it is not attached."""
        self.note_written: Callable[[int], None] | None = None
        """Told of the bytes when a group that was in its file stays in host memory, because it was written to."""

    def read_with(
        self, read_idle: Callable[[WeightGroup], None] | None, note_written: Callable[[int], None] | None = None
    ) -> None:
        """Set what reads the group into memory while nothing computes, and what is told that it stays there.

        None: it is read no more.
        """
        self.read_idle, self.note_written = read_idle, note_written

    @property
    def state(self) -> BlockState:
        return self.placed.state

    @property
    def slab_bytes(self) -> int:
        return self.layout.at_rest.slab_bytes

    @property
    def host_slab(self) -> torch.Tensor | None:
        """The weight store's slab of host memory; None if it is a file or does not exist."""
        return self.at_rest.host_slab

    @property
    def newest_slab(self) -> torch.Tensor:
        """The slab with the latest values: the one on the device if it was written to there, or rests in its file."""
        slab = self.host_slab
        if self.copy is not None and (slab is None or self.copy.is_written):
            slab = self.copy.slab
        assert slab is not None
        return slab

    @property
    def resting_slab(self) -> torch.Tensor | None:
        """The slab that the module's weights are views into between computes; None where they rest in their file."""
        return self.copy.slab if self.copy is not None else self.host_slab

    def index_of(self, name: str) -> int:
        return next(index for index, slot in enumerate(self.slots) if slot.spec.name == name)

    def decodes_plainly(self, name: str) -> bool:
        """Whether a weight is decoded before it computes, into memory in which its elements lie in their order."""
        index = self.index_of(name)
        if index not in self.encoded:
            return False
        form = self.layout.wide_form(index)
        return torch.empty_strided(form.shape, form.strides, device="meta").is_contiguous()

    def place_of(self, slot: ParameterSlot) -> int:
        return next(index for index, own in enumerate(self.slots) if own is slot)

    # -- packed in host memory, or left in the file

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
        self,
        slab: HostSlab,
        source: WeightsSource | None = None,
        progress: Callable[[int], None] | None = None,
        *,
        is_filled: bool = False,
        reads_mapped: bool = False,
        sharing: SlabSharing | None = None,
    ) -> None:
        """Move the weights into a slab of host memory, as `WeightsAtRest.pack`."""
        self.at_rest.pack(slab, source, progress, is_filled=is_filled, reads_mapped=reads_mapped, sharing=sharing)
        self.placed.note(self.at_rest.tensors, BlockState.HOST)

    def rest_in_file(self, source: WeightsSource, bounce: BounceBuffers, *, written: Collection[str] = ()) -> None:
        """Leave the weights in their file, as `WeightsAtRest.rest_in_file`."""
        self.at_rest.rest_in_file(source, bounce, self, written=written)
        self.placed.note(self.at_rest.tensors, BlockState.IN_FILE)

    def fill(
        self,
        source: WeightsSource | None,
        mapped: Mapping[str, torch.Tensor],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Give memory to weights that the module has on the meta device; ``progress`` as in `pack`.

        Args:
            mapped: those by name that lie in mappings of their files. Their pages are brought into RAM, where all
                processes share them; the others are read into memory of their own.
        """
        self.at_rest.remember_on_meta()
        shared = [slot.spec for slot in self.slots if slot.held.is_meta and slot.spec.name in mapped]
        fill_slots(self.slots, source, add_up(progress), mapped=mapped)
        for spec in shared:
            assert source is not None
            if not source.are_replaced([spec.name]):  # else it was in RAM before
                collections.deque(source.warm([spec.name]), maxlen=0)
            if progress is not None:
                progress(spec.weight_bytes)

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename weights, by their former names: their module has other names for them now."""
        for slot in self.slots:
            slot.describe(replace(slot.spec, name=names.get(slot.spec.name, slot.spec.name)))
        self.wide_dtypes = {names.get(name, name): dtype for name, dtype in self.wide_dtypes.items()}
        self.at_rest.rename(names)

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
        self.at_rest.leave_shared()
        slabs = [self.host_slab, *([self.copy.slab] if self.copy is not None else [])]
        with torch.inference_mode(False), torch.no_grad():
            self.layout.take_strides(index, form.strides, slabs)
        if self.stored is not None:
            self.stored.forget()
        return True

    # -- single weights

    def overwrite(self, name: str, weight: torch.Tensor) -> None:
        """Make a weight (wide or quantized alike, on any device) the new version where the group rests.

        Encoded weights are measured anew. A host does this for patched weights; what is written to the
        device is saved when the group leaves it. The caller ended every pass and copy.
        """
        index = self.index_of(name)
        slot = self.slots[index]
        if self.copy is None:
            self.at_rest.leave_shared()
        slab = self.resting_slab
        assert slab is not None
        with torch.no_grad():
            if index in self.encoded:
                slot.rest_as(self.encoded[index].measure(weight, name=name))
            store_weight(slot, self.layout.leaf_views(slab)[index], weight)

    def overwrite_leaves(self, name: str, form: StorageForm, leaves: Sequence[torch.Tensor]) -> None:
        """Do the same for an encoded weight whose form and leaves were read before."""
        index = self.index_of(name)
        if self.copy is None:
            self.at_rest.leave_shared()
        slab = self.resting_slab
        assert slab is not None
        self.slots[index].rest_as(form)
        with torch.no_grad():
            for own, leaf in zip(self.layout.leaf_views(slab)[index], leaves, strict=True):
                own.copy_(leaf)

    def wide(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a copy of a weight on a device in the form in which it computes."""
        self.at_rest.settle()
        index = self.index_of(name)
        slot, leaves = self.slots[index], self.newest_leaves(index)
        with torch.no_grad(), torch.inference_mode(False):
            if slot.encoding is None:
                return slot.form.assemble(iter([leaf.to(device, copy=True) for leaf in leaves]))
            copy = self.layout.wide_form(index).allocate(device)
            slot.encoding.decode_into(copy, [leaf.to(device) for leaf in leaves])
            return copy

    def newest_leaves(self, index: int) -> list[torch.Tensor]:
        """Return the leaves of a weight where it has its latest value; not of one that rests in the file alone."""
        store, first = self.at_rest.store, self.layout.first_leaf(index)
        is_kept = isinstance(store, FileStore) and first in store.kept
        if is_kept and (self.copy is None or not self.copy.find_written()[0]):
            assert isinstance(store, FileStore)
            return [store.kept[first + number] for number in range(self.layout.num_leaves[index])]
        return self.layout.leaf_views(self.newest_slab)[index]

    def keeps_apart(self, slot: ParameterSlot) -> bool:
        """Whether a weight rests in another form, or at another place, than the one in which it computes."""
        return slot.encoding is not None or slot.spec.name in self.at_rest.names_in_file

    # -- weights that rest in their file, used by other code (`ReadOnUse`)

    def read_weight(self, slot: ParameterSlot) -> torch.Tensor:
        """Read the group into host memory, and return what the module then holds for a weight.

        Raises:
            UnsafeState: it computes now, or is no longer attached.
            InvalidInput: the file has changed.
        """
        if self.placed.tensors:
            index = self.place_of(slot)
            if self.placed.tensors[index].is_meta and self.read_idle is not None:
                self.read_idle(self)
            if not self.placed.tensors[index].is_meta:
                return self.placed.tensors[index]
        raise UnsafeState(f"{slot.spec.name!r} rests in its file and has no memory")

    def read_copy(self, slot: ParameterSlot, device: torch.device) -> torch.Tensor | None:
        """Return a copy on a device of a weight that rests in its file, None if it does not.

        Raises `InvalidInput` if the file has changed.
        """
        store = self.at_rest.store
        if not isinstance(store, FileStore) or not slot.held.is_meta:
            return None
        (weight,) = self.read_as_it_computes([slot], store.source)
        return weight.to(device)

    def read_as_it_computes(self, slots: Sequence[ParameterSlot], source: WeightsSource) -> list[torch.Tensor]:
        """Return weights that rest in their file as they compute: rounded where they are encoded on their way.

        Raises as `read_weights` and `EncodedForm.measure`.
        """
        weights = read_weights(slots, source, drop_pages=True)
        return [self.as_it_computes(slot, weight, source) for slot, weight in zip(slots, weights, strict=True)]

    def as_it_computes(self, slot: ParameterSlot, weight: torch.Tensor, source: WeightsSource | None) -> torch.Tensor:
        """Return what a weight is once it was encoded and decoded, if it rests encoded.

        Args:
            source: the files from which it was read. What was decoded from their codes is not encoded once more, which
                gives others in some forms.
        """
        kind = self.encoded.get(self.place_of(slot))
        if kind is None or (source is not None and source.has_encoded(slot.spec, kind)):
            return weight
        form = slot.encoding or kind.measure(weight, name=slot.spec.name)
        with torch.no_grad(), torch.inference_mode(False):
            return form.decode(form.encode(weight), weight.dtype)

    # -- copied to a device

    def stream_from(self, stored: StoredCopy | None) -> None:
        """Copy to the device that computes from this copy on another one; None: from the weight store."""
        self.stored = stored

    @property
    def blocks_host(self) -> bool:
        """Whether a copy to a device holds the host until it is done."""
        return self.at_rest.blocks_host if self.stored is None else self.stored.blocks_host

    def copy_to(self, target: torch.Tensor, begin: int, copies: CopyStream) -> None:
        """Queue the copy of a part of the weights as they rest, from byte ``begin``, to as many bytes on a device."""
        if self.stored is not None:
            self.stored.copy_to(target, begin)
            return
        store = self.at_rest.store
        assert store is not None
        store.copy_to(target, begin, copies)

    def load(self, copies: CopyStream, slab: torch.Tensor | None = None) -> None:
        """Become resident: allocate a slab on the device and queue its copy.

        Args:
            slab: one whose copy was queued before; the caller made sure that it is of the weights as they rest now.

        Raises:
            torch.OutOfMemoryError: nothing changed.
        """
        store = self.at_rest.store
        assert store is not None and self.copy is None
        self.rest()  # a buffer that was replaced meanwhile goes to the weight store, before that is copied
        is_early = slab is not None
        slab = copies.allocate(self.slab_bytes) if slab is None else slab
        try:
            if not is_early:
                self.copy_to(slab, 0, copies)
            views = self.at_rest.views(slab)
            self.copy = ResidentCopy(slab, self.slots, views, buffers_begin=self.layout.buffers_begin)
        finally:
            if self.copy is None:
                copies.drain()  # the slab is freed now, and its copy may be under way
        self.copy.take_store_version(self.at_rest.version)
        self.placed.put(self.copy.views, BlockState.RESIDENT)

    def drop(self) -> int:
        """Leave the device without copying back; returns the bytes freed. The caller drained the copy stream."""
        assert self.copy is not None
        self.rest()
        self.save_changes(self.copy)
        store = self.at_rest.store
        assert store is not None
        self.placed.put(self.at_rest.tensors, store.state)
        self.kept.note(self.slots, self.copy.views)
        self.copy = None
        self.forget_views()
        self.kept.forget_gone()
        return self.slab_bytes

    def save_changes(self, copy: ResidentCopy) -> None:
        """Keep what was written on the device: counters in buffers, weights loaded into a resident module.

        Weights are read-only at inference, so almost always there is nothing, and nothing is copied back. Those that
        rest in their file but are not what it has any more stay in host memory from now on.
        """
        is_written, has_written_buffers = copy.find_written()
        if not is_written and not has_written_buffers:
            return
        self.at_rest.leave_shared()
        store = self.at_rest.store
        with torch.no_grad():
            if self.host_slab is not None:
                self.host_slab.copy_(copy.slab)
            elif isinstance(store, FileStore) and not (is_written and self.leave_file(store, copy)):
                store.keep(self.layout.at_rest.views(copy.slab))

    def leave_file(self, store: FileStore, copy: ResidentCopy) -> bool:
        """Make the weights on the device the weight store if they differ from the file; returns whether they do."""
        with torch.inference_mode(False):
            slab = allocate_slab(self.slab_bytes)
            slab.data.copy_(copy.slab)
        try:
            if not store.differs(slab.data):
                return False
        except InvalidInput:  # the file is gone or has changed: these weights are nowhere else
            pass
        self.at_rest.rest_in(slab)
        self.tell_written()
        return True

    def tell_written(self) -> None:
        if self.note_written is not None:
            self.note_written(self.slab_bytes)

    # -- what the module holds

    def compute_from(self, slab: torch.Tensor, scratch: torch.Tensor | None, *, is_wide: bool = False) -> None:
        """Give the module its weights in a slab on the device; decodes encoded weights into the scratch there.

        Args:
            is_wide: whether they were decoded there before, and nothing wrote to them since.
        """
        is_resident = self.copy is not None and slab is self.copy.slab
        if self.encoded:
            assert scratch is not None
            if self.at_rest.opened:  # a hook that runs between two of its computes may have written
                self.at_rest.settle()
                is_wide = False
            resident = self.copy.views if self.copy is not None and is_resident else None
            views = self.views.decoded(slab, scratch, resident, is_wide=is_wide)
        else:
            views = self.copy.views if self.copy is not None and is_resident else self.views.of(slab)
        self.placed.put(views, BlockState.COMPUTING)
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
        if isinstance(self.at_rest.store, FileStore):
            with torch.inference_mode(False), torch.no_grad():
                host = allocate_slab(self.slab_bytes)
                host.data.copy_(slab)
            self.at_rest.rest_as_written(host)
            self.tell_written()
        else:
            self.at_rest.leave_shared()
            assert self.host_slab is not None
            with torch.no_grad():
                self.host_slab.copy_(slab)

    def rest(self) -> None:
        """Give the module what it holds between computes: its resident views, else the weights at rest."""
        if self.copy is not None:
            self.placed.put(self.copy.views, BlockState.RESIDENT)
        else:
            store = self.at_rest.store
            if store is not None:  # else it computes in place, in the memory it came in
                self.placed.put(self.at_rest.tensors, store.state)
        self.origin = None

    def forget_views(self) -> None:
        """Drop the cached views into staging memory and scratch: they would keep freed slabs alive."""
        self.views.forget()

    def forget_resting(self) -> None:
        """Drop the weight store and all views; the module keeps what it holds."""
        self.at_rest.forget()
        self.placed.note([], BlockState.IN_PLACE)
        self.forget_views()

    # -- all tensors that stand for its weights

    def known_tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield all that the module holds, or may hold, at rest, by the index of its weight."""
        yield from ((index, slot.held) for index, slot in enumerate(self.slots) if slot.owners)
        yield from self.own_tensors()

    def own_tensors(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what the group has given the module, or may give it, at rest, by the index of the weight."""
        views = self.copy.views if self.copy is not None else ()
        for tensors in (self.at_rest.tensors, self.placed.tensors, views):
            yield from enumerate(tensors)

    def views_on_device(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what the group has given the module from its copy, also earlier, by the index of the weight."""
        if self.copy is not None:
            yield from enumerate(self.copy.views)
            yield from ((self.place_of(slot), view) for slot, view in self.kept.on_device(self.copy.slab.device))

    def count_references(self, tensor: torch.Tensor) -> int:
        """Return in how many places of its own lists the group has a tensor that the module holds, or held."""
        own = [self.at_rest.tensors, self.placed.tensors, self.at_rest.counted[-1], *self.views.cache.values()]
        own += [self.copy.views, self.copy.buffers] if self.copy is not None else []
        lists = {id(tensors): tensors for tensors in own}.values()  # some are the same
        return sum(each is tensor for tensors in lists for each in tensors)
