"""The master of one unit: the one complete copy of its weights, from which every device copy is made.

It is a slab of host memory, or, at tier ``disk``, the file that the weights came from. A file costs no RAM while the
unit is not on a device; on its way there it passes through two bounce buffers, block by block, and its pages leave the
system's cache behind it. What no file has (buffers, weights that were written to) stays in
host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from .source import WeightsSource
from .transfer import Bounce, CopyStream, SlabLayout

__all__ = ["FileMaster", "HostMaster"]


class HostMaster:
    """Weights in a slab of host memory, page-locked or not."""

    def __init__(self, slab: torch.Tensor) -> None:
        self.slab = slab

    @property
    def version(self) -> int:
        """Grows when the weights are written to."""
        return self.slab._version

    def copy_to(self, target: torch.Tensor, copies: CopyStream, ready: torch.Event) -> None:
        """Queue the copy of all weights to a slab on a device."""
        copies.copy_and_record(target, self.slab, ready)


class FileMaster:
    """Weights that rest in their file, by the leaves of a unit's slab.

    Args:
        names: the name of each leaf for the source; None for those that ``kept`` has.
        kept: leaves in host memory by their place.
        bounce: the buffers of the share, which opens them before anything is copied.
    """

    version = 0

    def __init__(
        self,
        layout: SlabLayout,
        names: Sequence[str | None],
        kept: Mapping[int, torch.Tensor],
        source: WeightsSource,
        bounce: Bounce,
    ) -> None:
        self.layout = layout
        self.names = list(names)
        self.kept = dict(kept)
        self.source = source
        self.bounce = bounce

    @property
    def kept_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.kept.values())

    def copy_to(self, target: torch.Tensor, copies: CopyStream, ready: torch.Event) -> None:
        """Read the weights and queue their copies, piece by piece; returns when all are read.

        Raises:
            InvalidInput: the file is not what it was.
        """
        for first, last in self.pieces():
            begin, end = self.layout.offsets[first], self.layout.end_of(last - 1)
            buffer = self.bounce.take(end - begin)
            self.read_leaves(range(first, last), self.layout.views(buffer, first, last))
            self.bounce.send(buffer[: end - begin], target[begin:end])
        ready.record(copies.stream)

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield runs of leaves that fit a bounce buffer; a leaf that does not is a run of its own."""
        first = 0
        for last in range(1, len(self.names) + 1):
            if last == len(self.names) or (
                self.layout.end_of(last) - self.layout.offsets[first] > self.bounce.buffer_bytes
            ):
                yield first, last
                first = last

    def differs(self, slab: torch.Tensor) -> bool:
        """Whether a slab of host memory has other weights than the file. Reads them one by one. Raises as `copy_to`."""
        for name, view in zip(self.names, self.layout.views(slab), strict=True):
            if name is not None:
                stored = torch.empty(view.nbytes, dtype=torch.uint8)
                self.source.read_into([(name, stored)], drop_pages=True)
                if not torch.equal(stored, view.reshape(-1).view(torch.uint8)):
                    return True
        return False

    def read_leaves(self, places: range, views: Sequence[torch.Tensor]) -> None:
        targets = []
        for place, view in zip(places, views, strict=True):
            name = self.names[place]
            if name is None:
                with torch.no_grad():
                    view.copy_(self.kept[place])
            else:
                targets.append((name, view))
        self.source.read_into(targets, drop_pages=True)
