"""`highwater needs`: what was learned is listed without names, and forgotten on request."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from pathlib import Path

import pytest

from highwater.headless.cli import main
from highwater.memory.manager.needs import Need
from highwater.memory.manager.needs_file import TABLE, NeedsFile

COMPONENT, DEVICE = "ab" * 16, "cd" * 16


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NeedsFile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("COMFYUI_DIR", raising=False)
    found = NeedsFile(tmp_path / "highwater" / "needs.sqlite3")
    now = int(time.time())
    failed = Need(seen_bytes=1 << 30, failed_bytes=1 << 31, used_s=now)
    assert found.write([((COMPONENT, DEVICE), (0, 2, 160), Need(seen_bytes=3 << 30, used_s=now))])
    assert found.write([((COMPONENT, DEVICE), (0, 2, 176), failed)])
    return found


def test_needs_are_listed(file, capsys) -> None:
    assert main(["needs"]) == 0
    printed = capsys.readouterr().out
    assert f"{file.path}: 2 learned needs" in printed
    assert "3.00GiB" in printed and "maximum" in printed and COMPONENT[:8] in printed


@pytest.mark.parametrize("num_parts", [2, 30, 60])
def test_the_numbers_are_shown_beside_a_size_of_any_length(file, capsys, monkeypatch, num_parts) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    size = (1, *[88] * num_parts)
    assert file.write([((COMPONENT, DEVICE), size, Need(seen_bytes=5 << 20, used_s=int(time.time())))])
    assert main(["needs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "5.00MiB" in line]
    shown = line.split()
    assert shown[:2] == [COMPONENT[:8], DEVICE[:8]] and shown[3:] == ["5.00MiB", "5.00MiB"]
    assert shown[2].startswith("1.88.88") and len(line) <= 80
    assert any("kept free next" in line for line in lines)


def test_needs_are_listed_as_json_and_forgotten(file, capsys) -> None:
    assert main(["needs", "--json", "--file", str(file.path)]) == 0
    (told,) = json.loads(capsys.readouterr().out)["files"]
    assert {need["kept_bytes"] for need in told["needs"]} == {3 << 30, None}
    assert main(["needs", "--reset", "--json", "--file", str(file.path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": [{"path": str(file.path), "num_forgotten": 2}]}
    assert file.read() == []
    assert main(["needs", "--reset", "--file", str(file.path)]) == 0
    assert capsys.readouterr().out == f"{file.path}: 0 learned needs deleted\n"


def test_those_of_comfyui_are_found(file, tmp_path, capsys) -> None:
    host = tmp_path / "ComfyUI"
    (host / "comfy").mkdir(parents=True)
    for name in ("main.py", "execution.py"):
        (host / name).touch()
    theirs = NeedsFile(host / "user" / "__highwater" / "needs.sqlite3")
    theirs.write([((COMPONENT, DEVICE), (1,), Need(used_s=int(time.time())))])
    assert main(["needs", "--reset", "--json", "--comfyui", str(host)]) == 0
    assert [found["num_forgotten"] for found in json.loads(capsys.readouterr().out)["files"]] == [2, 1]
    assert theirs.read() == file.read() == []


def test_what_cannot_be_forgotten_is_one_line(tmp_path, capsys) -> None:
    target = tmp_path / "needs"
    target.mkdir()
    assert main(["needs", "--reset", "--file", str(target)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"highwater: {target}: the learned needs cannot be deleted: ")
    assert os.path.isdir(target)


def database_of_another(path: Path, *, log: str = "DELETE", table: str = "bookmarks") -> None:
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA journal_mode = {log}")
    database.execute(f"CREATE TABLE {table} (component TEXT, url TEXT)")
    database.execute(f"INSERT INTO {table} VALUES ('a', 'b')")
    database.commit()
    database.close()


FOREIGN = {
    "text": lambda path: path.write_text("precious words\n" * 50),
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "short": lambda path: path.write_bytes(b"SQLite"),
    "cut database": lambda path: path.write_bytes(b"SQLite format 3\0" + b"\1" * 50),
    "another database": database_of_another,
    "one with a log": lambda path: database_of_another(path, log="WAL"),
    "one with a table of our name": lambda path: database_of_another(path, table=TABLE),
    "large": lambda path: path.write_bytes(bytes(17 << 20)),
}


@pytest.mark.parametrize("name", ["notes.txt", "needs.sqlite3"])
@pytest.mark.parametrize("options", [[], ["--json"], ["--reset"], ["--reset", "--json"]])
@pytest.mark.parametrize("what", FOREIGN)
def test_a_named_file_that_is_not_ours_is_left_as_it_is(tmp_path, capsys, what: str, options, name: str) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    path = folder / name
    FOREIGN[what](path)
    content, beside = path.read_bytes(), sorted(folder.iterdir())
    assert main(["needs", *options, "--file", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"highwater: {path}: is not a file of learned needs and was left unchanged: ")
    assert path.read_bytes() == content and sorted(folder.iterdir()) == beside
    assert not NeedsFile(path, is_named=True).write([((COMPONENT, DEVICE), (1,), Need(used_s=int(time.time())))])
    assert NeedsFile(path, is_named=True).read() == []
    assert path.read_bytes() == content and sorted(folder.iterdir()) == beside


def test_an_empty_file_that_is_named_stays_empty(tmp_path, capsys) -> None:
    path = tmp_path / "empty"
    path.touch()
    for options in ([], ["--reset"]):
        assert main(["needs", *options, "--file", str(path)]) == 0
        assert "0 learned needs" in capsys.readouterr().out and path.read_bytes() == b""


def test_a_named_file_that_cannot_be_read_is_one_line(tmp_path, capsys) -> None:
    assert main(["needs", "--file", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"highwater: {tmp_path}: the learned needs cannot be read: ")


def test_listing_removes_no_damaged_file_and_reset_begins_our_own_anew(file, capsys) -> None:
    file.path.write_text("no database" * 500)
    assert main(["needs"]) == 0 and "0 learned needs" in capsys.readouterr().out
    assert file.path.read_text() == "no database" * 500
    assert main(["needs", "--reset"]) == 0 and "0 learned needs deleted" in capsys.readouterr().out
    assert not file.path.exists()
