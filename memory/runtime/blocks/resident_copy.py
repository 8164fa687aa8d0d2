"""The copy of one group's weights that stays on a device: a slab, and the views into it that the module holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ..tensors.parameter_slots import ParameterSlot

__all__ = ["ResidentCopy", "content_tag"]

# Of the table whose rows and columns are summed up. The columns of a square one take longer where a CPU is the device.
NUM_ROWS = 1024
MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: the golden ratio of 64 bits


class ResidentCopy:
    """A slab on a device whose copy was queued.

    Args:
        views: what the module holds, one per slot.
        buffers_begin: where the slab has no more weights, but plain buffers.
    """

    def __init__(
        self,
        slab: torch.Tensor,
        slots: Sequence[ParameterSlot],
        views: Sequence[torch.Tensor],
        *,
        buffers_begin: int,
    ) -> None:
        self.slab = slab
        # Views share the slab's counter: a write to any shows there. Those of buffers have counters of their own.
        self.views = [view.data if slot.is_plain_buffer else view for slot, view in zip(slots, views, strict=True)]
        self.buffers = [view for slot, view in zip(slots, self.views, strict=True) if slot.is_plain_buffer]
        self.buffers_begin = buffers_begin
        self.loaded_version = slab._version
        self.store_version: int | None = None
        """The version of the weight store from which it was copied."""
        self.tags: tuple[int, int] | None = None
        """The tags of the weights, and of the buffers behind them, after the copy was complete; None until then."""
        self.is_untagged = False
        """Whether there was too little memory to compute the tags."""

    def take_views(self, views: Sequence[torch.Tensor]) -> None:
        """Give the module other objects for the same memory from now on; those of buffers stay."""
        self.views = list(views)

    def move_to(self, slab: torch.Tensor) -> None:
        """Lie in other memory, with the same bytes, from now on; counts as written. The caller repoints the views."""
        self.slab, self.loaded_version = slab, -1

    def take_store_version(self, version: int) -> None:
        """Be a copy of this version of the weight store from now on."""
        self.store_version = version

    def refresh(self, host_slab: torch.Tensor) -> None:
        """Copy the weights, not the buffers, from the weight store again; waits for it."""
        with torch.inference_mode(False), torch.no_grad():
            self.slab[: self.buffers_begin].copy_(host_slab[: self.buffers_begin])
        self.loaded_version = self.slab._version

    def refresh_leaves(self, leaves: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy single weights from host memory again, each to its place in the slab; waits for it."""
        with torch.inference_mode(False), torch.no_grad():
            for leaf, place in leaves:
                place.copy_(leaf)
        self.loaded_version = self.slab._version
        if self.tags is not None:
            try:
                weights, buffers = self.find_tags().tolist()
                self.take_tags(weights, buffers)
            except torch.OutOfMemoryError:
                self.tags = None
                self.go_untagged()

    def take_tags(self, weights: int, buffers: int) -> None:
        """Save the result of `find_tags` after the copy was complete."""
        self.tags = weights, buffers

    def go_untagged(self) -> None:
        """Work without tags: there was too little memory to compute them."""
        self.is_untagged = True

    @property
    def is_written(self) -> bool:
        """Whether weights were written to since it was loaded."""
        return self.slab._version != self.loaded_version

    def find_tags(self) -> torch.Tensor:
        """Return the tags of the weights and of the buffers, where they are."""
        regions = self.slab[: self.buffers_begin], self.slab[self.buffers_begin :]
        return torch.stack([content_tag(region) for region in regions])

    def find_written(self) -> tuple[bool, bool]:
        """Return whether weights, and whether buffers, differ from what was copied, however they were written.

        Reads the slab where it is, and two numbers of it; waits for what computes.
        """
        written = self.is_written, self.has_written_buffers
        if all(written) or (self.tags is None and not self.is_untagged):
            return written
        try:
            tags = self.find_tags().tolist() if self.tags is not None else None
        except torch.OutOfMemoryError:
            tags = None
        if tags is None:  # copying all of it back is right, too
            return True, True
        assert self.tags is not None
        return written[0] or tags[0] != self.tags[0], written[1] or tags[1] != self.tags[1]

    @property
    def has_written_buffers(self) -> bool:
        """Whether a forward wrote into a buffer since it was loaded."""
        return any(buffer._version for buffer in self.buffers)


@torch.no_grad()
def content_tag(slab: torch.Tensor) -> torch.Tensor:
    """Return 64 bits that identify the contents of a slab, on its device; reads it twice.

    Takes a thousandth of its bytes, or some kilobytes, of extra memory.

    The words as a table, and each row's and each column's sum times a factor of its own: words that change places
    change a row or a column, flipped signs do not cancel each other.
    """
    with torch.inference_mode(False):
        words = slab.view(torch.int64)
        num_rows = max(1, min(NUM_ROWS, math.isqrt(words.numel())))
        num_columns = words.numel() // num_rows
        table, tail = words[: num_rows * num_columns].view(num_rows, num_columns), words[num_rows * num_columns :]
        sums = torch.cat([table.sum(1), table.sum(0), tail])
        factors = torch.arange(1, sums.numel() + 1, device=slab.device).mul_(MULTIPLIER).bitwise_or_(1)
        return sums.mul_(factors).sum()
