"""Model files in the shapes of large ones, full of random numbers; one on disk at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from highwater.tests.comfyui.model_files import Shapes, flux, random_values, wan

__all__ = ["SHAPES", "NoTimeToWrite", "Shape", "ensure_model", "remove_models"]

# Matrices repeat these numbers: quick to write, and no weight is a constant.
TILE_ELEMENTS = (1 << 21) - 1
DEVIATION = 0.02
SPARE_BYTES = 2 << 30


class NoTimeToWrite(Exception):
    """The time was up before a model file was complete; nothing of it is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A model in ComfyUI's names, and what it is given; ``tiny`` makes the one of a rehearsal."""

    name: str
    full: Callable[[], Shapes]
    tiny: Callable[[], Shapes]
    text_width: tuple[int, int]
    text_tokens: tuple[int, int] = (512, 8)

    def shapes(self, rehearses: bool) -> Shapes:
        return self.tiny() if rehearses else self.full()


def wan_14b() -> Shapes:
    """Wan 2.1 14B: its feed-forward is 13824 wide, which is not four times its width."""
    shapes = wan(40, 5120)
    for index in range(40):
        shapes[f"blocks.{index}.ffn.0.weight"] = (13824, 5120)
        shapes[f"blocks.{index}.ffn.0.bias"] = (13824,)
        shapes[f"blocks.{index}.ffn.2.weight"] = (5120, 13824)
    return shapes


def flux_12b() -> Shapes:
    """Flux.1 schnell, which has no guidance of its own."""
    return flux(19, 38, width=3072, text_width=4096)


SHAPES = {
    "Flux 12B": Shape(name="flux", full=flux_12b, tiny=lambda: flux(4, 6), text_width=(4096, 64)),
    "Wan 14B": Shape(name="wan", full=wan_14b, tiny=wan, text_width=(4096, 4096)),
}


def models_directory(rehearses: bool) -> Path:
    return Path(tempfile.gettempdir(), f"highwater-gpu-models{'-rehearsal' if rehearses else ''}")


def remove_models(rehearses: bool) -> None:
    shutil.rmtree(models_directory(rehearses), ignore_errors=True)


def ensure_model(shape: Shape, rehearses: bool, left_s: Callable[[], float]) -> Path:
    """Write a model, removing others; returns the folder, laid out as ComfyUI's ``models``.

    The file has a second name, ``other_``: to ComfyUI that is another model of the same size.

    Args:
        left_s: tells the seconds that are left to write it.

    Raises:
        NoTimeToWrite: they were not enough.
        OSError: it does not fit on the disk.
    """
    directory = models_directory(rehearses)
    folder = directory / "diffusion_models"
    path, other = folder / f"{shape.name}.safetensors", folder / f"other_{shape.name}.safetensors"
    if not path.exists():
        shutil.rmtree(directory, ignore_errors=True)
        folder.mkdir(parents=True)
        write_model(path, shape.shapes(rehearses), left_s)
    if not other.is_symlink():
        other.symlink_to(path)
    return directory


def write_model(path: Path, shapes: Shapes, left_s: Callable[[], float]) -> None:
    """Write bf16 weights; the file appears complete or not at all."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    free = shutil.disk_usage(path.parent).free
    if free < end + SPARE_BYTES:
        raise OSError(f"{path.parent} has {free / 1e9:.1f} GB free; the model takes {end / 1e9:.1f} GB")
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    generator = torch.Generator().manual_seed(0)
    tile = to_bytes(torch.randn(TILE_ELEMENTS, generator=generator) * DEVIATION)
    new = path.with_suffix(".new")
    try:
        with open(new, "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name, shape in shapes.items():
                if left_s() <= 0:
                    raise NoTimeToWrite(f"{file.tell() / 1e9:.1f} of {end / 1e9:.1f} GB of the model file were written")
                num_bytes = 2 * math.prod(shape)
                if len(shape) < 2 or num_bytes < len(tile):
                    file.write(to_bytes(random_values(name, shape, DEVIATION, generator)))
                    continue
                for begin in range(0, num_bytes, len(tile)):
                    file.write(tile[: num_bytes - begin])
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def to_bytes(values: torch.Tensor) -> memoryview:
    return memoryview(values.to(torch.bfloat16).reshape(-1).view(torch.uint8).numpy())
