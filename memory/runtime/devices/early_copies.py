"""Copies of weights that are on a device before their component is loaded there.

[Note: early copies] While one component computes, blocks of the next one are copied to memory that is free. Until that
one is loaded nothing depends on them:

1. Its module holds nothing of them, and they are idle bytes of their component in the books: they leave with it.
2. `DeviceShare.load` takes a copy over where it would queue one, if the weights at rest are still those that were
   copied. What the plan does not want there is dropped then.
3. Memory is allocated and entered under the manager's lock. It is filled without it, because reading a file or copying
   pageable memory holds up the thread that does it. What drops a copy that is being filled from a file marks it first,
   and the filling ends within 4 MiB of the file: no forward of another component waits for the rest of a block. The
   component's own loading, and what writes to its weights at rest, wait until the block is queued.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from ...transfer.copy_stream import CopyStream
from ...transfer.devices import Device
from ...transfer.timing import Stopwatch
from ..blocks.weight_group import WeightGroup
from .ledger import Kind, Ledger

if TYPE_CHECKING:
    from ..blocks.weight_store import FileStore, HostStore

__all__ = ["EarlyCopies", "EarlyCopy"]


class NoLongerWanted(Exception):
    """Ends the filling of a copy that is being dropped."""


class EarlyCopy:
    """A slab on a device for one group, and which weights at rest it is filled from."""

    def __init__(self, group: WeightGroup, slab: torch.Tensor, watch: Stopwatch[str]) -> None:
        assert group.at_rest.store is not None
        self.group = group
        self.slab = slab
        self.store: FileStore | HostStore = group.at_rest.store
        self.version = group.at_rest.version
        self.watch = watch
        self.is_filled = False
        """Whether all of its copies are queued."""
        self.is_dropped = False
        """Whether another thread is about to free it. It waits for the filling, which ends soon."""

    @property
    def is_of_now(self) -> bool:
        """Whether it has what the group's weights at rest are now."""
        at_rest = self.group.at_rest
        return self.is_filled and self.store is at_rest.store and self.version == at_rest.version

    @property
    def is_there(self) -> bool:
        """Whether all of its copies have come."""
        return self.is_filled and self.watch.read() is not None

    def find_seconds(self) -> float:
        """Return the seconds that its copies took, 0.0 while they are under way."""
        return sum((self.watch.read() or {}).values()) if self.is_filled else 0.0

    def end_soon(self) -> None:
        """Make its filling end within a piece of its file; any thread may call it."""
        self.is_dropped = True

    def check(self) -> None:
        """Raise `NoLongerWanted` if it is being dropped."""
        if self.is_dropped:
            raise NoLongerWanted

    def fill(self, copies: CopyStream) -> None:
        """Queue its copies. Raises as the weight store's ``copy_to``, and `NoLongerWanted` if it is being dropped."""
        self.watch.start("", copies.stream)
        self.store.copy_to(self.slab, 0, copies, self.check)
        self.watch.stop("", copies.stream)
        self.is_filled = True


