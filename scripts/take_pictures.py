"""Takes the pictures of the page: those in ``docs/``, and one for the help page of each node in ``web/docs/``.

Usage: python scripts/take_pictures.py [NAME ...]   (``serve`` for those in ``docs/``, or nodes' ids; default: all)

Those in ``docs/`` show the example in `highwater serve`, streamed in eight bits, and its panel. Those of the help pages
show ComfyUI on simulated GPUs after a run of a small graph; nodes of pipelines are shown in `highwater serve`. Needs
ComfyUI, node 20 and Chromium, and the packages that the tests of the page install.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from PIL import Image

from highwater.tests.comfyui.host_process import HostProcess, find_host
from highwater.tests.comfyui.model_files import ensure_model_files
from highwater.tests.web.help_graphs import HELP_GRAPHS, MODEL_NAMES
from highwater.tests.web.serving import serving

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "web" / "take_pictures.mjs"
HELP = ROOT / "web" / "docs"
DEVICE_BYTES = 1844 << 20
SCALES = (1.0, 0.75, 0.5)
NUM_COLOURS = (128, 64, 32, 16, 8)
SMALL_BYTES = 40_000


def main() -> None:
    node, chromium = shutil.which("node"), shutil.which("chromium") or shutil.which("google-chrome")
    if node is None or chromium is None or not (SCRIPT.parent / "node_modules").is_dir():
        sys.exit("this needs node, Chromium, and once: npm ci --prefix tests/web")
    names = sys.argv[1:] or ["serve", *HELP_GRAPHS]
    if unknown := [name for name in names if name not in {"serve", *HELP_GRAPHS}]:
        sys.exit(f"no picture has the name {unknown[0]!r}; allowed: serve, {', '.join(HELP_GRAPHS)}")
    with tempfile.TemporaryDirectory() as folder:
        if "serve" in names:
            with serving(Path(folder)) as address:
                subprocess.run([node, str(SCRIPT), address, chromium, str(ROOT / "docs")], check=True)
        wanted = [name for name in HELP_GRAPHS if name in names]
        in_serve = [name for name in wanted if is_of_pipelines(name)]
        for host, shown in ((comfyui, [name for name in wanted if name not in in_serve]), (serving, in_serve)):
            if not shown:
                continue
            graphs = Path(folder, "graphs.json")
            graphs.write_text(json.dumps({name: HELP_GRAPHS[name].as_json() for name in shown}))
            with host(Path(folder)) as address:
                subprocess.run([node, str(SCRIPT), address, chromium, folder, str(graphs)], check=True)
            for name in shown:
                shrink(Path(folder, f"{name}.png"), HELP / f"{name}.png")


def is_of_pipelines(name: str) -> bool:
    """Whether the graph needs diffusers, which `highwater serve` has and ComfyUI need not have."""
    return any(node["class_type"] == "HighwaterLoadPipeline" for node in HELP_GRAPHS[name].graph.values())


@contextmanager
def comfyui(folder: Path) -> Iterator[str]:
    """Yield the address of a ComfyUI on two simulated GPUs, with the models that the graphs name."""
    files = find_host()
    if files is None:
        sys.exit("this needs ComfyUI at ~/comfy/ComfyUI, or in COMFYUI_DIR")
    models = ensure_model_files(list(MODEL_NAMES.values()))
    for name, made in MODEL_NAMES.items():
        (folder / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "models" / name).symlink_to(models / made)
    with HostProcess(files, models=folder / "models", total_bytes=[DEVICE_BYTES, DEVICE_BYTES], strict=False) as host:
        yield f"http://127.0.0.1:{host.port}"


def shrink(taken: Path, target: Path) -> None:
    """Write a picture in as many colours as make it small enough, or smaller: it is loaded with its page."""
    with Image.open(taken) as whole:
        picture = whole.convert("RGB")
    for scale, num_colours in product(SCALES, NUM_COLOURS):
        size = (round(picture.width * scale), round(picture.height * scale))
        few = picture.resize(size, Image.Resampling.LANCZOS).quantize(num_colours, dither=Image.Dither.NONE)
        few.save(target, optimize=True)
        if target.stat().st_size <= SMALL_BYTES:
            break
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB in {num_colours} colours")


if __name__ == "__main__":
    main()
