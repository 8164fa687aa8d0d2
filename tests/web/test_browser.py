"""The real page in a real browser: the example opens and runs, and every node shows its bytes in both renderers."""

from __future__ import annotations

import subprocess
import urllib.request
from pathlib import Path

import pytest

from highwater.benchmarks.badges import NOW
from highwater.tests.comfyui.host_process import find_host
from highwater.tests.web.serving import LOG, serving

HERE = Path(__file__).parent
PACKAGE = "comfyui_frontend_package"


@pytest.fixture(params=["newest", pytest.param("required", marks=pytest.mark.slow(one_in=2))])
def frontend(request: pytest.FixtureRequest) -> Path:
    """The package of the page: the newest, which is installed here, or the one that ComfyUI requires."""
    if request.param == "newest":
        return Path(pytest.importorskip(PACKAGE).__file__).parent
    host = find_host()
    if host is None:
        pytest.skip("NOT TESTED: the page that ComfyUI requires, as there is no ComfyUI (COMFYUI_DIR names one)")
    found = subprocess.run(
        [str(host.python), "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"], capture_output=True, text=True
    )
    if found.returncode:
        pytest.skip(f"NOT TESTED: the page that ComfyUI requires, as {host.python} has no {PACKAGE}")
    return Path(found.stdout.strip()).parent


def test_every_node_shows_its_bytes(node, packages, chromium, sim, frontend, tmp_path):
    """About 30 s: `highwater serve` with a simulated device, Chromium, four runs of the tiny Flux pipeline."""
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / PACKAGE).symlink_to(frontend)
    with serving(tmp_path, python_path=tmp_path / "page") as address:
        with urllib.request.urlopen(address) as index:
            assert index.read() == (frontend / "static" / "index.html").read_bytes()
        script = [node, str(HERE / "browse.mjs"), address, chromium, str(tmp_path), NOW]
        result = subprocess.run(script, capture_output=True, text=True, timeout=1200)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr + (tmp_path / LOG).read_text()
    assert "Traceback" not in (tmp_path / LOG).read_text()
    assert len(list((tmp_path / "output").glob("pipeline_*.png"))) == 4
