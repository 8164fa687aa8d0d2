"""Building the backend: without a compiler, twice at once, after a killed build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from highwater.memory.errors import InvalidInput

INSTALL = """
import sys
from highwater.headless import simdevice
simdevice.install("sim", build_directory=sys.argv[1])
import torch
print(torch.ones(1, device="sim:0").item())
"""


def install_in_a_process(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", INSTALL, str(directory)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.mark.parametrize("environment", [{"PATH": ""}, {"CXX": "/nowhere/c++"}], ids=["empty PATH", "wrong CXX"])
def test_no_compiler_is_one_clear_line(tmp_path: Path, environment: dict[str, str]) -> None:
    result = install_in_a_process(tmp_path, **environment)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("highwater.headless.simdevice.build.CompilerMissing: simulated devices need a C++ compiler")
    assert environment.get("CXX", "c++") in last
    assert "install g++ or clang++" in last
    assert list(tmp_path.iterdir()) == []


def test_what_is_built_needs_no_compiler(sim: ModuleType) -> None:
    result = install_in_a_process(sim.default_build_directory(), PATH="")
    assert (result.returncode, result.stdout) == (0, "1.0\n"), result.stderr


def test_a_killed_build_blocks_nobody(sim: ModuleType, tmp_path: Path) -> None:
    """A build works in a folder of its own, so its rest, locks included, is in nobody's way."""
    rest = tmp_path / "building-killed"
    rest.mkdir()
    (rest / "lock").touch()
    (rest / "highwater_simdevice.so").write_bytes(b"half")
    library = "highwater_simdevice.so"
    os.link(sim.default_build_directory() / library, tmp_path / library)
    assert install_in_a_process(tmp_path).returncode == 0


def test_a_failed_build_leaves_no_library(sim: ModuleType, tmp_path: Path) -> None:
    """A compiler that fails is torch's error with the compiler's words, not a CompilerMissing."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    result = install_in_a_process(tmp_path / "build", CXX=str(compiler))
    assert result.returncode == 1
    assert "CompilerMissing" not in result.stderr
    assert list((tmp_path / "build").iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT TESTED: no /dev/full on this system")
def test_a_full_disk_while_it_is_compiled_is_one_line(sim: ModuleType, tmp_path: Path) -> None:
    """What a compiler says of it stands among the lines of torch's error."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *simdevice.cpp*) exec head -c 1 /dev/zero > /dev/full;; esac\n'
        f'exec {shutil.which("c++") or "g++"} "$@"\n'
    )
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    script = "from highwater.headless.cli import main; raise SystemExit(main(['demo', '--devices', 'gpu:0=64MiB']))"
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "CXX": str(compiler), "LC_ALL": "de_DE.UTF-8"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    said = result.stderr.splitlines()
    assert result.returncode == 1 and len(said) == 1, result.stderr
    assert said[0].startswith("highwater: No space left on device: compiling the simulated devices needs 16.0MiB in ")
    assert str(cache) in said[0]
    assert not [path for path in cache.rglob("*") if path.is_file()]


# Where others can write ---------------------------------------------------------------------------------------

