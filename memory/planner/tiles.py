"""The tiles in which a VAE decodes or encodes, chosen before it runs: the largest that fits the memory there is.

Sizes are pixels of the image and frames of the video, never latents: what counts in latents converts at its own edge.
Tiles are square and overlap by a quarter, as in ComfyUI. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import InvalidInput, require
from ..units import align_up, format_bytes

__all__ = ["LEAST_PIXELS", "TileChoice", "TileCost", "TiledSize", "Tiles", "choose_tiles", "halve_tiles"]

# What ComfyUI's own widget steps by: sizes between two of these are not worth another try.
STEP_PIXELS = 32
# No smaller tile is chosen beforehand: a VAE normalises over what it sees, and small tiles differ in color.
LEAST_PIXELS = 256
# Down to this a tile is halved after a real out-of-memory error.
LAST_PIXELS = 64
# A VAE needs some latents around each that it decodes.
LEAST_LATENTS = 8
LEAST_FRAME_LATENTS = 2
OVERLAP_PART = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledSize:
    """What a VAE decodes or encodes, and how it compresses that.

    Args:
        pixels_per_latent, frames_per_latent: the compression; 1 where a VAE has none. An image has one frame.
    """

    height: int
    width: int
    frames: int = 1
    pixels_per_latent: int = 8
    frames_per_latent: int = 1

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            require(getattr(self, name), int, what=name, allowed="a whole number")
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} {getattr(self, name)} of a VAE's picture; allowed: 1 or more")

    @property
    def step_pixels(self) -> int:
        """What tile sizes are multiples of: a quarter is a whole number of latents, so half of a tile is one, too."""
        return align_up(STEP_PIXELS, OVERLAP_PART * self.pixels_per_latent)

    @property
    def whole_pixels(self) -> int:
        """The size of the smallest tile that covers the picture."""
        return align_up(max(self.height, self.width), self.step_pixels)

    @property
    def frame_latents(self) -> int:
        return -(-self.frames // self.frames_per_latent)

    @property
    def whole_frames(self) -> int:
        """The frames of the smallest tile that covers the video."""
        return self.frame_latents * self.frames_per_latent

    def least_pixels(self, pixels: int) -> int:
        return align_up(max(pixels, LEAST_LATENTS * self.pixels_per_latent), self.step_pixels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tiles of a picture: squares of ``pixels`` that overlap, of so many frames.

    Args:
        overlap_frames: 0 where a tile has all frames.
    """

    pixels: int
    overlap_pixels: int
    frames: int = 1
    overlap_frames: int = 0

    def volume(self, size: TiledSize) -> int:
        """Return the pixels of the largest tile, over all of its frames."""
        return min(self.pixels, size.height) * min(self.pixels, size.width) * min(self.frames, size.frames)

    def covers(self, size: TiledSize) -> bool:
        """Whether one tile is the whole picture."""
        return self.pixels >= max(size.height, size.width) and self.frames >= size.frames

    def text(self) -> str:
        """Return the tiles as text, such as ``512 px, overlap 128``."""
        if not self.overlap_frames:
            return f"{self.pixels} px, overlap {self.overlap_pixels}"
        return (
            f"{self.pixels} px and {self.frames} frames, overlap {self.overlap_pixels} px, {self.overlap_frames} frames"
        )


TileCost = Callable[[Tiles | None], int]
"""Returns the bytes that decoding takes beside the weights in such tiles; None: in one piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TileChoice:
    """The tiles that were chosen and why: all in bytes beside the VAE's weights."""

    tiles: Tiles
    tile_bytes: int
    whole_bytes: int
    budget_bytes: int

    @property
    def fits(self) -> bool:
        """Whether a tile fits; else it is the smallest, and other models have to make room for it."""
        return self.tile_bytes <= self.budget_bytes

    def reason(self, what: str = "decode") -> str:
        """Return the choice in one line for users."""
        needs, available = format_bytes(self.whole_bytes), format_bytes(max(0, self.budget_bytes))
        line = f"VAE {what} in tiles of {self.tiles.text()}: untiled needs {needs}, {available} available"
        if self.fits:
            return line
        return f"{line}; the smallest tile needs {format_bytes(self.tile_bytes)}, so other models make room"


def choose_tiles(size: TiledSize, cost: TileCost, budget_bytes: int) -> TileChoice | None:
    """Return the largest tiles that fit a number of bytes, or the smallest if none does; None: no tiles are needed.

    Of tiles of equal volume those with more frames come first. A picture that is no larger than the smallest tile is
    never tiled. Asks for the cost of at most a few thousand tiles.
    """
    whole_bytes = cost(None)
    if whole_bytes <= budget_bytes:
        return None
    found = None
    for tiles in candidates(size):
        found = TileChoice(tiles=tiles, tile_bytes=cost(tiles), whole_bytes=whole_bytes, budget_bytes=budget_bytes)
        if found.fits:
            return found
    return found


def candidates(size: TiledSize) -> Iterator[Tiles]:
    """Yield the tiles that a picture can be cut into, the largest first; neither those that cover it."""
    step = size.step_pixels
    least = min(size.least_pixels(LEAST_PIXELS), size.whole_pixels)
    pixels = range(size.whole_pixels, least - 1, -step)
    found = (tiles_of(size, *each) for each in itertools.product(pixels, frame_counts(size)))
    parts = [tiles for tiles in found if not tiles.covers(size)]
    yield from sorted(parts, key=lambda tiles: (-tiles.volume(size), -tiles.frames, tiles.pixels))


def frame_counts(size: TiledSize) -> Iterator[int]:
    """Yield the frames that a tile may have: all, and halves of them."""
    latents = size.frame_latents
    yield latents * size.frames_per_latent
    while latents > LEAST_FRAME_LATENTS:
        latents = max(LEAST_FRAME_LATENTS, -(-latents // 2))
        yield latents * size.frames_per_latent


def tiles_of(size: TiledSize, pixels: int, frames: int) -> Tiles:
    """Return tiles that overlap by a quarter; by no frame where one tile has them all."""
    is_whole = frames >= size.whole_frames
    latents = frames // size.frames_per_latent
    return Tiles(
        pixels=pixels,
        overlap_pixels=pixels // OVERLAP_PART,
        frames=frames,
        overlap_frames=0 if is_whole else max(1, latents // OVERLAP_PART) * size.frames_per_latent,
    )


def halve_tiles(size: TiledSize, tiles: Tiles | None) -> Tiles | None:
    """Return tiles of half the size for another try after tiles (None: the whole) ran out of memory; None: the last.

    Each is strictly smaller: first the pixels are halved, then the frames.
    """
    last = size.least_pixels(LAST_PIXELS)
    pixels = min(tiles.pixels, size.whole_pixels) if tiles is not None else size.whole_pixels
    frames = min(tiles.frames, size.whole_frames) if tiles is not None else size.whole_frames
    half = max(last, pixels // 2 // size.step_pixels * size.step_pixels)
    if half < pixels:
        return tiles_of(size, half, frames)
    latents = -(-frames // size.frames_per_latent)
    fewer = max(LEAST_FRAME_LATENTS, -(-latents // 2))
    return tiles_of(size, pixels, fewer * size.frames_per_latent) if fewer < latents else None
