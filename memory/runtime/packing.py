"""The weight stores of a component: packed into host memory or left in their file, and what its module holds at the
end."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from ..errors import InvalidInput
from ..planner.plan import ComponentPlan
from ..planner.sizes import bounce_buffer_bytes
from ..transfer.bounce_buffers import allocate_slabs
from ..transfer.copy_stream import CopyStream
from ..transfer.pinned_memory import ArenaLock, HostSlab
from ..units import PAGE_BYTES
from ..weights.component import Component
from ..weights.source import WeightsSource
from .blocks.added_layers import return_to_host
from .blocks.bundle import Bundle
from .blocks.claimed_weights import read_claimed
from .blocks.pristine_slab import KnownOrigins, PristineSlab, find_origins, lying_in, slab_of
from .blocks.unpacking import discard, unpack
from .blocks.weight_group import WeightGroup
from .blocks.weight_store import FileStore, HostStore
from .changes.written_weights import WrittenWeights, names_in, renamed
from .common_slabs import CommonSlabs, is_paid_elsewhere
from .devices.device_share import DeviceShare
from .devices.ledger import Ledger
from .host_books import HostBooks, count_host_bytes
from .mapped_weights import MappedWeights
from .tensors.parameter_slots import ParameterSlot

__all__ = ["Ending", "Packing"]


class Ending(enum.Enum):
    """What the module holds when its weights are no longer managed."""

    RESTORED = "restored"
    """Weights in plain memory, read from the file where they rest there. What came without goes so where anything rests
    in the file and nothing was written to."""
    LEFT = "left"
    """As restored, for a module that is not known to be used: what it shares with other components stays where it is. A
    write to such a weight gives it memory of its own."""
    HANDED_OVER = "handed over"
    """What is packed stays so, for the managed component that comes next ([Note: kept blocks] in `kept_blocks.py`)."""
    TAKEN_BACK = "taken back"
    """What it held before it was packed."""
    DISCARDED = "discarded"
    """Shapes without memory; nothing is copied or read."""


# The endings after which no other managed component goes on with the module.
ENDS = (Ending.RESTORED, Ending.LEFT, Ending.DISCARDED)


class Packing:
    """Packs the groups of a component's shares, and keeps the books of what that takes of host memory.

    Args:
        source: the files that the weights may rest in.
        after: the packing whose place this one takes.
    """

    def __init__(
        self,
        owner: str,
        component: Component,
        plan: ComponentPlan,
        shares: Sequence[DeviceShare],
        ledger: Ledger,
        source: WeightsSource | None,
        *,
        after: Packing | None = None,
    ) -> None:
        self.owner = owner
        self.component = component
        self.plan = plan
        self.shares = list(shares)
        self.source = source
        self.books = HostBooks(owner, ledger)
        self.added_bytes: dict[WeightGroup, Counter[str]] = {}
        """The part of the books that is of layers which were added, by their group."""
        self.was_refused = False
        """Whether the driver refused to page-lock part of what the plan wanted page-locked."""
        self.told_refusal = False
        self.is_first = after is None
        """Whether the module's weights lie where they were found."""
        self.goes_bare: bool | None = None
        """Whether at the end what came without memory goes so: its files have it as it is. None before the end."""
        self.mapped: MappedWeights = MappedWeights(source, after.mapped if after is not None else None)
        self.came_on_meta = frozenset(
            slot.spec.name for group in self.groups for slot in group.slots if slot.held.is_meta
        )
        """The weights that came under management without memory."""
        self.written = WrittenWeights(source)
        self.origins: KnownOrigins = {}
        """What weights that are not packed yet were read from; empty but while they are packed."""
        self.proven: Collection[int] | None = None
        """Where weights lie that come from files beyond doubt; None: all do that `origins` has."""
        self.filled: Sequence[PristineSlab] = ()
        """Slabs in which groups may lie already; empty but while they are packed."""
        self.common = CommonSlabs(owner, self.books.take)
        self.pristine: list[PristineSlab] = []
        """After the end, slabs whose weights are as their files have them."""
        self.left: list[Bundle] = []
        """Packed blocks that wait for the managed component which goes on with them; the same list for both."""
        if after is not None:
            self.came_on_meta, self.left = after.came_on_meta, after.left
        self.kept = [bundle for share in shares for bundle in share.bundles if bundle in self.left]
        """The blocks that were packed before."""
        if after is not None:
            self.written.go_on_from(after.written, [group for bundle in self.kept for group in bundle.groups])

    @property
    def groups(self) -> list[WeightGroup]:
        return [group for share in self.shares for group in share.groups]

    def own_groups(self, *, in_file: bool) -> list[WeightGroup]:
        """Return the groups that the plan wants in their file, or in RAM; without layers that were added."""
        own = [bundle.own for share in self.shares for bundle in share.bundles]
        return [group for group in own if (group.name in self.plan.in_file) is in_file]

    def tell_refusal(self) -> bool:
        """Whether the driver would not page-lock all that the plan wanted; true once."""
        buffers = [share.bounce for share in self.shares if share.bounce is not None]
        refused = self.was_refused or any(bounce.was_refused for bounce in buffers)
        refused = refused or any(share.stored.was_refused for share in self.shares if share.stored is not None)
        tells, self.told_refusal = refused and not self.told_refusal, self.told_refusal or refused
        return tells

    def note_refusal(self, was_refused: bool) -> None:
        """Note whether the driver refused to page-lock something."""
        self.was_refused = self.was_refused or was_refused

    def measure(self) -> None:
        """Find how weights will be encoded; changes nothing. Raises `InvalidInput` for weights that cannot be."""
        for group in self.groups:
            if group.at_rest.store is None:
                group.measure()

    def start_from(
        self,
        origins: KnownOrigins,
        filled: Sequence[PristineSlab],
        common: Mapping[WeightGroup, HostSlab] | None = None,
        proven: Collection[int] | None = None,
    ) -> None:
        """Set what the weights were read from, and where some of them are as they would be packed.

        `pack` forgets it all: the slabs of others would keep their memory as long as this component lives.

        Args:
            filled: slabs in which they may lie.
            common: slabs of other components that have the same weights, by the groups that share these.
            proven: the addresses of weights that come from files; others are compared with these. None: all do.
        """
        self.origins, self.filled, self.proven = origins, filled, proven
        self.common.start_from(common or {})

    def to_pack(self) -> int:
        """Return the bytes, as they come, of what `pack` would copy into slabs or read from files into RAM.

        What rests in its file counts as nothing, nor does what computes in the memory that it came in.
        """
        return sum(
            self.stored_bytes(group, index)
            for share in self.shares
            for group in share.groups
            if group.at_rest.store is None and group.name not in self.plan.in_file
            for index, slot in enumerate(group.slots)
            if share.copies is not None or group.encoded or slot.held.is_meta
        )

    def stored_bytes(self, group: WeightGroup, index: int) -> int:
        """Return the bytes of a weight as it comes: of its codes where its file has those in which it rests."""
        slot, kind = group.slots[index], group.encoded.get(index)
        if self.source is None or kind is None or not slot.held.is_meta or not self.source.has_encoded(slot.spec, kind):
            return slot.spec.weight_bytes
        return sum(kind.numbers.leaf_bytes(slot.spec))

    def pack(self, progress: Callable[[int], None] | None = None) -> None:
        """Build the missing weight stores; on failure the caller ends the packing as `Ending.TAKEN_BACK`.

        Uses one arena of slabs at a time beside the weights. All weights to encode were measured before any of them
        loses a bit. After that only ``progress``, the files or a lack of memory can fail; weights that were encoded by
        then come back decoded, because no copy of the originals is kept.

        Args:
            progress: called at least once per block with the bytes packed or read since its last call; they add up to
                `to_pack`. An exception from it is raised here.
        """
        self.go_on()
        if self.is_first:  # what rests in its file from the beginning does so by its user's word
            self.written.note_unproven(group for group in self.groups if group.name not in self.plan.in_file)
            in_file = [slot.spec for group in self.own_groups(in_file=True) for slot in group.slots]
            self.written.note_replaced(spec for spec in in_file if spec.name in self.component.lacking)
        try:
            with self.open_files():
                for share in self.shares:
                    if self.plan.in_file:
                        self.leave_in_file(share)
                    if self.plan.tier != "disk" or any(group.at_rest.store is None for group in share.groups):
                        self.pack_share(share, progress)
        finally:
            self.origins, self.filled, self.proven = {}, (), None
            self.common.start_from({})
        self.mapped.settle(self.groups)
        self.written.end_doubts(group for group in self.groups if group.name in self.plan.in_file)
        self.left.clear()
        self.books.charge_all()
        for group in self.groups:
            group.at_rest.charge_to(self.books.take_pageable)
            if group.at_rest.store is not None and not any(group in bundle.groups for bundle in self.kept):
                self.written.note_packed(group)

    def open_files(self) -> AbstractContextManager[object]:
        """Keep the files open meanwhile that weights are read from."""
        return self.source.held() if self.source is not None else nullcontext()

    def go_on(self) -> None:
        """Enter the blocks in the books that were packed before, and let their memory outlive the copies from now on.

        Waits for those of the component that had them before.
        """
        locks: dict[int, ArenaLock] = {}
        waits: dict[int, list[Callable[[], object]]] = {}
        for share in self.shares:
            for bundle in share.bundles:
                for group in bundle.groups if bundle in self.kept else ():
                    if isinstance(group.at_rest.store, FileStore):
                        assert share.bounce is not None
                        group.at_rest.store.go_through(share.bounce)
                        continue  # `leave_in_file` enters it
                    assert isinstance(group.at_rest.store, HostStore)
                    if is_paid_elsewhere(group):
                        self.common.go_on(group, share)
                        continue
                    lock = group.at_rest.store.memory.lock
                    if group is bundle.added:
                        own = {"host": group.slab_bytes} if lock is None else {"pinned": lock.arena.num_bytes}
                        self.added_bytes[group] = Counter(own)
                    if lock is None:
                        self.books.note("host", group.slab_bytes)
                        continue
                    assert share.copies is not None
                    locks[id(lock)] = lock
                    others = waits.setdefault(id(lock), [])
                    if share.copies.wait not in others:
                        others.append(share.copies.wait)
        for number, lock in locks.items():
            self.books.note("pinned", lock.arena.num_bytes)
            lock.copy_by(waits[number])

    def unpack_left(self, kept: Collection[Bundle] = (), *, reads: bool = False) -> None:
        """Unpack the blocks that no managed component goes on with.

        Args:
            reads: also what rests in its file as it computes, which stays there otherwise.
        """
        for bundle in [bundle for bundle in self.left if bundle not in kept]:
            for group in bundle.groups:
                in_file = frozenset() if reads else group.at_rest.names_in_file
                unpack(group, in_file | self.unread_again(group))
            self.left.remove(bundle)

    def unread_again(self, group: WeightGroup) -> frozenset[str]:
        """Return the weights whose files have the codes that rest: decoded and encoded again, they might be others."""
        source = self.source
        if source is None or not source.encoded or self.written.may_be_written(group):
            return frozenset()
        return frozenset(
            group.slots[index].spec.name
            for index, kind in group.encoded.items()
            if group.slots[index].spec.name in group.at_rest.on_meta
            and source.has_encoded(group.slots[index].spec, kind)
        )

    def restore_left(self) -> None:
        """Give the module the weights of blocks that no managed component goes on with, as `Ending.RESTORED` says."""
        for bundle in list(self.left):
            for group in bundle.groups:
                self.end_group(group, Ending.RESTORED)
            self.left.remove(bundle)

    def pack_share(self, share: DeviceShare, progress: Callable[[int], None] | None) -> None:
        """Move a share's weights into host slabs, page-locked as far as the plan says and the driver agrees."""
        self.common.pack(share, self.origins, progress)
        to_pack = [group for group in share.groups if group.at_rest.store is None]
        if share.copies is None:  # others compute in place, in the memory they came in
            groups = [group for group in to_pack if group.encoded]
            in_place = [group for group in to_pack if group not in groups]
            mapped = self.mapped.for_slots(in_place)
            for group in in_place:
                group.fill(self.source, mapped, progress)
        else:
            groups = sorted(to_pack, key=lambda group: group.name not in self.plan.pinned)
        self.books.note("host", sum(group.slab_bytes for group in to_pack if group not in groups))
        if share.copies is not None:
            for group in groups:
                group.at_rest.note_origins(find_origins(group, self.origins))
            groups = self.pack_filled(share.copies, groups, progress)
        locked = [group.slab_bytes for group in groups if group.name in self.plan.pinned]
        streams = [share.copies] if share.copies is not None else []
        # What an arena rounds up is less than its last page.
        slabs = allocate_slabs(
            [group.slab_bytes for group in groups],
            pinned_bytes=sum(locked) + len(locked) * PAGE_BYTES,
            streams=streams,
        )
        for group, slab in zip(groups, slabs, strict=True):
            self.prove(group, slab)
            group.pack(slab, self.source, progress, is_filled=self.proven is not None, reads_mapped=self.is_first)
            if not slab.data.is_pinned():
                self.books.note("host", group.slab_bytes)
        self.books.note("pinned", slabs.locked_bytes)
        self.note_refusal(slabs.was_refused)

    def pack_filled(
        self, copies: CopyStream, groups: list[WeightGroup], progress: Callable[[int], None] | None
    ) -> list[WeightGroup]:
        """Pack groups that lie in a slab of kept weights already; returns the others."""
        whole = lying_in(groups, self.filled, self.plan.pinned)
        for lock in {id(slab.lock): slab.lock for slab in whole.values()}.values():
            if lock is not None:
                lock.copy_by([copies.wait])
                self.books.note("pinned", lock.arena.num_bytes)
        for group, slab in whole.items():
            self.prove(group, slab)
            group.pack(slab, self.source, progress, is_filled=True)
            self.books.note("host", group.slab_bytes if slab.lock is None else 0)
        return [group for group in groups if group not in whole]

    def prove(self, group: WeightGroup, slab: HostSlab) -> None:
        """Compare weights of a group that is about to be packed with their files, unless it is known what they are."""
        if self.proven is not None and self.source is not None and any(group.at_rest.origins):
            read_claimed(group, slab, self.source, self.proven)

    def add(self, share: DeviceShare, bundle: Bundle, slots: Sequence[ParameterSlot]) -> None:
        """Pack the weights of layers that were added to a block, in the place of what was added before.

        They rest where the block does, except that what rests in its file has no place for them: they are in RAM.
        """
        self.remove_added(share, bundle)
        if not slots:
            return
        return_to_host(slots)
        group = WeightGroup(bundle.name, slots, beside=bundle.own)
        taken: Counter[str] = Counter()
        if share.copies is None:  # they compute in place, in the memory they came in
            taken["host"] = group.slab_bytes
        else:
            locks = bool(self.plan.pinned) and not bundle.own.at_rest.blocks_host
            limit = group.slab_bytes + PAGE_BYTES if locks else 0
            slabs = allocate_slabs([group.slab_bytes], pinned_bytes=limit, streams=[share.copies])
            for slab in slabs:
                group.pack(slab)
                taken["host"] += 0 if slab.data.is_pinned() else group.slab_bytes
            taken["pinned"] += slabs.locked_bytes
            self.written.note_packed(group)
        group.at_rest.charge_to(self.books.take_pageable)
        bundle.add(group)
        self.added_bytes[group] = taken
        for tier, num_bytes in taken.items():
            self.books.take(tier, num_bytes)

    def remove_added(self, share: DeviceShare, bundle: Bundle) -> None:
        """Give plain memory to the weights of layers that were added to a block; they are no part of it any more."""
        group = bundle.added
        if group is None:
            return
        group.placed.disown_gone()
        if group.copy is not None:
            share.drop_group(group)
        if share.stored is not None:
            share.stored.drop([group])
        unpack(group)
        bundle.add(None)
        bundle.forget_views()
        for tier, num_bytes in self.added_bytes.pop(group, Counter()).items():
            self.books.take(tier, -num_bytes)

    def rename(self, names: Mapping[str, str]) -> None:
        """Call weights what their module calls them by now, by the names that they had."""
        for group in self.groups:
            group.rename(names)
        self.came_on_meta = renamed(self.came_on_meta, names)
        self.written.rename(names)
        self.mapped.rename(names)

    def leave_in_file(self, share: DeviceShare) -> None:
        """Leave in their file what the plan wants there of a share; it reaches the device through bounce buffers."""
        assert self.source is not None and share.bounce is not None
        for group in [group for group in share.groups if group.name in self.plan.in_file]:
            if group.at_rest.store is None:
                self.written.compare(group)
                if self.has_written_encoded(group):
                    continue
                group.rest_in_file(self.source, share.bounce, written=self.written.names)
            assert isinstance(group.at_rest.store, FileStore)
            self.books.note("host", group.at_rest.store.kept_bytes)
        in_file = [group for group in share.groups if isinstance(group.at_rest.store, FileStore)]
        self.mapped.stream(in_file, maps_file=self.plan.maps_file)
        share.bounce.fill_from(self.source)
        num_bytes = bounce_buffer_bytes(self.component, list(share.blocks), first=share is self.shares[0])
        share.memory.read_through(num_bytes, locks=self.plan.locks_buffers)
        if share.stored is not None:
            share.stored.read_from(self.source, num_bytes, locks=self.plan.locks_buffers)

    def has_written_encoded(self, group: WeightGroup) -> bool:
        """Whether weights to encode are not what their file has any more: their group rests in RAM as a whole."""
        written = self.written.names
        return any(group.slots[index].spec.name in written for index in group.encoded)

    def follow(self, plan: ComponentPlan) -> None:
        """Note that weights rest as another plan of the same blocks says."""
        self.plan = plan

    def settle_books(self) -> None:
        """Enter in the ledger what the weight stores take now: groups have given up theirs."""
        self.books.settle(count_host_bytes(self.shares))

    def end(self, ending: Ending) -> None:
        """Give the module its weights as the ending says, and remove the weight stores from the ledger.

        The groups have left every device.

        Raises:
            InvalidInput: weights rest in a file that has changed; they stay without memory.
        """
        self.pristine = self.find_pristine() if ending in ENDS else []
        rested, others = self.own_groups(in_file=True), self.own_groups(in_file=False)
        self.written.note_end(rested, [*others, *self.added_bytes])
        if self.goes_bare is None:  # interrupted and called again, some of them are gone
            is_pristine = not self.written.names and self.written.doubtful.isdisjoint(names_in(others))
            self.goes_bare = bool(self.plan.in_file) and is_pristine
        error: InvalidInput | None = None
        if ending is Ending.RESTORED:
            try:
                self.mapped.give_memory(self.groups)
            except InvalidInput as problem:
                error = problem
        staying = self.to_leave(ending)
        self.left += [bundle for bundle in staying if bundle not in self.left]
        with self.open_files():
            for group in self.groups:
                group.at_rest.charge_to(None)
                if any(group in bundle.groups for bundle in staying):
                    group.forget_views()
                    continue
                self.common.leave(group, self.shares)
                if ending is not Ending.LEFT:
                    group.at_rest.give_up_sharing()
                try:
                    self.end_group(group, ending)
                except InvalidInput as problem:
                    error = error or problem
        self.common.end()
        self.books.close()
        if error is not None:
            raise error

    def find_pristine(self) -> list[PristineSlab]:
        """Return the slabs whose weights are known to be as their files have them."""
        pristine = [slab_of(group) for group in self.groups if not self.written.may_be_written(group)]
        return [slab for slab in pristine if slab is not None]

    def take_pristine(self) -> list[PristineSlab]:
        """Return the slabs that were found at the end, and forget them."""
        found, self.pristine = self.pristine, []
        return found

    def to_leave(self, ending: Ending) -> list[Bundle]:
        """Return the blocks that stay packed: all that are, or those that were before."""
        if ending is Ending.TAKEN_BACK:
            return self.kept
        if ending is not Ending.HANDED_OVER:
            return []
        bundles = [bundle for share in self.shares for bundle in share.bundles]
        return [
            bundle
            for bundle in bundles
            if all(group.at_rest.store is not None and not group.at_rest.has_given_back for group in bundle.groups)
        ]

    def read_left(self, ending: Ending) -> None:
        """End the groups whose file `end` could not read, if the module still holds their empty weights.

        Raises:
            InvalidInput: it still cannot be read.
        """
        for group in self.groups if not self.books.are_open else ():
            if any(group in bundle.groups for bundle in self.left):
                continue
            if group.at_rest.store is not None and group.placed.is_as_placed():
                self.end_group(group, ending)
            elif group.at_rest.store is not None:
                group.forget_resting()

    def end_group(self, group: WeightGroup, ending: Ending) -> None:
        if ending is Ending.DISCARDED:
            discard(group)
        elif ending is Ending.TAKEN_BACK:
            unpack(group, group.at_rest.on_meta)
        elif ending is Ending.HANDED_OVER:  # half packed
            unpack(group, group.at_rest.names_in_file)
        else:  # a model with memory for half of its weights would be of no use
            is_own = group not in self.added_bytes
            unpack(group, self.came_on_meta & names_in([group]) if self.goes_bare and is_own else ())
