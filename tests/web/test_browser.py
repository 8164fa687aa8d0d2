"""The real page in a real browser: the example opens and runs, and every node shows its bytes in both renderers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_every_node_shows_its_bytes(node, packages, chromium, sim, tmp_path):
    """About 30 s: `highwater serve` with a simulated device, Chromium, three runs of the tiny Flux pipeline."""
    command = [sys.executable, "-m", "highwater", "serve", "--port", "0", "--out", str(tmp_path / "output")]
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")}
    server_log = tmp_path / "server.log"
    with (
        server_log.open("w") as log,
        subprocess.Popen(
            [*command, "--devices", "gpu:0=64MiB"], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as server,
    ):
        try:
            address = next((line.split()[3] for line in server.stdout if line.startswith("Highwater runs at ")), None)
            assert address, server_log.read_text()
            script = [node, str(HERE / "browse.mjs"), address.rstrip("/"), chromium, str(tmp_path)]
            result = subprocess.run(script, capture_output=True, text=True, timeout=1200)
        finally:
            server.terminate()
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr + server_log.read_text()
    assert "Traceback" not in server_log.read_text()
    assert len(list((tmp_path / "output").glob("pipeline_*.png"))) == 3
