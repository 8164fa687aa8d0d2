"""The master of one unit: the one complete copy of its weights, from which every device copy is made.

It is a slab of host memory, or, at tier ``disk``, the file that the weights came from. A file costs no RAM while the
unit is not on a device; on its way there it passes through two bounce buffers, window by window, and its pages leave
the system's cache behind it. What no file has (buffers, weights that were written to) stays in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .reading import Target
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

    def copy_to(self, target: torch.Tensor, begin: int, copies: CopyStream) -> None:
        """Queue the copy of a part of the slab to as many bytes on a device."""
        copies.copy(target, self.slab[begin : begin + target.numel()])


class FileMaster:
    """Weights that rest in their file, by the leaves of a unit's slab.

    Args:
        names: the name of each leaf for the source; None for those that ``kept`` has.
        kept: leaves in host memory by their place.
        bounce: the buffers of the share, which opens them before anything is copied.
    """

    version = -1  # no slab's: what replaces the file is another master

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

    def address_of(self, place: int) -> int:
        """Return where in host memory a leaf is while it rests; 0 for one that rests in the file."""
        return self.kept[place].data_ptr() if place in self.kept else 0

    def resting_leaves(self) -> list[torch.Tensor]:
        """Return the leaves that are in host memory, and for the others shapes without memory."""
        with torch.inference_mode(False):
            return [
                self.kept[place] if place in self.kept else torch.empty(form.shape, dtype=form.dtype, device="meta")
                for place, form in enumerate(self.layout.forms)
            ]

    def copy_to(self, target: torch.Tensor, begin: int, copies: CopyStream) -> None:
        """Read a part of the slab and queue its copies, window by window; returns when all is read.

        A window is what a bounce buffer holds of the slab, wherever that cuts a weight.

        Raises:
            InvalidInput: the file is not what it was.
        """
        for done in range(0, target.numel(), self.bounce.buffer_bytes):
            part = target[done : done + self.bounce.buffer_bytes]
            window = self.bounce.take()[: part.numel()]
            self.read_window(begin + done, window)
            self.bounce.send(window, part)

    def differs(self, slab: torch.Tensor) -> bool:
        """Whether a slab of host memory has other weights than the file. Reads them one by one. Raises as `copy_to`."""
        for name, view in zip(self.names, self.layout.views(slab), strict=True):
            if name is not None:
                stored = torch.empty(view.nbytes, dtype=torch.uint8)
                self.source.read_into([(name, stored)], drop_pages=True)
                if not torch.equal(stored, view.reshape(-1).view(torch.uint8)):
                    return True
        return False

    def read_window(self, begin: int, window: torch.Tensor) -> None:
        """Fill host memory with what a slab has from this byte on; what lies between its weights stays as it is."""
        targets: list[Target] = []
        for place, (name, offset) in enumerate(zip(self.names, self.layout.offsets, strict=True)):
            first, last = max(begin, offset), min(begin + window.numel(), self.layout.end_of(place))
            if first >= last:
                continue
            part = window[first - begin : last - begin]
            if name is None:
                part.copy_(self.layout.forms[place].bytes_of(self.kept[place])[first - offset : last - offset])
            else:
                targets.append((name, part, first - offset))
        self.source.read_into(targets, drop_pages=True)
