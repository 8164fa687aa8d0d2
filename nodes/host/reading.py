"""Reading the files of a model that our block mover takes: from kept weights where there are some, else as core does.

[Note: state dicts] Core's loaders of files are each a reader of the file and a loader of its tensors. We call the two
one after the other, so that the first can be left out for weights that the manager has kept ([Note: kept weights] in
`memory/manager/kept_weights.py`), so that it is known which weight came from which file, and so that weights stay in a
private mapping of the file instead of being copied ([Note: tracing] in `memory/file_tensors.py`). Dynamic models stay
in core's own mapping, which cannot be written to, and are read by core alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import comfy.utils

from ...memory.errors import InvalidInput
from ...memory.hosted_component import FileTensors, drop_kept_weights

__all__ = ["Reading", "is_readable", "read_by"]

T = TypeVar("T")


class Reading(FileTensors):
    """The files of one loading."""

    def state(self, path: str, **how: Any) -> tuple[dict[str, Any], Any]:
        """Return the tensors of a file and its metadata. ``how``: as core's own loader calls its reader."""
        kept = self.read(path)
        if kept is not None:
            return kept
        if not comfy.utils.DISABLE_MMAP:
            with suppress(InvalidInput):  # core says what is wrong with the file
                return self.map_file(path)
        tensors, metadata = comfy.utils.load_torch_file(path, return_metadata=True, **how)
        self.watch(path, tensors)
        return tensors, metadata


def is_readable(path: str) -> bool:
    """Whether weights of such a file can be kept: of what is unpickled there are no names and offsets."""
    return path.lower().endswith((".safetensors", ".sft"))


@contextmanager
def read_by(
    read: Callable[[Reading | None], T], paths: Iterable[str], *, dynamic: bool
) -> Iterator[tuple[T, Reading | None]]:
    """Read files for the body, which adopts the model; None with files that core reads alone, else what is known.

    Until the body ends, weights of the model may lack the bytes of their file ([Note: tracing] in
    `memory/file_tensors.py`): what reads them is seen, and gets them.

    Args:
        dynamic: core's dynamic VRAM is to move what is read.
    """
    if dynamic or not all(map(is_readable, paths)):
        yield read(None), None
        return
    for _ in range(2):
        with Reading() as reading:
            result = read(reading)
            if not reading.were_written():
                yield result, reading
                return
        del result
        drop_kept_weights("ComfyUI wrote to them as it loaded the file")
    raise AssertionError("nothing is kept, and it was written to")
