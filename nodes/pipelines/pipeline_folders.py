"""Pipeline folders of the diffusers library: found below the host's folders, and checked file by file.

A folder is checked in full before any weight is read, so that a bad one leaves nothing half-loaded. Nothing here
imports torch or diffusers.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..file_names import check_file_name, check_relative_path, name_problem, shown
from .pipeline_files import PICKLE_SUFFIXES, FolderFile, check_configs, homes_of, list_files

__all__ = [
    "MODEL_CONFIG",
    "MODEL_INDEX",
    "check_pipeline",
    "component_origins",
    "find_pipeline",
    "is_quantized",
    "is_to_be_made",
    "list_pipelines",
    "pipeline_choices",
    "read_json",
    "ready_pipeline",
    "weights_files",
    "weights_fingerprint",
]

MODEL_INDEX = "model_index.json"
# Tokenizers, schedulers and image processors have no config.json: they hold no weights.
MODEL_CONFIG = "config.json"
# How diffusers and transformers name the weights that they load; with another word inside it is another variant.
WEIGHTS_NAMES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
# Classes that hold no weights, though some of their folders have a config.json.
WEIGHTLESS = (
    "Tokenizer",
    "TokenizerFast",
    "Processor",
    "ProcessorFast",
    "ProcessorPil",
    "Scheduler",
    "FeatureExtractor",
)
PLAIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}", re.ASCII)
SEARCH_DEPTH = 3
MAX_REMEMBERED = 32  # folders
TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def list_pipelines() -> list[str]:
    """Return the names of the pipeline folders below the host's ``diffusers`` folders; walks three levels."""
    return sorted(pipeline_folders())


def pipeline_choices() -> list[str]:
    """Return what a loader offers: the pipelines that are there, then the tiny ones, made or not."""
    from .tiny_pipelines import RECIPES

    return list(dict.fromkeys([*list_pipelines(), *RECIPES]))


def is_to_be_made(name: object) -> bool:
    """Whether a name is that of a tiny pipeline that is not there yet."""
    from .tiny_pipelines import RECIPES

    if not isinstance(name, str) or name not in RECIPES:
        return False
    return not any((root / name / MODEL_INDEX).is_file() for root in pipeline_roots())


def ready_pipeline(name: str) -> Path:
    """Return the folder of one of `pipeline_choices`; a tiny pipeline that is missing is made first (some seconds).

    Raises:
        InvalidInput: as `find_pipeline`; or the tiny one cannot be made, with the reason.
    """
    from ...memory.errors import InvalidInput
    from .tiny_pipelines import ensure_pipelines

    if is_to_be_made(name):
        try:
            ensure_pipelines(pipeline_roots()[0], [name])
        except OSError as error:
            raise InvalidInput(f"{error.filename}: the tiny pipeline cannot be made: {error.strerror}") from error
    return find_pipeline(name)


def find_pipeline(name: str) -> Path:
    """Return the folder of a pipeline that `list_pipelines` named; looks at that name only.

    Raises:
        InvalidInput: no such pipeline; a shared workflow may name one that this machine lacks.
    """
    from ...memory.errors import InvalidInput, allowed_values
    from .tiny_pipelines import RECIPES

    check_relative_path(name, "pipeline ")
    parts = name.split("/")
    if len(parts) <= SEARCH_DEPTH and not any(part.startswith(".") for part in parts):
        for root in pipeline_roots():
            above = [root.joinpath(*parts[:end]) for end in range(1, len(parts))]
            if (root / name / MODEL_INDEX).is_file() and not any((place / MODEL_INDEX).is_file() for place in above):
                return root / name
    folders = pipeline_folders()
    roots = ", ".join(map(str, pipeline_roots())) or "nowhere"
    allowed = allowed_values(name, sorted(folders)) if folders else f"there is no folder with a {MODEL_INDEX}"
    remedy = "; Load Pipeline makes it when it first uses it" if name in RECIPES else ""
    raise InvalidInput(f"pipeline {name!r} was not found; {allowed}; searched in {roots}{remedy}")


def pipeline_roots() -> list[Path]:
    import folder_paths

    return [Path(root) for root in folder_paths.get_folder_paths("diffusers")]


