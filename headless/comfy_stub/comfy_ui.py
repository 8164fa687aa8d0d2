"""The part of ComfyUI's V3 ``ui`` that our node files use: saved images and text on a node."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import folder_paths

if TYPE_CHECKING:
    import torch

    from .comfy_io import ComfyNode

__all__ = ["ImageSaveHelper", "PreviewText", "SavedImages", "SavedResult"]


class SavedResult(dict[str, str]):
    """Where the page finds a saved file."""

    def __init__(self, filename: str, subfolder: str, type: str) -> None:
        super().__init__(filename=filename, subfolder=subfolder, type=type)


class SavedImages:
    """Images shown below a node."""

    def __init__(self, results: Sequence[SavedResult]) -> None:
        self.results = list(results)

    def as_dict(self) -> dict[str, Any]:
        return {"images": self.results}


class PreviewText:
    """A text shown on a node."""

    def __init__(self, value: str) -> None:
        self.value = value

    def as_dict(self) -> dict[str, Any]:
        return {"text": (self.value,)}


@contextmanager
def no_partial_file(path: Path) -> Iterator[None]:
    """Remove a file that an error in the body, such as a full disk, leaves empty or incomplete."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


class ImageSaveHelper:
    """Writes images as the host does, so that a PNG dropped on its page brings the workflow back."""

    @staticmethod
    def get_save_images_ui(
        images: torch.Tensor, filename_prefix: str, cls: type[ComfyNode] | None, compress_level: int = 4
    ) -> SavedImages:
        """Save each image of [B, H, W, C] from 0 to 1 as a PNG below the output folder.

        Raises:
            InvalidInput: the prefix leads out of the output folder.
        """
        from PIL import Image
        from PIL.PngImagePlugin import PngInfo

        from ...nodes.file_names import naming_path

        height, width = images.shape[1:3]
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory(), width, height
        )
        metadata = PngInfo()
        if cls is not None:
            texts = {"prompt": cls.hidden.prompt, **(cls.hidden.extra_pnginfo or {})}
            for key, content in texts.items():
                if content is not None:
                    metadata.add_text(key, json.dumps(content))
        results = []
        for number, image in enumerate(images, start=counter):
            pixels = (image.cpu().clamp(0, 1) * 255).byte().numpy()
            filename = f"{name}_{number:05}_.png"
            path = Path(folder) / filename
            with naming_path(path), no_partial_file(path):
                Image.fromarray(pixels).save(path, pnginfo=metadata, compress_level=compress_level)
            results.append(SavedResult(filename, subfolder, "output"))
        return SavedImages(results)
