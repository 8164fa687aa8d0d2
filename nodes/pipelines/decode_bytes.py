"""What a VAE of diffusers allocates as it decodes, found without running it: a twin decodes on torch's meta device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...memory.planner.tiles import Tiles
from ...memory.tracing import trace_forward
from .tile_settings import set_to

__all__ = ["DecodeBytes", "cuts_well", "decode_bytes", "trace", "twin_of"]

# The sides of two pictures of latents that are traced; what lies between and beyond follows from the line through them.
TRACED_LATENTS = (16, 32)
# The side of a picture that is cut into four tiles to see what comes of it.
CUT_LATENTS = 24
# What kernels allocate for themselves stands in no tensor.
MARGIN = 1.1


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
        """Return the bytes for a picture with so many latents."""
        return int((self.fixed_bytes + self.bytes_per_latent * num_latents) * MARGIN)


known: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], DecodeBytes]] = weakref.WeakKeyDictionary()
known_to_cut: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], bool]] = weakref.WeakKeyDictionary()


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
    """Whether tiles of a VAE give the whole picture, of less memory at once; not so in every class of the library.

    Traces it once for latents of a shape, in whatever height and width.
    """
    key = (*shape[:-2], dtype)
    found = known_to_cut.setdefault(vae, {})
    if key not in found:
        twin, side, cut = twin_of(vae, dtype), TRACED_LATENTS[0], (*shape[:-2], CUT_LATENTS, CUT_LATENTS)
        whole_bytes, whole = trace(twin, cut, dtype)
        per_latent = whole[-1] // CUT_LATENTS
        with set_to(twin, Tiles(pixels=side * per_latent, overlap_pixels=side * per_latent // 4), per_latent):
            tiled_bytes, tiled = trace(twin, cut, dtype)
        found[key] = tiled == whole and tiled_bytes < whole_bytes
    return found[key]


def twin_of(vae: Any, dtype: torch.dtype) -> Any:
    """Return a VAE of the same config on the meta device."""
    with torch.device("meta"):
        twin = type(vae).from_config(vae.config)
    torch.nn.Module.to(twin.train(False), dtype)  # the library's own warns of classes that keep some weights in float32
    return twin


def trace(twin: Any, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, tuple[int, ...]]:
    """Return the most bytes that tensors of a decode have at once, the latents among them, and its result's shape."""
    latents = torch.empty(tuple(shape), dtype=dtype, device="meta")
    traced = trace_forward(twin, (latents,), {"return_dict": False}, method="decode", blocks=())
    (picture,) = traced.output_shapes
    return traced.peak_bytes + latents.nbytes, picture
