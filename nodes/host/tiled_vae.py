"""VAEs that our nodes hand out: they choose their tiles before they decode or encode, beside what stays on the device.

[Note: tiles beforehand] Core decodes in one piece, and in tiles only after that ran out of memory; to have the memory
it first unloads other models. Ours asks what the decode needs by core's own estimate and what is free, and takes the
largest tiles that fit before anything of a diffusion model leaves. The tiles are decoded by core's own functions, which
are asked for the memory of one tile. What is decoded in one piece goes through core's ``decode()``, as ever.

After a real out-of-memory error the tiles are halved, again and again. Core's ``decode()`` handles that error itself:
it loads for its own tiles, for which models leave. So it gets a stand-in for the model that reports a failure as
another exception, once the frames that failed are gone.

A user's own numbers (``decode_tiled``) go to core unchanged. So does what tiles by itself, decodes sound, has options
of its own, or computes on the CPU.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.model_management
import comfy.sd
import torch

from ...memory.hosted_component import (
    TiledSize,
    Tiles,
    choose_tiles,
    device_name,
    halve_tiles,
    is_out_of_memory,
    vae_room,
)
from ...memory.units import format_bytes
from .core_fields import set_class
from .dynamic_models import dynamic_model_of, is_dynamic
from .hosted import hosted_of, is_cpu, patcher_of
from .vae_sizes import cuts_well, decoded_size, encoded_size, tile_bytes

__all__ = ["TiledVAE", "as_core", "choose_beforehand"]

# What core adds to the bytes of weights that it has yet to load.
CORE_MARGIN = 1.1


class ShortOfMemory(Exception):
    """A VAE ran out of memory in one piece. Not an out-of-memory error: core would go on in tiles of its own."""


class Reporting:
    """A VAE's model that reports an out-of-memory error as `ShortOfMemory`, when the frames that failed are gone."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def decode(self, *given: Any, **options: Any) -> Any:
        return self.call(self.model.decode, given, options)

    def encode(self, *given: Any, **options: Any) -> Any:
        return self.call(self.model.encode, given, options)

    def call(self, function: Any, given: Sequence[Any], options: Mapping[str, Any]) -> Any:
        try:
            return function(*given, **options)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        raise ShortOfMemory


