"""What a VAE of core's decodes or encodes, and the bytes that this takes by core's own estimate, whole or in tiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from ...memory.hosted_component import TiledSize, Tiles, tile_lengths

__all__ = ["cuts_well", "decoded_size", "encoded_size", "tile_bytes", "tile_shapes"]


def cuts_well(vae: Any, num_dims: int) -> bool:
    """Whether core can cut what a VAE makes of so many dimensions, and nothing else decides how."""
    if vae.first_stage_model is None or vae.extra_1d_channel is not None or getattr(vae, "handles_tiling", False):
        return False
    return num_dims == vae.latent_dim and num_dims in (2, 3)


def decoded_size(vae: Any, shape: Sequence[int]) -> TiledSize | None:
    """Return what latents of a shape decode to, in pixels; None where core does not say it."""
    per_latent, per_frame = vae.spacial_compression_decode(), 1
    if len(shape) == 5:
        per_frame = vae.temporal_compression_decode() or 1
    return sized(shape, per_latent, per_frame, per_latent, per_frame)


def encoded_size(vae: Any, shape: Sequence[int]) -> TiledSize | None:
    """Return what pixels of a shape, channels first, are encoded from; None where core does not say it."""
    per_frame = (vae.temporal_compression_decode() or 1) if len(shape) == 5 else 1
    return sized(shape, 1, 1, vae.spacial_compression_encode(), per_frame)


def sized(
    shape: Sequence[int], pixels: int, frames: int, pixels_per_latent: int, frames_per_latent: int
) -> TiledSize | None:
    """Return a size in pixels of a shape; None where core does not say by how much the VAE compresses."""
    if not isinstance(pixels_per_latent, int) or min(shape) < 1 or pixels_per_latent < 1:
        return None
    return TiledSize(
        height=shape[-2] * pixels,
        width=shape[-1] * pixels,
        frames=shape[2] * frames if len(shape) == 5 else 1,
        pixels_per_latent=pixels_per_latent,
        frames_per_latent=frames_per_latent,
    )


def tile_bytes(
    memory_used: Callable[..., float],
    dtype: Any,
    shape: Sequence[int],
    tiles: Tiles | None,
    per_latent: int,
    frames_per_latent: int,
) -> int:
    """Return the bytes by core's own estimate: of the whole shape, or of the largest tile that core cuts of it.

    Core decodes images three times: in squares, and in tiles of twice the width and height.

    Args:
        memory_used: core's function, of a shape and a dtype.
        per_latent, frames_per_latent: pixels and frames of each unit of the shape; 1 for what is encoded.
    """
    if tiles is None:
        return int(memory_used(tuple(shape), dtype))
    frames = [min(shape[2], tiles.frames // frames_per_latent)] if len(shape) == 5 else []
    return max(
        int(memory_used((*shape[:2], *frames, min(shape[-2], height), min(shape[-1], width)), dtype))
        for height, width in cuts_of(shape, tiles, per_latent)
    )


def cuts_of(shape: Sequence[int], tiles: Tiles, per_latent: int) -> list[tuple[int, int]]:
    """Return height and width of the tiles in which core computes a shape, all of it once in each."""
    side = tiles.pixels // per_latent
    return [(side, side), *([(side // 2, side * 2), (side * 2, side // 2)] if len(shape) == 4 else [])]


def tile_shapes(
    shape: Sequence[int], tiles: Tiles, per_latent: int, frames_per_latent: int
) -> Counter[tuple[int, ...]]:
    """Return the shapes of the tiles that core cuts one picture or video of a shape into, and how many of each.

    Args:
        per_latent, frames_per_latent: as of `tile_bytes`.
    """
    overlap = tiles.overlap_pixels // per_latent
    frames = [list(shape[2:-2])]
    if len(shape) == 5 and tiles.overlap_frames:
        length, step = tiles.frames // frames_per_latent, tiles.overlap_frames // frames_per_latent
        frames = [[part] for part in tile_lengths(shape[2], max(2, length), max(1, step))]
    found: Counter[tuple[int, ...]] = Counter()
    for height, width in cuts_of(shape, tiles, per_latent):
        edges = tile_lengths(shape[-2], height, overlap), tile_lengths(shape[-1], width, overlap)
        found.update((1, shape[1], *run, *edge) for run, *edge in product(frames, *edges))
    return found
