"""The copy of one unit's weights that stays on a device: a slab, and the views into it that the module holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .entries import Entry
from .transfer import CopyStream

__all__ = ["DeviceCopy"]


class DeviceCopy:
    """A slab on a device whose copy was queued.

    Args:
        views: what the module holds for each entry.
        ready: recorded behind the copy.
    """

    def __init__(
        self, slab: torch.Tensor, entries: Sequence[Entry], views: Sequence[torch.Tensor], ready: torch.Event
    ) -> None:
        self.slab = slab
        # Views share the slab's counter: a write to any shows there. Those of buffers have counters of their own.
        self.views = [view.data if entry.is_plain_buffer else view for entry, view in zip(entries, views, strict=True)]
        self.buffers = [view for entry, view in zip(entries, self.views, strict=True) if entry.is_plain_buffer]
        self.ready = ready
        self.awaited: set[int] = set()
        """The streams that already wait for the copy."""
        self.loaded_version = slab._version

    @property
    def is_written(self) -> bool:
        """Whether weights were written to since it was loaded."""
        return self.slab._version != self.loaded_version

    @property
    def has_written_buffers(self) -> bool:
        """Whether a forward wrote into a buffer since it was loaded."""
        return any(buffer._version for buffer in self.buffers)

    def await_copy(self, copies: CopyStream) -> None:
        """Let the compute stream wait until the weights are there, each stream once."""
        stream = copies.compute_stream.stream_id
        if stream not in self.awaited:
            copies.await_on_compute(self.ready)
            self.awaited.add(stream)
