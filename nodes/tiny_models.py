"""Tiny models with random weights in ComfyUI's own format, made when a loader first uses them: no download needed.

ComfyUI reads a model's size from the shapes in its file, so a few megabytes make a Flux. CLIP-L has one size only: it
is written in eight bits. The names below always stand in the loaders' lists; a file of that name is used as it is.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .file_names import naming_path

if TYPE_CHECKING:
    import torch

__all__ = [
    "Shapes",
    "clip_l",
    "clip_layers",
    "convolution",
    "flux",
    "linear",
    "make_tiny_model",
    "norm",
    "prefixed",
    "taesd",
    "tiny_model_notes",
    "tiny_models",
]

Shapes = dict[str, tuple[int, ...]]  # of each tensor by its name
ITEM_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1}


class Recipe(NamedTuple):
    """What a tiny model holds."""

    shapes: Callable[[], Shapes]
    scale: float  # the standard deviation of its matrices
    dtype: str  # of torch

    @property
    def num_megabytes(self) -> int:
        return round(sum(map(math.prod, self.shapes().values())) * ITEM_BYTES[self.dtype] / 1e6)

    def make(self, path: Path) -> None:
        """Write the file: seeded, so that every machine has the same. It appears complete or not at all."""
        import torch
        from safetensors.torch import save

        generator = torch.Generator().manual_seed(1)
        dtype = getattr(torch, self.dtype)
        tensors = {
            name: random_values(name, shape, self.scale, generator).to(dtype) for name, shape in self.shapes().items()
        }
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".highwater-") as scratch:
            unfinished = Path(scratch, "unfinished")  # a name that the host does not list
            unfinished.write_bytes(save(tensors, metadata={"format": "pt"}))  # save_file() lets only its user read it
            unfinished.replace(path)


def tiny_models(folder: str) -> tuple[str, ...]:
    """Return the names of the tiny models of one of the host's model folders."""
    return tuple(RECIPES.get(folder, ()))


