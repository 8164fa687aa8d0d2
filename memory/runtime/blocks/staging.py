"""The staging memory of one device: how many bytes of each streamed block are there, and copies of the missing ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Protocol, TypeAlias

import torch

from ...planner.staging_layout import Occupancy, Offsets
from ...transfer.copy_stream import CopyStream
from .weight_store import MOST_PARTS

__all__ = ["StagingArea", "StagingSlot"]

Piece: TypeAlias = tuple[int, int, int, "StagingSlot | None"]
"""The use that must end before the bytes are overwritten (0: the copy stream has waited for it); begin, end, owner."""


class CopySource(Protocol):
    """The weights at rest of one block, from which its staging memory is filled."""

    def copy_to(self, target: torch.Tensor, begin: int, copies: CopyStream) -> None:
        """Queue the copy of a part of them, from byte ``begin``, into a target on the device."""
        ...


class StagingSlot:
    """One range of the staging memory, for one block; its bytes may be there or not."""

    def __init__(self, block: int, begin: int, slab: torch.Tensor, copies: CopyStream) -> None:
        self.block = block
        self.begin = begin
        self.end = begin + slab.numel()
        self.slab = slab
        self.parts: dict[tuple[int, int], torch.Tensor] = {}
        """Views of the slab by their begin and end in the staging memory; every pass fills the same views."""
        self.ready = copies.event()
        """Recorded behind the last copy."""
        self.free = copies.event()
        """Recorded behind the last compute."""
        self.stream = copies.compute_stream
        """The stream on which the block computes, or computed last."""
        self.last_use = 0
        """The number of the last compute; 0 if there was none."""
        self.in_use = False
        self.version: int | None = None
        """The version of the weights whose bytes are there: a host may write to weights at rest."""
        self.missing_bytes = slab.numel()
        """The bytes that other blocks have overwritten since it was filled."""

    def part(self, begin: int, end: int) -> torch.Tensor:
        """Return the view between two addresses in the staging memory."""
        if (begin, end) not in self.parts:
            if len(self.parts) >= MOST_PARTS:
                self.parts.clear()
            is_whole = begin == self.begin and end == self.end
            self.parts[begin, end] = self.slab if is_whole else self.slab[begin - self.begin : end - self.begin]
        return self.parts[begin, end]

    def holds(self, version: int) -> bool:
        """Whether all bytes of this version are there, or their copies are queued."""
        return self.version == version and not self.missing_bytes

    def take(self, version: int, *, missing_bytes: int) -> None:
        """Copies of this version are queued, of all but so many bytes."""
        self.version, self.missing_bytes = version, missing_bytes

    def lose(self, num_bytes: int) -> None:
        """So many bytes are overwritten by another block."""
        self.missing_bytes += num_bytes

    def forget(self) -> None:
        """Hold no version: copies begin and may fail, or the weights were written to past their version."""
        self.version = None

    def use(self, copies: CopyStream) -> None:
        """The block computes from now on: the compute stream waits for its bytes."""
        self.in_use = True
        self.stream = copies.await_on_compute(self.ready)

    def give_back(self, copies: CopyStream, number: int) -> None:
        """The block has computed: the bytes may be overwritten when the compute stream reaches this point.

        Args:
            number: of this use.
        """
        copies.mark_free(self.free, self.stream)
        self.in_use = False
        self.last_use = number


class StagingArea:
    """Device memory through which the streamed blocks of one device pass ([Note: offsets] in
    `planner/staging_layout.py`).

    Args:
        sizes: the bytes of each streamed block.

    Raises:
        torch.OutOfMemoryError: nothing was allocated.
    """

    def __init__(self, sizes: Mapping[int, int], offsets: Offsets, num_bytes: int, copies: CopyStream) -> None:
        self.copies = copies
        self.num_bytes = num_bytes
        slab = copies.allocate(num_bytes)
        self.occupancy = Occupancy[StagingSlot](num_bytes)
        staging_slots = {
            (block, begin): StagingSlot(block, begin, slab[begin : begin + sizes[block]], copies)
            for here in offsets
            for block, begin in here.items()
        }
        self.staging_slots = {block: tuple(staging_slots[block, here[block]] for here in offsets) for block in sizes}
        """By block, one slot for each round."""
        self.num_uses = 0
        self.last_awaited = 0
        """The latest use that the copy stream waits for: those before it are over as well."""
        self.bytes_moved = 0

    def count_bytes(self) -> int:
        """Return the bytes of the memory that is there now."""
        storages = {slot.slab.untyped_storage().data_ptr(): slot.slab.untyped_storage().nbytes() for slot in self}
        return sum(storages.values())

    def find(self, block: int, round_number: int, version: int) -> StagingSlot:
        """Return the slot that holds a block; if there is none, the slot of this round."""
        staging_slots = self.staging_slots[block]
        preferred = staging_slots[round_number % len(staging_slots)]
        if preferred.holds(version):
            return preferred
        for staging_slot in staging_slots:
            if staging_slot is not preferred and staging_slot.holds(version):
                return staging_slot
        return preferred

    def fill(
        self, staging_slot: StagingSlot, source: CopySource, version: int, keep: Collection[StagingSlot] = ()
    ) -> bool:
        """Queue copies of a block's missing bytes where memory is free; returns whether no byte is missing then.

        ``keep``: slots that are needed sooner, so not overwritten. After an error the next call copies all anew.
        """
        is_begun = staging_slot.version == version
        if is_begun and not staging_slot.missing_bytes:
            return True
        assert not staging_slot.in_use, f"block {staging_slot.block} refilled while it computes"
        free: list[Piece] = []
        left_bytes = 0
        for begin, end, owner in self.occupancy.within(staging_slot.begin, staging_slot.end):
            if owner is staging_slot and is_begun:
                continue
            if owner is not None and (owner.in_use or owner in keep):
                left_bytes += end - begin
            else:
                last_use = owner.last_use if owner else 0
                free.append((last_use if last_use > self.last_awaited else 0, begin, end, owner))
        staging_slot.forget()  # until all is queued: reading a file may fail
        for pieces in touching(free) if len(free) > 1 else (free,) if free else ():  # first what is free first
            for _, begin, end, owner in pieces:
                self.claim(begin, end, owner, staging_slot)
            begin, end = pieces[0][1], pieces[-1][2]
            source.copy_to(staging_slot.part(begin, end), begin - staging_slot.begin, self.copies)
            self.bytes_moved += end - begin
        if free:
            self.copies.mark_ready(staging_slot.ready)
        staging_slot.take(version, missing_bytes=left_bytes)
        return not left_bytes

    def claim(self, begin: int, end: int, owner: StagingSlot | None, staging_slot: StagingSlot) -> None:
        """Take bytes from their owner for the next copy, which overwrites them after their last use."""
        if owner is not None:
            assert not owner.in_use, f"block {owner.block} overwritten while it computes"
            self.copies.await_free(owner.ready, owner.free)
            self.last_awaited = max(self.last_awaited, owner.last_use)
            if owner is not staging_slot:
                owner.lose(end - begin)
        self.occupancy.take(begin, end, staging_slot)

    def give_back(self, staging_slot: StagingSlot) -> None:
        """As `StagingSlot.give_back`, with the number of this use."""
        self.num_uses += 1
        staging_slot.give_back(self.copies, self.num_uses)

    def forget(self) -> None:
        """Treat the bytes of every block as outdated; for writes that bypass versions (``.data``)."""
        for staging_slot in self:
            assert not staging_slot.in_use
            staging_slot.forget()

    def __iter__(self) -> Iterator[StagingSlot]:
        for staging_slots in self.staging_slots.values():
            yield from dict.fromkeys(staging_slots)


def touching(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield neighbouring pieces that wait for the same use together: one copy fills them.

    The pieces that are free first come first.
    """
    together: list[Piece] = []
    for piece in sorted(pieces, key=itemgetter(0, 1)):
        if together and (piece[0] != together[-1][0] or piece[1] != together[-1][2]):
            yield together
            together = []
        together.append(piece)
    if together:
        yield together
