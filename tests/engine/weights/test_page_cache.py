"""Reading weights again and again leaves the system's page cache as it was: what others keep there stays."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory.units import MIB, PAGE_BYTES
from highwater.memory.weights import file_reader, page_cache
from highwater.memory.weights.file_reader import OpenFiles, WeightsFile
from highwater.memory.weights.page_cache import PageCache, count_pages, resident_pages
from highwater.memory.weights.safetensors_header import read_header

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which tells what it has of a file")

PIECE_PAGES = 16
SIZES = [100, 3 * MIB, 50, 20_000, 5 * MIB + 1, 700_000]


def resident(path: Path) -> set[int]:
    """Return the pages of a file that are in RAM. Reading without waiting would tell, too, but brings them there."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        pages = ctypes.create_string_buffer(-(-len(mapping) // PAGE_BYTES))
        assert not ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(mapping)), pages)
        del first
    return {page for page, answer in enumerate(pages.raw) if answer & 1}


def forget(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def warm(path: Path, pages: range) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing ahead
    os.preadv(descriptor, [bytearray(len(pages) * PAGE_BYTES)], pages.start * PAGE_BYTES)
    os.close(descriptor)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("cache") / "model.safetensors"
    header, end = [], 0
    for number, size in enumerate(SIZES):
        header.append(f'"t{number}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{end},{end + size}]}}')
        end += size
    raw = ("{" + ",".join(header) + "}").encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + os.urandom(end))
    forget(path)
    if resident(path):
        pytest.skip("this folder is in memory")
    yield path


def targets_of(names: list[str]) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.empty(SIZES[int(name[1:])], dtype=torch.uint8)) for name in names]


