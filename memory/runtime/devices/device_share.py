"""One device's part of a component: brings it to its plan, shrinks it, and takes it away, books in step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from ...errors import UnsafeState
from ...planner.plan import DevicePlan
from ...transfer.bounce_buffers import BounceBuffers
from ...transfer.copy_stream import CopyStream
from ...transfer.devices import Device
from ...transfer.timing import PassTimes
from ..blocks.block_state import BlockState
from ..blocks.bundle import Bundle
from ..blocks.staging import StagingSlot
from ..blocks.weight_group import WeightGroup
from ..changes.forward_writes import keep_writes
from .decode_scratch import DecodeScratch
from .early_copies import EarlyCopies, EarlyCopy
from .ledger import Kind, Ledger
from .loading_tags import LoadingTags
from .prefetch import Streamer
from .stored_copies import StoredCopies
from .working_memory import WorkingMemory

__all__ = ["DeviceShare", "wait_for_copies"]


def ignore(num_bytes: int) -> None:
    """Watch no loading."""


class DeviceShare:
    """The groups of one component on one device; every allocation is entered in the ledger as it happens.

    On the CPU blocks compute from the weights at rest: nothing is loaded, only encoded weights need scratch.

    Args:
        host_replaces: a host may put other objects for the same weights into the module between passes, as ComfyUI's
            quantized layers do whenever they are moved; it writes weights through their group.
        widens_whole: whether encoded weights stay widened from their first use to the end of a pass.
        store: the device from whose memory blocks stream; None: they stream from where they rest.
    """

    def __init__(
        self,
        owner: str,
        device: Device,
        fixed: Bundle,
        blocks: Mapping[int, Bundle],
        ledger: Ledger,
        *,
        host_replaces: bool = False,
        widens_whole: bool = False,
        store: Device | None = None,
    ) -> None:
        self.owner = owner
        self.widens_whole = widens_whole
        self.widened: set[int] = set()
        """The blocks whose wide weights are in the scratch until the pass ends; empty where one block takes turns."""
        self.scratch: DecodeScratch | None = None
        """Where encoded weights are decoded; None while nothing is."""
        self.host_replaces = host_replaces
        self.device = device
        self.fixed = fixed
        self.blocks = dict(blocks)
        self.ledger = ledger
        self.copies = None if device.is_cpu else CopyStream(device)
        self.early = EarlyCopies(owner, device, self.copies, ledger)
        """Copies that are there before they are asked for."""
        self.memory = WorkingMemory(owner, device, self.copies, ledger)
        self.stored: StoredCopies | None = None
        """What it has in the memory of another device."""
        if store is not None:
            assert self.copies is not None
            self.stored = StoredCopies(owner, store, self.copies, ledger)
        self.times = PassTimes(device, self.blocks)
        self.computing: dict[int, StagingSlot | None] = {}
        self.entered: set[int] = set()
        """The blocks that have come here to compute, in any pass."""
        self.trace: list[int] = []
        """The blocks of this pass, in the order in which they ran."""
        self.order = sorted(self.blocks)
        """That of the last whole pass."""
        self.progress: Callable[[int], None] = ignore
        self.loaded_bytes = 0

    @property
    def streamer(self) -> Streamer | None:
        """What moves streamed blocks; None while none are."""
        return self.memory.streamer

    @property
    def bounce(self) -> BounceBuffers | None:
        """The buffers through which weights pass that rest in a file; None on the CPU."""
        return self.memory.bounce

    @property
    def groups(self) -> list[WeightGroup]:
        return [group for bundle in self.bundles for group in bundle.groups]

    @property
    def bundles(self) -> list[Bundle]:
        return [self.fixed, *self.blocks.values()]

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights copied to the device so far."""
        stored_bytes = self.stored.bytes_filled if self.stored is not None else 0
        return self.loaded_bytes + self.early.bytes_moved + self.memory.bytes_streamed + stored_bytes

    @property
    def waited_s(self) -> float:
        """Seconds for which its blocks waited for their copies, as far as `read_waits` or a pass has read them."""
        return self.copies.waits.seconds if self.copies is not None else 0.0

    def read_waits(self) -> float:
        """As `waited_s`, with what is over now; in the thread that runs the passes."""
        return self.copies.waits.read() if self.copies is not None else 0.0

    def take_speeds(self) -> dict[bool, float]:
        """Return bytes per second of copies, by whether they are from page-locked memory, each once it is known."""
        return self.copies.speeds.take() if self.copies is not None else {}

    # -- being brought to a plan

    def to_load(self, plan: DevicePlan) -> int:
        """Return the bytes that `load` would queue copies of, to this device or to the one that stores."""
        to_store = self.stored.missing(plan, self.blocks) if self.stored is not None else ()
        return self.to_allocate(plan) + sum(group.slab_bytes for group in to_store)

    def to_allocate(self, plan: DevicePlan) -> int:
        """Return the bytes of resident blocks and fixed tensors that are not on this device yet."""
        if self.copies is None:
            return 0
        return sum(group.slab_bytes for group in self.resident_groups(plan) if group.copy is None)

    def load(self, plan: DevicePlan, progress: Callable[[int], None] | None = None) -> int:
        """Bring the device to the plan; returns the bytes that came for it, early copies included. Idempotent.

        Raises:
            torch.OutOfMemoryError: or whatever ``progress`` raises: the share was unloaded, its books are at zero.
        """
        self.recover()
        self.settle()
        self.progress = progress or ignore
        with self.early.filling:  # the buffers for files are of one thread at a time
            return self.load_now(plan)

    def load_now(self, plan: DevicePlan) -> int:
        try:
            self.drop_blocks(number for number, group in self.blocks.items() if number not in plan.resident)
            self.fit_scratch(plan)
            if self.copies is None:
                return 0
            self.early.drop_others(self.resident_groups(plan))
            self.defragment(plan)
            if plan.read_bytes or self.to_allocate(plan):
                self.memory.open_bounce()
            tags = LoadingTags(self.copies)
            loaded = self.load_bundle(self.fixed, tags)
            self.fit_staging(plan)
            loaded += sum(self.load_bundle(self.blocks[number], tags) for number in sorted(plan.resident))
            if not plan.read_bytes or (self.stored is not None and self.stored.missing(plan, self.blocks)):
                self.memory.close_bounce()
            if self.stored is not None:  # what was stored and stays on the device now is loaded from there
                loaded += self.stored.fit(plan, self.blocks, self.progress)
                if plan.read_bytes:
                    self.memory.open_bounce()
            if loaded:
                tags.finish()
        except BaseException:  # no memory, a file that has changed, or the loading was cancelled
            self.unload()
            raise
        finally:
            self.progress = ignore  # it refers to the manager's member, and so to us
        return loaded

    def defragment(self, plan: DevicePlan) -> None:
        """Have what a plan allocates lie apart from what forwards are known to allocate, where memory is short."""
        staging_bytes = 0 if self.memory.has_staging(plan) else plan.staging_bytes
        to_allocate = self.to_allocate(plan) - self.early.num_bytes + staging_bytes
        if to_allocate > 0:
            self.device.defragment(to_allocate + max(0, plan.keeps_bytes))

    def load_bundle(self, bundle: Bundle, tags: LoadingTags) -> int:
        """Make a bundle resident; returns the bytes that came for that, now or before."""
        loaded = 0
        for group in bundle.groups:
            if group.copy is None:
                try:
                    self.load_group(group)
                except torch.OutOfMemoryError:
                    if not tags.give_up():  # a few bytes may be what is missing
                        raise
                    self.load_group(group)
                assert group.copy is not None
                tags.follow(group.copy)
                loaded += group.slab_bytes
                self.progress(group.slab_bytes)
        return loaded

    def load_group(self, group: WeightGroup) -> None:
        assert self.copies is not None
        with self.weights_booked(group):
            slab = self.early.take(group)
            group.load(self.copies, slab)
        self.loaded_bytes += group.slab_bytes if slab is None else 0

    def settle(self) -> None:
        """Enter in the ledger what is there: an interrupt may have come between a step and its entry."""
        name = self.device.name
        resident_bytes = sum(group.slab_bytes for group in self.groups if group.copy is not None)
        self.ledger.settle(name, self.owner, Kind.WEIGHTS, resident_bytes + self.early.num_bytes)
        self.memory.settle()
        if self.stored is not None:
            self.stored.settle()

    def count_bytes(self) -> Iterator[tuple[str, Kind, int]]:
        """Yield place, kind and bytes of all memory that is there now, as the tensors have it that hold it."""
        for group in self.groups:
            if group.copy is not None:
                yield self.device.name, Kind.WEIGHTS, group.copy.slab.untyped_storage().nbytes()
        yield self.device.name, Kind.WEIGHTS, self.early.count_bytes()
        yield from self.memory.count_bytes()
        if self.stored is not None:
            yield from self.stored.count_bytes()

    def buffer_bytes(self) -> dict[str, int]:
        """Return the bytes of host memory through which weights pass on their way, by tier."""
        own = Counter(self.bounce.host_bytes if self.bounce is not None else {})
        own.update(self.stored.buffer_bytes() if self.stored is not None else {})
        return own

    def weights_booked(self, group: WeightGroup) -> AbstractContextManager[None]:
        held = lambda: {self.device.name: group.slab_bytes} if group.copy is not None else {}  # noqa: E731
        return self.ledger.booked(self.owner, Kind.WEIGHTS, held)

    # -- copies that are there before the component is loaded ([Note: early copies] in `early_copies.py`)

    def find_early(self, plan: DevicePlan) -> WeightGroup | None:
        """Return the first block that a plan has resident and that is not here, nor on its way; None: all are.

        Not the fixed tensors: among them are the buffers of the module, to which other code writes unseen.
        """
        return self.early.find_next(group for number in sorted(plan.resident) for group in self.blocks[number].groups)

    def begin_early(self, group: WeightGroup) -> EarlyCopy:
        """Make room for the early copy of a group; `EarlyCopies.fill` is to follow.

        Raises:
            torch.OutOfMemoryError: nothing changed.
        """
        self.memory.open_bounce()
        return self.early.begin(group)

    def close_early(self, plan: DevicePlan) -> None:
        """Free the buffers through which files were read for early copies, if the plan reads none."""
        with self.early.filling:
            if not plan.read_bytes:
                self.memory.close_bounce()

    def resident_groups(self, plan: DevicePlan) -> list[WeightGroup]:
        """Return what a plan has resident, in the order in which it is loaded."""
        bundles = [self.fixed, *(self.blocks[number] for number in sorted(plan.resident))]
        return [group for bundle in bundles for group in bundle.groups]

    def fit_scratch(self, plan: DevicePlan) -> None:
        have = self.memory.held_scratch().get(self.device.name, 0)
        if have == plan.scratch_bytes and (self.scratch is None or self.scratch.num_parts == plan.decodes):
            return
        self.free_scratch()
        if not plan.scratch_bytes:
            return
        self.memory.allocate_scratch(plan.scratch_bytes)
        assert self.memory.scratch is not None
        places = None
        if self.widens_whole:
            blocks = self.blocks.items()
            places = {number: sum(group.layout.wide.slab_bytes for group in bundle.groups) for number, bundle in blocks}
        self.scratch = DecodeScratch(self.memory.scratch, self.copies, places=places, num_parts=plan.decodes)

    def fit_staging(self, plan: DevicePlan) -> None:
        if not self.memory.has_staging(plan):
            self.free_staging()
            if plan.staging_bytes:
                self.memory.allocate_staging(plan, self.blocks, self.order)

    # -- giving bytes back

    def held_bytes(self) -> int:
        return self.ledger.held(self.owner, self.device.name)

    def shrink(self, num_bytes: int, lasting_bytes: int = 0) -> int:
        """Give back at least so many bytes if they are there: what came early, blocks from the end, then all else.

        Returns the bytes that are free now.

        Args:
            lasting_bytes: so many stay, and all that is no block.
        """
        self.recover()
        self.settle()
        before = self.held_bytes()
        self.early.drop_others(num_bytes=num_bytes)
        for number in sorted(self.blocks, reverse=True):
            if before - self.held_bytes() >= num_bytes:
                break
            block_bytes = sum(group.slab_bytes for group in self.blocks[number].groups if group.copy is not None)
            if not lasting_bytes or self.held_bytes() - block_bytes >= lasting_bytes:
                self.drop_blocks([number])
        if before - self.held_bytes() < num_bytes and not lasting_bytes:
            self.unload()
        return before - self.held_bytes()

    def unload(self) -> int:
        """Leave the device; returns the bytes freed, after which the ledger holds none of this share."""
        self.recover()
        self.settle()
        before = self.held_bytes()
        self.early.drop_others()
        self.drop_blocks(list(self.blocks))
        self.free_staging()
        self.free_scratch()
        self.drop_bundle(self.fixed)
        self.memory.close_bounce()
        return before - self.held_bytes()

    def shrink_stored(self, device: str, num_bytes: int) -> int:
        """Give back at least so many bytes of the device that stores, if they are there; returns those freed.

        No pass runs: the blocks stream from their origin once the component was planned anew.
        """
        if self.stored is None or self.stored.device.name != device:
            return 0
        return self.stored.shrink(num_bytes)

    def unload_stored(self) -> int:
        """Leave the device that stores; returns the bytes freed."""
        return self.stored.drop_all() if self.stored is not None else 0

    def drop_blocks(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            self.drop_bundle(self.blocks[number])

    def drop_bundle(self, bundle: Bundle) -> None:
        for group in reversed(bundle.groups):  # its own last: by that it is resident
            if group.copy is not None:
                self.drop_group(group)

    def drop_group(self, group: WeightGroup) -> None:
        assert self.copies is not None
        self.copies.drain()
        with self.copies.home, self.weights_booked(group):  # what was written is saved behind what wrote it
            group.drop()

    def free_staging(self) -> None:
        if self.memory.streamer is not None:
            self.forget_views()
            self.memory.free_staging()

    def free_scratch(self) -> None:
        if self.memory.scratch is not None:
            self.forget_views()
            self.widened.clear()
            self.scratch = None
            self.memory.free_scratch()

    def forget_views(self) -> None:
        for bundle in self.bundles:
            bundle.forget_views()

    # -- computing

    def begin_pass(self, *, is_timed: bool, beside: bool = False, micro_batch: int | None = None) -> None:
        """A forward begins: the first streamed blocks are queued. ``is_timed``: once after each loading.

        Args:
            beside: it computes beside the last one (`CopyStream.begin_pass`).
            micro_batch: the number of the micro-batch that it belongs to.
        """
        self.recover()
        self.trace = []
        self.widened.clear()
        if is_timed:
            self.times.begin()
        if self.copies is not None:
            self.copies.begin_pass(beside=beside)
        if self.scratch is not None:
            self.scratch.begin_pass(micro_batch)
        if self.streamer is not None:
            self.streamer.begin_pass()

    def begin_quiet_pass(self) -> None:
        """A forward begins in which all blocks compute from their resident copies."""
        if self.copies is not None:
            self.copies.begin_pass()
        for bundle in self.blocks.values() if self.host_replaces else ():
            if not bundle.is_as_placed():
                for group in bundle.groups:
                    group.rest()

    @property
    def is_wholly_resident(self) -> bool:
        """Whether every block computes from a copy that stays on this accelerator as it is."""
        return self.copies is not None and self.memory.streamer is None and self.memory.scratch is None

    @property
    def decodes_one_by_one(self) -> bool:
        """Whether two micro-batches would decode weights into the same memory."""
        return self.scratch is not None and not self.scratch.has_room_beside

    @property
    def has_run_whole(self) -> bool:
        """Whether the last whole pass ran every block."""
        return self.entered >= self.blocks.keys()

    def end_pass(self, *, completed: bool) -> None:
        """A forward has ended, by its return or by an exception."""
        self.recover()
        self.widened.clear()
        if self.copies is not None:
            self.copies.waits.end_pass()
        ran, self.trace = self.trace, []
        if completed and set(ran) == self.blocks.keys():
            self.order = ran
        if self.streamer is not None:
            is_first = 0 in self.blocks  # else those of another device run before
            self.streamer.end_pass(completed=completed, began_with=ran[0] if ran and is_first else None)

    def enter(self, number: int) -> None:
        """A block is about to compute here: let its module hold usable weights."""
        if self.computing:  # blocks do not nest: whatever still computes was left by an exit that ran no hook
            self.recover()
        bundle = self.blocks[number]
        if not self.host_replaces and not bundle.is_as_placed():
            raise UnsafeState(
                f"{self.owner}: a weight of {bundle.name} was replaced in the forward: replace weights before it"
            )
        self.entered.add(number)
        self.trace.append(number)
        scratch = self.scratch.take(number) if self.scratch is not None else None
        is_wide = number in self.widened
        if bundle.own.copy is not None:
            self.computing[number] = None
            if self.times.watch is not None and self.copies is not None:
                self.times.start(number, self.copies.compute_stream)
            bundle.compute_from(None, scratch, is_wide=is_wide)
        elif self.copies is None:
            self.computing[number] = None
            bundle.compute_in_place(scratch, is_wide=is_wide)
        else:
            streamer = self.memory.streamer
            assert streamer is not None, f"{self.owner}: block {bundle.name} is neither resident nor streamed"
            staging_slot = streamer.acquire(number)
            self.computing[number] = staging_slot  # first: after an interrupt only what is noted here is given back
            staging_slot.use(self.copies)
            if self.times.watch is not None:
                self.times.start(number, staging_slot.stream)
            bundle.compute_from(staging_slot.slab, scratch, is_wide=is_wide)
        if self.widens_whole:
            self.widened.add(number)

    def leave(self, number: int, *, prefetches: bool = True) -> None:
        """The block has computed, or failed: its module holds what it rests on, its staging memory is free."""
        if number not in self.computing:
            return
        staging_slot = self.computing[number]
        bundle = self.blocks[number]
        if self.times.watch is not None and self.copies is not None:
            self.times.stop(number, self.copies.compute_stream)
        refused = None
        if bundle.state is BlockState.COMPUTING:
            for group in bundle.all:
                if group.is_written() or (not self.host_replaces and not group.placed.is_as_placed()):
                    refused = keep_writes(group, self.wait_for_copies, host_replaces=self.host_replaces) or refused
                    self.widened.discard(number)  # it rests in its form, which may be another value
                group.rest()
        if self.scratch is not None:
            self.scratch.give_back(number)
        streamer = self.memory.streamer
        if staging_slot is not None and streamer is not None:
            streamer.give_back(staging_slot)
        self.computing.pop(number, None)  # last: until here an interrupt lets it all be done again
        if staging_slot is not None and streamer is not None and prefetches:
            streamer.prefetch()
        if refused is not None:
            raise UnsafeState(
                f"{self.owner}: {refused} while {bundle.name} computed; the change was undone: "
                "release it before such a forward"
            )

    def wait_for_copies(self) -> None:
        """Wait on the host until nothing is copied to the device."""
        self.early.finish()
        if self.copies is not None:
            self.copies.finish()

    def forget_staged(self) -> None:
        """Copy what streams or came early anew: weights at rest were written to past their version."""
        self.early.drop_others()
        if self.stored is not None:
            self.stored.forget()
        if self.streamer is not None:
            self.streamer.area.forget()

    def changes_hands(self, number: int) -> bool:
        """Whether the memory that a block computes from now is used for other weights after it."""
        return self.computing.get(number) is not None or self.blocks[number].is_encoded

    def recover(self) -> None:
        """Bring every block that an interrupt left computing back to rest."""
        for number in list(self.computing):
            self.leave(number, prefetches=False)


def wait_for_copies(shares: Iterable[DeviceShare]) -> None:
    """Wait on the host until nothing is copied to the devices of these shares."""
    for share in shares:
        share.wait_for_copies()
