"""The weight store of one group: the one complete copy of its weights, from which every device copy is made.

It is a slab of host memory, or the file that the weights came from. A file costs no RAM while the
group is not on a device; on its way there it passes through two bounce buffers, window by window, and its pages leave
the system's cache behind it. What no file has (buffers, weights that were written to) stays in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ...errors import InvalidInput
from ...transfer.bounce_buffers import BounceBuffers
from ...transfer.copy_stream import CopyStream
from ...transfer.pinned_memory import HostSlab
from ...transfer.slabs import SlabLayout
from ...weights.file_reader import Target
from ...weights.source import WeightsSource
from .block_state import BlockState

__all__ = ["FileStore", "HostStore", "SharedStore"]

# How many views of a slab, or of a staging slot, are kept.
MOST_PARTS = 16


class HostStore:
    """Weights in a slab of host memory, page-locked or not."""

    state = BlockState.HOST
    """The state of a group that neither computes nor has a copy on a device."""

    def __init__(self, slab: HostSlab) -> None:
        self.memory = slab
        self.slab = slab.data
        self.blocks_host = not self.slab.is_pinned()
        """Whether the host goes on only when a copy is done."""
        self.parts: dict[tuple[int, int], torch.Tensor] = {}
        """Views of the slab that were copied from, by where they begin and their bytes: every pass copies the same."""

    @property
    def version(self) -> int:
        """Grows when the weights are written to."""
        return self.slab._version

    def copy_to(self, target: torch.Tensor, begin: int, copies: CopyStream) -> None:
        """Queue the copy of a part of the slab to as many bytes on a device."""
        num_bytes = target.numel()
        source = self.parts.get((begin, num_bytes))
        if source is None:
            if len(self.parts) >= MOST_PARTS:
                self.parts.clear()
            source = self.parts[begin, num_bytes] = self.slab[begin : begin + num_bytes]
        copies.copy(target, source)

    def own_leaf(self, layout: SlabLayout, place: int) -> torch.Tensor | None:
        """Return a leaf where it lies, with a storage of its own that outlives the slab; None where that cannot be."""
        begin, form = layout.offsets[place], layout.forms[place]
        piece = self.memory.piece(begin, layout.end_of(place))
        if piece is None:
            return None
        with torch.inference_mode(False):
            return piece.view(form.dtype).as_strided(form.shape, form.strides).detach()


class SharedStore(HostStore):
    """Weights in a slab that several components have, and that is in the books as none of theirs.

    Nothing is written to it: what would be takes a slab of its own first (`SlabSharing`).
    """

    def __init__(self, slab: HostSlab, owner: str) -> None:
        super().__init__(slab)
        self.owner = owner
        """The component, for the report."""

    def own_leaf(self, layout: SlabLayout, place: int) -> torch.Tensor | None:
        """Return None: the memory is not this component's alone."""
        return None


