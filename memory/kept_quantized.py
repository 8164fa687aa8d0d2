"""`load_quantized`: a model in a storage form, from a file that is kept beside its own and made the first time."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .errors import InvalidInput
from .model_loading import find_shards, load_model
from .quantizing import KEPT_OF, Progress, find_layout, quantize_file
from .weights.known_errors import MeasuredFile
from .weights.safetensors_header import read_header

__all__ = ["load_quantized"]

one_at_a_time = threading.Lock()
"""Held while a file is looked for, made and opened: another thread would replace it in between."""


def load_quantized(
    path: str | Path | Sequence[str | Path],
    form: str,
    model_class: Callable[..., nn.Module] | None = None,
    *,
    config: Mapping[str, Any] | str | Path | None = None,
    prefix: str = "",
    ignore_unexpected: bool = False,
    exclude: Iterable[str] = (),
    error_limit: float | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Return a model as `load_model` does, with the weights of its blocks in a form of `quantize_file`.

    They are encoded once, into a file beside the model's: ``model-int8.safetensors`` of ``model.safetensors``. It is
    made anew when the model's file, or what is asked for, has changed.

    Args:
        path, model_class, config, prefix, ignore_unexpected: as of `load_model`.
        form, exclude, error_limit, progress: as of `quantize_file`.

    Raises:
        InvalidInput: as both; or there is another file of that name, which is not replaced.
        OSError: the file cannot be written.
    """
    exclude = exclude if isinstance(exclude, str) else tuple(exclude)
    word = find_layout(form).name.replace(" ", "-")
    paths = find_shards(path)
    headers = [read_header(each) for each in paths]
    contents = [
        MeasuredFile(path=header.path, version=header.version, tensors=header.tensors).key for header in headers
    ]
    kept_of = hashlib.sha256(repr((contents, word, exclude, error_limit)).encode()).hexdigest()[:32]
    first = paths[0].name.removesuffix(".safetensors").partition("-00001-of-")[0]
    target = paths[0].with_name(f"{first}-{word}.safetensors")
    with one_at_a_time:
        if not target.exists() or kept_of_file(target) != kept_of:
            quantize_file(
                paths,
                target,
                word,
                exclude=exclude,
                error_limit=error_limit,
                replaces=True,
                progress=progress,
                kept_of=kept_of,
            )
        return load_model(target, model_class, config=config, prefix=prefix, ignore_unexpected=ignore_unexpected)


def kept_of_file(path: Path) -> str:
    """Return of which content a file is kept.

    Raises:
        InvalidInput: `load_quantized` has not made this file.
    """
    try:
        told = json.loads(read_header(path).metadata.get("highwater", "{}"))
        kept_of = told.get(KEPT_OF) if isinstance(told, dict) else None
    except (InvalidInput, ValueError):
        kept_of = None
    if not isinstance(kept_of, str):
        remedy = "load it by load_model, or move it"
        raise InvalidInput(f"{path}: was not made by load_quantized, and is not replaced; {remedy}")
    return kept_of
