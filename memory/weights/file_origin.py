"""Which bytes of which file a weight was read from, and what tells that the file still has them.

[Note: same file] A file is the same as long as its path leads to the same inode with the same size, mtime, ctime and
header. No program can set the ctime back: an overwrite in place shows in it, even where size and mtime are restored.
So does a new hard link, which costs one read in vain. On Windows, where it is the time of creation, and on file systems
that keep no such times, bytes of the weights are compared as well (`differs`).
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..errors import InvalidInput
from .file_reader import advise, bytes_of, torch_dtype
from .safetensors_header import TensorHeader, WeightsHeader, open_regular, read_header

__all__ = ["FileIdentity", "Origin", "differs"]

# Of so many weights some bytes are compared with their file before they are used in its place.
NUM_SAMPLES = 64
SAMPLE_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIdentity:
    """A file as it was when its header was read ([Note: same file])."""

    path: str
    """Without symbolic links."""
    volume: int
    inode: int
    file_bytes: int
    mtime_ns: int
    ctime_ns: int
    header_digest: str

    @classmethod
    def of(cls, path: str | Path) -> tuple[FileIdentity, WeightsHeader]:
        """Return what identifies a file now, and its header. Reads only that.

        Raises:
            InvalidInput: as `read_header`, or the file was replaced meanwhile.
        """
        before = os.stat(path) if os.path.exists(path) else None
        header = read_header(path)
        after = os.stat(path)
        if before is None or times_of(before) != times_of(after):
            raise InvalidInput(f"{path}: was replaced while its header was read; load it again")
        digest = hashlib.sha256(repr((header.tensors, sorted(header.metadata.items()))).encode()).hexdigest()
        identity = cls(
            path=os.path.realpath(path),
            volume=after.st_dev,
            inode=after.st_ino,
            file_bytes=after.st_size,
            mtime_ns=after.st_mtime_ns,
            ctime_ns=after.st_ctime_ns,
            header_digest=digest,
        )
        return identity, header

    @property
    def name(self) -> str:
        """The name of the file, without its folder."""
        return Path(self.path).name


def times_of(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@dataclass(frozen=True, slots=True)
class Origin:
    """One tensor of a file: where the values of a weight come from, each as it is or converted to another dtype."""

    file: FileIdentity
    tensor: TensorHeader
    dtype: torch.dtype | None = None
    """The dtype to which they were converted; None: it is the file's."""

    def in_dtype(self, dtype: torch.dtype) -> Origin | None:
        """Return the origin of a copy in a dtype; None for what was converted twice."""
        own = self.dtype or torch_dtype(self.tensor.dtype)
        if dtype == own:
            return self
        return replace(self, dtype=dtype) if self.dtype is None else None

    def is_form_of(self, leaf: torch.Tensor) -> bool:
        """Whether a tensor has this dtype and the shape that the file gives; its strides are those of a file."""
        is_same = (
            leaf.dtype == (self.dtype or torch_dtype(self.tensor.dtype)) and tuple(leaf.shape) == self.tensor.shape
        )
        return is_same and leaf.is_contiguous()


def differs(path: str | Path, weights: Sequence[tuple[Origin, torch.Tensor]]) -> bool:
    """Whether values of weights, taken here and there, are not what the file has there now; reads a few KiB.

    Raises `InvalidInput` where it cannot be read.
    """
    filled = [(origin, tensor) for origin, tensor in weights if tensor.numel()]
    chosen = filled if len(filled) <= NUM_SAMPLES else random.sample(filled, NUM_SAMPLES)
    with open_regular(Path(path), "a .safetensors file") as file:
        advise(file.raw, "POSIX_FADV_RANDOM", 0, 0)  # type: ignore[attr-defined]
        for origin, tensor in chosen:
            stored_dtype = torch_dtype(origin.tensor.dtype)
            assert stored_dtype is not None
            length = min(tensor.numel(), SAMPLE_BYTES // stored_dtype.itemsize)
            begin = random.randint(0, tensor.numel() - length)
            file.seek(origin.tensor.begin + begin * stored_dtype.itemsize)
            stored = bytearray(file.read(length * stored_dtype.itemsize))
            if len(stored) < length * stored_dtype.itemsize:
                return True
            expected = torch.frombuffer(stored, dtype=stored_dtype).to(tensor.dtype)
            if bytes_of(expected) != bytes_of(tensor.detach().reshape(-1)[begin : begin + length]):
                return True
    return False
