"""The tiles of a pipeline's VAE, chosen as it decodes: beside the model that made the latents, which stays.

[Note: tiles of diffusers] The library's VAEs cut pictures themselves; whether and how large stands in attributes of
each. They are set for one decode and then put back. A VAE that is set to tiles already keeps them: they are its user's.
A pipeline calls ``vae.decode`` in the middle of its own call, where nothing else can choose, and nothing else can try
again after an out-of-memory error. So while our node runs the pipeline, the VAE object, which our node has loaded, has
a ``decode`` of ours; its class and others of that class are untouched.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...memory.planner.tiles import TileCost, TiledSize, Tiles, choose_tiles, halve_tiles
from ...memory.units import format_bytes

if TYPE_CHECKING:
    import torch

    from ...memory.manager.vae_room import VaePlace, VaeRoom

__all__ = ["choosing_tiles", "cost_of", "set_to", "size_of"]

# What each way to set tiles writes, beside ``use_tiling``.
SQUARE = ("tile_sample_min_size", "tile_latent_min_size", "tile_overlap_factor")
SIDES = (
    "tile_sample_min_height", "tile_sample_min_width", "tile_sample_stride_height", "tile_sample_stride_width",
)  # fmt: skip
# Tiles stay on the device until they are joined: what they overlap counts twice, then rows, then the picture.
JOINED_PICTURES = 16 / 9 + 2
NUM_CHANNELS = 3


@contextmanager
def choosing_tiles(pipe: Any, vae_room: VaeRoom) -> Iterator[None]:
    """In the body the VAE of a pipeline decodes in the largest tiles that fit beside what stays on its device."""
    vae = getattr(pipe, "vae", None)
    if vae is None or not hasattr(vae, "decode") or "decode" in vars(vae):
        yield
        return
    vae.decode = TiledDecode(vae, vae_room)
    try:
        yield
    finally:
        del vae.decode


class TiledDecode:
    """The ``decode`` of one VAE, in tiles where one piece does not fit."""

    def __init__(self, vae: Any, vae_room: VaeRoom) -> None:
        self.vae = vae
        self.vae_room = vae_room
        self.decode = vae.decode

    def __call__(self, z: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Decode latents; as the VAE's own.

        Raises:
            torch.OutOfMemoryError: not even the smallest tile fits.
        """
        place = self.vae_room.place_of(self.vae)
        if place is None or getattr(self.vae, "use_tiling", False) or z.ndim not in (4, 5):
            return self.decode(z, *args, **options)
        size = size_of(self.vae, z)
        if way_of(self.vae) is None:
            self.refuse(place, f"{type(self.vae).__name__} has no tiles that can be set", size)
            return self.decode(z, *args, **options)
        try:
            cost = cost_of(self.vae, z, size)
        except Exception as error:  # of whatever the class does on the meta device
            self.refuse(place, f"{type(self.vae).__name__} cannot be traced: {type(error).__name__}", size)
            return self.decode(z, *args, **options)
        return self.run(place, size, cost, lambda: self.decode(z, *args, **options))

    def run(self, place: VaePlace, size: TiledSize, cost: TileCost, decode: Callable[[], Any]) -> Any:
        """Decode in one piece, or in the tiles that fit; after an out-of-memory error in half of them."""
        from ...memory.manager import read_shortage

        room = self.vae_room.beside(place.device, place.name)
        taken = place.missing_bytes + room.kept_bytes
        choice = choose_tiles(size, cost, room.free_bytes + room.idle_bytes - taken)
        tiles = choice.tiles if choice is not None else None
        if choice is not None:
            self.tell(place, choice.tile_bytes, choice.reason())
        lacking = cost(tiles) + taken - room.free_bytes
        if lacking > 0 and room.idle_bytes:
            self.vae_room.clear(place.device, place.name, min(lacking, room.idle_bytes), "the VAE decodes")
        while True:
            try:
                with set_to(self.vae, tiles, size.pixels_per_latent):
                    return decode()
            except Exception as error:
                smaller = halve_tiles(size, tiles)
                if smaller is None or read_shortage(error) is None:
                    raise
            failed = f"in tiles of {tiles.text()}" if tiles is not None else "untiled"
            line = f"VAE decode ran out of memory {failed}; next try in tiles of {smaller.text()}"
            self.tell(place, cost(smaller), f"{line}: {format_bytes(cost(smaller))}", is_retry=True)
            tiles = smaller

    def refuse(self, place: VaePlace, why: str, size: TiledSize) -> None:
        """Tell that a decode stays in one piece whatever is free."""
        self.tell(place, 0, f"VAE decode of {size.width} x {size.height} px in one piece: {why}")

    def tell(self, place: VaePlace, num_bytes: int, line: str, *, is_retry: bool = False) -> None:
        logging.getLogger(__name__).log(logging.WARNING if is_retry else logging.INFO, "%s: %s", place.name, line)
        self.vae_room.note(place.device, place.name, num_bytes, line, is_retry=is_retry)


def size_of(vae: Any, z: torch.Tensor) -> TiledSize:
    """Return what latents decode to; frames are never cut here, so a video counts as one picture."""
    per_latent = getattr(vae, "spatial_compression_ratio", None)
    if per_latent is None:
        per_latent = 2 ** (len(getattr(vae.config, "block_out_channels", (0,) * 4)) - 1)
    per_latent = int(per_latent)
    return TiledSize(height=z.shape[-2] * per_latent, width=z.shape[-1] * per_latent, pixels_per_latent=per_latent)


def cost_of(vae: Any, z: torch.Tensor, size: TiledSize) -> TileCost:
    """Return what tells the bytes of a decode in tiles. Raises as `decode_bytes`."""
    from .decode_bytes import decode_bytes

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = decode_bytes(vae, z.shape, z.dtype)
    frames = (z.shape[2] - 1) * temporal_ratio(vae) + 1 if z.ndim == 5 else 1
    picture_bytes = z.shape[0] * NUM_CHANNELS * frames * size.height * size.width * z.dtype.itemsize

    height, width = z.shape[-2:]

    def cost(tiles: Tiles | None) -> int:
        if tiles is None:
            return line.of(height * width)
        side = tiles.pixels // size.pixels_per_latent
        return line.of(min(side, height) * min(side, width)) + int(JOINED_PICTURES * picture_bytes)

    return cost


def temporal_ratio(vae: Any) -> int:
    """Return how many frames become one latent."""
    return int(getattr(vae, "temporal_compression_ratio", None) or 2 ** sum(getattr(vae, "temperal_downsample", ())))


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
    wanted: Mapping[str, Any]
    if way is SQUARE:
        latents = tiles.pixels // pixels_per_latent
        wanted = dict(zip(way, (tiles.pixels, latents, tiles.overlap_pixels / tiles.pixels), strict=True))
    else:
        stride = tiles.pixels - tiles.overlap_pixels
        wanted = dict(zip(way, (tiles.pixels, tiles.pixels, stride, stride), strict=True))
    before = {name: getattr(vae, name) for name in ("use_tiling", *way)}
    try:
        for name, value in {"use_tiling": True, **wanted}.items():
            setattr(vae, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(vae, name, value)
