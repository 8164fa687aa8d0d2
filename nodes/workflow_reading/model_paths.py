"""The files that a workflow names, in the host's folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...memory.errors import InvalidInput, quoted
from ..pipelines import ready_pipeline
from ..tiny_models import make_tiny_model
from .description import PIPELINE, AppliedLora, LoadedModel

__all__ = ["FoundFiles", "find_files", "find_loras", "image_size"]

# Where ComfyUI-GGUF finds its files where that pack is installed: the same folders, with other endings.
GGUF_FOLDERS = {"diffusion_models": "unet_gguf", "text_encoders": "clip_gguf"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundFiles:
    """The files of a model, in the order in which the workflow names them."""

    paths: tuple[Path, ...]
    """Of a pipeline: its folder."""
    missing: tuple[str, ...] = ()
    """One line for each file that is not there, or not named."""


def find_files(model: LoadedModel) -> FoundFiles:
    """Return where a model's files are; reads none. Tiny models that are missing are made, as their loaders do."""
    unnamed = tuple(line for line in model.unknown if line.startswith("file:"))
    if model.kind == PIPELINE:
        try:
            return FoundFiles(paths=tuple(map(ready_pipeline, model.files)), missing=unnamed)
        except InvalidInput as error:
            return FoundFiles(paths=(), missing=(f"{model.node.label}: {error}", *unnamed))
    found = find_all(model.node.label, model.folder, model.files)
    return FoundFiles(paths=found.paths, missing=(*found.missing, *unnamed))


def find_loras(loras: Sequence[AppliedLora]) -> FoundFiles:
    """Return where LoRAs are."""
    paths: list[Path] = []
    missing: list[str] = []
    for lora in loras:
        if lora.file is None:
            missing.append(f"{lora.node.label}: another node gives the name of its file")
            continue
        found = find_all(lora.node.label, "loras", (lora.file,))
        paths += found.paths
        missing += found.missing
    return FoundFiles(paths=tuple(paths), missing=tuple(missing))


def find_all(label: str, folder: str, names: Sequence[str]) -> FoundFiles:
    paths: list[Path] = []
    missing: list[str] = []
    for name in names:
        path = find_path(folder, name)
        if path is None and folder == "vae":
            approximate = find_approximate(name)
            if approximate:
                paths += approximate
                continue
        if path is None:
            missing.append(f"{label}: {quoted(name)} is not in the folder {folder}" if folder else f"{label}: {name}")
        else:
            paths.append(path)
    return FoundFiles(paths=tuple(paths), missing=tuple(missing))


def find_approximate(name: str) -> list[Path]:
    """Return the encoder and decoder of a tiny VAE, which ComfyUI's loader names together: ``taesd``, ``taef1``."""
    import folder_paths

    if "." in name or not name:
        return []
    files = [file for file in folder_paths.get_filename_list("vae_approx") if file.startswith(f"{name}_")]
    return [path for path in (find_path("vae_approx", file) for file in files) if path is not None]


def find_path(folder: str, name: str) -> Path | None:
    import folder_paths

    for place in (folder, GGUF_FOLDERS.get(folder, "")):
        try:
            make_tiny_model(place, name)  # others are left alone
            path = folder_paths.get_full_path(place, name) if place and "\0" not in name else None
        except (OSError, ValueError):  # a name that no file can have, or no folder to write to
            path = None
        if path is not None:
            return Path(path)
    return None


def image_size(name: str) -> tuple[int, int] | None:
    """Return width and height of an image in the host's input folder, as its loader turns it; None if it is not there.

    Reads the header of the file.
    """
    import folder_paths

    find = getattr(folder_paths, "get_annotated_filepath", None)
    if find is None:  # outside of ComfyUI there is no such folder
        return None
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(find(name)) as image:
            width, height = image.size
            is_turned = image.getexif().get(0x0112, 1) >= 5  # the tag of its orientation: those turned by 90 degrees
    except (OSError, SyntaxError, TypeError, UnidentifiedImageError, ValueError):
        return None
    return (height, width) if is_turned else (width, height)