needs_modes = pytest.mark.skipif(not hasattr(os, "getuid"), reason="no users and modes here")
needs_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away")
OTHER_USER = 54321
NOT_A_LIBRARY = b"what others have put there"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A cache with a library in it that must not be loaded, three folders deep, all of them private."""
    directory = tmp_path / "cache" / "highwater" / "key"
    directory.mkdir(parents=True)
    for folder in (directory, *directory.parents[:2]):
        folder.chmod(0o700)
    (directory / "highwater_simdevice.so").write_bytes(NOT_A_LIBRARY)
    (directory / "highwater_simdevice.so").chmod(0o700)
    return directory


def give_away(path: Path) -> None:
    os.chown(path, OTHER_USER, -1, follow_symlinks=False)


def link_elsewhere(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


UNSAFE = {
    "the library is another user's": ("highwater_simdevice.so", give_away, "belongs to user 54321"),
    "the library is open to the group": ("highwater_simdevice.so", lambda path: path.chmod(0o770), "chmod go-w"),
    "the library is open to all": ("highwater_simdevice.so", lambda path: path.chmod(0o702), "chmod go-w"),
    "the library is a link": ("highwater_simdevice.so", link_elsewhere, "is a link"),
    "the folder is another user's": (".", give_away, "belongs to user 54321"),
    "the folder is open to the group": (".", lambda path: path.chmod(0o770), "chmod go-w"),
    "the folder is open to all, each for himself": (".", lambda path: path.chmod(0o1777), "chmod go-w"),
    "a folder above is another user's": ("..", give_away, "belongs to user 54321"),
    "a folder above is open to all": ("../..", lambda path: path.chmod(0o777), "chmod go-w"),
    "a folder above is open to the group": ("..", lambda path: path.chmod(0o775), "chmod go-w"),
}


@needs_modes
@pytest.mark.parametrize("kind", UNSAFE)
def test_a_library_that_others_could_have_put_there_is_not_loaded(
    sim: ModuleType, kept: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from highwater.headless.simdevice import build

    place, change, words = UNSAFE[kind]
    if change is give_away and os.getuid() != 0:
        pytest.skip("only root gives files away")
    change((kept / place).resolve() if place != "highwater_simdevice.so" else kept / place)
    monkeypatch.setattr(build.torch.ops, "load_library", lambda path: pytest.fail(f"{path} was loaded"))
    with pytest.raises(InvalidInput, match=words) as error:
        build.load_backend(kept)
    assert "\n" not in str(error.value) and "XDG_CACHE_HOME" in str(error.value)


@needs_modes
def test_a_library_is_not_built_where_others_can_write(sim: ModuleType, kept: Path) -> None:
    from highwater.headless.simdevice import build

    kept.parent.chmod(0o777)
    with pytest.raises(InvalidInput, match="other users can write there; run: chmod go-w"):
        build.load_backend(kept / "new")
    assert list((kept / "new").iterdir()) == []


@needs_modes
def test_what_was_kept_open_to_readers_is_closed_and_loaded(sim: ModuleType, kept: Path, monkeypatch) -> None:
    from highwater.headless.simdevice import build

    loaded: list[str] = []
    monkeypatch.setattr(build.torch.ops, "load_library", loaded.append)
    kept.chmod(0o755)
    (kept.parents[2] / "alias").symlink_to(kept)
    build.load_backend(kept.parents[2] / "alias")
    assert loaded == [str(kept / "highwater_simdevice.so")], "the folder itself, not the link to it"
    assert kept.stat().st_mode & 0o777 == 0o700


@needs_root
def test_a_sticky_folder_of_the_system_above_is_fine(sim: ModuleType, kept: Path, monkeypatch) -> None:
    from highwater.headless.simdevice import build

    loaded: list[str] = []
    monkeypatch.setattr(build.torch.ops, "load_library", loaded.append)
    kept.parent.chmod(0o1777)
    build.load_backend(kept)
    assert loaded
    os.chown(kept.parent, OTHER_USER, -1)
    with pytest.raises(InvalidInput, match="belongs to user"):
        build.load_backend(kept)


def test_a_cache_in_the_working_directory_is_refused(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for relative in ("cache", "./cache", "../x", "~/.cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        with pytest.raises(InvalidInput, match=r"XDG_CACHE_HOME is .*; allowed: an absolute path"):
            sim.default_build_directory()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_made_are_private_whatever_the_umask_is(sim: ModuleType, tmp_path: Path) -> None:
    from highwater.headless.simdevice import build

    before = os.umask(0)
    try:
        made = build.make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in (made, made.parent, made.parent.parent)] == [0o700] * 3


@pytest.mark.parametrize(("ci", "outcome"), [("true", "1 error"), ("", "1 skipped")])
def test_without_a_compiler_tests_fail_on_ci_and_are_skipped_elsewhere(tmp_path: Path, ci: str, outcome: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"{__file__}::test_what_is_built_needs_no_compiler"],
        env={**os.environ, "CI": ci, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert outcome in result.stdout.splitlines()[-1]
    assert "simulated devices need a C++ compiler: 'c++' was not found" in result.stdout
