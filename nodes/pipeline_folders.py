"""Pipeline folders of the diffusers library: found below the host's folders, and checked file by file.

A folder is checked in full before any weight is read, so that a bad one leaves nothing half-loaded. Nothing here
imports torch or diffusers.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = [
    "MODEL_INDEX",
    "check_pipeline",
    "find_pipeline",
    "list_pipelines",
    "read_json",
    "weights_files",
    "weights_fingerprint",
]

MODEL_INDEX = "model_index.json"
# Tokenizers, schedulers and image processors have no config.json: they hold no weights.
MODEL_CONFIG = "config.json"
# How diffusers and transformers name the weights that they load; with another word inside it is another variant.
WEIGHTS_NAMES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".pkl")
SEARCH_DEPTH = 3
TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def list_pipelines() -> list[str]:
    """Return the names of the pipeline folders below the host's ``diffusers`` folders; walks three levels."""
    return sorted(pipeline_folders())


def find_pipeline(name: str) -> Path:
    """Return the folder of a pipeline that `list_pipelines` named.

    Raises:
        InvalidInput: no such pipeline; a shared workflow may name one that this machine lacks.
    """
    from ..memory.errors import InvalidInput, allowed_values

    folders = pipeline_folders()
    if name not in folders:
        roots = ", ".join(map(str, pipeline_roots())) or "nowhere"
        allowed = allowed_values(name, sorted(folders)) if folders else f"there is none: no folder with {MODEL_INDEX}"
        raise InvalidInput(f"pipeline {name!r} is not here; {allowed}; looked below {roots}")
    return folders[name]


def pipeline_roots() -> list[Path]:
    import folder_paths

    return [Path(root) for root in folder_paths.get_folder_paths("diffusers")]


def pipeline_folders() -> dict[str, Path]:
    """Name to folder; a name is the path below its root, and the first root that has it wins."""
    folders: dict[str, Path] = {}
    seen: set[str] = set()  # one root may lie below another
    for root in pipeline_roots():
        for place, subfolders, files in os.walk(root, followlinks=True):
            folder = Path(place)
            depth = len(folder.relative_to(root).parts)
            if MODEL_INDEX in files and depth:
                if (real := os.path.realpath(folder)) not in seen:
                    folders.setdefault(folder.relative_to(root).as_posix(), folder)
                seen.add(real)
                subfolders.clear()
            elif depth == SEARCH_DEPTH:
                subfolders.clear()
            else:
                subfolders[:] = [name for name in subfolders if not name.startswith(".")]
    return folders


def check_pipeline(folder: Path) -> dict[str, str]:
    """Check every file of a pipeline folder; return each weighted component's dtype as torch names it.

    Reads the JSON files and the headers of the weights, no tensor.

    Raises:
        InvalidInput: naming the file that is missing, truncated, malformed or a pickle.
    """
    from ..memory.errors import InvalidInput

    if not folder.is_dir():
        raise InvalidInput(f"{folder}: no such folder; expected a diffusers pipeline")
    index = read_json(folder / MODEL_INDEX)
    if not isinstance(index.get("_class_name"), str):
        raise InvalidInput(f"{folder / MODEL_INDEX}: names no pipeline class under '_class_name'")
    dtypes: dict[str, str] = {}
    for component, origin in index.items():
        # Null components and plain settings (boundary_ratio, ...) have no folder.
        if component.startswith("_") or not isinstance(origin, list) or None in origin:
            continue
        place = folder / component
        if not place.is_dir():
            raise InvalidInput(f"{place}: no such folder; {folder / MODEL_INDEX} lists it as {origin}")
        if (place / MODEL_CONFIG).is_file():
            dtypes[component] = check_weights(place)
        elif not any(place.iterdir()):
            raise InvalidInput(f"{place}: is empty; expected the files of {origin}")
    return dtypes


def check_weights(place: Path) -> str:
    """Check the headers of one component's safetensors files; return the dtype that holds most bytes."""
    from ..memory.errors import InvalidInput
    from ..memory.weights import read_header

    read_json(place / MODEL_CONFIG)
    shards = set(place.glob("*.safetensors"))
    for index in place.glob("*.safetensors.index.json"):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InvalidInput(f"{index}: has no 'weight_map' of tensor names to files")
        shards |= {place / str(shard) for shard in weight_map.values()}
    if not shards:
        pickles = sorted(path for path in place.iterdir() if path.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise InvalidInput(f"{pickles[0]}: is a pickle, which may run code when loaded; convert it to .safetensors")
        raise InvalidInput(f"{place}: has no weights; expected a .safetensors file")
    dtype_bytes: Counter[str] = Counter()
    for shard in sorted(shards):
        for tensor in read_header(shard).tensors:
            dtype_bytes[TORCH_DTYPES.get(tensor.dtype, "bfloat16")] += tensor.weight_bytes
    return dtype_bytes.most_common(1)[0][0] if dtype_bytes else "float32"


def weights_files(place: Path) -> list[Path]:
    """Return the safetensors files that the libraries load for one component of a checked folder: one, or its shards.

    Empty where that is not plain: another variant has weights of the same names and shapes.
    """
    found = []
    for name in WEIGHTS_NAMES:
        if (place / name).is_file():
            found.append([place / name])
        if (place / f"{name}.index.json").is_file():
            shards = read_json(place / f"{name}.index.json")["weight_map"].values()
            found.append(sorted({place / str(shard) for shard in shards}))
    return found[0] if len(found) == 1 else []


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        InvalidInput: no such file, not JSON, or not an object.
    """
    from ..memory.errors import InvalidInput

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"{path}: no such file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInput(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise InvalidInput(f"{path}: is a JSON {type(content).__name__}, expected an object")
    return content


def weights_fingerprint(folder: Path) -> str:
    """Return a text that changes when a file of the folder does: names, sizes and times, no content."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return ";".join(
        f"{path.relative_to(folder).as_posix()}:{(stat := path.stat()).st_size}:{stat.st_mtime_ns}" for path in files
    )
