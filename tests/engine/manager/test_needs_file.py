"""What was learned of needs outlives the process; whatever is wrong with its file fails no run."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory import InvalidInput, MemoryManager, manage
from highwater.memory.manager.needs import Need, Needs, digest_device
from highwater.memory.manager.needs_file import MAX_ROWS, TABLE, NeedsFile, installed_versions

KEY = "0" * 32, "1" * 32
MOMENT_S = 5  # far above the time that a lock is waited for


def need(seen: int = 7, **numbers: int) -> Need:
    return Need(seen_bytes=seen, used_s=int(time.time()), **numbers)


@pytest.fixture
def file(tmp_path: Path) -> NeedsFile:
    return NeedsFile(tmp_path / "highwater" / "needs.sqlite3")


class Net(nn.Module):
    """Layers of 256 KiB that need 3 MiB beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        big = x.new_zeros(3 << 18)
        return x + big[:1]


def run(sim, file: NeedsFile, forward_fails: bool) -> str:
    """Run in a new manager, as another process would; returns the plan of what is loaded."""
    with sim.cluster([sim.SimDeviceSpec(total_bytes=4 << 20)]), torch.no_grad():
        manager = MemoryManager(needs_file=file)
        manager.set_watermark("*", 0, 0)
        net = Net()
        with manage(net, manager=manager) as managed:
            planned = managed.plan.text()
            if forward_fails:
                with pytest.raises(torch.OutOfMemoryError):
                    net(torch.ones(1, 256))
            else:
                net(torch.ones(1, 256))
        return planned


def test_a_failure_and_what_came_through_later_outlive_the_process(sim, file) -> None:
    run(sim, file, True)
    assert "keeps" in run(sim, file, False) and not next(entry for *_, entry in file.read()).is_open
    for _ in range(3):
        assert "free for activations: an earlier run needed it" in run(sim, file, False)
    (found,) = [entry for *_, entry in file.read()]
    assert 3 << 20 <= found.seen_bytes < found.guard_bytes < 4 << 20


def test_the_file_tells_no_names(sim, file) -> None:
    run(sim, file, True)
    content = file.path.read_bytes()
    for word in (b"layers", b"model", b"weight", b"gpu", b"sim:", os.fsencode(file.path.parent.name + "/")):
        assert word not in content
    assert file.path.stat().st_mode & 0o077 == 0 or os.name == "nt"


def test_what_is_written_is_read(file) -> None:
    entries = [(KEY, (0, 4, size), need(size, failed_bytes=1, guard_bytes=2, futile_bytes=3)) for size in range(1, 9)]
    assert file.write(entries)
    assert sorted(file.read(), key=lambda entry: entry[1]) == entries
    assert file.write([(KEY, (0, 4, 1), need(99))])
    assert {size: found.seen_bytes for _, size, found in file.read()}[0, 4, 1] == 99
    assert file.reset() == 8 and file.read() == [] and file.reset() == 0
    assert file.write(entries)


