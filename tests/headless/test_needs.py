"""`highwater needs`: what was learned is listed without names, and forgotten on request."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from highwater.headless.cli import main
from highwater.memory.needs import Need
from highwater.memory.needs_file import NeedsFile

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
    assert f"{file.path}: 2 needs" in printed
    assert "3.00GiB" in printed and "as much as can be" in printed and COMPONENT[:8] in printed


def test_needs_are_listed_as_json_and_forgotten(file, capsys) -> None:
    assert main(["needs", "--json", "--file", str(file.path)]) == 0
    (told,) = json.loads(capsys.readouterr().out)["files"]
    assert {need["kept_bytes"] for need in told["needs"]} == {3 << 30, None}
    assert main(["needs", "--reset", "--json", "--file", str(file.path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": [{"path": str(file.path), "num_forgotten": 2}]}
    assert file.read() == []
    assert main(["needs", "--reset", "--file", str(file.path)]) == 0
    assert capsys.readouterr().out == f"{file.path}: 0 needs forgotten\n"


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
    assert line.startswith(f"highwater: {target}: what was learned cannot be forgotten: ")
    assert os.path.isdir(target)
