"""Takes the pictures of the page in ``docs/``: the example in `highwater serve`, streamed in eight bits, and its panel.

Needs node 20 and Chromium, and the packages that the tests of the page install.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from highwater.tests.web.serving import serving

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "web" / "take_pictures.mjs"


def main() -> None:
    node, chromium = shutil.which("node"), shutil.which("chromium") or shutil.which("google-chrome")
    if node is None or chromium is None or not (SCRIPT.parent / "node_modules").is_dir():
        sys.exit("this needs node, Chromium, and once: npm ci --prefix tests/web")
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as address:
        subprocess.run([node, str(SCRIPT), address, chromium, str(ROOT / "docs")], check=True)


if __name__ == "__main__":
    main()
