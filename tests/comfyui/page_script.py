"""Runs a script beside this file in Chromium, against the page of a running ComfyUI."""

from __future__ import annotations

import subprocess
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from highwater.tests.comfyui.host_process import HostProcess
from highwater.tests.web.conftest import chromium, node, packages  # noqa: F401 (fixtures)

__all__ = ["PageScript", "frontend", "frontend_arguments", "in_page"]

HERE = Path(__file__).parent


@pytest.fixture(params=["required", pytest.param("newest", marks=pytest.mark.slow(one_in=2))])
def frontend(request: pytest.FixtureRequest) -> Path | None:
    """The folder of the newest page, which is that of `highwater serve`; None: the page that the host requires."""
    if request.param == "required":
        return None
    assert request.param == "newest"
    return Path(pytest.importorskip("comfyui_frontend_package").__file__).parent / "static"


@pytest.fixture
def frontend_arguments(frontend: Path | None) -> list[str]:
    """The host's arguments for it."""
    return [] if frontend is None else ["--front-end-root", str(frontend)]


@dataclass(frozen=True)
class PageScript:
    """What every script needs: its first arguments are the page's address, Chromium, and a folder for pictures."""

    node: str
    chromium: str
    pictures: Path
    frontend: Path | None

    def run(self, name: str, host: HostProcess, arguments: Sequence[object] = ()) -> None:
        """Run a script until it ends, which it does with an error where the page is not as expected."""
        address = f"http://127.0.0.1:{host.port}"
        with urllib.request.urlopen(address) as index:
            assert self.frontend is None or index.read() == (self.frontend / "index.html").read_bytes()
        command = [self.node, HERE / name, address, self.chromium, self.pictures, *arguments]
        result = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=1200, check=False
        )
        print(result.stdout)
        assert result.returncode == 0, result.stdout + result.stderr + host.log()[-4000:]


@pytest.fixture
def in_page(
    node: str,  # noqa: F811
    packages: Path,  # noqa: F811
    chromium: str,  # noqa: F811
    frontend: Path | None,
    tmp_path: Path,
) -> PageScript:
    return PageScript(node, chromium, tmp_path, frontend)
