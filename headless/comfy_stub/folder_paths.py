"""The part of ComfyUI's ``folder_paths`` that our node files use. `configure` sets the two roots."""

from __future__ import annotations

import os
import posixpath
import re
import time
from pathlib import Path

__all__ = [
    "configure",
    "get_filename_list",
    "get_folder_paths",
    "get_full_path",
    "get_output_directory",
    "get_save_image_path",
]

# The kinds of model whose files may lie in a second folder.
FOLDERS = {
    "text_encoders": ("text_encoders", "clip"),
    "diffusion_models": ("unet", "diffusion_models"),
    "controlnet": ("controlnet", "t2i_adapter"),
}
MODEL_SUFFIXES = {".ckpt", ".pt", ".pt2", ".bin", ".pth", ".safetensors", ".pkl", ".sft"}

models_directory = Path("models")
output_directory = Path("output")


def configure(*, models: str | Path, output: str | Path) -> None:
    """Set where models are read and results are written, for the whole process as in ComfyUI."""
    global models_directory, output_directory
    models_directory, output_directory = Path(models).resolve(), Path(output).resolve()


def get_folder_paths(folder_name: str) -> list[str]:
    """Return the folders that hold one kind of model: the kind's own below the models folder.

    The models folder itself holds pipelines too, so that ``--models`` can name a folder of them.
    """
    own = [str(models_directory / name) for name in FOLDERS.get(folder_name, (folder_name,))]
    return [*own, str(models_directory)] if folder_name == "diffusers" else own


def get_filename_list(folder_name: str) -> list[str]:
    """Return the files of one kind of model, as paths below its folders, sorted; walks the folders."""
    names = {
        os.path.relpath(os.path.join(place, name), root)
        for root in get_folder_paths(folder_name)
        for place, _, files in os.walk(root, followlinks=True)
        for name in files
        if os.path.splitext(name)[1].lower() in MODEL_SUFFIXES
    }
    return sorted(names)


def get_full_path(folder_name: str, filename: str) -> str | None:
    """Return the path of a file of one kind of model, or None; no name leads out of the kind's folders."""
    inside = os.path.relpath(os.path.join("/", filename), "/")
    paths = (os.path.join(root, inside) for root in get_folder_paths(folder_name))
    return next(filter(os.path.isfile, paths), None)


def get_output_directory() -> str:
    return str(output_directory)


def get_save_image_path(
    filename_prefix: str, output_dir: str, image_width: int = 0, image_height: int = 0
) -> tuple[str, str, int, str, str]:
    """Return folder, file name, next number, subfolder and the prefix with its ``%marks%`` replaced.

    Creates the folder.

    Raises:
        InvalidInput: the prefix leads out of the output folder.
    """
    from ...memory.errors import InvalidInput  # here, as the engine imports torch and listing nodes must not
    from ...nodes.file_names import prefix_problem, shown

    now = time.localtime()
    marks = {"width": image_width, "height": image_height, "year": f"{now.tm_year}"}
    for name in ("mon", "mday", "hour", "min", "sec"):
        long_name = {"mon": "month", "mday": "day", "min": "minute", "sec": "second"}.get(name, name)
        marks[long_name] = f"{getattr(now, 'tm_' + name):02}"
    for mark, text in marks.items():
        filename_prefix = filename_prefix.replace(f"%{mark}%", str(text))
    prefix = posixpath.normpath(filename_prefix)
    subfolder, _, filename = prefix.rpartition("/")
    problem = prefix_problem(filename_prefix)
    folder = Path(output_dir, subfolder).resolve() if problem is None else None
    if folder is None or not folder.is_relative_to(Path(output_dir).resolve()):  # by a link
        raise InvalidInput(
            f"filename_prefix {shown(filename_prefix)} is not a file name below {output_dir}; "
            "allowed: a name such as Highwater, or folder/name"
        )
    folder.mkdir(parents=True, exist_ok=True)
    numbered = re.compile(re.escape(filename) + r"_(\d+)_?\.\w+")
    numbers = [int(match[1]) for path in folder.iterdir() if (match := numbered.fullmatch(path.name))]
    return str(folder), filename, max(numbers, default=0) + 1, subfolder, filename_prefix