class TiledVAE(comfy.sd.VAE):
    """A VAE of core's that chooses its tiles beforehand."""

    def decode(self, samples_in: torch.Tensor, vae_options: Mapping[str, Any] = {}) -> torch.Tensor:
        """Decode latents, in tiles where one piece does not fit beside what stays on the device.

        Raises:
            torch.OutOfMemoryError: not even the smallest tile fits.
        """
        samples = samples_in[:, :, 0] if self.latent_dim == 2 and samples_in.ndim == 5 else samples_in
        size = None if vae_options else self.decoded_size(samples)
        if size is None:
            return super().decode(samples_in, **({"vae_options": vae_options} if vae_options else {}))
        unit = size.pixels_per_latent, size.frames_per_latent

        def in_tiles(vae: TiledVAE, tiles: Tiles) -> Any:
            return comfy.sd.VAE.decode_tiled(vae, samples, **tile_arguments(tiles, samples.ndim, *unit))

        return self.run(
            "decode",
            size,
            lambda tiles: tile_bytes(self.memory_used_decode, self.vae_dtype, samples.shape, tiles, *unit),
            lambda vae: comfy.sd.VAE.decode(vae, samples_in),
            in_tiles,
        )

    def encode(self, pixel_samples: torch.Tensor) -> torch.Tensor:
        """Encode pixels; as `decode`."""
        shape = self.encoded_shape(pixel_samples)
        size = self.encoded_size(shape)
        if size is None:
            return super().encode(pixel_samples)

        def in_tiles(vae: TiledVAE, tiles: Tiles) -> Any:
            return comfy.sd.VAE.encode_tiled(vae, pixel_samples, **tile_arguments(tiles, len(shape), 1, 1))

        return self.run(
            "encode",
            size,
            lambda tiles: tile_bytes(self.memory_used_encode, self.vae_dtype, shape, tiles, 1, 1),
            lambda vae: comfy.sd.VAE.encode(vae, pixel_samples),
            in_tiles,
        )

    # -- sizes

    def decoded_size(self, samples: torch.Tensor) -> TiledSize | None:
        """Return what latents decode to, in pixels; None for what is left to core."""
        return decoded_size(self, samples.shape) if self.takes_tiles(samples.ndim - 2) else None

    def encoded_size(self, shape: Sequence[int]) -> TiledSize | None:
        """Return what pixels of a shape, channels first, are encoded from; None for what is left to core."""
        return encoded_size(self, shape) if self.takes_tiles(len(shape) - 2) else None

    def encoded_shape(self, pixels: torch.Tensor) -> list[int]:
        """Return the shape, channels first, in which core encodes pixels, cropped as it crops them."""
        shape = list(self.vae_encode_crop_pixels(pixels).movedim(-1, 1).shape)
        if self.latent_dim == 3 and len(shape) == 4:
            batch, *rest = shape
            return [batch, rest[0], 1, *rest[1:]] if self.not_video else [1, rest[0], batch, *rest[1:]]
        return shape

    def takes_tiles(self, num_dims: int) -> bool:
        """Whether core can cut what this VAE decodes on a device of the manager's, and nothing else decides how."""
        return not is_cpu(self.device) and cuts_well(self, num_dims) and vae_room().sees(device_name(self.device))

    # -- bytes

    @property
    def missing_bytes(self) -> int:
        """The bytes of its weights that core has yet to load."""
        size = int(self.patcher.model_size())
        is_here = self.patcher.current_loaded_device() == self.device
        return max(0, size - int(self.patcher.loaded_size())) if is_here else size

    @property
    def book_name(self) -> str:
        """Its name in the books."""
        if is_dynamic(self.patcher):
            component = dynamic_model_of(self.patcher)
            return component.id or component.name
        hosted = hosted_of(self.patcher.model)
        return hosted.book_name if hosted is not None else type(self.patcher.model).__name__

    # -- running

    def run(
        self,
        what: str,
        size: TiledSize,
        cost: Callable[[Tiles | None], int],
        whole: Callable[[TiledVAE], Any],
        in_tiles: Callable[[TiledVAE, Tiles], Any],
    ) -> Any:
        """Decode or encode in one piece, or in the tiles that fit; after an out-of-memory error in half of them."""
        device, name = device_name(self.device), self.book_name
        room, missing = vae_room().beside(device, name), int(self.missing_bytes * CORE_MARGIN)
        reserved = int(comfy.model_management.extra_reserved_memory())
        taken = missing + max(room.kept_bytes, reserved)
        # Core makes this much free for computing in any case, whatever is asked of it.
        least = int(comfy.model_management.minimum_inference_memory()) - reserved
        choice = choose_tiles(size, cost, max(room.free_bytes + room.idle_bytes - taken, least))
        tiles = choice.tiles if choice is not None else None
        if choice is not None:
            tell(device, name, choice.tile_bytes, choice.reason(what))
        lacking = cost(tiles) + taken - room.free_bytes
        if lacking > 0 and room.idle_bytes:
            vae_room().clear(device, name, min(lacking, room.idle_bytes), f"the VAE {what}s")
        while True:
            try:
                if tiles is None:
                    return whole(self.reporting() if halve_tiles(size, None) is not None else self)
                return in_tiles(self.asking_for(cost(tiles)), tiles)
            except Exception as error:
                smaller = halve_tiles(size, tiles)
                is_short = isinstance(error, ShortOfMemory) or is_out_of_memory(error)
                if smaller is None or not is_short:
                    raise
            # Out of the clause: the exception held what the failed try had allocated.
            comfy.model_management.soft_empty_cache()
            failed = f"in tiles of {tiles.text()}" if tiles is not None else "untiled"
            line = f"VAE {what} ran out of memory {failed}; next try in tiles of {smaller.text()}"
            tell(device, name, cost(smaller), f"{line}: {format_bytes(cost(smaller))}", is_retry=True)
            tiles = smaller

    def reporting(self) -> TiledVAE:
        """Return a copy whose model reports an out-of-memory error as `ShortOfMemory`."""
        copied = copy.copy(self)
        copied.first_stage_model = Reporting(self.first_stage_model)
        return copied

    def asking_for(self, num_bytes: int) -> TiledVAE:
        """Return a copy that asks core for so many bytes beside its weights, whatever it decodes."""
        copied = copy.copy(self)
        copied.memory_used_decode = copied.memory_used_encode = lambda shape, dtype: num_bytes
        return copied


def tile_arguments(tiles: Tiles, num_dims: int, per_latent: int, frames_per_latent: int) -> dict[str, int]:
    """Return the arguments of core's tiled functions, in what they count."""
    side = tiles.pixels // per_latent
    arguments = {"tile_x": side, "tile_y": side, "overlap": tiles.overlap_pixels // per_latent}
    if num_dims == 5 and tiles.overlap_frames:
        arguments["tile_t"] = tiles.frames // frames_per_latent
        arguments["overlap_t"] = tiles.overlap_frames // frames_per_latent
    return arguments


def tell(device: str, name: str, num_bytes: int, line: str, *, is_retry: bool = False) -> None:
    """Write a line to the host's log and to the event log."""
    logging.log(logging.WARNING if is_retry else logging.INFO, "highwater: %s: %s", name, line)
    vae_room().note(device, name, num_bytes, line, is_retry=is_retry)


def choose_beforehand(vae: Any) -> Any:
    """Return a VAE of core's as one that chooses its tiles beforehand; one of another class as it is."""
    if type(vae) is not comfy.sd.VAE or patcher_of(vae) is None:
        return vae
    chosen = copy.copy(vae)
    set_class(chosen, TiledVAE)
    return chosen


def as_core(vae: Any) -> Any:
    """Return a copy of a VAE that decodes as core's does."""
    copied = copy.copy(vae)
    if isinstance(vae, TiledVAE):
        set_class(copied, comfy.sd.VAE)
    return copied
