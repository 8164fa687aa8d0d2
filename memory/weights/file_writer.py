"""A safetensors file that is written tensor by tensor: whole or not at all, whatever stops it.

It is written beside its place under a name that ends in ``.unfinished``, and moved there when all of it is on the disk.
The data begin at a multiple of 64 bytes, and so does each tensor whose own bytes and those before it allow it: those of
whole multiples come first, since the format has no room between tensors.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType

from ..errors import InvalidInput
from ..units import align_up
from .safetensors_header import DTYPE_BITS

__all__ = ["FileWriter", "WrittenTensor", "refuse_existing"]

ALIGNMENT = 64
CANNOT_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT}
UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}

WrittenTensor = tuple[str, str, tuple[int, ...]]
"""The name of a tensor, its dtype as safetensors calls it, and its shape."""


class FileWriter:
    """A new file; use it as a context manager, within which every tensor is to be written in full.

    Args:
        replaces: whether a file that is there already is replaced; else it is an error, also one that comes meanwhile.

    Raises:
        InvalidInput: there is a file already, or what is no file; no such folder, or none that can be written to.
        OSError: of the system, such as a full disk: there is no new file then, and the one that was there is as it was.
    """

    def __init__(
        self, path: Path, tensors: Sequence[WrittenTensor], metadata: Mapping[str, str], *, replaces: bool = False
    ) -> None:
        self.path = path
        self.replaces = replaces
        sizes = {name: prod(shape) * DTYPE_BITS[dtype] // 8 for name, dtype, shape in tensors}
        ordered = sorted(tensors, key=lambda tensor: sizes[tensor[0]] % ALIGNMENT != 0)
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        self.begins: dict[str, int] = {}
        self.data_bytes = 0
        for name, dtype, shape in ordered:
            begin, self.data_bytes = self.data_bytes, self.data_bytes + sizes[name]
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, self.data_bytes]}
            self.begins[name] = begin
        header = json.dumps(entries, separators=(",", ":")).encode()
        self.header = header.ljust(align_up(8 + len(header), ALIGNMENT) - 8)
        self.unfinished: Path | None = None
        self.descriptor = -1

    @property
    def file_bytes(self) -> int:
        """The bytes of the whole file."""
        return 8 + len(self.header) + self.data_bytes

    def __enter__(self) -> FileWriter:
        refuse_existing(self.path, self.replaces)
        unfinished = self.path.with_name(f".{self.path.name[:100]}.{secrets.token_hex(4)}.unfinished")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            self.descriptor = os.open(unfinished, flags, 0o666)
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise
            raise InvalidInput(f"{self.path.parent}: nothing can be written there: {error.strerror}") from None
        self.unfinished = unfinished
        try:
            with suppress(AttributeError):  # not on Windows and macOS
                self.reserve()
            self.put(0, len(self.header).to_bytes(8, "little") + self.header)
        except BaseException:
            self.give_up()
            raise
        return self

    def reserve(self) -> None:
        """Take the room on the disk, so that one that is too full says so at once; some file systems cannot."""
        try:
            os.posix_fallocate(self.descriptor, 0, self.file_bytes)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def write(self, name: str, part: bytes | memoryview, begin: int = 0) -> None:
        """Write some of a tensor's bytes, from one of them on."""
        self.put(8 + len(self.header) + self.begins[name] + begin, part)

    def put(self, position: int, part: bytes | memoryview) -> None:
        view = memoryview(part).cast("B")
        os.lseek(self.descriptor, position, os.SEEK_SET)
        while view:
            view = view[os.write(self.descriptor, view) :]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.give_up()
            return
        try:
            self.finish()
        except BaseException:
            self.give_up()
            raise

    def finish(self) -> None:
        """Move the file to its place."""
        assert self.unfinished is not None
        os.fsync(self.descriptor)
        os.close(self.descriptor)
        self.descriptor = -1
        if self.replaces:
            os.replace(self.unfinished, self.path)
        else:
            move_to_new(self.unfinished, self.path)
        self.unfinished = None

    def give_up(self) -> None:
        """Leave nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self.unfinished is not None:
            with suppress(OSError):
                self.unfinished.unlink()
            self.unfinished = None


def refuse_existing(path: Path, replaces: bool) -> None:
    """Refuse a path to which nothing can be written, or at which there is a file that is not to be replaced."""
    if not path.parent.is_dir():
        raise InvalidInput(f"{path.parent}: no such folder; make it first")
    if path.is_dir():
        raise InvalidInput(f"{path}: is a folder; name the file that is to be written in it")
    if path.exists() and not path.is_file():  # a pipe or a device: a file in its place would take it from the system
        raise InvalidInput(f"{path}: is no regular file; name another one")
    if path.exists() and not replaces:
        raise InvalidInput(f"{path}: exists already; name another file, or replace it (--force)")


def move_to_new(unfinished: Path, path: Path) -> None:
    """Move a file to a path at which there is none, and refuse if one came meanwhile."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        refuse_existing(path, replaces=False)
        raise
    except (OSError, AttributeError):  # a file system without links
        refuse_existing(path, replaces=False)
        os.replace(unfinished, path)
    else:
        unfinished.unlink()
