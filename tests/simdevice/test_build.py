"""Building the backend: without a compiler, twice at once, after a killed build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
