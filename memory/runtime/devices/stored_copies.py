"""What a share stores in the memory of another device: copies of streamed blocks ([Note: store] in
`planner/device_store.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from ...planner.plan import DevicePlan
from ...transfer.copy_stream import CopyStream
from ...transfer.devices import Device
from ...transfer.peer_copies import PeerCopies
from ...weights.source import WeightsSource
from ..blocks.bundle import Bundle
from ..blocks.stored_copy import StoredCopy
from ..blocks.weight_group import WeightGroup
from .ledger import Kind, Ledger
from .working_memory import WorkingMemory

__all__ = ["StoredCopies"]


class StoredCopies:
    """The copies that one component stores on a device for its share on another; each is in the ledger as it is made.

    Args:
        device: the one that stores.
        target: the copy stream of the one that computes.
    """

    def __init__(self, owner: str, device: Device, target: CopyStream, ledger: Ledger) -> None:
        self.owner = owner
        self.device = device
        self.ledger = ledger
        self.copies = CopyStream(device)
        self.peers = PeerCopies(self.copies, target)
        target.wait_beside(self.copies)
        self.memory = WorkingMemory(owner, device, self.copies, ledger)
        """The buffers through which files are read to be stored."""
        self.by_group: dict[WeightGroup, StoredCopy] = {}
        self.bytes_filled = 0
        """The bytes of weights that were copied to the device so far."""

    @property
    def was_refused(self) -> bool:
        """Whether the driver refused to page-lock buffers."""
        return self.peers.was_refused or (self.memory.bounce is not None and self.memory.bounce.was_refused)

    # -- in the books

    @property
    def num_bytes(self) -> int:
        return sum(stored.slab.numel() for stored in list(self.by_group.values()))

    def held_on_device(self) -> dict[str, int]:
        return {self.device.name: self.num_bytes}

    def held_buffers(self) -> Mapping[str, int]:
        return self.peers.host_bytes

    def count_bytes(self) -> Iterator[tuple[str, Kind, int]]:
        """Yield place, kind and bytes of the tensors that are allocated now."""
        stored = [copy.slab.untyped_storage().nbytes() for copy in list(self.by_group.values())]
        yield self.device.name, Kind.STORED, sum(stored)
        for tier, num_bytes in self.peers.host_bytes.items():
            yield tier, Kind.STAGING, num_bytes
        yield from self.memory.count_bytes()

    def buffer_bytes(self) -> dict[str, int]:
        """Return the bytes of host memory that all buffers take, by tier."""
        own, files = self.peers.host_bytes, self.memory.held_bounce()
        return {tier: own.get(tier, 0) + files.get(tier, 0) for tier in own.keys() | files.keys()}

    def settle(self) -> None:
        """Enter in the ledger what is there: an interrupt may have come between a step and its entry."""
        self.ledger.settle(self.device.name, self.owner, Kind.STORED, self.num_bytes)

    # -- filled and dropped

    def read_from(self, source: WeightsSource, buffer_bytes: int, *, locks: bool) -> None:
        """Read files through buffers of so many bytes, page-locked or not, where they are stored."""
        assert self.memory.bounce is not None
        self.memory.bounce.fill_from(source)
        self.memory.read_through(buffer_bytes, locks=locks)

    def missing(self, plan: DevicePlan, blocks: Mapping[int, Bundle]) -> list[WeightGroup]:
        """Return what a plan stores and is not there yet, in the order in which it streams."""
        groups = [group for number in plan.streamed if number in plan.stored for group in blocks[number].groups]
        return [group for group in groups if group.slab_bytes and not self.has(group)]

    def has(self, group: WeightGroup) -> bool:
        """Whether a group streams from its copy; not where an interrupt came while that was made or dropped."""
        stored = self.by_group.get(group)
        return stored is not None and stored.is_filled and group.stored is stored

    def fit(self, plan: DevicePlan, blocks: Mapping[int, Bundle], progress: Callable[[int], None]) -> int:
        """Store what a plan stores and drop the rest; returns the bytes that were queued to be stored.

        Reads files, which takes as long as loading them to any device.

        Args:
            progress: called with the bytes of each block.

        Raises:
            torch.OutOfMemoryError: the device has less memory than was planned. What was stored stays.
            InvalidInput: a file is not what it was.
        """
        wanted = {group for number in plan.stored for group in blocks[number].groups}
        self.drop([group for group in self.by_group if group not in wanted or not self.has(group)])
        missing = self.missing(plan, blocks)
        try:
            if plan.stored:
                with self.ledger.booked(self.owner, Kind.STAGING, self.held_buffers):
                    self.peers.open()
            else:
                self.close_buffers()
            if missing:
                self.memory.open_bounce()
            for group in missing:
                self.store(group)
                progress(group.slab_bytes)
        finally:
            self.memory.close_bounce()
        return sum(group.slab_bytes for group in missing)

    def store(self, group: WeightGroup) -> None:
        """Allocate a slab on the device and queue a copy of a group's weights at rest into it. Raises as `fit`."""
        bounce = self.memory.bounce
        assert bounce is not None
        with self.ledger.booked(self.owner, Kind.STORED, self.held_on_device):
            slab = self.copies.allocate(group.slab_bytes)
            stored = self.by_group[group] = StoredCopy(group.at_rest, slab, self.peers)
        stored.fill(bounce)
        group.stream_from(stored)
        self.bytes_filled += group.slab_bytes

    def drop(self, groups: Iterable[WeightGroup]) -> None:
        """Free the memory of these groups' copies, behind all that reads them; their blocks stream from their origin.

        Nothing is lost and nothing is copied back.
        """
        groups = [group for group in groups if group in self.by_group]
        if not groups:
            return
        for group in groups:
            group.stream_from(None)
        self.copies.drain()
        with self.ledger.booked(self.owner, Kind.STORED, self.held_on_device):
            for group in groups:
                del self.by_group[group]

    def shrink(self, num_bytes: int) -> int:
        """Free at least so many bytes if they are there, what was stored last first; returns those that were freed."""
        self.settle()
        before, leaving = self.num_bytes, []
        left = num_bytes
        for group in reversed(self.by_group):
            if left <= 0:
                break
            leaving.append(group)
            left -= group.slab_bytes
        self.drop(leaving)
        return before - self.num_bytes

    def drop_all(self) -> int:
        """Leave the device; returns the bytes freed. Waits for copies through buffers."""
        self.settle()
        before = self.num_bytes
        self.drop(list(self.by_group))
        self.close_buffers()
        self.memory.close_bounce()
        return before

    def close_buffers(self) -> None:
        if self.peers.buffers:
            with self.ledger.booked(self.owner, Kind.STAGING, self.held_buffers):
                self.peers.close()

    def forget(self) -> None:
        """Copy anew what the weights at rest have before it streams: these were written to past their version."""
        for stored in self.by_group.values():
            stored.forget()
