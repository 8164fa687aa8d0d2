"""The tiles in which a VAE decodes or encodes, chosen before it runs: the largest that fits the memory there is.

Sizes are pixels of the image and frames of the video, never latents: what counts in latents converts at its own edge.
Tiles are square and overlap by a quarter, as in ComfyUI. No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..errors import InvalidInput, require
from ..units import align_up, format_bytes

__all__ = [
    "LEAST_PIXELS",
    "TileChoice",
    "TileCost",
    "TiledSize",
    "Tiles",
    "choose_tiles",
    "halve_tiles",
    "tile_lengths",
]

# What ComfyUI's own widget steps by: sizes between two of these are not worth another try.
STEP_PIXELS = 32
# A VAE normalises over what it sees, and smaller tiles differ in color: chosen only where no larger one fits.
SMALL_PIXELS = 256
# Nothing smaller is chosen, nor tried after a real out-of-memory error.
LEAST_PIXELS = 64
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

    def count(self, size: TiledSize) -> int:
        """Return how many tiles a picture is cut into."""
        return prod(len(lengths) for lengths, _ in self.cuts(size))

    def work(self, size: TiledSize) -> float:
        """Return how many times the picture all tiles together are: what overlaps is computed more than once."""
        return prod(sum(lengths) / length for lengths, length in self.cuts(size))

    def cuts(self, size: TiledSize) -> Iterator[tuple[list[int], int]]:
        """Yield for each side the lengths of the tiles along it, and its own."""
        for length, tile, overlap in (
            (size.height, self.pixels, self.overlap_pixels),
            (size.width, self.pixels, self.overlap_pixels),
            (size.frames, self.frames, self.overlap_frames),
        ):
            yield tile_lengths(length, tile, overlap), length

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
    is_small: bool = False
    """Whether it has too little of a larger picture for what a VAE normalises."""
    expected_bytes: int | None = None
    """What of ``tile_bytes`` tensors take, without the margin for what kernels allocate; None: all of it."""

    @property
    def fits(self) -> bool:
        """Whether a tile fits; else it is the smallest, and other models have to make room for it."""
        return self.tile_bytes <= self.budget_bytes

    def reason(self, what: str = "decode") -> str:
        """Return the choice in one line for users."""
        needs, available = format_bytes(self.whole_bytes), format_bytes(max(0, self.budget_bytes))
        line = f"VAE {what} in tiles of {self.tiles.text()}: untiled needs {needs}, {available} available"
        if self.is_small:
            line += "; colors may differ between tiles this small"
        if self.fits:
            return line
        return f"{line}; the smallest tile needs {format_bytes(self.tile_bytes)}, so other models make room"


def choose_tiles(size: TiledSize, cost: TileCost, budget_bytes: int) -> TileChoice | None:
    """Return the largest tiles that fit a number of bytes, or the smallest if none does; None: no tiles are needed.

    Tiles below 256 pixels come last. Of tiles of equal volume those with more frames come first. A picture that is no
    larger than the smallest tile is never tiled. Asks for the cost of at most a few thousand tiles.
    """
    whole_bytes = cost(None)
    if whole_bytes <= budget_bytes:
        return None
    found = None
    for tiles in candidates(size):
        found = TileChoice(
            tiles=tiles,
            tile_bytes=cost(tiles),
            whole_bytes=whole_bytes,
            budget_bytes=budget_bytes,
            is_small=tiles.pixels < min(SMALL_PIXELS, max(size.height, size.width)),
        )
        if found.fits:
            return found
    return found


@lru_cache(maxsize=16)
def candidates(size: TiledSize) -> tuple[Tiles, ...]:
    """Return the tiles that a picture can be cut into, in the order in which they are wanted."""
    step, small = size.step_pixels, size.least_pixels(SMALL_PIXELS)
    least = min(size.least_pixels(LEAST_PIXELS), size.whole_pixels)
    pixels = range(size.whole_pixels, least - 1, -step)
    found = (tiles_of(size, *each) for each in itertools.product(pixels, frame_counts(size)))
    parts = [tiles for tiles in found if not tiles.covers(size)]
    order = sorted(parts, key=lambda tiles: (tiles.pixels < small, -tiles.volume(size), -tiles.frames, tiles.pixels))
    return tuple(order)


def frame_counts(size: TiledSize) -> Iterator[int]:
    """Yield the frames that a tile may have: all, and halves of them."""
    latents = size.frame_latents
    yield latents * size.frames_per_latent
    while latents > LEAST_FRAME_LATENTS:
        latents = max(LEAST_FRAME_LATENTS, -(-latents // 2))
        yield latents * size.frames_per_latent


def tile_lengths(length: int, tile: int, overlap: int) -> list[int]:
    """Return the lengths of the tiles along a side, in order: each begins where the one before has its overlap."""
    if length <= tile:
        return [length]
    return [min(tile, length - begin) for begin in range(0, length - overlap, tile - overlap)]


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
    last = size.least_pixels(LEAST_PIXELS)
    pixels = min(tiles.pixels, size.whole_pixels) if tiles is not None else size.whole_pixels
    frames = min(tiles.frames, size.whole_frames) if tiles is not None else size.whole_frames
    half = max(last, pixels // 2 // size.step_pixels * size.step_pixels)
    if half < pixels:
        return tiles_of(size, half, frames)
    latents = -(-frames // size.frames_per_latent)
    fewer = max(LEAST_FRAME_LATENTS, -(-latents // 2))
    return tiles_of(size, pixels, fewer * size.frames_per_latent) if fewer < latents else None
