"""Slots that processes share: a crash frees one, and only what a process that lives wrote itself is believed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory import InvalidInput
from highwater.memory.manager.claims.neighbours import ProcessUse
from highwater.memory.manager.claims.process_slots import ENTRY_BYTES, NUM_SLOTS, SLOT_BYTES, SlotFile, slot_file
from highwater.memory.private_folders import make_private_folder
from highwater.memory.user_folders import runtime_folder

from . import other_process

posix = pytest.mark.skipif(sys.platform == "win32", reason="owners and modes are those of POSIX")


class Other:
    """Another process with a slot of a file."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, other_process.__file__, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def write(self, entry: bytes) -> int:
        return int(self.tell(entry.hex()))

    def read(self) -> list[bytes]:
        return [bytes.fromhex(entry) for entry in self.tell("read").split()]

    def crash(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def others() -> Iterator[Callable[[Path], Other]]:
    started = []

    def start(path: Path) -> Other:
        started.append(Other(path))
        return started[-1]

    yield start
    for other in started:
        other.crash()


def padded(entry: bytes) -> bytes:
    return entry.ljust(ENTRY_BYTES, b"\0")


def test_processes_read_what_the_others_wrote_last(tmp_path: Path, others: Callable[[Path], Other]) -> None:
    path = tmp_path / "a.slots"
    one, two, own = others(path), others(path), slot_file(path)
    assert {one.write(b"one"), two.write(b"two"), own.claim(b"own")} == {0, 1, 2}
    one.write(b"one, later")
    assert sorted(own.read()) == sorted(map(padded, (b"one, later", b"two")))
    assert sorted(one.read()) == sorted(map(padded, (b"own", b"two")))
    own.free(2)
    assert one.read() == [padded(b"two")]


def test_a_crash_frees_the_slot_and_what_it_left_is_ignored(tmp_path: Path, others: Callable[[Path], Other]) -> None:
    path = tmp_path / "a.slots"
    crashed, own = others(path), slot_file(path)
    slot = crashed.write(b"alive")
    assert own.read() == [padded(b"alive")]
    crashed.crash()
    assert padded(b"alive") in path.read_bytes()
    assert own.read() == []
    assert others(path).write(b"next") == slot
    assert own.read() == [padded(b"next")]


def test_all_slots_may_be_taken(tmp_path: Path, others: Callable[[Path], Other]) -> None:
    own = slot_file(tmp_path / "a.slots")
    assert {own.claim(b"") for _ in range(NUM_SLOTS)} == set(range(NUM_SLOTS))
    assert own.claim(b"") is None
    assert others(own.path).tell("00") == "None"
    own.free(5)
    assert others(own.path).write(b"x") == 5


@given(begin=st.integers(0, 3 * SLOT_BYTES), garbage=st.binary(min_size=1, max_size=3 * SLOT_BYTES))
def test_garbage_counts_as_nothing_though_the_slot_is_held(
    shared_garbage: tuple[SlotFile, Other], begin: int, garbage: bytes
) -> None:
    own, other = shared_garbage
    slot = other.write(b"right")
    before = own.path.read_bytes()
    with own.path.open("r+b") as file:
        file.seek(begin)
        file.write(garbage)
    after = own.path.read_bytes()
    here = slice(slot * SLOT_BYTES, (slot + 1) * SLOT_BYTES)
    assert own.read() == ([padded(b"right")] if before[here] == after[here] else [])
    own.path.open("r+b").truncate(0)
    assert own.read() == []


@pytest.fixture(scope="module")
def shared_garbage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SlotFile, Other]]:
    own = slot_file(tmp_path_factory.mktemp("garbage") / "a.slots")
    own.claim(b"own")
    other = Other(own.path)
    yield own, other
    other.crash()


def test_an_entry_in_another_slot_than_its_own_counts_as_nothing(
    tmp_path: Path, others: Callable[[Path], Other]
) -> None:
    own = slot_file(tmp_path / "a.slots")
    one, two = others(own.path), others(own.path)
    begin = one.write(b"one") * SLOT_BYTES
    copied = own.path.read_bytes()[begin : begin + SLOT_BYTES]
    with own.path.open("r+b") as file:
        file.seek(two.write(b"two") * SLOT_BYTES)
        file.write(copied)
    assert own.read() == [padded(b"one")]


