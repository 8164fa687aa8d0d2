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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...memory.planner.tiles import TileCost, TiledSize, Tiles, choose_tiles, halve_tiles
from ...memory.units import format_bytes
from .tile_settings import cuts_frames, set_to, way_of

if TYPE_CHECKING:
    import torch

    from ...memory.manager.vae_room import VaePlace, VaeRoom
    from .decode_bytes import DecodeBytes

__all__ = ["choosing_tiles", "measure"]


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

        def decode() -> Any:
            return self.decode(z, *args, **options)

        if way_of(self.vae) is None:
            return self.whole(place, f"{type(self.vae).__name__} has no tiles that can be set", decode)
        try:
            size, cost = measure(self.vae, z)
        except Exception as error:  # of whatever the class does on the meta device
            return self.whole(place, f"its decode cannot be traced: {type(error).__name__}", decode)
        return self.run(place, size, cost, z, decode)

    def whole(self, place: VaePlace, why: str, decode: Callable[[], Any]) -> Any:
        """Decode in one piece, whatever is free, and tell why."""
        self.tell(place, 0, f"VAE decode in one piece, whatever is free: {why}")
        return decode()

    def run(self, place: VaePlace, size: TiledSize, cost: TileCost, z: torch.Tensor, decode: Callable[[], Any]) -> Any:
        """Decode in one piece, or in the tiles that fit; after an out-of-memory error in half of them."""
        from ...memory.manager import read_shortage
        from .decode_bytes import cuts_well

        room = self.vae_room.beside(place.device, place.name)
        taken = place.missing_bytes + room.kept_bytes
        choice = choose_tiles(size, cost, room.tile_bytes(place, taken))
        if choice is not None and not cuts_well(self.vae, z.shape, z.dtype):
            return self.whole(place, f"tiles of {type(self.vae).__name__} save nothing, or lose a part", decode)
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
                if smaller is None or read_shortage(error) is None or not cuts_well(self.vae, z.shape, z.dtype):
                    raise
            failed = f"in tiles of {tiles.text()}" if tiles is not None else "untiled"
            line = f"VAE decode ran out of memory {failed}; next try in tiles of {smaller.text()}"
            self.tell(place, cost(smaller), f"{line}: {format_bytes(cost(smaller))}", is_retry=True)
            tiles = smaller

    def tell(self, place: VaePlace, num_bytes: int, line: str, *, is_retry: bool = False) -> None:
        logging.getLogger(__name__).log(logging.WARNING if is_retry else logging.INFO, "%s: %s", place.name, line)
        self.vae_room.note(place.device, place.name, num_bytes, line, is_retry=is_retry)


def measure(vae: Any, z: torch.Tensor) -> tuple[TiledSize, TileCost]:
    """Return what latents decode to, and what tells the bytes of that in tiles. Raises as `decode_bytes`.

    A video whose frames the VAE cannot be told to cut counts as one picture.
    """
    from .decode_bytes import MARGIN, cut_of, decode_bytes, pieces_of

    def traced_for(shape: Sequence[int]) -> DecodeBytes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return decode_bytes(vae, shape, z.dtype)

    traced = traced_for(z.shape)
    height, width = z.shape[-2:]
    per_latent = traced.pixels_per_latent
    size = TiledSize(height=height * per_latent, width=width * per_latent, pixels_per_latent=per_latent)
    if z.ndim == 5 and cuts_frames(vae):
        size = replace(size, frames=traced.num_frames, frames_per_latent=int(vae.temporal_compression_ratio))

    def cost(tiles: Tiles | None) -> int:
        if tiles is None:
            return traced.of(height * width)
        frames, heights, widths = pieces_of(vae, z.shape, size, tiles)
        found = traced
        if tiles.overlap_frames:
            found = traced_for((*z.shape[:-3], max(frames), height, width))
        run_bytes = found.picture_bytes_per_latent * height * width
        pictures = cut_of(vae, z.shape, z.dtype).joined_pictures
        most = tiled_bytes(found, heights, widths, pictures * run_bytes)
        # Runs of frames stay until all are there, and are put together beside the last.
        before = run_bytes * (len(frames) - 1)
        return int(MARGIN * max(before + most, before + run_bytes + pictures * before))

    return size, cost


def tiled_bytes(one: DecodeBytes, heights: Sequence[int], widths: Sequence[int], joined_bytes: float) -> float:
    """Return the most bytes of tensors while tiles of these latents are decoded in turn, stay, and then are joined."""
    held, most = 0, 0.0
    for num_latents in (height * width for height in heights for width in widths):
        most = max(most, held + one.tensors(num_latents))
        held += one.picture_bytes_per_latent * num_latents
    return most if len(heights) * len(widths) == 1 else max(most, held + joined_bytes)
