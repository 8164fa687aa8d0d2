"""The model files of ComfyUI's folders: listed, found by name, and looked into before they are loaded."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ..tiny_models import make_tiny_model, tiny_models

__all__ = [
    "KINDS",
    "SAFETENSORS",
    "check_text_encoders",
    "files_fingerprint",
    "find_model_file",
    "list_model_files",
    "model_choices",
    "model_path",
    "named_as",
]

# The host's folders of models that we load, and what a file in each of them is.
KINDS = {
    "checkpoints": "a checkpoint",
    "clip_vision": "a CLIP vision model",
    "controlnet": "a ControlNet",
    "diffusion_models": "a diffusion model",
    "text_encoders": "a text encoder",
    "vae": "a VAE",
}
NUM_FILES_TOLD = 20
SAFETENSORS = (".safetensors", ".sft")
# How core begins what it says of a file that it cannot use: without its name, or with advice that is not ours.
CORES_REFUSAL = "ERROR: "
# Every text encoder has a table of tokens. Those inside of a checkpoint have a prefix that core does not look for.
TOKENS = re.compile(
    r"(?!cond_stage_model|conditioner)(.*\.)?(token_embedding|embed_tokens|shared|word_embeddings)\.weight"
)
# Their second file holds projections only.
TYPES_WITH_MORE = ("ltxv",)


def list_model_files(folder: str) -> list[str]:
    """Return the files of one of the host's model folders; the host remembers them until a folder changes."""
    import folder_paths

    return folder_paths.get_filename_list(folder)


def model_choices(folder: str) -> list[str]:
    """Return what a loader offers: the files of one of the host's model folders, then the tiny models, made or not."""
    return list(dict.fromkeys([*list_model_files(folder), *tiny_models(folder)]))


def model_path(folder: str, name: str) -> str:
    """Return the path of one of `model_choices`; a tiny model that is missing is made first.

    Raises:
        InvalidInput: as `find_model_file` and `make_tiny_model`.
    """
    make_tiny_model(folder, name)
    return find_model_file(folder, name)


def find_model_file(folder: str, name: str) -> str:
    """Return the path of a file that `list_model_files` named.

    Raises:
        InvalidInput: no such file; a link may name one that this machine lacks.
    """
    import folder_paths

    from ...memory.errors import InvalidInput, allowed_values

    names = list_model_files(folder)
    path = folder_paths.get_full_path(folder, name) if name in names else None
    if path is None:
        near = difflib.get_close_matches(name, names, n=NUM_FILES_TOLD)
        told = list(dict.fromkeys([*near, *names]))[:NUM_FILES_TOLD]
        more = f" and {len(names) - len(told)} more" if len(names) > len(told) else ""
        choices = allowed_values(name, told) if told else "the folder has no models"
        raise InvalidInput(f"{name!r} is not in the folder {folder}; {choices}{more}")
    return path


def files_fingerprint(folder: str, names: Sequence[str]) -> str:
    """Return a text that is another one as soon as one of these files is replaced, moved or written to.

    A tiny model is the same always: that one is made here is no change.
    """
    import folder_paths

    found = []
    for name in names:
        path = None if name in tiny_models(folder) else folder_paths.get_full_path(folder, name)
        with suppress(OSError):  # gone by now, which the node tells when it runs
            if path is not None:
                is_now = os.stat(path)
                found.append(
                    f"{is_now.st_dev}:{is_now.st_ino}:{is_now.st_size}:{is_now.st_mtime_ns}:{is_now.st_ctime_ns}"
                )
    return " ".join(found)


def check_text_encoders(paths: Sequence[str], clip_type: str) -> None:
    """Refuse a file that is not a text encoder: core would make one with random weights, and only log it.

    Reads the headers of safetensors files; of other formats nothing is known before they are loaded.

    Raises:
        InvalidInput: naming the file.
    """
    from ...memory.errors import InvalidInput
    from ...memory.weights.safetensors_header import read_header

    without = [
        path
        for path in paths
        if path.endswith(SAFETENSORS) and not any(TOKENS.fullmatch(tensor.name) for tensor in read_header(path).tensors)
    ]
    if len(without) > (clip_type in TYPES_WITH_MORE and len(paths) > 1):
        raise InvalidInput(
            f"{without[0]}: is not a text encoder: it has no token embeddings; choose another file, or load it with "
            "ComfyUI's own node and link Manage CLIP after it"
        )


@contextmanager
def named_as(path: str, kind: str) -> Iterator[None]:
    """Name the file and what it should hold where core says only that it cannot use it. Raises `InvalidInput`."""
    from ...memory.errors import InvalidInput

    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(CORES_REFUSAL):
            raise
        raise InvalidInput(f"{path}: is not {kind} that ComfyUI can load") from error
