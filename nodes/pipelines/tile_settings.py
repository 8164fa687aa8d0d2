"""How VAEs of diffusers are told to decode in tiles: by attributes of each, which are put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...memory.planner.tiles import Tiles

__all__ = ["cuts_frames", "set_to", "way_of"]

# What each way to set tiles writes, beside ``use_tiling``.
SQUARE = ("tile_sample_min_size", "tile_latent_min_size", "tile_overlap_factor")
SIDES = (
    "tile_sample_min_height", "tile_sample_min_width", "tile_sample_stride_height", "tile_sample_stride_width",
)  # fmt: skip
# What classes have that can decode a video in runs of frames, which overlap; beside ``use_framewise_decoding``.
FRAMES = ("tile_sample_min_num_frames", "tile_sample_stride_num_frames")


def cuts_frames(vae: Any) -> bool:
    """Whether a VAE decodes all frames at once, and can be told to decode runs of them.

    Not so of classes that decode frame by frame as they are (Wan, CogVideoX, HunyuanVideo), and of one whose frames
    come out different then (Mochi).
    """
    return (
        getattr(vae, "use_framewise_decoding", None) is False
        and hasattr(vae, "_temporal_tiled_decode")
        and all(hasattr(vae, name) for name in FRAMES)
    )


def way_of(vae: Any) -> tuple[str, ...] | None:
    """Return the attributes that set the tiles of a VAE; None for a class that cannot be set, or in another way."""
    if not hasattr(vae, "use_tiling"):
        return None
    return next((way for way in (SQUARE, SIDES) if all(hasattr(vae, name) for name in way)), None)


@contextmanager
def set_to(vae: Any, tiles: Tiles | None, pixels_per_latent: int) -> Iterator[None]:
    """In the body a VAE decodes in tiles; None: in one piece."""
    way = way_of(vae)
    if tiles is None or way is None:
        yield
        return
    wanted: dict[str, Any]
    if way is SQUARE:
        latents = tiles.pixels // pixels_per_latent
        wanted = dict(zip(way, (tiles.pixels, latents, tiles.overlap_pixels / tiles.pixels), strict=True))
    else:
        stride = tiles.pixels - tiles.overlap_pixels
        wanted = dict(zip(way, (tiles.pixels, tiles.pixels, stride, stride), strict=True))
        # Where a class keeps these beside them.
        kept = [name for name in ("tile_latent_min_height", "tile_latent_min_width") if hasattr(vae, name)]
        wanted |= dict.fromkeys(kept, tiles.pixels // pixels_per_latent)
    if tiles.overlap_frames and cuts_frames(vae):
        wanted |= dict(zip(FRAMES, (tiles.frames, tiles.frames - tiles.overlap_frames), strict=True))
        wanted["use_framewise_decoding"] = True
    before = {name: getattr(vae, name) for name in ("use_tiling", *wanted)}
    try:
        for name, value in {"use_tiling": True, **wanted}.items():
            setattr(vae, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(vae, name, value)
