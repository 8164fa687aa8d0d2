"""How a pipeline's VAE would decode latents in tiles, found without running it: which tiles, and how long they take."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from ...memory.planner.tiles import TileChoice, TileCost, TiledSize, Tiles, choose_tiles
from ...memory.tracing import Kernel, Segment, Trace, trace_forward
from .decode_bytes import MARGIN, cuts_well, decode_bytes, pieces_of, twin_of
from .tile_settings import way_of
from .tiled_decode import measure

if TYPE_CHECKING:
    from ...memory.planner.run import BlockTimes

__all__ = ["DecodeTiling", "tiling_of"]

# Of each line of pixels in which tiles overlap: both are weighed, added, and written; with what each reads and writes.
BLEND_TENSORS = (2, 2, 3, 2)


def tiling_of(
    vae: Any,
    inputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    whole_bytes: int,
    times_of: Callable[[Trace], Mapping[str, BlockTimes]],
    blocks: Sequence[str] | None = None,
) -> DecodeTiling | None:
    """Return how our node lets a VAE decode its inputs; None where it leaves that to the VAE.

    Args:
        inputs: shape and dtype of what it is called with.
        whole_bytes: what the decode takes in one piece, as traced.
        times_of: returns what a trace takes, by device; kept as long as what is returned.
        blocks: the names of its blocks; None: as a trace finds them.
    """
    if not inputs or len(inputs[0][0]) not in (4, 5) or way_of(vae) is None or getattr(vae, "use_tiling", False):
        return None
    # A plan is kept longer than the VAE, whose weights a twin has not.
    shape, dtype = inputs[0]
    return DecodeTiling(twin_of(vae, dtype), shape, dtype, whole_bytes, times_of, blocks)


class DecodeTiling:
    """One decode; `Tiling` of the planner. Traces when it is first asked, once for each size of tile."""

    beside_model = False

    def __init__(
        self,
        vae: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        whole_bytes: int,
        times_of: Callable[[Trace], Mapping[str, BlockTimes]],
        blocks: Sequence[str] | None = None,
    ) -> None:
        self.vae = vae
        self.blocks = blocks
        self.shape = shape
        self.dtype = dtype
        self.whole_bytes = whole_bytes
        self.times_of = times_of
        self.known: dict[Tiles, Mapping[str, BlockTimes]] = {}
        self.traced: dict[tuple[int, ...], Trace] = {}

    @cached_property
    def measured(self) -> tuple[TiledSize, TileCost] | None:
        """What is decoded and what tells its bytes; None where the VAE decodes in one piece, whatever is free."""
        try:
            size, cost = measure(self.vae, torch.empty(self.shape, dtype=self.dtype, device="meta"))
            # A planner asks for the same tiles again and again.
            return (size, cache(cost)) if cuts_well(self.vae, self.shape, self.dtype) else None
        except Exception:  # of whatever the class does on the meta device; the node, too, decodes in one piece then
            return None

    def choose(self, left_bytes: int) -> TileChoice | None:
        """Return the tiles that the node will choose where so much is left; traces nothing where one piece fits."""
        if int(self.whole_bytes * MARGIN) <= left_bytes or self.measured is None:
            return None
        found = choose_tiles(*self.measured, left_bytes)
        return None if found is None else replace(found, expected_bytes=int(found.tile_bytes / MARGIN))

    def num_forwards(self, tiles: Tiles) -> int:
        return prod(len(lengths) for lengths in pieces_of(self.vae, self.shape, self.size, tiles))

    def work(self, tiles: Tiles) -> float:
        sides = pieces_of(self.vae, self.shape, self.size, tiles)
        whole = (self.num_frames, *self.shape[-2:])
        return prod(sum(lengths) / length for lengths, length in zip(sides, whole, strict=True))

    def times(self, tiles: Tiles) -> Mapping[str, BlockTimes]:
        """Return what all tiles take by device: each size of tile is traced once, joining them is counted."""
        if tiles not in self.known:
            self.known[tiles] = self.times_of(self.trace(tiles))
        return self.known[tiles]

    # -- in latents

    @property
    def num_frames(self) -> int:
        return self.shape[2] if len(self.shape) == 5 else 1

    @property
    def size(self) -> TiledSize:
        assert self.measured is not None, "only what can be cut has tiles"
        return self.measured[0]

    def trace(self, tiles: Tiles) -> Trace:
        """Return the tiles one after the other as a trace, and what joins them. Its bytes are not told."""
        counted = Counter(itertools.product(*pieces_of(self.vae, self.shape, self.size, tiles)))
        segments = [segment for piece, times in counted.items() for segment in self.trace_of(piece).segments * times]
        entries = [entry for piece, times in counted.items() for entry in self.trace_of(piece).entries * times]
        joins = Segment(block="", kernels=tuple(self.joins(tiles)), entry_bytes=0, peak_bytes=0)
        return Trace(segments=(*segments, joins), peak_bytes=0, output_bytes=0, entries=tuple(entries))

    def trace_of(self, piece: tuple[int, ...]) -> Trace:
        """Return the decode of one tile of so many frames, height and width."""
        if piece not in self.traced:
            shape = (*self.shape[:2], *piece[-len(self.shape) + 2 :])
            latents = torch.empty(shape, dtype=self.dtype, device="meta")
            twin = twin_of(self.vae, self.dtype)
            self.traced[piece] = trace_forward(
                twin, (latents,), {"return_dict": False}, method="decode", blocks=self.blocks
            )
        return self.traced[piece]

    def joins(self, tiles: Tiles) -> Iterator[Kernel]:
        """Yield what blends the tiles, line by line and frame by frame, and puts them together."""
        frames, height, width = pieces_of(self.vae, self.shape, self.size, tiles)
        runs, rows, columns = len(frames), len(height), len(width)
        decoded = decode_bytes(self.vae, self.shape, self.dtype)
        run_bytes = decoded.picture_bytes_per_latent * prod(self.shape[-2:]) // runs
        line_bytes = run_bytes // (self.size.height * columns)
        num_lines = tiles.overlap_pixels * ((rows - 1) * columns + rows * (columns - 1)) * runs
        num_frames = tiles.overlap_frames * (runs - 1)
        blended = [line_bytes] * num_lines + [run_bytes * runs // decoded.num_frames] * num_frames
        for num_bytes in blended:
            yield from (Kernel(0, num_tensors * num_bytes) for num_tensors in BLEND_TENSORS)
        for num_bytes in [run_bytes // rows] * (rows * runs) + [run_bytes] * runs:
            yield Kernel(0, 2 * num_bytes)