NUM_PAGES = -(-sum(SIZES) // PAGE_BYTES)
ranges = st.tuples(st.integers(0, NUM_PAGES - 1), st.integers(1, 900)).map(
    lambda pair: range(pair[0], min(NUM_PAGES, pair[0] + pair[1]))
)


@settings(max_examples=12)
@given(
    kept=st.lists(ranges, max_size=3),
    passes=st.lists(
        st.tuples(
            st.permutations([f"t{number}" for number in range(len(SIZES))]),
            st.integers(0, len(SIZES)),
            st.booleans(),
        ),
        min_size=1,
        max_size=2,
    ),
)
def test_what_was_there_before_is_there_afterwards_and_nothing_else(
    path: Path, kept: list[range], passes: list[tuple[list[str], int, bool]]
) -> None:
    for attempt in range(5):  # a system that is short of memory takes pages by itself
        try:
            read_and_look(path, kept, passes)
            return
        except AssertionError:
            if attempt == 4:
                raise


def read_and_look(path: Path, kept: list[range], passes: list[tuple[list[str], int, bool]]) -> None:
    whole = path.read_bytes()
    weights = WeightsFile(read_header(path))
    tensors = read_header(path).tensors
    begin_of = {tensor.name: tensor.begin for tensor in tensors}
    forget(path)
    for pages in kept:
        warm(path, pages)
    before = resident(path)
    for pages in kept:
        assert before >= set(pages)
    with OpenFiles() as files:
        for names, cut, is_held in passes:
            before = resident(path)
            for part in (names[:cut], names[cut:]):
                targets = targets_of(part)
                weights.read_into(targets, drop_pages=True, files=files if is_held else None)
                for name, target in targets:
                    assert bytes(target.numpy()) == whole[begin_of[name] : begin_of[name] + len(target)]
            if is_held:
                files.close()
            after = resident(path)
            assert after >= before
            # Without an open file between them, what one read brought ahead of itself is a page of others for the next.
            if is_held or cut in (0, len(names)):
                edges = {t.begin // PAGE_BYTES for t in tensors} | {(t.end - 1) // PAGE_BYTES for t in tensors}
                # The system keeps pages in larger pieces, and drops no part of one.
                assert all(any(abs(page - edge) < PIECE_PAGES for edge in edges) for page in after - before)
                assert len(after - before) < 2 * PIECE_PAGES


def test_where_the_system_does_not_tell_pages_stay(path: Path, monkeypatch) -> None:
    forget(path)
    monkeypatch.setattr(page_cache, "find_mincore", lambda: None)
    WeightsFile(read_header(path)).read_into(targets_of(["t1", "t4"]), drop_pages=True)
    header = read_header(path)
    needed = {page for t in header.tensors[1:5:3] for page in range(t.begin // PAGE_BYTES, -(-t.end // PAGE_BYTES))}
    assert resident(path) >= needed


def test_parts_of_a_file_are_asked_for_as_the_whole(path: Path) -> None:
    forget(path)
    for pages in (range(1, 2), range(17, 300), range(NUM_PAGES - 5, NUM_PAGES)):
        warm(path, pages)
    with path.open("rb", buffering=0) as file:
        for first, last in ((0, NUM_PAGES), (1, 2), (20, 301), (NUM_PAGES - 1, NUM_PAGES)):
            told = {first + page for page, answer in enumerate(resident_pages(file, first, last)) if answer & 1}
            assert told == resident(path) & set(range(first, last))
        assert resident_pages(file, 0, NUM_PAGES + 50) is not None  # of a file that was cut short


@pytest.mark.parametrize("there", ["all", "none", "some"])
def test_pages_are_listed_only_where_some_are_there_and_some_are_not(path: Path, monkeypatch, there: str) -> None:
    forget(path)
    if there != "none":
        warm(path, range(NUM_PAGES if there == "all" else 300))
    with path.open("rb", buffering=0) as file:
        if count_pages(file, 0, NUM_PAGES) is None:
            pytest.skip("this system does not count pages")
        before, lists = resident(path), []
        mapped = mmap.mmap
        monkeypatch.setattr(mmap, "mmap", lambda *args, **options: lists.append(1) or mapped(*args, **options))
        told = resident_pages(file, 0, NUM_PAGES)
        monkeypatch.undo()
    assert {page for page, answer in enumerate(told) if answer & 1} == before
    assert bool(lists) == (there == "some")


def test_a_system_that_cannot_count_pages_lists_them(path: Path, monkeypatch) -> None:
    forget(path)
    warm(path, range(300))
    monkeypatch.setattr(page_cache, "find_syscall", lambda: lambda *arguments: -1)
    with path.open("rb", buffering=0) as file:
        assert count_pages(file, 0, NUM_PAGES) is None
        told = resident_pages(file, 0, NUM_PAGES)
    assert {page for page, answer in enumerate(told) if answer & 1} == resident(path)


@pytest.mark.parametrize("num_cores, from_ram", [(2, []), (4, [3]), (8, [7]), (64, [8])])
@pytest.mark.parametrize("in_ram", [True, False])
@pytest.mark.parametrize("handling", [{"drop_pages": True}, {"keep_pages": True}, {}])
def test_threads_read_what_is_in_ram_only_where_there_are_cores_for_them(
    path: Path, monkeypatch, num_cores: int, from_ram: list[int], in_ram: bool, handling: dict[str, bool]
) -> None:
    whole, (tensor,) = path.read_bytes(), [t for t in read_header(path).tensors if t.name == "t4"]
    forget(path)
    if in_ram:
        warm(path, range(NUM_PAGES))
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    look = PageCache.look
    # The system may take a page, or bring one, between this and the read.
    monkeypatch.setattr(PageCache, "look", lambda *parts: (look(*parts), in_ram)[1])
    monkeypatch.setattr(file_reader, "is_cached", lambda *parts: in_ram)
    with OpenFiles() as files:
        ((name, target),) = targets_of(["t4"])
        WeightsFile(read_header(path)).read_into([(name, target)], **handling, files=files)
        assert list(files.pools) == (from_ram if in_ram else [2])
    assert bytes(target.numpy()) == whole[tensor.begin : tensor.end]


def test_what_stays_is_asked_for_again_in_the_next_pass(path: Path) -> None:
    """Pages that were there, and that the system took since, are dropped when they were read again."""
    weights = WeightsFile(read_header(path))
    (tensor,) = [t for t in read_header(path).tensors if t.name == "t4"]
    forget(path)
    warm(path, range(NUM_PAGES))
    with OpenFiles() as files:
        assert weights.read_into(targets_of(["t4"]), drop_pages=True, files=files)
        forget(path)
        assert not weights.read_into(targets_of(["t4"]), drop_pages=True, files=files)
    read = range(tensor.begin // PAGE_BYTES, -(-tensor.end // PAGE_BYTES))
    assert len(resident(path) & set(read)) < 2 * PIECE_PAGES


def test_a_read_says_whether_all_of_it_was_in_ram(path: Path, monkeypatch) -> None:
    weights = WeightsFile(read_header(path))
    pages_of = {t.name: range(t.begin // PAGE_BYTES, -(-t.end // PAGE_BYTES)) for t in read_header(path).tensors}
    forget(path)
    assert not weights.read_into(targets_of(["t4"]), drop_pages=True)
    warm(path, pages_of["t1"])
    assert weights.read_into(targets_of(["t1"]), drop_pages=True)
    assert not weights.read_into(targets_of(["t1", "t4"]), drop_pages=True)
    assert not weights.read_into(targets_of(["t1"])), "nobody asked"
    monkeypatch.setattr(page_cache, "find_mincore", lambda: None)
    assert not weights.read_into(targets_of(["t1"]), drop_pages=True), "nobody knows"


@pytest.mark.parametrize("way", ["replaced", "written to", "gone"])
def test_an_open_file_that_is_another_by_now_is_refused_until_it_comes_back(tmp_path: Path, path: Path, way) -> None:
    from highwater.memory.errors import InvalidInput

    own, aside = tmp_path / "own.safetensors", tmp_path / "aside"
    own.write_bytes(path.read_bytes())
    os.utime(own, ns=(1, 1))
    weights = WeightsFile(read_header(own))
    with OpenFiles() as files:
        weights.read_into(targets_of(["t0"]), files=files)
        if way == "written to":
            os.utime(own, ns=(1, 10**9))
        else:
            own.rename(aside)
            if way == "replaced":
                own.write_bytes(path.read_bytes())
        expected = {"replaced": "replaced|its time", "written to": "written to", "gone": "cannot be opened now"}[way]
        for _ in range(2):
            with pytest.raises(InvalidInput, match=expected):
                weights.read_into(targets_of(["t1"]), files=files)
        if way == "written to":
            os.utime(own, ns=(1, 1))
        else:
            aside.rename(own)
        weights.read_into(targets_of(["t1"]), files=files)
        assert len(files.files) == 1


def test_what_others_brought_again_after_it_was_dropped_stays(tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    raw = f'{{"t":{{"dtype":"U8","shape":[{4 * MIB}],"data_offsets":[0,{4 * MIB}]}}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + os.urandom(4 * MIB))
    weights = WeightsFile(read_header(path))
    forget(path)
    if resident(path):
        pytest.skip("this folder is in memory")
    half = torch.empty(2 * MIB, dtype=torch.uint8)
    with OpenFiles() as files:
        weights.read_into([("t", half, 0)], drop_pages=True, files=files)
        warm(path, range(500, 504))
        weights.read_into([("t", half[:PAGE_BYTES], 500 * PAGE_BYTES)], drop_pages=True, files=files)
        weights.read_into([("t", half, 2 * MIB)], drop_pages=True, files=files)
    assert resident(path) >= {500, 501, 502, 503}


def test_kept_pages_stay_until_they_are_dropped_and_those_of_others_longer(path: Path) -> None:
    weights = WeightsFile(read_header(path))
    names = [f"t{number}" for number in range(len(SIZES))]
    for _ in range(5):  # a system that is short of memory takes pages by itself
        forget(path)
        theirs = range(200, 600)
        warm(path, theirs)
        weights.read_into(targets_of(names), keep_pages=True)
        if len(resident(path)) < NUM_PAGES:
            continue
        assert weights.read_into(targets_of(names), keep_pages=True), "all of it is there"
        weights.drop_kept()
        left = resident(path)
        assert left >= set(theirs)
        assert len(left - set(theirs)) < 4 * PIECE_PAGES, "the system drops no part of a larger piece"
        weights.drop_kept()  # nothing is left to drop
        assert resident(path) >= set(theirs)
        return
    pytest.skip("NOT TESTED: this system keeps no pages")


def test_a_plain_read_asks_whether_all_of_it_is_in_ram(path: Path) -> None:
    (tensor,) = [t for t in read_header(path).tensors if t.name == "t4"]
    forget(path)
    warm(path, range(NUM_PAGES))
    with path.open("rb", buffering=0) as file:
        there = resident(path) >= set(range(tensor.begin // PAGE_BYTES, -(-tensor.end // PAGE_BYTES)))
        assert file_reader.is_cached(file, tensor.begin, tensor.end) == there
        forget(path)
        assert not file_reader.is_cached(file, tensor.begin, tensor.end)