class FileStore:
    """Weights that rest in their file, by the leaves of a group's slab.

    Args:
        names: the name of each leaf for the source; None for those that ``kept`` has.
        kept: leaves in host memory by their place.
        bounce: the buffers of the share, which opens them before anything is copied.
        mapped: weights by name in a mapping of their file, which stays what it was where another file takes its place.
    """

    state = BlockState.IN_FILE
    version = -1  # no slab's: what replaces the file is another weight store
    blocks_host = True  # which reads

    def __init__(
        self,
        layout: SlabLayout,
        names: Sequence[str | None],
        kept: Mapping[int, torch.Tensor],
        source: WeightsSource,
        bounce: BounceBuffers,
        mapped: Mapping[str, torch.Tensor],
    ) -> None:
        self.layout = layout
        self.mapped = dict(mapped)
        self.names = list(names)
        self.kept = dict(kept)
        self.source = source
        self.bounce = bounce
        # Leaves that are in no file come first.
        at = [("", 0) if name is None else source.position_of(name) for name in names]
        self.places_in_file = sorted(range(len(names)), key=at.__getitem__)

    def go_through(self, bounce: BounceBuffers) -> None:
        """Pass through the buffers of another share from now on."""
        self.bounce = bounce

    def rename(self, names: Mapping[str, str]) -> None:
        """Call weights by other names, by which the source finds them already."""
        self.names = [name if name is None else names.get(name, name) for name in self.names]
        self.mapped = {names.get(name, name): weight for name, weight in self.mapped.items()}

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

    def keep(self, views: Sequence[torch.Tensor]) -> None:
        """Take over the values of the leaves that are in host memory, from views of a whole slab."""
        for place, leaf in self.kept.items():
            with torch.inference_mode(leaf.is_inference()):  # one made there is written to there only
                leaf.copy_(views[place])

    def copy_to(self, target: torch.Tensor, begin: int, copies: CopyStream) -> None:
        """Read a part of the slab and queue its copies, window by window; returns when all is read.

        A window is what a bounce buffer holds, in the order of the file, wherever that cuts a weight.

        Raises:
            InvalidInput: the file is not what it was.
        """
        for window in self.windows(begin, begin + target.numel()):
            buffer = self.bounce.take()
            to_read: list[Target] = []
            parts = []
            filled = 0
            for place, first, last in window:
                part = buffer[filled : filled + last - first]
                name, offset = self.names[place], self.layout.offsets[place]
                if name is None:
                    part.copy_(self.layout.forms[place].bytes_of(self.kept[place])[first - offset : last - offset])
                else:
                    to_read.append((name, part, first - offset))
                parts.append((part, target[first - begin : last - begin]))
                filled += last - first
            was_cached = self.read(to_read)
            self.bounce.queue_copies(parts, was_cached=was_cached)

    def read(self, targets: Sequence[Target]) -> bool:
        """Fill memory with bytes of weights; returns whether all of them were in the system's cache.

        Where the file was deleted or another one took its place, they come from the mapping that the module came with.

        Raises:
            InvalidInput: the file is not what it was.
        """
        names = [target[0] for target in targets]
        try:
            return self.source.read_into(targets, drop_pages=True)
        except InvalidInput:
            # Of a file that was overwritten where it is the mapping shows what is there now, or nothing.
            if not self.mapped.keys() >= set(names) or not self.source.are_replaced(names):
                raise
        for name, memory, *offset in targets:
            begin = offset[0] if offset else 0
            memory.copy_(self.mapped[name].detach().reshape(-1).view(torch.uint8)[begin : begin + memory.numel()])
        return False

    def windows(self, begin: int, end: int) -> Iterator[list[tuple[int, int, int]]]:
        """Yield what fits a bounce buffer: places of leaves, and the bytes of each, between two bytes of the slab."""
        window: list[tuple[int, int, int]] = []
        left = self.bounce.buffer_bytes
        for place in self.places_in_file:
            first, last = max(begin, self.layout.offsets[place]), min(end, self.layout.end_of(place))
            while first < last:
                cut = min(last, first + left)
                window.append((place, first, cut))
                left -= cut - first
                first = cut
                if not left:
                    yield window
                    window, left = [], self.bounce.buffer_bytes
        if window:
            yield window

    def read_whole(self, slab: torch.Tensor) -> None:
        """Read all weights straight into a slab of host memory. Raises as `copy_to`."""
        to_read: list[Target] = []
        for place, (name, form) in enumerate(zip(self.names, self.layout.forms, strict=True)):
            part = slab[self.layout.offsets[place] : self.layout.end_of(place)]
            if name is None:
                part.copy_(form.bytes_of(self.kept[place]))
            else:
                to_read.append((name, part))
        self.read(to_read)

    def differs(self, slab: torch.Tensor) -> bool:
        """Whether a slab of host memory has other weights than the file. Reads them one by one. Raises as `copy_to`."""
        with self.source.held():
            for name, view in zip(self.names, self.layout.views(slab), strict=True):
                if name is not None:
                    stored = torch.empty(view.nbytes, dtype=torch.uint8)
                    self.read([(name, stored)])
                    if not torch.equal(stored, view.reshape(-1).view(torch.uint8)):
                        return True
        return False