def make_tiny_model(folder: str, name: str) -> None:
    """Make a file of `tiny_models` in the host's folder if it is not there: a second or two. Others are left alone.

    Raises:
        InvalidInput: it cannot be written; names the file and the reason.
    """
    import folder_paths

    from ..memory.errors import InvalidInput

    recipe = RECIPES.get(folder, {}).get(name)
    if recipe is None or folder_paths.get_full_path(folder, name) is not None:
        return
    paths = [Path(path) for path in folder_paths.get_folder_paths(folder)]
    path = next((path for path in paths if path.name == folder), paths[0]) / name
    try:
        with naming_path(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            recipe.make(path)
    except OSError as error:
        raise InvalidInput(f"{error.filename}: the tiny model cannot be made: {error.strerror}") from error


def tiny_model_notes(folder: str, names: list[str]) -> list[str]:
    """Return what a loader says of the tiny models among the files that it loads."""
    recipes = RECIPES.get(folder, {})
    return [
        f"{name}: {recipes[name].num_megabytes} MB of random weights in the model folder {folder}; the image is noise"
        for name in names
        if name in recipes
    ]


def random_values(name: str, shape: tuple[int, ...], scale: float, generator: torch.Generator) -> torch.Tensor:
    """Return values of a tensor: small ones for matrices and biases, about one for norms."""
    import torch

    values = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return values * scale
    is_norm = name.endswith("scale") or (name.endswith(".weight") and "norm" in name)
    return values * 0.02 + (1.0 if is_norm else 0.0)


# -- the shapes


def linear(name: str, num_in: int, num_out: int) -> Shapes:
    return {f"{name}.weight": (num_out, num_in), f"{name}.bias": (num_out,)}


def convolution(name: str, num_in: int, num_out: int, size: int = 3) -> Shapes:
    return {f"{name}.weight": (num_out, num_in, size, size), f"{name}.bias": (num_out,)}


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def prefixed(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def flux(num_double: int, num_single: int, width: int, text_width: int) -> Shapes:
    """Flux in Black Forest Labs' names. A head is 128 wide, so the width is a multiple of that."""
    shapes = {**linear("img_in", 64, width), **linear("txt_in", text_width, width)}
    for name, num_in in (("time_in", 256), ("vector_in", 768)):
        shapes |= linear(f"{name}.in_layer", num_in, width) | linear(f"{name}.out_layer", width, width)
    for index in range(num_double):
        for stream in ("img", "txt"):
            block = f"double_blocks.{index}.{stream}"
            shapes |= linear(f"{block}_mod.lin", width, 6 * width) | linear(f"{block}_attn.qkv", width, 3 * width)
            shapes |= {f"{block}_attn.norm.{part}_norm.scale": (128,) for part in ("query", "key")}
            shapes |= linear(f"{block}_attn.proj", width, width)
            shapes |= linear(f"{block}_mlp.0", width, 4 * width) | linear(f"{block}_mlp.2", 4 * width, width)
    for index in range(num_single):
        block = f"single_blocks.{index}"
        shapes |= linear(f"{block}.linear1", width, 7 * width) | linear(f"{block}.linear2", 5 * width, width)
        shapes |= {f"{block}.norm.{part}_norm.scale": (128,) for part in ("query", "key")}
        shapes |= linear(f"{block}.modulation.lin", width, 3 * width)
    shapes |= linear("final_layer.linear", width, 64) | linear("final_layer.adaLN_modulation.1", width, 2 * width)
    return shapes


def taesd(latent_channels: int) -> Shapes:
    """The tiny autoencoder; its size is fixed, and small."""

    def block(name: str) -> Shapes:
        return {key: shape for part in (0, 2, 4) for key, shape in convolution(f"{name}.conv.{part}", 64, 64).items()}

    def without_bias(name: str) -> Shapes:
        return {f"{name}.weight": (64, 64, 3, 3)}

    encoder = convolution("0", 3, 64) | convolution("14", 64, latent_channels)
    decoder = convolution("1", latent_channels, 64) | convolution("19", 64, 3)
    for index in (2, 6, 10):
        encoder |= without_bias(str(index))
    for index in (1, 3, 4, 5, 7, 8, 9, 11, 12, 13):
        encoder |= block(str(index))
    for index in (7, 12, 17):
        decoder |= without_bias(str(index))
    for index in (3, 4, 5, 8, 9, 10, 13, 14, 15, 18):
        decoder |= block(str(index))
    shapes: Shapes = {"vae_scale": (), "vae_shift": ()}
    return shapes | prefixed("taesd_encoder.", encoder) | prefixed("taesd_decoder.", decoder)


def clip_layers(prefix: str, num_layers: int, width: int) -> Shapes:
    shapes: Shapes = {}
    for index in range(num_layers):
        layer = f"{prefix}encoder.layers.{index}"
        shapes |= norm(f"{layer}.layer_norm1", width) | norm(f"{layer}.layer_norm2", width)
        for part in ("q", "k", "v", "out"):
            shapes |= linear(f"{layer}.self_attn.{part}_proj", width, width)
        shapes |= linear(f"{layer}.mlp.fc1", width, 4 * width) | linear(f"{layer}.mlp.fc2", 4 * width, width)
    return shapes


def clip_l() -> Shapes:
    """The text encoder of SD 1.5; ComfyUI knows it in this size only (123 million numbers)."""
    shapes: Shapes = {
        "text_model.embeddings.token_embedding.weight": (49408, 768),
        "text_model.embeddings.position_embedding.weight": (77, 768),
    }
    return shapes | clip_layers("text_model.", 12, 768) | norm("text_model.final_layer_norm", 768)


# The host's model folder -> its tiny models. A name stands for these weights for good: other weights, another name.
RECIPES: dict[str, dict[str, Recipe]] = {
    "diffusion_models": {
        "highwater-tiny-flux.safetensors": Recipe(lambda: flux(4, 8, width=256, text_width=768), 0.05, "bfloat16"),
    },
    "text_encoders": {"highwater-tiny-clip-l.safetensors": Recipe(clip_l, 0.03, "float8_e4m3fn")},
    "vae": {"highwater-tiny-vae.safetensors": Recipe(lambda: taesd(16), 0.04, "bfloat16")},
}
