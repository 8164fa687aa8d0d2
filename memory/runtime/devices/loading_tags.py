"""The tags of copies that a loading queues: each is computed while the next one is copied."""

from __future__ import annotations

import torch

from ...transfer.copy_stream import CopyStream
from ..blocks.resident_copy import ResidentCopy

__all__ = ["LoadingTags"]


class LoadingTags:
    """Finds the tags of one loading's copies, by which writes are seen when they leave.

    Computed behind all copies they would take a twentieth of the loading's time, at 1 TB/s beside a link of 25 GB/s.
    They run on the home stream, where memory is allocated, one copy behind: the copy after the next waits for that
    stream ([Note: ordering] in ``transfer/copy_stream.py``, rule 1). Copies from pageable memory block the host, which
    queues nothing beside them: their tags come behind them.
    """

    def __init__(self, copies: CopyStream) -> None:
        self.copies = copies
        self.last: tuple[ResidentCopy, torch.Event] | None = None
        """The copy that was queued last, whose tags are not queued yet."""
        self.found: list[torch.Tensor] = []
        """The tags of the others, in their order, on the device."""
        self.loaded: list[ResidentCopy] = []
        self.is_given_up = False

    def follow(self, copy: ResidentCopy) -> None:
        """Note that a copy was queued, and compute the tags of the one before it. Waits for nothing on the host."""
        self.find_last()
        self.loaded.append(copy)
        if not self.is_given_up:
            ready = self.copies.event()
            self.copies.mark_ready(ready)
            self.last = copy, ready

    def find_last(self) -> None:
        last, self.last = self.last, None
        if last is None:
            return
        copy, ready = last
        try:
            self.copies.await_at_home(ready)
            with self.copies.home:
                self.found.append(copy.find_tags())
        except torch.OutOfMemoryError:
            self.give_up()

    def give_up(self) -> bool:
        """Free what the tags so far take, and compute no more; returns whether they took anything.

        The copies count as untagged once all have come: those of a failed loading leave unwritten.
        """
        had_found = bool(self.found)
        self.found, self.last, self.is_given_up = [], None, True
        return had_found

    def finish(self) -> None:
        """Give each copy its tags; waits on the host until they are there, and with them all copies.

        Any stream may use the copies then, and a host may read buffers.
        """
        self.find_last()
        self.copies.drain()
        tags: list[tuple[int, int]] = []
        try:
            if self.found:
                with self.copies.home:
                    tags = torch.stack(self.found).tolist()
        except torch.OutOfMemoryError:
            self.give_up()
        if self.is_given_up:
            self.copies.wait()
            for copy in self.loaded:
                copy.go_untagged()
            return
        for copy, (weights, buffers) in zip(self.loaded, tags, strict=True):
            copy.take_tags(weights, buffers)
