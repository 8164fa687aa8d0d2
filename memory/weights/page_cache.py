"""The system's page cache: which pages of a file are in it because we read them, and dropping only those.

[Note: pages of others] Weights that are read for every pass would push all else out of the system's page cache, so what
a read brought there is dropped behind it. But a file may be there because another program, or the user, keeps it warm.
So before pages are read Linux is asked which of them it has: those stay. Mostly it has all or none, and it counts them
(``cachestat``, Linux 6.5) in an eighth of the time in which it lists them (``mincore``, 9 ms for 512 MiB). Of a file
that the process may neither write to nor owns Linux says that all pages are there; then nothing is dropped, nor where
the system cannot tell or takes no such advice (macOS, Windows). The system reads ahead of what it was asked for, so the
question covers what may come with a read, too, and what did is dropped when the file is closed. It keeps some pages
together in larger pieces, and drops no part of one: at the edge of two reads such a piece may stay.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterator
from functools import cache
from io import FileIO
from typing import Any

from ..units import MIB, PAGE_BYTES

__all__ = ["PageCache", "find_heap_trim"]

# The system reads ahead no further than this: twice what a device may be set to, in every kernel so far.
READ_AHEAD_REACH = 32 * MIB

UNKNOWN, OURS, THEIRS = range(3)
STRETCHES = tuple(re.compile(re.escape(bytes([state])) + b"+") for state in (UNKNOWN, OURS, THEIRS))
# The number of the call, for which the C library has no function.
CACHESTAT = ctypes.c_long(451)
# What mincore says of a page is in the lowest bit.
STATES = bytes(THEIRS if answer & 1 else OURS for answer in range(256))


class PageCache:
    """The pages of one file in the system's cache, as far as they matter here.

    Args:
        data_begin: where the first tensor begins.
    """

    def __init__(self, *, data_begin: int, file_bytes: int) -> None:
        self.data_begin = data_begin
        self.file_bytes = file_bytes
        self.num_pages = -(-file_bytes // PAGE_BYTES)
        self.states: bytearray | None = None
        """A byte for each page, while the file is open."""
        self.begun: dict[int, int] = {}
        """Of pages at the edge of what was read, the bytes that were read of each so far."""
        self.begun_ours: set[int] = set()
        """Those among them that a read brought in, while the file is closed."""
        self.kept: bytearray | None = None
        """A byte for each page: 1 for one that we brought and left there. None as long as none was left."""

    def look(self, file: FileIO, begin: int, end: int) -> bool:
        """Find out which pages are there, before what lies between two bytes is read, and what comes with it.

        Returns whether all between the two bytes are there, and the system tells.
        """
        if self.states is None:
            self.states = bytearray(self.num_pages)
            for page in self.begun_ours:
                self.states[page] = OURS
        first, last = begin // PAGE_BYTES, min(self.num_pages, -(-(end + READ_AHEAD_REACH) // PAGE_BYTES))
        for begin_page, end_page in stretches(self.states, UNKNOWN, first, last):
            self.states[begin_page:end_page] = resident_pages(file, begin_page, end_page).translate(STATES)
        end_page = -(-end // PAGE_BYTES)
        return find_mincore() is not None and self.states.count(THEIRS, first, end_page) == end_page - first

    def drop(self, file: FileIO, begin: int, end: int) -> None:
        """Take the pages between two bytes that we brought out of the cache; one at an edge when all of it was read.

        Dropped at once, a page at an edge would be read again for the neighbour; kept, such pages are most of a file
        whose small tensors lie scattered. The caller looked before it read.
        """
        assert self.states is not None
        first, last = begin // PAGE_BYTES, (end - 1) // PAGE_BYTES
        kept = {page for page in {first, last} if not self.completes(page, begin, end)}
        first, last = first + (first in kept), last + 1 - (last in kept)
        if first >= last:
            return
        for ours in stretches(self.states, OURS, first, last):
            drop_pages(file, *ours)
        self.states[first:last] = bytes(last - first)

    def keep(self, begin: int, end: int) -> None:
        """Leave the pages between two bytes in the cache, for the next time, until `drop_kept`. The caller looked."""
        assert self.states is not None
        first, last = begin // PAGE_BYTES, -(-end // PAGE_BYTES)
        if self.kept is None:
            self.kept = bytearray(self.num_pages)
        for ours in stretches(self.states, OURS, first, last):
            self.note_kept(*ours)
        self.states[first:last] = bytes([THEIRS]) * (last - first)

    def note_kept(self, first: int, last: int) -> None:
        """Note pages between two that we brought and leave there, until `drop_kept`. Any thread may call it."""
        if self.kept is None:
            self.kept = bytearray(self.num_pages)
        self.kept[first:last] = b"\1" * (last - first)

    def drop_kept(self, file: FileIO) -> None:
        """Take the pages that `keep` left out of the cache. Those that a program has mapped stay."""
        kept, self.kept = self.kept, None
        for ours in stretches(kept or bytearray(), OURS):
            drop_pages(file, *ours)

    def completes(self, page: int, begin: int, end: int) -> bool:
        """Whether all tensors in a page have been read once now that those between two bytes were."""
        page_begin = max(page * PAGE_BYTES, self.data_begin)
        page_end = min((page + 1) * PAGE_BYTES, self.file_bytes)
        num_read = self.begun.pop(page, 0) + min(end, page_end) - max(begin, page_begin)
        if num_read < page_end - page_begin:
            self.begun[page] = num_read
            return False
        return True

    def close(self, file: FileIO | None) -> None:
        """Drop what came with a read and was not asked for, or note that it stays, too, where what was read does.

        Then forget what is there: others may bring or drop it.
        """
        if self.states is None:
            return
        self.begun_ours = {page for page in self.begun if self.states[page] == OURS}
        for page in self.begun_ours:
            self.states[page] = THEIRS  # stays until all of it was read
        states, self.states = self.states, None
        if file is None:
            return
        for begin, end in stretches(states, OURS):
            for come in stretches(bytearray(resident_pages(file, begin, end).translate(STATES)), THEIRS):
                first, last = begin + come[0], begin + come[1]
                if self.kept is not None:
                    self.note_kept(first, last)
                else:
                    drop_pages(file, first, last)


def stretches(states: bytearray, state: int, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of pages in a state. They may get another one meanwhile.

    Searching for the next run takes a hundredth of what matching takes: 1 ms for a file of 24 GB, where there is none.
    """
    last = len(states) if last is None else last
    begin = states.find(state, first, last)
    while begin >= 0:
        found = STRETCHES[state].match(states, begin, last)
        assert found is not None
        end = found.end()
        del found  # while it exists the states cannot be resized
        yield begin, end
        begin = states.find(state, end, last)