@given(st.binary(min_size=ENTRY_BYTES, max_size=ENTRY_BYTES), st.integers(1, 1 << 40))
def test_what_a_device_cannot_have_is_not_believed(entry: bytes, total_bytes: int) -> None:
    use = ProcessUse.from_bytes(entry, total_bytes)
    if use is not None:
        amounts = (use.low_bytes, use.high_bytes, use.used_bytes, use.idle_bytes, use.need_bytes, use.lent_bytes)
        assert max(amounts) <= total_bytes and use.low_bytes <= use.high_bytes
        assert ProcessUse.from_bytes(padded(use.to_bytes()), total_bytes) == use


@posix
def test_a_forked_child_has_no_slot_and_leaves_its_parents_alone(
    tmp_path: Path, others: Callable[[Path], Other]
) -> None:
    own = slot_file(tmp_path / "a.slots")
    slot = own.claim(b"parent")
    assert slot is not None
    child = os.fork()
    if child == 0:  # nothing but calls of the system here: the threads of the parent are not there
        own.write(slot, b"child")
        own.free(slot)
        os._exit(own.read() != [] or own.claim(b"child") is not None)
    assert os.waitpid(child, 0)[1] == 0
    assert others(own.path).read() == [padded(b"parent")]


def test_a_removed_file_is_made_anew(tmp_path: Path, others: Callable[[Path], Other]) -> None:
    path = tmp_path / "a.slots"
    before = slot_file(path)
    before.claim(b"before")
    path.unlink()
    assert before.is_lost()
    after = slot_file(path)
    assert after is not before
    after.claim(b"after")
    assert others(path).read() == [padded(b"after")]


# -- whose files


@posix
def test_files_and_folders_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = tmp_path / "run" / "highwater"
        make_private(folder)
        slot_file(folder / "a.slots").claim(b"x")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder)] == [0o700, 0o700]
    assert stat.S_IMODE((folder / "a.slots").stat().st_mode) == 0o600


def make_private(folder: Path) -> None:
    make_private_folder(folder, purpose="processes share devices here", variable="XDG_RUNTIME_DIR")


@posix
@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o755, 0o777, 0o1777])
def test_a_folder_that_others_can_look_into_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "highwater").mkdir()
    (tmp_path / "highwater").chmod(mode)
    with pytest.raises(InvalidInput, match=r"highwater: processes share devices here, but .*run: chmod "):
        make_private(tmp_path / "highwater")
    assert stat.S_IMODE((tmp_path / "highwater").stat().st_mode) == mode


@posix
def test_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "highwater").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInput, match="it is a link or no folder"):
        make_private(tmp_path / "highwater")
    (tmp_path / "a.slots").symlink_to(tmp_path / "elsewhere" / "file")
    with pytest.raises(OSError, match=r"a\.slots"):
        slot_file(tmp_path / "a.slots")
    (tmp_path / "elsewhere" / "file").write_bytes(b"")
    os.link(tmp_path / "elsewhere" / "file", tmp_path / "b.slots")
    with pytest.raises(OSError, match="is no plain file"):
        slot_file(tmp_path / "b.slots")
    assert list((tmp_path / "elsewhere").iterdir()) == [tmp_path / "elsewhere" / "file"]


@posix
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away")
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    os.chown(tmp_path / "theirs", 54321, -1)
    os.chown(tmp_path / "link", 54321, -1, follow_symlinks=False)
    for folder in ("theirs", "theirs/highwater", "link/highwater"):
        with pytest.raises(InvalidInput, match="user 54321"):
            make_private(tmp_path / folder)
    assert not list((tmp_path / "ours").iterdir())
    (tmp_path / "ours" / "a.slots").touch(mode=0o600)
    os.chown(tmp_path / "ours" / "a.slots", 54321, -1)
    with pytest.raises(OSError, match="belongs to user 54321"):
        slot_file(tmp_path / "ours" / "a.slots")


@posix
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["a folder", "a pipe"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.slots")
    with pytest.raises(OSError, match=r"a\.slots"):
        slot_file(tmp_path / "a.slots")


@posix
def test_the_folder_is_that_of_the_session_if_that_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert runtime_folder() == tmp_path / "run" / "highwater"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert (runtime_folder() or Path("/")).is_absolute()
