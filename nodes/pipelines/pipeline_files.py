"""Checks the files of a pipeline folder before a library reads them.

[Note: downloaded folders] A folder of models is data. What makes it more is refused by name before a library looks at
it: Python files and compiled ones, configs that name code (`check_config`), pickles where weights are expected, links
that lead elsewhere, pipes and devices. Hidden files and folders do not count: neither library reads them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..file_names import path_problem, shown

__all__ = ["PICKLE_SUFFIXES", "FolderFile", "check_configs", "homes_of", "list_files"]

# What Python imports, in whatever case: some systems make no difference.
CODE_SUFFIXES = (".py", ".pyc", ".pyd", ".pyo", ".pyw", ".pyz", ".so", ".dll", ".dylib", ".egg", ".whl")
# Formats that hold Python objects, or that another runtime executes.
PICKLE_SUFFIXES = (
    ".bin", ".ckpt", ".pt", ".pt2", ".pth", ".pkl", ".pickle", ".dill", ".joblib", ".npy", ".npz", ".msgpack", ".h5",
    ".hdf5", ".onnx", ".onnx_data", ".pb", ".mar", ".ptl", ".torchscript",
)  # fmt: skip
# With it transformers takes the weights of another folder as the model's base.
ADAPTER_CONFIG = "adapter_config.json"
# The JSON files that the libraries take settings from; others are tables of tokens.
CONFIG_ENDINGS = ("config.json", "model_index.json", "_map.json")
# Keys of a tokenizer's config that are no file names: neither is opened.
UNREAD_FILES = ("special_tokens_map_file",)
MAX_FILES = 10_000
MAX_DEPTH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderFile:
    """One regular file, under its name in the folder."""

    path: Path
    file_bytes: int
    mtime_ns: int
    inode: int

    @property
    def version(self) -> str:
        return f"{self.path}:{self.file_bytes}:{self.mtime_ns}:{self.inode}"


def homes_of(folder: Path, roots: Sequence[Path]) -> list[Path]:
    """Return where links in a pipeline folder may lead: itself, the host's model folders, its blobs in a hub cache."""
    real = Path(os.path.realpath(folder))
    homes = [real, *(Path(os.path.realpath(root)) for root in roots)]
    if real.parent.name == "snapshots":
        homes.append(real.parent.parent / "blobs")
    return homes


def list_files(folder: Path, homes: Sequence[Path]) -> list[FolderFile]:
    """Return the files below a folder, sorted; looks at names and kinds, opens nothing.

    Raises:
        InvalidInput: a file that has no place in a model, or more files than any model has.
    """
    from ...memory.errors import InvalidInput

    found: list[FolderFile] = []
    for path in walk(folder, homes, depth=0):
        if len(found) == MAX_FILES:
            raise InvalidInput(f"{folder}: contains more than {MAX_FILES} files; expected a diffusers pipeline")
        if path.suffix.lower() in CODE_SUFFIXES:
            raise InvalidInput(
                f"{path}: is a program, and no program in a model folder is run; remove it to load the rest"
            )
        if path.name.lower() == ADAPTER_CONFIG:
            raise InvalidInput(f"{path}: is the config of an adapter for another model; expected a complete model")
        found.append(describe(path))
    return sorted(found, key=lambda file: file.path)


def describe(path: Path) -> FolderFile:
    from ...memory.errors import InvalidInput

    try:
        status = path.stat()
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidInput(f"{path}: is not a regular file; expected a diffusers pipeline")
    return FolderFile(path=path, file_bytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)


def walk(folder: Path, homes: Sequence[Path], *, depth: int) -> Iterator[Path]:
    """Yield all files below a folder; follows links only to allowed folders."""
    from ...memory.errors import InvalidInput

    if depth > MAX_DEPTH:
        raise InvalidInput(f"{folder}: lies more than {MAX_DEPTH} folders deep; expected a diffusers pipeline")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise InvalidInput(f"{folder}: cannot be read: {error.strerror}") from None
    for name in names:
        if name.startswith("."):
            continue
        path = folder / name
        if not name.isprintable():
            raise InvalidInput(f"{folder}: contains {name!r}, a name with unprintable characters; rename it")
        if path.is_symlink():
            real = Path(os.path.realpath(path))
            if not any(real.is_relative_to(home) for home in homes):
                raise InvalidInput(f"{path}: is a link to {real}, outside of the folder; put the file itself here")
        if path.is_dir():
            yield from walk(path, homes, depth=depth + 1)
        else:
            yield path


def check_configs(files: Sequence[FolderFile]) -> None:
    """Refuse the settings among a folder's files that name code or files elsewhere; reads those files.

    Raises:
        InvalidInput: naming the file and the key.
    """
    from ...memory.errors import InvalidInput
    from ...memory.weights.untrusted_config import check_config, read_config_file, walk_items

    for file in files:
        path = file.path
        if not path.name.lower().endswith(CONFIG_ENDINGS):
            continue
        config = read_config_file(path)
        check_config(config, str(path))
        for key, value in walk_items(config):
            is_read = key.endswith(("_file", "_files")) and key not in UNREAD_FILES
            if not is_read and key != "transformers_weights":
                continue
            for name in value if isinstance(value, list) else [value]:
                if isinstance(name, str) and (problem := path_problem(name.removeprefix("./"))) is not None:
                    raise InvalidInput(
                        f"{path}: {key!r} is {shown(name)}, which {problem}; allowed: a file in the same folder"
                    )