def pipeline_folders() -> dict[str, Path]:
    """Return folders by name; a name is the path below its root, and the first root with that name counts."""
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

    Reads the JSON files and the headers of the weights, no tensor; nothing where no file has changed since.

    Raises:
        InvalidInput: naming the file that is missing, truncated, malformed, a pickle, or a program
            ([Note: downloaded folders] in `pipeline_files.py`).
    """
    from ...memory.errors import InvalidInput

    if not folder.is_dir():
        raise InvalidInput(f"{folder}: no such folder; expected a diffusers pipeline")
    dtypes, problem = check_once(folder, tuple(files_of(folder)))
    if problem is not None:
        raise InvalidInput(problem)
    return dict(dtypes)


def files_of(folder: Path) -> list[FolderFile]:
    try:
        roots = pipeline_roots()
    except ModuleNotFoundError:  # outside of any host
        roots = []
    return list_files(folder, homes_of(folder, roots))


@lru_cache(maxsize=MAX_REMEMBERED)
def check_once(folder: Path, files: tuple[FolderFile, ...]) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """Check a folder as it is now; return its dtypes, or the line that refuses it. A prompt may name it many times."""
    from ...memory.errors import InvalidInput

    try:
        return tuple(check_components(folder, files).items()), None
    except InvalidInput as error:
        return (), str(error)


def check_components(folder: Path, files: Sequence[FolderFile]) -> dict[str, str]:
    from ...memory.errors import InvalidInput

    index = read_json(folder / MODEL_INDEX)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str):
        raise InvalidInput(f"{folder / MODEL_INDEX}: names no pipeline class under '_class_name'")
    dtypes: dict[str, str] = {}
    for component, (library, component_class) in component_origins(folder, index).items():
        place = folder / component
        if not place.is_dir():
            raise InvalidInput(
                f"{place}: no such folder; {folder / MODEL_INDEX} lists it as {[library, component_class]}"
            )
        own_files = [file.path for file in files if file.path.is_relative_to(place)]
        if not own_files:
            raise InvalidInput(f"{place}: is empty; expected the files of {[library, component_class]}")
        if (place / MODEL_CONFIG).is_file() and not component_class.endswith(WEIGHTLESS):
            dtypes[component] = check_weights(place)
        else:
            refuse_pickles(own_files)
    check_configs(files)
    return dtypes


def component_origins(folder: Path, index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the library and class of each component that a pipeline has; all of them are plain names.

    Null components, and plain settings (boundary_ratio, ...), have no folder.

    Raises:
        InvalidInput: a name that is a path, or the name of a module that no pipeline may choose.
    """
    from ...memory.errors import InvalidInput

    origins = {}
    for component, origin in index.items():
        if component.startswith("_") or not isinstance(origin, list) or None in origin:
            continue
        if len(origin) != 2 or not all(isinstance(word, str) for word in origin):
            continue
        where = f"{folder / MODEL_INDEX}: component {shown(component)}"
        if not PLAIN_NAME.fullmatch(component) or name_problem(component) is not None:
            raise InvalidInput(f"{where} is not a plain name; allowed: letters, digits and _")
        for word in origin:
            if not PLAIN_NAME.fullmatch(word):
                raise InvalidInput(
                    f"{where} comes from {shown(word)}; allowed: a class of diffusers, of transformers, or of one of "
                    "diffusers' pipelines"
                )
        origins[component] = origin[0], origin[1]
    return origins


def refuse_pickles(paths: Iterable[Path]) -> None:
    from ...memory.errors import InvalidInput

    for path in paths:
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise InvalidInput(f"{path}: is a pickle, which may run code when loaded; convert it to .safetensors")


def check_weights(place: Path) -> str:
    """Check the headers of one component's safetensors files; return the dtype that holds most bytes.

    Pickles beside them are no matter: they are not read.
    """
    from ...memory.errors import InvalidInput
    from ...memory.weights.safetensors_header import read_header

    read_json(place / MODEL_CONFIG)
    shards = set(place.glob("*.safetensors"))
    for index in place.glob("*.safetensors.index.json"):
        shards |= set(read_shards(index))
    if not shards:
        refuse_pickles(sorted(place.iterdir()))
        raise InvalidInput(f"{place}: has no weights; expected a .safetensors file")
    dtype_bytes: Counter[str] = Counter()
    for shard in sorted(shards):
        for tensor in read_header(shard).tensors:
            dtype_bytes[TORCH_DTYPES.get(tensor.dtype, "bfloat16")] += tensor.weight_bytes
    return dtype_bytes.most_common(1)[0][0] if dtype_bytes else "float32"


def read_shards(index: Path) -> list[Path]:
    """Return the files of the shards that an index lists, all beside it.

    Raises:
        InvalidInput: it lists none, or one elsewhere.
    """
    from ...memory.errors import InvalidInput

    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InvalidInput(f"{index}: has no 'weight_map' of tensor names to files")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise InvalidInput(f"{index}: its 'weight_map' contains a value that is not a file name")
    names = sorted(set(weight_map.values()))
    for name in names:
        check_file_name(name, str(index))
        if not name.endswith(".safetensors"):
            raise InvalidInput(f"{index}: {shown(name)} is not allowed in 'weight_map'; allowed: .safetensors files")
    return [index.with_name(name) for name in names]


def weights_files(place: Path) -> list[Path]:
    """Return the safetensors files that the libraries load for one component of a checked folder: one, or its shards.

    Empty where that is not plain: another variant has weights of the same names and shapes.
    """
    found = []
    for name in WEIGHTS_NAMES:
        if (place / name).is_file():
            found.append([place / name])
        if (place / f"{name}.index.json").is_file():
            found.append(read_shards(place / f"{name}.index.json"))
    return found[0] if len(found) == 1 else []


def is_quantized(paths: Sequence[Path]) -> bool:
    """Whether any of these files is in a quantized format that is known; reads headers."""
    from ...memory.weights.file_layouts import describe_quantized
    from ...memory.weights.safetensors_header import read_header

    return any(describe_quantized(tensor.name for tensor in read_header(path).tensors) for path in paths)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        InvalidInput: no such file, not JSON, or not an object.
    """
    from ...memory.weights.untrusted_config import read_config_file

    return read_config_file(path)


def weights_fingerprint(folder: Path) -> str:
    """Return a text that changes when a file of the folder does: names, sizes and times, no content."""
    return ";".join(file.version for file in files_of(folder))
