"""What core's own classes say that a model needs beside its weights, from the header of its file alone.

Core reserves so much before it samples, encodes or decodes. Its formulas belong to objects that it makes as it loads a
model. So these are made here, by core's own loaders, on the meta device: each weight is a shape and a dtype. Of a file,
only single numbers, short vectors and marks are read, by which core tells models and quantized files apart, and
tokenizers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from comfy.model_detection import unet_prefix_from_state_dict
from safetensors import SafetensorError, safe_open

from ...memory.errors import InvalidInput, reason_of
from ...memory.hosted_component import TiledSize, Tiles
from .vae_sizes import cuts_well, decoded_size, encoded_size, tile_bytes, tile_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "CodingNeeds",
    "SamplingNeeds",
    "TiledNeeds",
    "coding_needs",
    "kept_free_bytes",
    "on_meta",
    "reserves_for_gpus",
    "sampling_needs",
    "text_encoder",
]

# Of norms, by which core tells fine-tuned models apart, and of texts that say how a layer is quantized.
LARGEST_READ_BYTES = 16384
# Of tokenizers, which files of text encoders have as vectors of bytes.
LARGEST_TOKENIZER_BYTES = 64 << 20
NO_OP = "for .*: copying from a non-meta parameter in the checkpoint to a meta parameter"
VAE_PREFIXES = ("first_stage_model.", "vae.")
CORES_OPTIONS: dict[str, dict[str, Any]] = {
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
"""By the words of core's loader: the options with which it loads."""


class SamplingNeeds:
    """One diffusion model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def latent_shape(self, width: int, height: int, frames: int = 1, batch: int = 1) -> tuple[int, ...]:
        """Return the shape of latents for pictures of so many pixels."""
        form = self.model.latent_format
        edges = [max(1, edge // form.spacial_downscale_ratio) for edge in (height, width)]
        if form.latent_dimensions == 3:
            edges.insert(0, (frames - 1) // form.temporal_downscale_ratio + 1)
        return (batch, form.latent_channels, *edges)

    def num_bytes(
        self,
        latent_shape: Sequence[int],
        *,
        num_conds: int = 1,
        references: Sequence[Sequence[int]] = (),
    ) -> int:
        """Return what core reserves for one step.

        Args:
            num_conds: evaluations that are computed at once: 2 with a negative prompt, if there is room for both.
            references: the shapes of latents that the model attends to beside; core counts them for some models only.
        """
        batch, *rest = latent_shape
        latents = [torch.empty(tuple(shape), device="meta") for shape in references]
        shapes = self.model.extra_conds_shapes(reference_latents=latents) if latents else {}
        conds = {name: [shape] * num_conds for name, shape in shapes.items()}
        return int(self.model.memory_required([batch * num_conds, *rest], cond_shapes=conds))


@dataclass(frozen=True, kw_only=True, slots=True)
class TiledNeeds:
    """What one picture or video needs in tiles, by core's estimate."""

    size: TiledSize
    num_bytes: Callable[[Tiles | None], int]
    """Returns the bytes of the largest tile; None: in one piece."""
    shape: tuple[int, ...]
    """Of one picture or video, as core cuts it."""
    tile_shapes: Callable[[Tiles], Mapping[tuple[int, ...], int]]
    """Returns the shapes of the tiles, and how many there are of each."""
    least_bytes: int
    """What core makes free for computing in any case."""


