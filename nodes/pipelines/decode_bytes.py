"""What a VAE of diffusers allocates as it decodes, found without running it: a twin decodes on torch's meta device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...memory.planner.tiles import TiledSize, Tiles
from ...memory.tracing import Trace, trace_forward
from .tile_settings import cuts_frames, set_to

__all__ = ["Cut", "DecodeBytes", "cut_of", "cuts_well", "decode_bytes", "pieces_of", "trace", "twin_of"]

# The sides of two pictures of latents that are traced; what lies between and beyond follows from the line through them.
TRACED_LATENTS = (16, 32)
# The side of a picture that is cut into four tiles to see what comes of it.
CUT_LATENTS = 24
# What kernels allocate for themselves stands in no tensor.
MARGIN = 1.1
# What runs once for each tile, in classes that have it; what comes behind the last one joins them.
DECODER = "decoder"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeBytes:
    """The most bytes of tensors that a decode has at once, as a line over the latents of a frame."""

    fixed_bytes: int
    bytes_per_latent: float
    picture_bytes_per_latent: int
    """Of what is decoded."""
    pixels_per_latent: int
    """Along each side."""
    num_frames: int = 1
    """Of the video that is decoded."""

    def of(self, num_latents: int) -> int:
        """Return the bytes for a picture with so many latents, with what kernels may allocate."""
        return int(self.tensors(num_latents) * MARGIN)

    def tensors(self, num_latents: int) -> float:
        """Return the bytes of tensors alone."""
        return self.fixed_bytes + self.bytes_per_latent * num_latents


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What comes of a picture that a VAE decodes in tiles."""

    works: bool
    """Whether it is whole, and took less memory at once."""
    joined_pictures: float
    """How many pictures there are at most beside all tiles, while these are joined."""


known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], DecodeBytes]] = weakref.WeakKeyDictionary()
known_cuts: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Cut]] = weakref.WeakKeyDictionary()


def decode_bytes(vae: Any, shape: Sequence[int], dtype: torch.dtype) -> DecodeBytes:
    """Return what a VAE allocates for latents of a shape, in whatever height and width.

    Traces it once: that takes a second for an image, and some for a long video.

    Raises:
        whatever the decode raises on the meta device.
    """
    key = (*shape[:-2], dtype)
    found = known.setdefault(vae, {})
    if key not in found:
        twin = twin_of(vae, dtype)
        (small, _), (large, picture) = (trace(twin, (*shape[:-2], side, side), dtype) for side in TRACED_LATENTS)
        few, many = (side * side for side in TRACED_LATENTS)
        per_latent = (large - small) / (many - few)
        found[key] = DecodeBytes(
            fixed_bytes=max(0, int(small - per_latent * few)),
            bytes_per_latent=per_latent,
            picture_bytes_per_latent=math.prod(picture) * dtype.itemsize // many,
            pixels_per_latent=picture[-1] // TRACED_LATENTS[-1],
            num_frames=picture[2] if len(picture) == 5 else 1,
        )
    return found[key]


def cuts_well(vae: Any, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether tiles of a VAE give the whole picture, of less memory at once; not so in every class of the library."""
    return cut_of(vae, shape, dtype).works


def cut_of(vae: Any, shape: Sequence[int], dtype: torch.dtype) -> Cut:
    """Return what comes of tiles of a VAE. Traces it once for latents of a shape, in whatever height and width."""
    key = (*shape[:-2], dtype)
    found = known_cuts.setdefault(vae, {})
    if key not in found:
        twin, side, cut = twin_of(vae, dtype), TRACED_LATENTS[0], (*shape[:-2], CUT_LATENTS, CUT_LATENTS)
        whole_bytes, whole = trace(twin, cut, dtype)
        per_latent = whole[-1] // CUT_LATENTS
        tiles = Tiles(pixels=side * per_latent, overlap_pixels=side * per_latent // 4)
        with set_to(twin, tiles, per_latent):
            traced = trace_decode(twin, cut, dtype, blocks=[DECODER] if hasattr(twin, DECODER) else [])
        (tiled,) = traced.output_shapes
        edge = CUT_LATENTS * per_latent
        size = TiledSize(height=edge, width=edge, pixels_per_latent=per_latent)
        _, lengths, _ = pieces_of(twin, cut, size, tiles)
        tile_bytes = math.prod(tiled) * dtype.itemsize * (sum(lengths) / CUT_LATENTS) ** 2
        # Behind the last tile; where it cannot be told which that is, at any time.
        last = max((n for n, segment in enumerate(traced.segments) if segment.block), default=-1)
        joined_bytes = max((segment.peak_bytes for segment in traced.segments[last + 1 :]), default=0) - tile_bytes
        found[key] = Cut(
            works=tiled == whole and traced.peak_bytes + latent_bytes(cut, dtype) < whole_bytes,
            joined_pictures=max(1.0, joined_bytes / (math.prod(tiled) * dtype.itemsize)),
        )
    return found[key]


def pieces_of(vae: Any, shape: Sequence[int], size: TiledSize, tiles: Tiles) -> tuple[list[int], list[int], list[int]]:
    """Return the lengths of tiles in latents, as the library cuts them: frames, height, width.

    Both sides are cut where one is longer than a tile. The last tile of a side may be what overlaps.
    """

    def pieces(length: int, tile: int, step: int) -> list[int]:
        return [min(tile, length - begin) for begin in range(0, length, step)]

    per_latent, per_frame = size.pixels_per_latent, size.frames_per_latent
    num_frames = shape[2] if len(shape) == 5 else 1
    side, step = tiles.pixels // per_latent, (tiles.pixels - tiles.overlap_pixels) // per_latent
    height, width = ([length] if max(shape[-2:]) <= side else pieces(length, side, step) for length in shape[-2:])
    if not (tiles.overlap_frames and cuts_frames(vae)):
        return [num_frames], height, width
    # A run of frames has one latent more, whose frame is dropped.
    frames, step = tiles.frames // per_frame, (tiles.frames - tiles.overlap_frames) // per_frame
    return pieces(num_frames, frames + 1, step), height, width


def twin_of(vae: Any, dtype: torch.dtype) -> Any:
    """Return a VAE of the same config on the meta device."""
    with torch.device("meta"):
        twin = type(vae).from_config(vae.config)
    torch.nn.Module.to(twin.train(False), dtype)  # the library's own warns of classes that keep some weights in float32
    return twin


def trace(twin: Any, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, tuple[int, ...]]:
    """Return the most bytes that tensors of a decode have at once, the latents among them, and its result's shape."""
    traced = trace_decode(twin, shape, dtype)
    (picture,) = traced.output_shapes
    return traced.peak_bytes + latent_bytes(shape, dtype), picture


def trace_decode(twin: Any, shape: Sequence[int], dtype: torch.dtype, blocks: Collection[str] = ()) -> Trace:
    latents = torch.empty(tuple(shape), dtype=dtype, device="meta")
    return trace_forward(twin, (latents,), {"return_dict": False}, method="decode", blocks=blocks)


def latent_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