def drop_pages(file: FileIO, first: int, last: int) -> None:
    """Take the pages between two of a file out of the cache."""
    os.posix_fadvise(file.fileno(), first * PAGE_BYTES, (last - first) * PAGE_BYTES, os.POSIX_FADV_DONTNEED)


class CachestatRange(ctypes.Structure):
    """As in linux/mman.h."""

    _fields_ = (("begin", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64))


class Cachestat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted"))


def count_pages(file: FileIO, first: int, last: int) -> int | None:
    """Return how many of the pages between two of a file are in RAM; None if the system does not tell."""
    syscall = find_syscall()
    if syscall is None:
        return None
    stretch, found = CachestatRange(first * PAGE_BYTES, (last - first) * PAGE_BYTES), Cachestat()
    failed = syscall(CACHESTAT, file.fileno(), ctypes.byref(stretch), ctypes.byref(found), 0)
    return None if failed else int(found.cache)


def resident_pages(file: FileIO, first: int, last: int) -> bytes:
    """Return a byte for each page between two of a file, odd if the page is in RAM or the system does not tell."""
    num_pages = last - first
    mincore = find_mincore()
    if mincore is None:
        return b"\1" * num_pages
    num_resident = count_pages(file, first, last)
    if num_resident in (0, num_pages):
        return bytes([num_resident != 0]) * num_pages
    unit = mmap.ALLOCATIONGRANULARITY
    begin = first * PAGE_BYTES // unit * unit
    num_before = first - begin // PAGE_BYTES
    num_bytes = min(last * PAGE_BYTES, os.fstat(file.fileno()).st_size) - begin
    answers = ctypes.create_string_buffer(num_before + num_pages)
    try:
        with mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY, offset=begin) as mapping:  # of no page
            address = ctypes.c_char.from_buffer(mapping)
            failed = mincore(ctypes.byref(address), ctypes.c_size_t(num_bytes), answers)
            del address  # a mapping that is referred to cannot be closed
    except (OSError, ValueError):  # a file system that maps nothing, or a file that was cut short
        return b"\1" * num_pages
    return b"\1" * num_pages if failed else answers.raw[num_before:]


@cache
def find_syscall() -> Any:
    """Return the function that makes a system call by its number; None where `CACHESTAT` is another call or none."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return None
    return getattr(ctypes.CDLL(None), "syscall", None)


@cache
def find_mincore() -> Any:
    """Return the system's call; None where there is none, or where it does not answer for files."""
    if sys.platform != "linux" or not hasattr(os, "posix_fadvise"):
        return None
    return getattr(ctypes.CDLL(None), "mincore", None)


@cache
def find_heap_trim() -> Any:
    """Return glibc's call that gives back what is free in its heap; None where there is none.

    It stands here because every call into the C library does.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "malloc_trim"):
        return None
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)(("malloc_trim", library))
