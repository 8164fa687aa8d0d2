"""Reads weights from their file straight into existing memory: no copy in between, nothing read twice.

A mapping would be shorter. But its pages stay in RAM beside the slab they are copied to, they come in one by one as
they are touched, and where the file was cut short the process dies. Here a read fills many tensors at once, wherever
they lie, and whatever is wrong with the file is an error that names it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, nullcontext, suppress
from functools import partial
from io import FileIO
from typing import TypeAlias

import torch

from ..errors import InvalidInput
from ..units import MIB, PAGE_BYTES
from .page_cache import PageCache, count_pages
from .safetensors_header import TORCH_NAMES, FileVersion, WeightsHeader, open_at_once

__all__ = ["OpenFiles", "Target", "WeightsFile", "bytes_of", "count_cached_threads", "torch_dtype"]

# Reads begin and end at multiples of this. With two threads the fastest of 1 to 32 MiB where the system reads
# 8 MiB ahead (there more threads and longer reads run out of its window) and where it reads 128 KiB ahead.
CHUNK_BYTES = 4 * MIB
NUM_THREADS = 2
# A file in RAM is read as fast as cores copy: on an H200's machine with 16 of them 5.3 GiB/s with one thread, 8.8 with
# two, 16.7 with four, 27 with eight.
MOST_CACHED_THREADS = 8
# Runs shorter than this on average are read without the system's read-ahead. It reads pages that are not needed and are
# never dropped: where it is 8 MiB, half a file again in runs of 1 MiB, and a twentieth in runs of 16 MiB, which are
# read a quarter faster with it.
READ_AHEAD_BYTES = 16 * MIB
# How much is brought into the page cache at a time.
WARM_BYTES = 4 * MIB
# Linux and macOS take no more in one call.
MAX_BUFFERS = 1024

Target: TypeAlias = tuple[str, torch.Tensor] | tuple[str, torch.Tensor, int]
"""The name of a stored tensor, what it fills, and from which of its bytes on; without that all of them."""

Chunk: TypeAlias = tuple[int, list[memoryview]]
"""Where in the file a read begins, and what it fills, in this order."""
ChunkRead: TypeAlias = tuple[int, int]
"""Where it began, and how many bytes it brought."""


class OpenFiles:
    """The files that are being read, and the threads that read them: from their first use until `close`."""

    def __init__(self) -> None:
        self.files: dict[WeightsFile, FileIO] = {}
        self.pools: dict[int, ThreadPoolExecutor] = {}
        """By their number of threads."""

    def open(self, weights: WeightsFile) -> FileIO:
        """Return the open file. Raises `InvalidInput` if it has changed since it was planned."""
        try:
            if weights not in self.files:
                self.files[weights] = weights.open()
            else:
                weights.check(FileVersion.at(weights.path))
            weights.check_unchanged(self.files[weights])
        except BaseException as error:
            self.close_file(weights)
            if isinstance(error, OSError):
                raise weights.cannot_be_opened(error) from error
            raise
        return self.files[weights]

    def read(
        self, read_chunk: Callable[[Chunk], ChunkRead], chunks: Sequence[Chunk], *, are_cached: bool
    ) -> Generator[ChunkRead, None, None]:
        """Yield the result for each chunk, in their order. Closed early, it cancels the reads that have not begun.

        A single chunk is read here: handing it to a thread takes longer. So are ``are_cached`` chunks where there are
        few cores: reading from RAM takes a core, and the copy to the device needs one, too.
        """
        num_threads = count_cached_threads() if are_cached else NUM_THREADS
        if len(chunks) == 1 or num_threads == 1:
            yield from map(read_chunk, chunks)
            return
        if not hasattr(os, "preadv"):
            num_threads = 1  # they would share one position
        if num_threads not in self.pools:
            self.pools[num_threads] = ThreadPoolExecutor(num_threads, "highwater-read")
        pool = self.pools[num_threads]
        reads = [pool.submit(read_chunk, chunk) for chunk in chunks]
        try:
            for read in reads:
                yield read.result()
        finally:
            for read in reads:
                read.cancel()
            wait(reads)

    def close_file(self, weights: WeightsFile) -> None:
        file = self.files.pop(weights, None)
        weights.pages.close(file)
        if file is not None:
            file.close()

    def close(self) -> None:
        for pool in self.pools.values():
            pool.shutdown()
        self.pools.clear()
        for weights in list(self.files):
            self.close_file(weights)

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class WeightsFile:
    """A safetensors file as it was when its header was read; a changed one is refused. Holds no descriptor."""

    def __init__(self, header: WeightsHeader) -> None:
        self.path = header.path
        self.version = header.version
        self.tensors = {tensor.name: tensor for tensor in header.tensors}
        data_begin = min((tensor.begin for tensor in header.tensors), default=0)
        self.pages = PageCache(data_begin=data_begin, file_bytes=header.version.file_bytes)

    def read_into(
        self,
        targets: Iterable[Target],
        *,
        progress: Callable[[int], None] | None = None,
        drop_pages: bool = False,
        keep_pages: bool = False,
        files: OpenFiles | None = None,
    ) -> bool:
        """Fill CPU tensors with the bytes of named tensors, in the order of the file; returns when all are there.

        The result says whether all of it was in the page cache before; False if that was not asked, or is not known.

        A target is contiguous and takes exactly the tensor's bytes, in whatever dtype, or a row of them; no byte is
        asked for twice. The bytes come as they are stored. Takes no memory beside the targets. Counts as a write to
        each of them.

        ``progress`` is called in this thread with the bytes done so far, every 4 MiB or sooner. What it raises stops
        the reading and is raised here, after the reads that have begun. ``drop_pages`` takes what was read out of the
        system's page cache, if it was not there before, a page that other tensors share when they have been read, too:
        for files that are read again and again and would push out all others. ``keep_pages`` leaves it there and notes
        what was not there before, for `drop_kept`. ``files`` keeps file and threads for the
        next call.

        Raises:
            InvalidInput: the file is gone, cannot be read, has changed since its header was read, or has no such
                tensor. The targets may then hold anything, as after an exception of ``progress``.
        """
        targets = list(targets)
        chunks = cut_chunks(self.locate(targets))
        runs = runs_of(chunks)
        num_done = 0
        was_cached = False
        try:
            with nullcontext(files) if files is not None else OpenFiles() as opened:
                file = opened.open(self)
                advise(file, advice_for(runs), 0, 0)
                if drop_pages or keep_pages:
                    looks = [self.pages.look(file, begin, end) for begin, end in runs]
                    are_cached = was_cached = all(looks)
                else:
                    are_cached = all(is_cached(file, begin, end) for begin, end in runs)
                with closing(opened.read(partial(self.read_chunk, file), chunks, are_cached=are_cached)) as reads:
                    for begin, num_read in reads:
                        if drop_pages and not was_cached:
                            self.pages.drop(file, begin, begin + num_read)
                        num_done += num_read
                        if progress is not None:
                            progress(num_done)
                for begin, end in runs if was_cached and drop_pages else ():  # nothing to drop, only to forget
                    self.pages.drop(file, begin, end)
                for begin, end in runs if keep_pages else ():
                    self.pages.keep(begin, end)
                self.check_unchanged(file)
        finally:
            torch.autograd.graph.increment_version([target[1] for target in targets])
        return was_cached

    def warm(self, names: Iterable[str]) -> Iterator[int]:
        """Bring the bytes of tensors into the page cache, in the order of the file, piece by piece; an iterator.

        Yields the bytes that each piece brought, at most 4 MiB; 0 for one that was there. Costs a buffer of this size.

        Raises:
            InvalidInput: as `read_into`.
        """
        places = sorted((self.tensors[name].begin, self.tensors[name].end) for name in names)
        buffer = memoryview(bytearray(WARM_BYTES))
        with self.open() as file:
            self.check_unchanged(file)
            for begin, end in join_ranges(places):
                for piece in range(begin, end, WARM_BYTES):
                    last = min(end, piece + WARM_BYTES)
                    first_page, end_page = piece // PAGE_BYTES, -(-last // PAGE_BYTES)
                    there = count_pages(file, first_page, end_page)
                    if there == end_page - first_page:
                        yield 0
                        continue
                    _, num_bytes = self.read_chunk(file, (piece, [buffer[: last - piece]]))
                    if there == 0:
                        self.pages.note_kept(first_page, end_page)
                    yield num_bytes

    def drop_kept(self) -> None:
        """Take what reads with ``keep_pages`` brought out of the page cache; nothing where the file is gone."""
        if self.pages.kept is not None:
            with suppress(OSError), FileIO(self.path, opener=open_at_once) as file:
                self.pages.drop_kept(file)

    def locate(self, targets: Sequence[Target]) -> list[tuple[int, memoryview]]:
        """Return where the bytes of each target begin in the file, and its memory, in the order of the file."""
        parts = []
        for target in targets:
            name, memory = target[0], bytes_of(target[1])
            if name not in self.tensors:
                raise InvalidInput(f"{self.path}: has no tensor {name!r} among its {len(self.tensors)}")
            tensor = self.tensors[name]
            begin = target[2] if len(target) == 3 else 0
            left = tensor.weight_bytes - begin
            fits = begin >= 0 and len(memory) <= left if len(target) == 3 else len(memory) == left
            assert fits, f"{name}: {left} bytes from {begin} on into {len(memory)}"
            parts.append((tensor.begin + begin, memory))
        return sorted(parts, key=lambda part: (part[0], len(part[1])))

    def open(self) -> FileIO:
        """Open the file. Raises `InvalidInput`; at once for a pipe or a device, which may never answer."""
        try:
            file = FileIO(self.path, opener=open_at_once)
        except OSError as error:
            raise self.cannot_be_opened(error) from error
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise InvalidInput(f"{self.path}: was planned, but is no regular file now; load it again")
        return file

    def cannot_be_opened(self, error: OSError) -> InvalidInput:
        return InvalidInput(f"{self.path}: was planned, but cannot be opened now: {error.strerror}")

    def check_path(self) -> None:
        """Refuse a file that was replaced or changed since its header was read. Raises `InvalidInput`."""
        try:
            self.check(FileVersion.at(self.path))
        except OSError as error:
            raise self.cannot_be_opened(error) from error

    def is_replaced(self) -> bool:
        """Whether the path leads to another file by now, or to none."""
        try:
            return FileVersion.at(self.path).inode != self.version.inode
        except OSError:
            return True

    def refuse_overwritten(self) -> None:
        """Refuse a file that was changed where it is, so that a mapping shows that. Raises `InvalidInput`.

        A file in whose place another was put is no error, nor is one that is gone: a mapping has what was mapped.
        """
        try:
            now = FileVersion.at(self.path)
        except OSError:
            return
        if now.inode == self.version.inode:
            self.check(now)

    def check_unchanged(self, file: FileIO) -> None:
        self.check(FileVersion.of(file.fileno()))

    def check(self, now: FileVersion) -> None:
        if now != self.version:
            raise InvalidInput(f"{self.path}: {self.version.describe_change(now)}; load it again")

    def read_chunk(self, file: FileIO, chunk: Chunk) -> ChunkRead:
        """Fill the buffers of one chunk, in as many reads as the system takes; returns where it began, and how far."""
        begin, buffers = chunk
        position = begin
        while buffers:
            try:
                num_read = read_once(file, position, buffers)
            except OSError as error:
                raise InvalidInput(f"{self.path}: cannot be read at byte {position}: {error.strerror}") from error
            if num_read == 0:
                planned = self.version.file_bytes
                raise InvalidInput(f"{self.path}: was planned with {planned} bytes, now has {position}; load it again")
            position += num_read
            while buffers and num_read >= len(buffers[0]):
                num_read -= len(buffers.pop(0))
            if num_read:
                buffers[0] = buffers[0][num_read:]
        return begin, position - begin


def count_cached_threads() -> int:
    """Return how many threads read a file that is in RAM: one core is left for what copies to the device."""
    num_cores = os.cpu_count() or 1
    return 1 if num_cores <= NUM_THREADS else min(MOST_CACHED_THREADS, num_cores - 1)


def is_cached(file: FileIO, begin: int, end: int) -> bool:
    """Whether all pages between two bytes of a file are in RAM; False where the system does not tell."""
    first, last = begin // PAGE_BYTES, -(-end // PAGE_BYTES)
    return count_pages(file, first, last) == last - first


def cut_chunks(parts: Iterable[tuple[int, memoryview]]) -> list[Chunk]:
    """Cut parts of a file into reads: neighbours join, and no read crosses a multiple of `CHUNK_BYTES`."""
    chunks: list[Chunk] = []
    position = 0
    for begin, memory in parts:
        assert begin >= position, "two targets for one tensor"
        while memory:
            if begin != position or begin % CHUNK_BYTES == 0 or len(chunks[-1][1]) == MAX_BUFFERS:
                chunks.append((begin, []))
            piece = memory[: CHUNK_BYTES - begin % CHUNK_BYTES]
            chunks[-1][1].append(piece)
            memory = memory[len(piece) :]
            begin = position = begin + len(piece)
    return chunks


def runs_of(chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
    """Return the begin and end of each run of reads without a gap."""
    runs: list[tuple[int, int]] = []
    for begin, buffers in chunks:
        end = begin + sum(map(len, buffers))
        if runs and runs[-1][1] == begin:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((begin, end))
    return runs


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted ranges, neighbours as one."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def advice_for(runs: Sequence[tuple[int, int]]) -> str:
    """Return whether the system should read ahead: not if most of what follows each run is not needed."""
    num_bytes = sum(end - begin for begin, end in runs)
    is_long = len(runs) <= 1 or num_bytes >= len(runs) * READ_AHEAD_BYTES
    return "POSIX_FADV_SEQUENTIAL" if is_long else "POSIX_FADV_RANDOM"


def read_once(file: FileIO, position: int, buffers: list[memoryview]) -> int:
    """Fill buffers as far as one system call does; returns the bytes, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), buffers, position)
    file.seek(position)
    return file.readinto(buffers[0])


def advise(file: FileIO, advice: str, begin: int, num_bytes: int) -> None:
    """Tell the system how the file is read, where it takes such advice."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), begin, num_bytes, getattr(os, advice))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    own = tensor.detach()
    if own.dtype is not torch.uint8 or own.dim() != 1:
        own = own.reshape(-1).view(torch.uint8)
    return own.numpy().data


def torch_dtype(name: str) -> torch.dtype | None:
    """Return torch's dtype for a name in a header; None where this torch has none, or none with whole elements."""
    return getattr(torch, TORCH_NAMES.get(name, ""), None)
