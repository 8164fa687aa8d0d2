"""What a VAE of diffusers allocates as it decodes, found without running it: a twin decodes on torch's meta device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...memory.planner.tiles import Tiles
from .tile_settings import set_to

__all__ = ["DecodeBytes", "cuts_well", "decode_bytes", "trace", "twin_of"]

# The sides of two pictures of latents that are traced; what lies between and beyond follows from the line through them.
TRACED_LATENTS = (16, 32)
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
            picture_bytes_per_latent=picture.nbytes // many,
            pixels_per_latent=picture.shape[-1] // TRACED_LATENTS[-1],
        )
    return found[key]


def cuts_well(vae: Any, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether tiles of a VAE give the whole picture, of less memory at once; not so in every class of the library.

    Traces it once for latents of a shape, in whatever height and width.
    """
    key = (*shape[:-2], dtype)
    found = known_to_cut.setdefault(vae, {})
    if key not in found:
        twin, (few, many) = twin_of(vae, dtype), TRACED_LATENTS
        whole_bytes, whole = trace(twin, (*shape[:-2], many, many), dtype)
        per_latent = whole.shape[-1] // many
        tiles = Tiles(pixels=few * per_latent, overlap_pixels=few * per_latent // 4)
        with set_to(twin, tiles, per_latent):
            tiled_bytes, tiled = trace(twin, (*shape[:-2], many, many), dtype)
        found[key] = tiled.shape == whole.shape and tiled_bytes < whole_bytes
    return found[key]


def twin_of(vae: Any, dtype: torch.dtype) -> Any:
    """Return a VAE of the same config on the meta device."""
    with torch.device("meta"):
        twin = type(vae).from_config(vae.config)
    torch.nn.Module.to(twin.eval(), dtype)  # the library's own warns of classes that keep some weights in float32
    return twin


def trace(twin: Any, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """Return the most bytes that tensors of a decode have at once, the latents among them, and what it returns."""
    latents = torch.empty(shape, dtype=dtype, device="meta")
    with torch.no_grad(), OneKernelAttention(), LiveBytes(twin) as live:
        (picture,) = twin.decode(latents, return_dict=False)
    return live.peak_bytes + latents.nbytes, picture


class OneKernelAttention(TorchFunctionMode):
    """Makes attention one kernel without a matrix of scores, as on GPUs; the meta device has only the plain one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            query, _, value = (
                args[:3] if len(args) >= 3 else [(kwargs or {})[name] for name in ("query", "key", "value")]
            )
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that operators in the body make, as long as they are alive."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.weights = {weight.untyped_storage()._cdata for weight in (*module.parameters(), *module.buffers())}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.weights and storage._cdata not in self.live:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: entry for key, entry in self.live.items() if not entry[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self.live.values()))
        return made