class CodingNeeds:
    """One VAE."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def latent_shape(self, width: int, height: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one latent for pictures of so many pixels."""
        step = self.vae.spacial_compression_decode()
        edges = [max(1, edge // step) for edge in (height, width)]
        if self.vae.latent_dim == 3:
            edges.insert(0, (frames - 1) // (self.vae.temporal_compression_decode() or 1) + 1)
        return (1, self.vae.latent_channels, *edges)

    def pixel_shape(self, width: int, height: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of one picture or video that is encoded."""
        return (1, 3, *((frames,) if self.vae.latent_dim == 3 else ()), height, width)

    def decode_bytes(
        self, width: int, height: int, frames: int = 1, *, tile_size: int | None = None, tile_frames: int | None = None
    ) -> int:
        """Return what core reserves to decode one picture or video of so many pixels, or one tile of it."""
        width, height, frames = tile_of(width, height, frames, tile_size, tile_frames)
        return int(self.vae.memory_used_decode(self.latent_shape(width, height, frames), self.vae.vae_dtype))

    def decode_tiles(self, width: int, height: int, frames: int = 1) -> TiledNeeds | None:
        """Return what tiles of one picture or video need that a VAE of ours decodes; None for what is left to core."""
        shape, vae = self.latent_shape(width, height, frames), self.vae
        size = decoded_size(vae, shape) if cuts_well(vae, len(shape) - 2) else None
        if size is None:
            return None
        unit = size.pixels_per_latent, size.frames_per_latent
        return needs_in_tiles(size, vae.memory_used_decode, vae.vae_dtype, shape, *unit)

    def encode_tiles(self, width: int, height: int, frames: int = 1) -> TiledNeeds | None:
        """Return what tiles of one picture or video that a VAE of ours encodes need; as `decode_tiles`."""
        vae = self.vae
        shape = self.pixel_shape(width, height, frames)
        size = encoded_size(vae, shape) if cuts_well(vae, len(shape) - 2) else None
        return None if size is None else needs_in_tiles(size, vae.memory_used_encode, vae.vae_dtype, shape, 1, 1)

    def encode_bytes(
        self, width: int, height: int, frames: int = 1, *, tile_size: int | None = None, tile_frames: int | None = None
    ) -> int:
        """Return what core reserves to encode one picture or video of so many pixels, or one tile of it."""
        width, height, frames = tile_of(width, height, frames, tile_size, tile_frames)
        return int(self.vae.memory_used_encode(self.pixel_shape(width, height, frames), self.vae.vae_dtype))


def reserves_for_gpus() -> bool:
    """Whether core reserves for sampling what GPUs take: where it has none, several times as much, for attention."""
    return bool(comfy.model_management.cpu_state == comfy.model_management.CPUState.GPU)


def kept_free_bytes() -> int:
    """Return what core keeps free of weights on each GPU: for computing, and what ``--reserve-vram`` says."""
    return int(comfy.model_management.minimum_inference_memory())


def needs_in_tiles(size: TiledSize, *counted: Any) -> TiledNeeds:
    """Return what a size needs in tiles; ``counted``: as `tile_bytes` takes it, but for the tiles."""
    memory_used, dtype, shape, per_latent, frames_per_latent = counted
    kept = comfy.model_management.minimum_inference_memory() - comfy.model_management.extra_reserved_memory()
    return TiledNeeds(
        size=size,
        num_bytes=cache(lambda tiles: tile_bytes(memory_used, dtype, shape, tiles, per_latent, frames_per_latent)),
        shape=tuple(shape),
        tile_shapes=cache(lambda tiles: tile_shapes(shape, tiles, per_latent, frames_per_latent)),
        least_bytes=int(kept),
    )


def sampling_needs(path: str, *, weight_dtype: str = "default") -> SamplingNeeds:
    """Return the needs of a diffusion model's file, or of a checkpoint's; takes as long as its modules to make.

    Args:
        weight_dtype: as core's loader takes it.

    Raises:
        InvalidInput: no safetensors file, or no model that core knows.
    """
    tensors, metadata = on_meta(path)
    prefix = unet_prefix_from_state_dict(tensors)
    tensors = comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""}, filter_keys=True) or tensors
    # It writes marks, and reads them later: as tensors that have their bytes.
    tensors, metadata = comfy.utils.convert_old_quants(tensors, "", metadata=metadata)
    # As core chooses, but for a device to which a model without memory cannot be moved.
    options = {**CORES_OPTIONS.get(weight_dtype, {}), "offload_device": torch.device("cpu")}
    with making(path):
        patcher = comfy.sd.load_diffusion_model_state_dict(tensors, model_options=options, metadata=metadata)
    if patcher is None:
        raise InvalidInput(f"{path}: is no diffusion model that ComfyUI knows")
    return SamplingNeeds(patcher.model)


def coding_needs(path: str) -> CodingNeeds:
    """Return the needs of a VAE's file, or of the VAE in a checkpoint. Raises `InvalidInput`, as `sampling_needs`."""
    tensors, metadata = on_meta(path)
    for prefix in VAE_PREFIXES:
        if any(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            break
    with making(path):
        vae = comfy.sd.VAE(sd=tensors, metadata=metadata)
    if vae.first_stage_model is None:
        raise InvalidInput(f"{path}: is no VAE that ComfyUI knows")
    return CodingNeeds(vae)


def text_encoder(paths: Sequence[str], *, text_type: str | None = None) -> Any:
    """Return core's text encoder of these files, or of a checkpoint, without memory; with its tokenizer.

    Args:
        text_type: as core's loader takes it; None: of a checkpoint, whose other parts say it.

    Raises:
        InvalidInput: as `sampling_needs`.
    """
    read = [on_meta(path) for path in paths]
    options = {"initial_device": torch.device("meta")}
    with making(paths[0]):
        if text_type is None:
            tensors, metadata = read[0]
            _, clip, *_ = comfy.sd.load_state_dict_guess_config(
                tensors,
                output_vae=False,
                output_model=False,
                model_options={"offload_device": torch.device("cpu")},
                te_model_options=options,
                metadata=metadata,
            ) or (None, None)
        else:
            kinds = comfy.sd.CLIPType
            kind = getattr(kinds, text_type.upper(), kinds.STABLE_DIFFUSION)
            tensors = [comfy.utils.convert_old_quants(tensors, "", metadata=metadata)[0] for tensors, metadata in read]
            clip = comfy.sd.load_text_encoder_state_dicts(tensors, clip_type=kind, model_options=options)
    if clip is None:
        raise InvalidInput(f"{paths[0]}: has no text encoder that ComfyUI knows")
    return clip


@contextmanager
def making(path: str) -> Iterator[None]:
    """Give what core makes no memory. Raises `InvalidInput` where core fails over what a file has."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", NO_OP)
            yield
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(f"{path}: ComfyUI cannot say what it needs ({reason_of(error)})") from error


def on_meta(path: str) -> tuple[dict[str, torch.Tensor], Mapping[str, str] | None]:
    """Return the tensors of a safetensors file as shapes, but for the smallest, and its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: shape_or_vector(file, name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InvalidInput(f"{path}: is not a safetensors file that can be read ({reason_of(error)})") from error


def shape_or_vector(file: Any, name: str) -> torch.Tensor:
    """Return one tensor: the bytes of a number, short vector or tokenizer, of all others only shape and dtype."""
    part = file.get_slice(name)
    shape = part.get_shape()
    dtype = part.get_dtype()
    limit = LARGEST_TOKENIZER_BYTES if dtype == "U8" else LARGEST_READ_BYTES
    if not shape or (len(shape) == 1 and shape[0] * part[:0].dtype.itemsize <= limit):
        vector: torch.Tensor = file.get_tensor(name)
        return vector
    return torch.empty(shape, dtype=part[:0].dtype, device="meta")


def tile_of(
    width: int, height: int, frames: int, tile_size: int | None, tile_frames: int | None
) -> tuple[int, int, int]:
    """Return the size of the largest tile."""
    edge, length = tile_size or max(width, height), tile_frames or frames
    return min(width, edge), min(height, edge), min(frames, length)
