"""The weight store of one group: the one complete copy of its weights, from which every device copy is made.

It is a slab of host memory, or the file that the weights came from. A file costs no RAM while the
group is not on a device; on its way there it passes through two bounce buffers, window by window, and its pages leave
the system's cache behind it. What the file has in another form is converted in these buffers (`converted_leaves.py`).
Where nothing is page-locked and the system has room for the file's pages, what streams is copied from a mapping of the
file, as it would be from memory of its own.
What no file has (buffers, weights that were written to) stays in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TypeAlias

import torch

from ...errors import InvalidInput
from ...transfer.bounce_buffers import BounceBuffers, WindowCopies
from ...transfer.copy_stream import CopyStream
from ...transfer.pinned_memory import HostSlab
from ...transfer.slabs import Form, SlabLayout
from ...units import align_up
from ...weights.file_reader import Target
from ...weights.source import WeightsSource
from ...weights.stored_encodings import renamed
from .block_state import BlockState
from .converted_leaves import ConvertedLeaf

__all__ = ["FileStore", "HostStore", "SharedStore"]

Piece: TypeAlias = tuple[int, int, int, int]
"""The place of a leaf, between which bytes of the slab, and where it is read in the buffer."""

# How many views of a slab, or of a staging slot, are kept.
MOST_PARTS = 16
# Where in a buffer a leaf begins that is converted there: every dtype can be read there.
ALIGNMENT = 8


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

    def copy_to(
        self, target: torch.Tensor, begin: int, copies: CopyStream, check: Callable[[], None] | None = None
    ) -> None:
        """Queue the copy of a part of the slab to as many bytes on a device.

        It is one copy, and no file is read: ``check`` is not called.
        """
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
        converted: the leaves that the file has in another form, by their place.
        shown: what a weight is when it computes that the file has encoded, by the place of its first leaf.
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
        converted: Mapping[int, ConvertedLeaf],
        shown: Mapping[int, Form] = MappingProxyType({}),
    ) -> None:
        self.layout = layout
        self.shown = dict(shown)
        self.converted = dict(converted)
        self.mapped = dict(mapped)
        self.streams_mapped = False
        """Whether blocks are copied from the mapping while no buffers are open."""
        self.is_cached = False
        """Whether all of it was read into the system's cache once; nothing looks whether it is still there."""
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
        self.names = [name if name is None else renamed(name, names) for name in self.names]
        self.mapped = {names.get(name, name): weight for name, weight in self.mapped.items()}

    def stream_from(self, mapped: Mapping[str, torch.Tensor] | None) -> None:
        """Copy to devices from mappings of the file whenever no bounce buffers are open; None: always through buffers.

        Args:
            mapped: the weights that rest in the file, by name, beyond those that are known to be mapped.
        """
        self.mapped.update(mapped or {})
        self.streams_mapped = mapped is not None

    @property
    def kept_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.kept.values())

    def address_of(self, place: int) -> int:
        """Return where in host memory a leaf is while it rests; 0 for one that rests in the file."""
        return self.kept[place].data_ptr() if place in self.kept else 0

    def resting_leaves(self) -> list[torch.Tensor]:
        """Return the leaves that are in host memory, and for the others shapes without memory of what computes."""
        with torch.inference_mode(False):
            return [
                self.kept[place]
                if place in self.kept
                else torch.empty(self.shown.get(place, form).shape, dtype=self.computing_dtype(place), device="meta")
                for place, form in enumerate(self.layout.forms)
            ]

    def computing_dtype(self, place: int) -> torch.dtype:
        """Return the dtype in which the weight of a leaf that rests in the file computes."""
        if place in self.shown:
            return self.shown[place].dtype
        return self.converted[place].wide if place in self.converted else self.layout.forms[place].dtype

    def keep(self, views: Sequence[torch.Tensor]) -> None:
        """Take over the values of the leaves that are in host memory, from views of a whole slab."""
        for place, leaf in self.kept.items():
            with torch.inference_mode(leaf.is_inference()):  # one made there is written to there only
                leaf.copy_(views[place])

    def copy_to(
        self, target: torch.Tensor, begin: int, copies: CopyStream, check: Callable[[], None] | None = None
    ) -> None:
        """Read a part of the slab and queue its copies, window by window; returns when all is read.

        From mappings of the file nothing is read that the system has in its cache, and each leaf is one copy.

        A window is what a bounce buffer holds, in the order of the file, wherever that cuts a weight.

        ``check`` is called before each window, and every 4 MiB of one or sooner. What it raises stops the reading and
        is raised here; copies of what was read before may be under way then.

        From a mapping each leaf is one copy, and ``check`` is called only while the file comes into the system's cache.

        Raises:
            InvalidInput: the file is not what it was, or a weight cannot be encoded.
        """
        end = begin + target.numel()
        if self.streams_mapped and not self.bounce.buffers:
            self.copy_mapped(target, begin, end, copies, check)
            return
        self.measure(begin, end, check)
        if begin == end:
            return  # what has no bytes needs no buffers, and they may not be open
        for window in self.windows(begin, end):
            if check is not None:
                check()
            buffer = self.bounce.take()
            if self.converted:
                self.convert_window(window, buffer, target, begin, check)
            else:
                self.read_window(window, buffer, target, begin, check)

    def read_window(
        self,
        window: Sequence[Piece],
        buffer: torch.Tensor,
        target: torch.Tensor,
        begin: int,
        check: Callable[[], None] | None,
    ) -> None:
        """Read a window into a buffer, and queue the copies of what has come while the rest is read."""
        parts = [
            (buffer[room : room + last - first], target[first - begin : last - begin])
            for _, first, last, room in window
        ]
        to_read: list[Target] = []
        num_kept = 0
        for (place, first, last, _), (part, _) in zip(window, parts, strict=True):
            name = self.names[place]
            if name is None:
                part.copy_(self.part_of(place, self.kept[place], first, last))
                num_kept += last - first
            else:
                to_read.append((name, part, first - self.layout.offsets[place]))
        pieces = WindowCopies(self.bounce, parts)
        pieces.follow(num_kept)

        def follow(num_read: int) -> None:
            if check is not None:
                check()
            pieces.follow(num_kept + num_read)

        try:
            self.source.read_into(to_read, progress=follow, drop_pages=True)
        except InvalidInput as error:
            pieces.restart()
            self.read_mapped(to_read, error)
        pieces.follow(sum(part.numel() for part, _ in parts))

    def convert_window(
        self,
        window: Sequence[Piece],
        buffer: torch.Tensor,
        target: torch.Tensor,
        begin: int,
        check: Callable[[], None] | None,
    ) -> None:
        """Read a window, convert what the file has in another form, and queue the copies."""
        to_read: list[Target] = []
        for place, first, last, room in window:
            part, offset = buffer[room : room + self.room_bytes(place, last - first)], self.layout.offsets[place]
            name, leaf = self.names[place], self.converted.get(place)
            if name is None:
                part.copy_(self.part_of(place, self.kept[place], first, last))
            elif leaf is None:
                to_read.append((name, part, first - offset))
            else:
                before, num_elements = ((at - offset) // leaf.leaf.itemsize for at in (first, last + offset - first))
                to_read.append((name, leaf.read_part(part, num_elements), before * leaf.stored.itemsize))
        was_cached = self.read(to_read, check)
        parts = []
        for place, first, last, room in window:
            part, leaf = buffer[room : room + self.room_bytes(place, last - first)], self.converted.get(place)
            if leaf is not None:
                if not leaf.is_measured:
                    leaf.measure([part])
                part = leaf.convert(part, (last - first) // leaf.leaf.itemsize)
            parts.append((part, target[first - begin : last - begin]))
        self.bounce.note_cached(was_cached)
        self.bounce.queue_copies(parts)

    def copy_mapped(
        self, target: torch.Tensor, begin: int, end: int, copies: CopyStream, check: Callable[[], None] | None
    ) -> None:
        """Queue the copies of a part of the slab from the leaves in host memory and in mappings of their files."""
        if not self.is_cached:
            self.cache(check)
        for place, name in enumerate(self.names):
            first, last = max(begin, self.layout.offsets[place]), min(end, self.layout.end_of(place))
            if first < last:
                leaf = self.kept[place] if name is None else self.mapped[name].detach()
                copies.copy(target[first - begin : last - begin], self.part_of(place, leaf, first, last))

    def part_of(self, place: int, leaf: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return the bytes of a leaf in host memory that lie between two bytes of the slab."""
        offset = self.layout.offsets[place]
        return self.layout.forms[place].bytes_of(leaf)[first - offset : last - offset]

    def cache(self, check: Callable[[], None] | None) -> None:
        """Read what rests in the file into the system's cache, faster than the pages come when they are touched."""
        names = [name for name in self.names if name is not None]
        with suppress(InvalidInput):  # another file is in the place of one of them: the mapping has what it was
            for _ in self.source.warm(names):
                if check is not None:
                    check()
        self.is_cached = True

    def room_bytes(self, place: int, num_bytes: int) -> int:
        """Return what some bytes of a leaf take of a buffer while they are read."""
        leaf = self.converted.get(place)
        return num_bytes if leaf is None else leaf.room_bytes(num_bytes // leaf.leaf.itemsize)

    def measure(self, begin: int, end: int, check: Callable[[], None] | None = None) -> None:
        """Read the weights between two bytes of the slab that are to be encoded and were not measured before.

        Those that a window will have as a whole are measured there.
        """
        for place, leaf in self.converted.items():
            first, last = self.layout.offsets[place], self.layout.end_of(place)
            is_in_window = last <= begin or end <= first or self.is_whole(place, begin, end)
            if leaf.is_measured or (is_in_window and first < last):
                continue
            name = self.names[place]
            assert name is not None
            num_bytes = self.layout.forms[place].shape.numel() * leaf.stored.itemsize
            leaf.measure(self.pieces(name, num_bytes, check))

    def is_whole(self, place: int, begin: int, end: int) -> bool:
        """Whether one window has room for a leaf that lies between two bytes of the slab."""
        first, last = self.layout.offsets[place], self.layout.end_of(place)
        return begin <= first and last <= end and self.room_bytes(place, last - first) <= self.bounce.buffers[0].numel()

    def pieces(self, name: str, num_bytes: int, check: Callable[[], None] | None = None) -> Iterator[torch.Tensor]:
        """Yield the bytes that the file has of a weight, in pieces of a buffer."""
        first = 0
        while first < num_bytes:
            piece = self.bounce.take()[: num_bytes - first]
            piece = piece[: piece.numel() // ALIGNMENT * ALIGNMENT or piece.numel()]
            self.read([(name, piece, first)], check)
            yield piece
            first += piece.numel()

    def read(self, targets: Sequence[Target], check: Callable[[], None] | None = None) -> bool:
        """Fill memory with bytes of weights; returns whether all of them were in the system's cache.

        Where the file was deleted or another one took its place, they come from the mapping that the module came with.
        ``check`` is called every 4 MiB or sooner; what it raises stops the reading.

        Raises:
            InvalidInput: the file is not what it was.
        """
        progress = None if check is None else lambda num_done: check()
        try:
            return self.source.read_into(targets, progress=progress, drop_pages=True)
        except InvalidInput as error:
            self.read_mapped(targets, error)
        return False

    def read_mapped(self, targets: Sequence[Target], error: InvalidInput) -> None:
        """Fill memory from the mapping that the module came with, where another file is in the place of its own.

        Raises the error that reading the file ended in where there is no such mapping. Of a file that was overwritten
        where it is, it would show what is there now, or nothing.
        """
        names = [target[0] for target in targets]
        if not self.mapped.keys() >= set(names) or not self.source.are_replaced(names):
            raise error
        for name, memory, *offset in targets:
            begin = offset[0] if offset else 0
            own = self.mapped[name].detach().reshape(-1).view(torch.uint8)[begin : begin + memory.nbytes]
            memory.reshape(-1).view(torch.uint8).copy_(own)

    @property
    def window_bytes(self) -> int:
        """How many bytes of the next buffer are filled."""
        return self.bounce.convertible_bytes if self.converted else self.bounce.buffer_bytes

    def windows(self, begin: int, end: int) -> Iterator[list[tuple[int, int, int, int]]]:
        """Yield what fits a bounce buffer: places of leaves, the bytes of each, and where it is read in the buffer.

        Between two bytes of the slab. A leaf that is measured in its window is not cut.
        """
        window: list[tuple[int, int, int, int]] = []
        filled, most = 0, self.window_bytes
        for place in self.places_in_file:
            first, last = max(begin, self.layout.offsets[place]), min(end, self.layout.end_of(place))
            leaf = self.converted.get(place)
            while first < last:
                if leaf is not None:
                    filled = align_up(filled, ALIGNMENT)
                unit = 1 if leaf is None else leaf.leaf.itemsize if leaf.is_measured else last - first
                if not window:
                    most = max(most, self.room_bytes(place, unit))
                num_bytes = min(last - first, max(0, most - filled) // self.room_bytes(place, unit) * unit)
                if num_bytes:
                    window.append((place, first, first + num_bytes, filled))
                    filled += self.room_bytes(place, num_bytes)
                    first += num_bytes
                if not num_bytes or filled >= most:
                    yield window
                    window, filled, most = [], 0, self.window_bytes
        if window:
            yield window

    def read_whole(self, slab: torch.Tensor) -> None:
        """Read all weights straight into a slab of host memory. Raises as `copy_to`.

        Takes memory for the largest weight that is encoded, or that the file has in a wider dtype.
        """
        to_read: list[Target] = []
        for place, (name, view) in enumerate(zip(self.names, self.layout.views(slab), strict=True)):
            part = slab[self.layout.offsets[place] : self.layout.end_of(place)]
            if name is None:
                part.copy_(self.layout.forms[place].bytes_of(self.kept[place]))
            elif place in self.converted:
                self.read_leaf(place, view)
            else:
                to_read.append((name, part))
        self.read(to_read)

    def read_leaf(self, place: int, leaf: torch.Tensor) -> None:
        """Read one leaf that rests in the file into memory. Raises as `copy_to`."""
        name, converted = self.names[place], self.converted.get(place)
        assert name is not None
        if converted is None or converted.kind is None:
            self.read([(name, leaf)])
            return
        with torch.inference_mode(False):
            wide = torch.empty(leaf.shape, dtype=converted.wide)
        self.read([(name, wide)])
        with torch.no_grad():
            if not converted.is_measured:
                converted.measure_whole(wide)
            converted.encode(wide, leaf)

    def read_encoded(self, place: int) -> torch.Tensor:
        """Return a leaf that the file has as it rests, in memory of its own. Raises as `copy_to`."""
        form, name = self.layout.forms[place], self.names[place]
        assert name is not None
        with torch.inference_mode(False):
            leaf = torch.empty(form.shape, dtype=form.dtype)
        self.read([(name, leaf)])
        return leaf

    def differs(self, slab: torch.Tensor) -> bool:
        """Whether a slab of host memory has other weights than the file. Reads them one by one. Raises as `copy_to`."""
        with self.source.held():
            for place, (name, view) in enumerate(zip(self.names, self.layout.views(slab), strict=True)):
                if name is not None:
                    stored = torch.empty_like(view, memory_format=torch.contiguous_format)
                    self.read_leaf(place, stored)
                    if not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (stored, view))):
                        return True
        return False