def test_the_oldest_leave(file) -> None:
    now = int(time.time())
    entries = [(KEY, (number % 9999, number // 9999), Need(used_s=now - number)) for number in range(MAX_ROWS + 50)]
    assert file.write(entries)
    assert sorted(found.used_s for *_, found in file.read())[0] == now - MAX_ROWS + 1
    file.write([(KEY, (1,), Need(used_s=1))])  # half a century ago
    assert (1,) not in {size for _, size, _ in file.read()}


@pytest.mark.parametrize("what", ["highwater", "torch", "library", "attention", "host"])
def test_another_version_has_its_own(file, monkeypatch, what: str) -> None:
    """What computes otherwise may need more or less; both stand in the file, and are listed and forgotten together."""
    file.write([(KEY, (1,), need())])
    other = NeedsFile(file.path, host="another" if what == "host" else "")
    installed_versions.cache_clear()
    if what in ("highwater", "torch"):
        monkeypatch.setattr(f"{what}.__version__", "another")
    elif what == "library":
        monkeypatch.setattr("importlib.metadata.version", lambda name: "another")
    elif what == "attention":
        monkeypatch.setattr("torch.backends.cuda.flash_sdp_enabled", lambda: False)
    assert other.read() == []
    other.write([(KEY, (1,), need(9))])
    assert [found.seen_bytes for *_, found in other.read()] == [9]
    monkeypatch.undo()
    installed_versions.cache_clear()
    assert [found.seen_bytes for *_, found in file.read()] == [7]
    assert len(file.listed()) == 2 and file.reset() == 2


def test_what_an_earlier_form_of_the_file_held_goes(file) -> None:
    """It may come from simulated devices, which real ones of that name and size would believe."""
    file.path.parent.mkdir()
    with sqlite3.connect(file.path) as database:
        database.execute("CREATE TABLE needs_1 (component, device)")
    assert file.read() == [] and file.write([(KEY, (1,), need())]) and len(file.read()) == 1
    with sqlite3.connect(file.path) as database:
        assert database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [(TABLE,)]


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "text":
        path.write_text("no database" * 500)
    elif how == "pages":
        path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "columns":
        path.unlink()
        with sqlite3.connect(path) as database:
            database.execute(f"CREATE TABLE {TABLE} (component TEXT)")
    elif how == "view":
        path.unlink()
        with sqlite3.connect(path) as database:
            columns = ["component", "device", "size", "version", "seen", "failed", "guard", "futile", "used"]
            database.execute(f"CREATE VIEW {TABLE} AS SELECT " + ", ".join(f"1 AS {name}" for name in columns))
    elif how == "large":
        with path.open("ab") as opened:
            opened.truncate(20 << 20)


@pytest.mark.parametrize("how", ["cut", "text", "pages", "empty", "columns", "view", "large"])
def test_a_damaged_file_begins_anew(file, how: str) -> None:
    file.write([(KEY, (number,), need()) for number in range(200)])
    damage(file.path, how)
    assert file.read() == []
    assert file.write([(KEY, (1,), need())])
    assert [size for _, size, _ in file.read()] == [(1,)]
    damage(file.path, how)
    file.reset()
    assert file.write([(KEY, (2,), need())]) and (2,) in {size for _, size, _ in file.read()}


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), num_bytes=st.integers(1, 400))
def test_bytes_that_are_changed_anywhere_fail_nothing(file, seed: int, num_bytes: int) -> None:
    draw = random.Random(seed)
    file.remove()
    file.write([(KEY, (number,), need()) for number in range(50)])
    content = bytearray(file.path.read_bytes())
    for _ in range(num_bytes):
        content[draw.randrange(len(content))] = draw.randrange(256)
    file.path.write_bytes(content)
    for _, size, found in file.read():
        assert all(type(part) is int for part in size) and found.seen_bytes >= 0
    file.write([(KEY, (77,), need())])
    file.read()


@pytest.mark.parametrize(
    "values",
    [("x", "1" * 32, "1"), ("0" * 32, "1" * 32, "1;DROP"), ("0" * 32, "1" * 32, "1" * 9), (None, "1" * 32, "1"),
     (b"0" * 32, "1" * 32, "1")],
)  # fmt: skip
@pytest.mark.parametrize("number", [1, -1, 1 << 60, "many", 0.5, None])
def test_rows_that_we_would_not_have_written_are_left_out(file, values: tuple[object, ...], number: object) -> None:
    file.path.parent.mkdir()
    version = file.version
    with sqlite3.connect(file.path) as database:
        database.execute(
            f"CREATE TABLE {TABLE} (component, device, size, version, seen, failed, guard, futile, used,"
            " PRIMARY KEY (component, device, size, version))"
        )
        for row in ((*values, version, 1, 1, 1, 1, 1), (*KEY, "1", version, number, 1, 1, 1, 1)):
            database.execute(f"INSERT INTO {TABLE} VALUES (?,?,?,?,?,?,?,?,?)", row)
    assert len(file.read()) == (number == 1)


def test_one_that_is_locked_is_waited_for_a_moment_only(sim, file) -> None:
    run(sim, file, True)
    holder = sqlite3.connect(file.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    begin = time.monotonic()
    assert file.read() == [] and not file.write([(KEY, (1,), need())])
    with pytest.raises(InvalidInput, match="the learned needs cannot be deleted: database is locked"):
        file.reset()
    run(sim, file, True)  # nothing was learned, and nothing else is wrong
    assert time.monotonic() - begin < MOMENT_S
    holder.execute("ROLLBACK")
    holder.close()
    assert len(file.read()) == 1


def test_what_could_not_be_written_is_written_later(sim, file) -> None:
    file.write([(KEY, (1,), need())])
    holder = sqlite3.connect(file.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with sim.cluster([sim.SimDeviceSpec(total_bytes=16 << 20)]), torch.no_grad():
        manager = MemoryManager(needs_file=file)
        net = Net()
        with manage(net, manager=manager):
            net(torch.ones(1, 256))
            assert manager.capacity.needs.changed
            holder.execute("ROLLBACK")
            holder.close()
            net(torch.ones(1, 256))
            assert not manager.capacity.needs.changed and len(file.read()) == 2


@pytest.mark.parametrize("what", ["a link", "a dangling link", "a folder", "no folder", "a pipe"])
def test_what_is_no_plain_file_is_left_alone(sim, file, tmp_path, what: str) -> None:
    file.path.parent.mkdir()
    other = tmp_path / "precious"
    other.write_text("precious")
    if what == "a link":
        file.path.symlink_to(other)
    elif what == "a dangling link":
        file.path.symlink_to(tmp_path / "new")
    elif what == "a folder":
        file.path.mkdir()
    elif what == "no folder":
        file.path.parent.rmdir()
        file.path.parent.write_text("a file is in the way")
    else:
        os.mkfifo(file.path)
    run(sim, file, True)
    assert other.read_text() == "precious" and not (tmp_path / "new").exists()
    assert file.read() == [] and not file.write([(KEY, (1,), need())])


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may read; each pytest that starts closes its own to all others."""
    with tempfile.TemporaryDirectory(prefix="highwater-needs-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_read_only_one_is_read(open_folder: Path, run_python, what: str) -> None:
    file = NeedsFile(open_folder / "highwater" / "needs.sqlite3")
    file.write([(KEY, (1,), need())])
    file.path.parent.chmod(0o555 if what == "folder" else 0o777)
    file.path.chmod(0o666 if what == "folder" else 0o444)
    run_python(f"""
import os
from pathlib import Path
from highwater.memory.manager.needs_file import NeedsFile
from highwater.memory.manager.needs import Need, Needs, digest_device
os.seteuid(65534)
file = NeedsFile(Path({str(file.path)!r}))
assert len(file.read()) == 1
assert not file.write([(("0" * 32, "1" * 32), (5,), Need(used_s=2**31))])
""")
    assert len(file.read()) == 1


def test_a_full_disk_loses_only_what_is_new(file, run_python) -> None:
    file.write([(KEY, (number,), need()) for number in range(20)])
    run_python(f"""
import resource, signal
from pathlib import Path
from highwater.memory.manager.needs_file import NeedsFile
from highwater.memory.manager.needs import Need, Needs, digest_device
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = NeedsFile(Path({str(file.path)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({file.path.stat().st_size}, {file.path.stat().st_size}))
assert not file.write([(("0" * 32, "1" * 32), (5, n), Need(used_s=2**31)) for n in range(4000)])
assert len(file.read()) == 20
""")
    assert len(file.read()) == 20


def test_a_process_that_is_killed_leaves_no_half(file) -> None:
    script = """
import sys, time
from pathlib import Path
from highwater.memory.manager.needs_file import NeedsFile
from highwater.memory.manager.needs import Need, Needs, digest_device
file = NeedsFile(Path(sys.argv[1]))
number = 0
print("ready", flush=True)
while True:
    number += 1
    file.write([(("0" * 32, "1" * 32), (n,), Need(seen_bytes=number, used_s=2**31)) for n in range(500)])
"""
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", script, str(file.path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.uniform(0.05, 0.3))
            process.kill()
        found = {entry.seen_bytes for *_, entry in file.read()}
        assert len(found) <= 1, found


def test_several_writers_at_once_lose_nothing_of_each_other(file) -> None:
    done: list[tuple[int, ...]] = []

    def write(writer: int) -> None:
        for number in range(10):
            if file.write([(KEY, (writer, number), need())]):
                done.append((writer, number))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(size for _, size, _ in file.read()) == sorted(done)
    assert len(done) >= 10


SIMULATED = """
import sys
from pathlib import Path

import torch
from highwater.headless import simdevice
from highwater.memory import default_manager, manage
from highwater.memory.manager.default import remember_needs_in

named, (folder, build) = sys.argv[1], sys.argv[2:]
if named == "before":
    remember_needs_in(folder)
simdevice.install("sim", num_devices=1, build_directory=build)
if named == "after":
    remember_needs_in(folder)
net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).requires_grad_(False)
with manage(net, placement="gpu:0"):
    for _ in range(3):
        net(torch.ones(1 << 10, 64))
assert default_manager().capacity.needs.known
"""


@pytest.mark.parametrize("named", ["nowhere", "before", "after"])
def test_what_a_simulated_device_needs_is_written_only_where_something_said(sim, tmp_path: Path, named: str) -> None:
    """A script that simulates devices by itself: it is no run of the command line."""
    cache, folder = tmp_path / "cache", tmp_path / "folder"
    subprocess.run(
        [sys.executable, "-c", SIMULATED, named, str(folder), str(sim.default_build_directory())],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        check=True,
    )
    assert not cache.exists()
    assert (folder / "needs.sqlite3").exists() == (named != "nowhere")


SMALL, LARGE = (0, 4, 64), (0, 4, 128)


def elsewhere(needs: Needs, size: tuple[int, ...] | None = SMALL) -> int | None:
    kept = needs.kept(("c" * 32, "a" * 8 + "2" * 24), size)
    assert kept is None or not kept.is_known
    return None if kept is None else kept.num_bytes


def test_another_device_of_the_type_gives_a_first_estimate() -> None:
    """Its peak counts, and what was too little; not what it kept free for other reasons, nor another type's."""
    needs = Needs()
    needs.restore([(("c" * 32, "a" * 8 + "1" * 24), SMALL, need(1600, guard_bytes=99999))])
    assert elsewhere(needs) == elsewhere(needs, LARGE) == elsewhere(needs, None) == 1700
    assert elsewhere(needs, (0, 4, 32)) is None  # a smaller input needs less
    needs.restore([(("c" * 32, "b" * 8 + "1" * 24), SMALL, need(99999))])
    needs.restore([(("d" * 32, "a" * 8 + "1" * 24), SMALL, need(99999))])
    assert elsewhere(needs) == 1700
    needs.restore([(("c" * 32, "a" * 8 + "3" * 24), SMALL, need(0, failed_bytes=3200))])
    assert elsewhere(needs) == 3400
    own = ("c" * 32, "a" * 8 + "2" * 24)
    needs.restore([(own, SMALL, need(500))])
    kept = needs.kept(own, SMALL)
    assert kept is not None and kept.num_bytes == 500 and kept.is_known


def test_the_digest_of_a_device_begins_with_its_type(sim) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=4 << 20), sim.SimDeviceSpec(total_bytes=8 << 20)]):
        devices = MemoryManager().devices
        host, first, second = (digest_device(devices[name]) for name in ("cpu", "gpu:0", "gpu:1"))
    assert first[:8] == second[:8] != host[:8] and first[8:] != second[8:]
