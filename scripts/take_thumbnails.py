"""Takes the pictures of the examples in ``workflows/``, or of those that are named: in ComfyUI on simulated GPUs.

Examples of pipelines are taken in `highwater serve`. Needs ComfyUI, node 20 and Chromium, and the packages that the
tests of the page install.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from highwater.tests.comfyui.host_process import HostProcess, find_host
from highwater.tests.web.serving import serving

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "web" / "take_thumbnails.mjs"
WIDTH = 880
DEVICE_BYTES = 1844 << 20
NO_WEIGHTS = b"\x02\0\0\0\0\0\0\0{}"  # a file that loaders list


def main() -> None:
    node, chromium = shutil.which("node"), shutil.which("chromium") or shutil.which("google-chrome")
    if node is None or chromium is None or not (SCRIPT.parent / "node_modules").is_dir():
        sys.exit("this needs node, Chromium, and once: npm ci --prefix tests/web")
    files = find_host()
    if files is None:
        sys.exit("this needs ComfyUI at ~/comfy/ComfyUI, or in COMFYUI_DIR")
    graphs = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "workflows").glob("*.json"))}
    names = sys.argv[1:] or list(graphs)

    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        for graph in graphs.values():
            for linked in (file for node in graph["nodes"] for file in node["properties"].get("models", [])):
                (models / linked["directory"]).mkdir(parents=True, exist_ok=True)
                (models / linked["directory"] / linked["name"]).write_bytes(NO_WEIGHTS)
        for name in names:  # each in a host of its own, which knows nothing of the others
            if any(node["type"] == "HighwaterLoadPipeline" for node in graphs[name]["nodes"]):
                with serving(Path(folder)) as address:
                    subprocess.run([node, str(SCRIPT), address, chromium, folder, name], check=True)
            else:
                with HostProcess(files, models=models, total_bytes=[DEVICE_BYTES, DEVICE_BYTES]) as host:
                    address = f"http://127.0.0.1:{host.port}"
                    subprocess.run([node, str(SCRIPT), address, chromium, folder, name], check=True)
            with Image.open(Path(folder, f"{name}.png")) as picture:
                size = (WIDTH, round(picture.height * WIDTH / picture.width))
                picture.convert("RGB").resize(size, Image.Resampling.LANCZOS).save(
                    ROOT / "workflows" / f"{name}.jpg", quality=88, optimize=True
                )


if __name__ == "__main__":
    main()
