"""What decides which weights the components of a pipeline are loaded with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .pipeline_folders import MODEL_INDEX, component_origins, is_quantized, read_json, weights_files

if TYPE_CHECKING:
    from ...memory.weights.loading import Loading

__all__ = ["read_loadings"]


def read_loadings(folder: Path, dtypes: Mapping[str, str]) -> dict[str, Loading]:
    """Return how the components of a checked folder are loaded now; reads JSON files and headers.

    None for those whose files are not plain (`weights_files`), and for quantized ones, of which weights are not kept.

    Args:
        dtypes: of the components, as `check_pipeline` returns them.

    Raises:
        InvalidInput: one of the files was replaced meanwhile, or cannot be read.
    """
    from ...memory.weights.file_origin import FileIdentity
    from ...memory.weights.loading import Loading

    index = read_json(folder / MODEL_INDEX)
    origins = component_origins(folder, index)
    found = {}
    for name, dtype in dtypes.items():
        paths = weights_files(folder / name)
        files = tuple(FileIdentity.of(path)[0] for path in paths) if not is_quantized(paths) else ()
        made = [str(index.get("_class_name")), name, *origins[name], dtype, digest_configs(folder / name)]
        if files:
            found[name] = Loading(made=" ".join(made), files=files)
    return found


def digest_configs(place: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(place.glob("*.json")):
        with path.open("rb") as file:
            digest.update(f"{path.name}\n{hashlib.sha256(file.read()).hexdigest()}\n".encode())
    return digest.hexdigest()
