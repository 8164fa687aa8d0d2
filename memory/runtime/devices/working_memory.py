"""The memory of a device that a component uses beside resident weights: scratch, staging memory, bounce buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ...planner.plan import DevicePlan
from ...planner.staging_layout import Offsets
from ...transfer.bounce_buffers import BounceBuffers
from ...transfer.copy_stream import CopyStream
from ...transfer.devices import Device
from ...transfer.slabs import allocate_device
from ..blocks.bundle import Bundle
from ..blocks.staging import StagingArea
from .ledger import Kind, Ledger
from .prefetch import Streamer

__all__ = ["WorkingMemory"]


class WorkingMemory:
    """The memory that one share computes and copies with; every allocation is entered in the ledger as it happens.

    A caller that frees memory drops its views of it first.

    Args:
        copies: None for the CPU, where nothing is copied and only encoded weights need scratch.
    """

    def __init__(self, owner: str, device: Device, copies: CopyStream | None, ledger: Ledger) -> None:
        self.owner = owner
        self.device = device
        self.copies = copies
        self.ledger = ledger
        self.scratch: torch.Tensor | None = None
        """Where encoded weights are decoded."""
        self.streamer: Streamer | None = None
        """Moves blocks through the staging memory."""
        self.staging: tuple[int, Offsets] = (0, ())
        """The bytes and offsets of the staging memory."""
        self.bounce = None if copies is None else BounceBuffers(copies)
        self.bounce_bytes = 0
        """The bytes of each bounce buffer while weights are loaded; 0 if none rest in a file."""
        self.locks_bounce = False
        """Whether bounce buffers should be page-locked."""
        self.past_streamed_bytes = 0

    @property
    def bytes_streamed(self) -> int:
        """Bytes copied to staging memory so far."""
        return self.past_streamed_bytes + (self.streamer.area.bytes_moved if self.streamer is not None else 0)

    # -- in the books

    def count_bytes(self) -> Iterator[tuple[str, Kind, int]]:
        """Yield place, kind and bytes of the tensors that are allocated now."""
        if self.scratch is not None:
            yield self.device.name, Kind.SCRATCH, self.scratch.untyped_storage().nbytes()
        if self.streamer is not None:
            yield self.device.name, Kind.STAGING, self.streamer.area.count_bytes()
        if self.bounce is not None:
            for tier, num_bytes in self.bounce.count_bytes().items():
                yield tier, Kind.STAGING, num_bytes

    def held_scratch(self) -> dict[str, int]:
        return {self.device.name: self.scratch.numel()} if self.scratch is not None else {}

    def held_staging(self) -> dict[str, int]:
        return {self.device.name: self.streamer.area.num_bytes} if self.streamer is not None else {}

    def held_bounce(self) -> Mapping[str, int]:
        return self.bounce.host_bytes if self.bounce is not None else {}

    def settle(self) -> None:
        """Enter in the ledger what is on the device: an interrupt may have come between a step and its entry."""
        for kind, held in ((Kind.SCRATCH, self.held_scratch()), (Kind.STAGING, self.held_staging())):
            self.ledger.settle(self.device.name, self.owner, kind, held.get(self.device.name, 0))

    # -- coming and going

    def read_through(self, num_bytes: int, *, locks: bool) -> None:
        """Take buffers of so many bytes, page-locked or not, while weights are loaded from their file."""
        self.bounce_bytes, self.locks_bounce = num_bytes, locks

    def open_bounce(self) -> None:
        if self.bounce is not None and self.bounce_bytes and not self.bounce.buffers:
            with self.ledger.booked(self.owner, Kind.STAGING, self.held_bounce):
                self.bounce.open(self.bounce_bytes, locks=self.locks_bounce)

    def close_bounce(self) -> None:
        if self.bounce is not None and self.bounce.buffers:
            with self.ledger.booked(self.owner, Kind.STAGING, self.held_bounce):
                self.bounce.close()

    def allocate_scratch(self, num_bytes: int) -> None:
        with self.ledger.booked(self.owner, Kind.SCRATCH, self.held_scratch):
            self.scratch = self.copies.allocate(num_bytes) if self.copies else allocate_device(num_bytes, self.device)

    def free_scratch(self) -> None:
        if self.copies is not None:
            self.copies.drain()
        with self.ledger.booked(self.owner, Kind.SCRATCH, self.held_scratch):
            self.scratch = None

    def has_staging(self, plan: DevicePlan) -> bool:
        """Whether the staging memory is as a plan wants it."""
        return self.streamer is not None and self.staging == (plan.staging_bytes, plan.offsets)

    def allocate_staging(self, plan: DevicePlan, blocks: Mapping[int, Bundle], order: Sequence[int]) -> None:
        """Allocate the staging memory of a plan. ``order``: the blocks as they ran in the last whole pass."""
        assert self.copies is not None
        streamed = {number: blocks[number] for number in plan.streamed}
        sizes = {number: bundle.slab_bytes for number, bundle in streamed.items()}
        with self.ledger.booked(self.owner, Kind.STAGING, self.held_staging):
            area = StagingArea(sizes, plan.offsets, plan.staging_bytes, self.copies)
            self.staging = plan.staging_bytes, plan.offsets
            self.streamer = Streamer(streamed, area, [number for number in order if number in streamed])

    def free_staging(self) -> None:
        assert self.copies is not None and self.streamer is not None
        self.copies.drain()
        self.past_streamed_bytes += self.streamer.area.bytes_moved
        with self.ledger.booked(self.owner, Kind.STAGING, self.held_staging):
            self.streamer = None
