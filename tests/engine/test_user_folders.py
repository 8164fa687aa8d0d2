"""One place says where the user's files lie; everything that stores something asks it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import highwater
from highwater.headless import cli
from highwater.headless.server.user_directory import default_user_directory
from highwater.memory.manager.needs_file import cache_path
from highwater.memory.transfer import link_speed
from highwater.memory.user_folders import cache_folder, data_folder, runtime_folder

PACK = Path(highwater.__file__).parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="where folders lie is the system's choice")


@pytest.fixture(autouse=True)
def _links_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "links_folder", [])


def test_the_named_cache_holds_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from highwater.headless.simdevice.build import default_build_directory

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("highwater.nodes.pipelines.tiny_pipelines.ensure_pipelines", lambda folder: {})
    options = cli.build_parser().parse_args(["run", "a.json"])
    found = [cache_path(), link_speed.cache_directory(), default_build_directory(), cli.models_directory(options)]
    assert all(path is not None and path.is_relative_to(tmp_path / "highwater") for path in found)
    assert len(set(found)) == len(found)


@linux
@pytest.mark.parametrize("relative", ["", "cache", "./cache", "../x", "~/.cache"])
def test_a_relative_name_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    monkeypatch.setenv("XDG_DATA_HOME", relative)
    assert cache_folder() == tmp_path / ".cache" / "highwater"
    assert data_folder() == tmp_path / ".local" / "share" / "highwater"
    assert default_user_directory() == tmp_path / ".local" / "share" / "highwater" / "user"


@pytest.mark.parametrize("kind", ["cache", "data"])
def test_a_relative_folder_is_not_taken_from_any_version_of_platformdirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(f"platformdirs.user_{kind}_path", lambda name, appauthor: Path("here", name))
    found = {"cache": cache_folder, "data": data_folder}[kind]()
    assert found is not None and found.is_relative_to(Path.home())


@linux
def test_a_user_without_a_home_stores_nothing(tmp_path: Path) -> None:
    """As in a container with a number for a user; the name of a cache still counts."""
    code = """if True:
        import os
        import platformdirs, platformdirs.unix
        from highwater.memory.user_folders import cache_folder
        from highwater.memory.manager.needs_file import cache_path
        from highwater.memory.transfer.link_speed import cache_directory
        os.setuid(54321)
        print(cache_folder(), cache_path(), cache_directory())
    """
    if os.getuid() != 0:
        pytest.skip("only root can become a user without a home")
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["None", "None", "None"]


@pytest.mark.parametrize("named", [True, False])
def test_a_host_that_names_a_folder_needs_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Neither a library that knows the system's folders, nor a folder beside the host's."""
    from highwater.memory.manager import default

    monkeypatch.setattr(default, "needs_folder", [])
    monkeypatch.setattr(default, "made", [])
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    default.remember_needs_in(tmp_path if named else None)
    default.default_manager()
    assert link_speed.cache_directory() == (tmp_path / "links" if named else None)


def test_no_other_file_computes_such_a_folder() -> None:
    """Only the simulated devices read the variable too: they refuse a name that depends on the working directory."""
    words = ("XDG_CACHE_HOME", "XDG_DATA_HOME", "LOCALAPPDATA", ".cache", "AppData")
    found = {
        path.relative_to(PACK).as_posix()
        for area in ("memory", "nodes", "headless")
        for path in (PACK / area).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in words
    }
    assert found <= {"memory/user_folders.py", "headless/simdevice/build.py"}


def test_without_platformdirs_there_is_no_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a ComfyUI whose Python lacks it: nothing is shared with other processes, and the manager is made."""
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert runtime_folder() is None
