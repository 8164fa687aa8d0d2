"""Brings weights of components that are used next nearer to their device, while another component computes.

[Note: look-ahead] The forecast says what is used soon. A thread first reads the files of what rests there into the
system's cache: piece by piece, in the order of the uses to come, and no further than RAM has room above its watermark.
That takes no memory of ours, and it ends within a piece when the forecast changes. While what computes reads its own
file in each pass, the thread waits: the disk is the bottleneck then. Then it copies blocks to device memory that is
free ([Note: early loading] in `early_loading.py`). It evicts nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import InvalidInput
from ..weights.source import WeightsSource
from .early_loading import EarlyLoading
from .live_capacity import LiveCapacity
from .member import Member

__all__ = ["LookAhead", "ReadAhead"]

# How long the thread waits for something to do before it ends, and how often it looks whether the disk is free.
IDLE_S = 5.0
BUSY_S = 0.02


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """What was read ahead of one component since it was loaded last."""

    num_bytes: int = 0
    seconds: float = 0.0

    def plus(self, num_bytes: int, seconds: float) -> ReadAhead:
        return ReadAhead(self.num_bytes + num_bytes, self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A component that is used soon."""

    component: str
    source: WeightsSource | None
    names: frozenset[str]
    """Its weights that rest in their file; none where it is in RAM."""
    file_bytes: int


class LookAhead:
    """Knows what is used next, and has a thread that reads it and loads it early.

    Args:
        leased: the members that compute now, by their ids.
    """

    def __init__(self, capacity: LiveCapacity, leased: Mapping[str, Member], early: EarlyLoading) -> None:
        self.capacity = capacity
        self.leased = leased
        self.early = early
        self.is_on = True
        self.wanted: tuple[Wanted, ...] = ()
        """In the order of their use; replaced as a whole."""
        self.done: dict[str, ReadAhead] = {}
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def turn(self, is_on: bool) -> None:
        """Read and load ahead from now on, or not."""
        self.is_on = is_on
        self.follow()

    def follow(self) -> None:
        """Take the forecast as it is now; the caller holds the manager's lock. What is read for another one ends."""
        wanted = tuple(self.find_wanted()) if self.is_on else ()
        with self.changed:
            if wanted != self.wanted:
                self.wanted = wanted  # before it waits for anything: the thread ends what it does for another forecast
                self.changed.notify()
                if wanted and (self.thread is None or not self.thread.is_alive()):
                    self.thread = threading.Thread(target=self.run, name="highwater-ahead", daemon=True)
                    self.thread.start()
        self.early.drop_others({*self.capacity.forecast.next_uses} if self.is_on else ())

    def find_wanted(self) -> Iterator[Wanted]:
        """Yield the components of the steps to come that are not leased, the next one first."""
        uses = self.capacity.forecast.later_uses
        for component in sorted(uses, key=uses.__getitem__):
            member = self.capacity.members.get(component)
            if member is None or component in self.leased:
                continue
            groups = [group for group in member.managed.groups if group.copy is None]
            names = frozenset(name for group in groups for name in group.at_rest.names_in_file)
            file_bytes = sum(group.slab_bytes for group in groups if group.at_rest.names_in_file)
            if groups:
                yield Wanted(component, member.managed.source, names, file_bytes)

    def take(self, component: str) -> ReadAhead:
        """Return what was read ahead of a component that is loaded now, once."""
        return self.done.pop(component, ReadAhead())

    # -- the thread

    def run(self) -> None:
        asked: tuple[Wanted, ...] = ()
        while (found := self.wait_for_others(asked)) is not None:
            asked, num_bytes = found, 0
            in_ram = []
            for each in asked:
                num_bytes += each.file_bytes
                if self.wanted is not asked or not self.capacity.has_room_for_pages(num_bytes):
                    break
                self.read(each, asked)
                in_ram.append(each.component)
            self.early.load(in_ram, lambda: self.wanted is asked)  # noqa: B023

    def wait_for_others(self, asked: tuple[Wanted, ...]) -> tuple[Wanted, ...] | None:
        """Return what is wanted when that is something else; None, and the thread ends, if it stays the same."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.wanted is not asked, IDLE_S):
                self.thread = None
                return None
            return self.wanted

    def read(self, wanted: Wanted, asked: tuple[Wanted, ...]) -> None:
        """Read one component's files, until that is not what is wanted any more."""
        if wanted.source is None or not wanted.names:
            return
        begin_s = time.perf_counter()
        try:
            for num_bytes in wanted.source.warm(wanted.names):
                now_s = time.perf_counter()
                if num_bytes:
                    before = self.done.get(wanted.component, ReadAhead())
                    self.done[wanted.component] = before.plus(num_bytes, now_s - begin_s)
                while self.wanted is asked and self.is_disk_busy():
                    time.sleep(BUSY_S)
                if self.wanted is not asked:
                    return
                begin_s = time.perf_counter()
        except (InvalidInput, KeyError):  # its loading says what is wrong with the file
            return

    def is_disk_busy(self) -> bool:
        """Whether what computes now reads a file in each pass."""
        plans = [member.managed.plan for member in list(self.leased.values())]
        return any(share.read_bytes for plan in plans for share in plan.shares)