class EarlyCopies:
    """The early copies of one component on one device; every allocation is entered in the ledger as it happens.

    Args:
        copies: None for the CPU, where there are none.
    """

    def __init__(self, owner: str, device: Device, copies: CopyStream | None, ledger: Ledger) -> None:
        self.owner = owner
        self.device = device
        self.copies = copies
        self.ledger = ledger
        self.by_group: dict[WeightGroup, EarlyCopy] = {}
        self.filling = threading.RLock()
        """Held while one is filled; the manager's lock is never waited for meanwhile."""
        self.bytes_moved = 0
        self.taken_bytes = 0
        """Of what was loaded last, how much was there before."""
        self.taken_s = 0.0
        """How long these copies took."""

    # -- in the books

    @property
    def num_bytes(self) -> int:
        return sum(early.slab.numel() for early in list(self.by_group.values()))

    def count_bytes(self) -> int:
        """Return the bytes of the memory that is there now."""
        return sum(early.slab.untyped_storage().nbytes() for early in list(self.by_group.values()))

    def booked(self) -> AbstractContextManager[None]:
        return self.ledger.booked(self.owner, Kind.WEIGHTS, lambda: {self.device.name: self.num_bytes})

    # -- coming

    def find_next(self, groups: Iterable[WeightGroup]) -> WeightGroup | None:
        """Return the first group that is not on the device, nor on its way there; None: all of them are."""
        if self.copies is None:
            return None
        return next((g for g in groups if g.slab_bytes and g.copy is None and g not in self.by_group), None)

    def begin(self, group: WeightGroup) -> EarlyCopy:
        """Allocate memory for a group that is not resident and as it was placed; `fill` is to follow.

        Raises:
            torch.OutOfMemoryError: nothing changed.
        """
        assert self.copies is not None
        with self.booked():
            slab = self.copies.allocate(group.slab_bytes)
            early = self.by_group[group] = EarlyCopy(group, slab, Stopwatch(self.device))
        return early

    def fill(self, early: EarlyCopy) -> bool:
        """Queue the copies that `begin` made room for; needs no lock. Returns False where it was dropped meanwhile.

        Raises as the weight store's ``copy_to``.
        """
        assert self.copies is not None
        with self.filling:
            if not self.has(early):
                return False
            try:
                early.fill(self.copies)
                self.bytes_moved += early.slab.numel()
            except NoLongerWanted:
                return False
            finally:
                if not self.has(early):  # a garbage collection released the component here
                    self.copies.drain()
            return True

    def has(self, early: EarlyCopy) -> bool:
        """Whether it was neither taken over nor dropped."""
        return self.by_group.get(early.group) is early

    def is_coming(self, early: EarlyCopy) -> bool:
        """Whether its copies are still under way, and it is still wanted."""
        return self.has(early) and not early.is_there

    def finish(self) -> None:
        """Wait until what is being filled is queued."""
        with self.filling:
            pass

    # -- taken over

    def begin_loading(self) -> None:
        """Count anew what is taken over; what is not on its way yet is dropped."""
        self.drop_unfilled()
        self.taken_bytes, self.taken_s = 0, 0.0

    def take(self, group: WeightGroup) -> torch.Tensor | None:
        """Return the slab with a group's weights, out of the books and the caller's now; None where there is none.

        Its copies may be under way.
        """
        early = self.by_group.get(group)
        if early is None:
            return None
        group.rest()
        if not early.is_of_now:
            self.drop([group])
            return None
        assert self.copies is not None
        self.copies.drain()  # an interrupt may free it from here on
        with self.booked():
            del self.by_group[group]
        self.taken_bytes += early.slab.numel()
        self.taken_s += early.find_seconds()
        return early.slab

    # -- dropped

    def drop_others(self, wanted: Container[WeightGroup] = (), *, num_bytes: int | None = None) -> None:
        """Drop what is not wanted, the last one first.

        Args:
            num_bytes: how much is to be free; None: all of it goes.
        """
        missing = self.num_bytes if num_bytes is None else num_bytes
        unwanted = []
        for group in reversed(self.by_group):
            if missing > 0 and group not in wanted:
                unwanted.append(group)
                missing -= group.slab_bytes
        self.drop(unwanted)

    def drop_unfilled(self) -> None:
        """Drop what has not all of its copies queued: that failed."""
        self.finish()
        self.drop([group for group, early in self.by_group.items() if not early.is_filled])

    def drop(self, groups: Iterable[WeightGroup]) -> None:
        """Free the memory of these groups' early copies; the filling of one ends within a piece of its file."""
        groups = list(groups)
        for group in groups:
            self.by_group[group].end_soon()  # before it waits for the filling
        for group in groups:
            assert self.copies is not None
            with self.filling:
                self.copies.drain()
                with self.booked():
                    del self.by_group[group]
