"""The real page in a real browser: the example opens and runs, and every node shows its bytes in both renderers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from highwater.tests.web.serving import LOG, serving

HERE = Path(__file__).parent


def test_every_node_shows_its_bytes(node, packages, chromium, sim, tmp_path):
    """About 30 s: `highwater serve` with a simulated device, Chromium, three runs of the tiny Flux pipeline."""
    with serving(tmp_path) as address:
        script = [node, str(HERE / "browse.mjs"), address, chromium, str(tmp_path)]
        result = subprocess.run(script, capture_output=True, text=True, timeout=1200)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr + (tmp_path / LOG).read_text()
    assert "Traceback" not in (tmp_path / LOG).read_text()
    assert len(list((tmp_path / "output").glob("pipeline_*.png"))) == 3
