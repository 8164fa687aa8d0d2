"""A folder in the place of a model's, for another library's loader: its files lack the bytes of kept weights.

A library that reads files itself touches each tensor, and the system reads most of a file for that. These files have
the same headers and sizes, with holes in the place of kept weights, which take no disk and are not read from one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import nn

from .file_tensors import alike
from .manager.default import default_manager
from .manager.known_loadings import KeptOfLoading
from .weights.file_origin import Origin
from .weights.loading import Loading
from .weights.safetensors_header import TensorHeader, open_regular

__all__ = ["StandIn", "open_stand_in"]

COPY_BYTES = 1 << 20


class StandIn:
    """The folder, and the kept weights of which it has no bytes."""

    def __init__(self, folder: Path, kept: KeptOfLoading) -> None:
        self.folder = folder
        self.kept = kept

    def fill(self, module: nn.Module) -> bool:
        """Point the weights of a module that was loaded from the folder to the kept ones.

        Returns False if that cannot be done: it has other weights than the equal loading before gave.
        """
        weights = dict(module.named_parameters(remove_duplicate=False))
        for name, (origin, kept) in self.kept.items():
            weight = weights.get(name)
            if type(weight) is not nn.Parameter or weight.device.type != "cpu" or not origin.is_form_of(weight):
                return False
            weight.data = alike(kept, weight)
        return True


@contextmanager
def open_stand_in(loading: Loading, paths: Sequence[Path]) -> Iterator[StandIn | None]:
    """Make a folder to load a model from in the place of its own, if most of its weights are kept; else None.

    It has the model's JSON files beside its weights, and is removed at the end.

    Args:
        paths: the files of the loading, all in one folder.

    Raises:
        InvalidInput: a file is gone.
    """
    kept = default_manager().find_loaded(loading)
    if not kept:
        yield None
        return
    with ExitStack() as made:
        try:
            text = made.enter_context(tempfile.TemporaryDirectory(prefix="highwater-", ignore_cleanup_errors=True))
            folder = Path(text, paths[0].parent.name)
            copy_folder(loading, paths, folder, {origin for origin, _ in kept.values()})
        except OSError:  # no room for it: the files themselves are loaded
            yield None
            return
        yield StandIn(folder, kept)


def copy_folder(loading: Loading, paths: Sequence[Path], folder: Path, holes: Iterable[Origin]) -> None:
    folder.mkdir()
    for path in paths[0].parent.glob("*.json"):
        shutil.copyfile(path, folder / path.name)
    for path in paths:
        file = loading.file_at(path)
        copy_with_holes(path, folder / path.name, [origin.tensor for origin in holes if origin.file == file])


def copy_with_holes(path: Path, copy: Path, holes: Iterable[TensorHeader]) -> None:
    """Copy a file without the bytes of these tensors."""
    with open_regular(path, "a .safetensors file") as source, copy.open("wb") as target:
        file_bytes = source.seek(0, os.SEEK_END)
        target.truncate(file_bytes)
        position = 0
        for begin, end in [*sorted((hole.begin, hole.end) for hole in holes), (file_bytes, file_bytes)]:
            source.seek(position)
            target.seek(position)
            while position < begin and (part := source.read(min(COPY_BYTES, begin - position))):
                target.write(part)
                position += len(part)
            position = end
