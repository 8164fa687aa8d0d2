"""Reading by offset: the bytes of the official reader, each read once, of the planned file or of none."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from highwater.memory.errors import InvalidInput
from highwater.memory.weights import file_reader, page_cache
from highwater.memory.weights.file_reader import WeightsFile, torch_dtype
from highwater.memory.weights.safetensors_header import DTYPE_BITS, read_header

MIB = 1 << 20
GUARD = 0xA5
WHOLE_DTYPES = [name for name in DTYPE_BITS if torch_dtype(name) is not None]


def write_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], *, header_order=None, padding: int = 0):
    """Write random bytes for each tensor, in this order; the header lists them in another. Returns the bytes."""
    header, contents, end = {}, {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end - (-torch.Size(shape).numel() * DTYPE_BITS[dtype] // 8)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        contents[name] = random.randbytes(end - begin)
    raw = json.dumps({name: header[name] for name in header_order or header}).encode() + b" " * padding
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(contents.values()))
    return contents


def write_bytes(path: Path, *sizes: int) -> dict[str, bytes]:
    return write_file(path, {f"t{number}": ("U8", (size,)) for number, size in enumerate(sizes)})


def new_targets(contents: dict[str, bytes]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(len(content), dtype=torch.uint8) for name, content in contents.items()}


def plain(tensor: torch.Tensor) -> bytes:
    return bytes(file_reader.bytes_of(tensor))


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("highwater-read")]


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test, however it ends, leaves a thread or a descriptor."""
    before = open_files()
    yield
    assert not reading_threads()
    assert open_files() == before


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where each read began, and how many bytes it brought."""
    return record_reads(monkeypatch)


def record_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    done: list[tuple[int, int]] = []
    read_once = file_reader.read_once

    def record(file, position: int, buffers: list[memoryview]) -> int:
        done.append((position, read_once(file, position, buffers)))
        return done[-1][1]

    monkeypatch.setattr(file_reader, "read_once", record)
    return done


SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from(WHOLE_DTYPES), SHAPES), max_size=12)


@settings(max_examples=150)
@given(tensors=TENSORS, data=st.data())
def test_bytes_are_those_of_the_official_reader_each_read_once(tmp_path: Path, tensors, data) -> None:
    path = tmp_path / "model.safetensors"
    named = {f"{number}.weight": tensor for number, tensor in enumerate(tensors)}
    write_file(path, named, header_order=data.draw(st.permutations(list(named))), padding=data.draw(st.integers(0, 8)))
    official = load_file(path)
    wanted = data.draw(st.lists(st.sampled_from(list(named)), unique=True) if named else st.just([]), label="wanted")
    slab = torch.full((sum(official[name].nbytes + 80 for name in wanted) + 64,), GUARD, dtype=torch.uint8)
    expected, targets, begin = slab.clone(), [], 64
    for name in wanted:
        target = slab[begin : begin + official[name].nbytes]
        expected[begin : begin + target.nbytes] = official[name].reshape(-1).view(torch.uint8)
        in_its_dtype = data.draw(st.booleans()) and target.data_ptr() % official[name].itemsize == 0
        targets.append((name, target.view(official[name].dtype).view(official[name].shape) if in_its_dtype else target))
        begin += target.nbytes + 64 + -target.nbytes % 16
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(file_reader, "CHUNK_BYTES", data.draw(st.sampled_from([1, 16, 64, 4 * MIB])))
        monkeypatch.setattr(file_reader, "MAX_BUFFERS", data.draw(st.sampled_from([1, 3, 1024])))
        if data.draw(st.booleans(), label="as on Windows"):
            for name in ("preadv", "posix_fadvise"):
                monkeypatch.delattr(os, name, raising=False)
        done = record_reads(monkeypatch)
        WeightsFile(read_header(path)).read_into(targets)
    assert torch.equal(slab, expected)
    offsets = [offset for begin, num_bytes in done for offset in range(begin, begin + num_bytes)]
    assert len(offsets) == len(set(offsets)) == sum(official[name].nbytes for name in wanted)


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_each_dtype_arrives_as_it_is_stored(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_file(path, {"odd": ("U8", (3,)), "a": (dtype, (4, 2)), "one": (dtype, (8,))}, padding=1)
    targets = new_targets(contents)
    WeightsFile(read_header(path)).read_into(targets.items())
    assert {name: plain(target) for name, target in targets.items()} == contents
    if (known := torch_dtype(dtype)) is not None:
        assert known.itemsize * 8 == DTYPE_BITS[dtype]
    if dtype not in ("F8_E8M0", "F4", "F6_E2M3", "F6_E3M2"):
        assert load_file(path)["a"].dtype == known


@settings(max_examples=80)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), data=st.data())
def test_windows_bring_each_byte_of_their_tensors_once(tmp_path: Path, sizes: list[int], data) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_bytes(path, *sizes)
    targets = new_targets(contents)
    windows = []
    for name, target in targets.items():
        cuts = sorted(data.draw(st.sets(st.integers(0, len(target)), max_size=3)) | {0, len(target)})
        windows += [(name, target[begin:end], begin) for begin, end in itertools.pairwise(cuts)]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(file_reader, "CHUNK_BYTES", data.draw(st.sampled_from([1, 16, 4 * MIB])))
        done = record_reads(monkeypatch)
        calls = data.draw(st.integers(1, 3))
        for call in range(calls):
            WeightsFile(read_header(path)).read_into(windows[call::calls])
    assert {name: plain(target) for name, target in targets.items()} == contents
    assert sum(num_bytes for _, num_bytes in done) == sum(sizes)


def test_neighbours_share_a_read_wherever_they_go(tmp_path: Path, reads) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_bytes(path, *[1000] * 3000, 9 * MIB)
    targets = new_targets(contents)
    WeightsFile(read_header(path)).read_into(reversed(targets.items()))
    assert {name: plain(target) for name, target in targets.items()} == contents
    assert len(reads) <= 3 + 12 // 4 + 1  # as many as the buffers of one call take, and a cut every 4 MiB
    assert all((begin + num_bytes) % (4 * MIB) == 0 for begin, num_bytes in reads if num_bytes > 2 * MIB)


def test_a_read_that_stops_early_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_bytes(path, 5, 0, 1, 700, 3, 90_000)
    preadv = os.preadv

    def stop_early(descriptor: int, buffers: list[memoryview], position: int) -> int:
        some = random.randint(1, sum(map(len, buffers)))
        room = []
        for buffer in buffers:
            room.append(buffer[:some])
            some -= len(room[-1])
        return preadv(descriptor, room, position)

    monkeypatch.setattr(os, "preadv", stop_early)
    for _ in range(20):
        targets = new_targets(contents)
        WeightsFile(read_header(path)).read_into(targets.items())
        assert {name: plain(target) for name, target in targets.items()} == contents


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"1")


def rewrite(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


def replace(path: Path) -> None:
    stat, other = path.stat(), path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


CHANGES = [
    (truncate, "was planned with 4171 bytes, now has 4170; load it again"),
    (append, "was planned with 4171 bytes, now has 4172; load it again"),
    (rewrite, "was written to since it was planned: its time stamp moved by +"),
    (replace, "was replaced by another file of 4171 bytes since it was planned; load it again"),
    (Path.unlink, "was planned, but cannot be opened now: No such file"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_file_that_changed_since_it_was_planned_is_refused_by_name(tmp_path: Path, reads, change, words) -> None:
    path = tmp_path / "model.safetensors"
    for _ in range(10):  # at once each time: mmgp took the rewritten file for the old one (its defect 13)
        contents = write_bytes(path, 4096)
        file = WeightsFile(read_header(path))
        change(path)
        with pytest.raises(InvalidInput, match=r"model\.safetensors: ") as error:
            file.read_into(new_targets(contents).items())
        assert words in str(error.value)
    assert not reads


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("put", [put_pipe, put_device])
def test_what_a_read_would_wait_for_in_place_of_a_file_is_refused_at_once(tmp_path: Path, put: Callable) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_bytes(path, 4096)
    file = WeightsFile(read_header(path))
    file.read_into(new_targets(contents).items())
    put(path)
    waits_no_longer = threading.Event()

    def end_waiting() -> None:
        if not waits_no_longer.wait(20):
            path.write_bytes(b"")  # the writer for which a read of the pipe waits

    writer = threading.Thread(target=end_waiting, daemon=True)
    writer.start()
    try:
        with pytest.raises(InvalidInput, match=r"model\.safetensors: was planned, but is no regular file now; load it"):
            file.read_into(new_targets(contents).items())
    finally:
        waits_no_longer.set()
        writer.join()


def test_touching_neither_bytes_nor_times_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_bytes(path, 100)
    file = WeightsFile(read_header(path))
    path.chmod(0o600)
    os.link(path, tmp_path / "other.safetensors")
    targets = new_targets(contents)
    file.read_into(targets.items())
    assert plain(targets["t0"]) == contents["t0"]


@pytest.mark.parametrize(("change", "words"), [(rewrite, "was written to"), (truncate, "now has")])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: Callable, words: str) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_bytes(path, 20 * MIB)

    def change_once(num_done: int) -> None:
        if num_done == 20 * MIB:
            change(path)

    with pytest.raises(InvalidInput, match=rf"model\.safetensors: .*{words}"):
        WeightsFile(read_header(path)).read_into(new_targets(contents).items(), progress=change_once)


def test_a_file_cut_short_while_it_is_read_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_bytes(path, 64_000)
    monkeypatch.setattr(file_reader, "CHUNK_BYTES", 1000)
    read_once = file_reader.read_once

    def cut_short(file, position: int, buffers: list[memoryview]) -> int:
        os.truncate(path, 32_000)
        return read_once(file, position, buffers)

    monkeypatch.setattr(file_reader, "read_once", cut_short)
    with pytest.raises(InvalidInput, match=r"model\.safetensors: was planned with \d+ bytes, now has 32000"):
        WeightsFile(read_header(path)).read_into(new_targets(contents).items())


def test_a_disk_that_fails_and_a_tensor_that_is_not_there_are_named(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "model.safetensors"
    targets = new_targets(write_bytes(path, 100))
    file = WeightsFile(read_header(path))
    with pytest.raises(InvalidInput, match=r"model\.safetensors: has no tensor 'other' among its 1"):
        file.read_into([*targets.items(), ("other", torch.empty(0))])

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_reader, "read_once", fail)
    with pytest.raises(InvalidInput, match=r"model\.safetensors: cannot be read at byte \d+: Input/output error"):
        file.read_into(targets.items())


def test_progress_counts_every_byte_in_the_calling_thread(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_bytes(path, 3, 5 * MIB, 0, 6 * MIB)
    told: list[tuple[int, threading.Thread]] = []
    WeightsFile(read_header(path)).read_into(
        new_targets(contents).items(), progress=lambda num_done: told.append((num_done, threading.current_thread()))
    )
    counts = [num_done for num_done, _ in told]
    assert counts == sorted(counts)
    assert counts[-1] == 11 * MIB + 3
    assert max(after - before for before, after in zip([0, *counts], counts, strict=False)) <= 4 * MIB
    assert {thread for _, thread in told} == {threading.current_thread()}


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError])
def test_progress_that_raises_ends_the_reading(tmp_path: Path, monkeypatch, reads, stop: type) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_bytes(path, 64_000)
    monkeypatch.setattr(file_reader, "CHUNK_BYTES", 64)
    read_once = file_reader.read_once

    def read_slowly(*arguments) -> int:
        time.sleep(0.001)
        return read_once(*arguments)

    def cancel(num_done: int) -> None:
        raise stop("enough")

    monkeypatch.setattr(file_reader, "read_once", read_slowly)
    with pytest.raises(stop, match="enough"):
        WeightsFile(read_header(path)).read_into(new_targets(contents).items(), progress=cancel)
    assert not reading_threads()
    assert 0 < len(reads) < 500


def nothing_resident(file, first: int, last: int) -> bytes:
    return bytes(last - first)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
def test_pages_are_dropped_on_request_when_all_of_them_was_read(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_bytes(path, 100, 9 * MIB, 50, 20_000)
    dropped: list[tuple[int, int]] = []

    def record(_: int, begin: int, num_bytes: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            dropped.append((begin, num_bytes))

    monkeypatch.setattr(os, "posix_fadvise", record)
    monkeypatch.setattr(page_cache, "resident_pages", nothing_resident)
    targets, header = new_targets(contents), read_header(path)
    file, page = WeightsFile(header), os.sysconf("SC_PAGESIZE")
    file.read_into(targets.items())
    file.read_into([("t2", targets["t2"])], drop_pages=True)  # within one page, which others are in
    assert not dropped
    file.read_into([("t1", targets["t1"]), ("t3", targets["t3"])], drop_pages=True)
    pages = [number for begin, size in dropped for number in range(begin // page, (begin + size) // page)]
    assert all(begin % page == size % page == 0 for begin, size in dropped)
    read = range(header.tensors[0].end // page + 1, -(-header.tensors[3].end // page))  # a page has t0, too
    assert sorted(pages) == list(read)
    dropped.clear()
    file.read_into([("t0", targets["t0"])], drop_pages=True)
    assert dropped == [(0, page)]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 30_000)), min_size=1, max_size=30),
    padding=st.integers(0, 9000),
    data=st.data(),
)
def test_each_page_with_weights_is_dropped_once_in_a_pass_in_whatever_order(
    tmp_path: Path, sizes: list[int], padding: int, data
) -> None:
    path = tmp_path / "model.safetensors"
    contents = write_file(path, {f"t{n}": ("U8", (size,)) for n, size in enumerate(sizes)}, padding=padding)
    header, page = read_header(path), os.sysconf("SC_PAGESIZE")
    file = WeightsFile(header)
    names = data.draw(st.permutations(list(contents)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(names)), max_size=4)) | {0, len(names)})
    for _ in range(2):  # the second pass as the first
        dropped: list[int] = []

        def record(_: int, begin: int, num_bytes: int, advice: int, dropped: list[int] = dropped) -> None:
            if advice == os.POSIX_FADV_DONTNEED:
                assert num_bytes and begin % page == num_bytes % page == 0
                dropped.extend(range(begin // page, (begin + num_bytes) // page))

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(os, "posix_fadvise", record)
            monkeypatch.setattr(page_cache, "resident_pages", nothing_resident)
            for first, last in itertools.pairwise(cuts):
                targets = {name: torch.empty(len(contents[name]), dtype=torch.uint8) for name in names[first:last]}
                file.read_into(targets.items(), drop_pages=True)
        holding = {
            number for t in header.tensors if t.begin < t.end for number in range(t.begin // page, -(-t.end // page))
        }
        assert sorted(dropped) == sorted(holding)
        assert not file.pages.begun


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice")
def test_the_system_reads_ahead_only_where_what_is_wanted_lies_together(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "model.safetensors"
    targets = new_targets(write_bytes(path, *[MIB] * 40))
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: advised.append(arguments[-1]))
    file = WeightsFile(read_header(path))
    for numbers in (range(40), [7], range(0, 40, 2), [*range(18), *range(20, 40)]):
        file.read_into([(f"t{number}", targets[f"t{number}"]) for number in numbers])
    ahead, not_ahead = os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_RANDOM
    assert advised == [ahead, ahead, not_ahead, ahead]


def test_a_short_read_starts_no_thread(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "model.safetensors"
    targets = new_targets(write_bytes(path, 64, 9 * MIB))
    readers: set[str] = set()
    read_once = file_reader.read_once
    monkeypatch.setattr(
        file_reader, "read_once", lambda *parts: readers.add(threading.current_thread().name) or read_once(*parts)
    )
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    file = WeightsFile(read_header(path))
    file.read_into([("t0", targets["t0"])])
    assert readers == {threading.current_thread().name}
    readers.clear()
    file.read_into([("t1", targets["t1"])])
    assert all(name.startswith("highwater-read") for name in readers)


def test_reading_counts_as_a_write_to_its_targets(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_bytes(path, 8)
    slab = torch.zeros(64, dtype=torch.uint8)
    before = slab._version
    WeightsFile(read_header(path)).read_into([("t0", slab[8:16].view(torch.int32))])
    assert slab._version > before


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the peak of RAM cannot be reset")
def test_takes_no_memory_beside_its_targets(tmp_path: Path) -> None:
    path, num_bytes = tmp_path / "model.safetensors", 96 * MIB
    header = json.dumps({"a": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + num_bytes)
    target = torch.full((num_bytes,), GUARD, dtype=torch.uint8)
    file = WeightsFile(read_header(path))
    Path("/proc/self/clear_refs").write_text("5")

    def kibibytes(word: str) -> int:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word)]
        return int(line.split()[1])

    before = kibibytes("VmRSS")
    file.read_into([("a", target)])
    assert not target.any()
    assert kibibytes("VmHWM") - before < 16 << 10
