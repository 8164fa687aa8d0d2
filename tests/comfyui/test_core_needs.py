"""What core's classes need beside the weights, and compute, is the same from a header as from the loaded model."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from highwater.tests.comfyui.host_process import HostFiles
from highwater.tests.comfyui.model_files import MODEL_FILES, ensure_model_files

SCRIPT = Path(__file__).with_name("core_needs.py")
PACK = Path(__file__).parents[2]
FOLDERS = ("diffusion_models", "vae", "checkpoints", "text_encoders")
NAMES = [name for name in MODEL_FILES if name.startswith(FOLDERS) and "only_sd" not in name and "big_" not in name]
NAMES += [f"loras/{name}.safetensors" for name in ("tiny_flux_lora", "flux_fused", "flux_dora")]


def test_needs_from_headers_are_those_of_the_loaded_models(host_files: HostFiles, tmp_path: Path) -> None:
    folder = ensure_model_files(NAMES)
    output = tmp_path / "needs.json"
    command = [str(host_files.python), str(SCRIPT), str(PACK), str(output), *(str(folder / name) for name in NAMES)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=host_files.directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(output.read_text())
    assert {name for name, *_ in rows} == {Path(name).stem for name in NAMES}
    assert not [row for row in rows if not row[2] == row[3] > 0]  # file, what, loaded, told


REFUSED = """
import sys
sys.path.insert(0, ".")
pack, *files = sys.argv[1:]
sys.argv[1:] = ["--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import importlib.util, pathlib
spec = importlib.util.spec_from_file_location("highwater", f"{pack}/__init__.py", submodule_search_locations=[pack])
sys.modules["highwater"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["highwater"])
from highwater.memory.errors import InvalidInput
from highwater.nodes.host.core_needs import coding_needs, sampling_needs
for file in files:
    for needs in (sampling_needs, coding_needs):
        try:
            needs(file)
            print("made")
        except InvalidInput as error:
            print(str(error).replace(file, "FILE"))
"""


def test_other_files_are_refused_in_one_line(host_files: HostFiles, tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"\1" * 100)
    encoder = ensure_model_files(["text_encoders/clip_l.safetensors"]) / "text_encoders/clip_l.safetensors"
    files = [tmp_path / "none.safetensors", tmp_path / "broken.safetensors", encoder]
    command = [str(host_files.python), "-c", REFUSED, str(PACK), *map(str, files)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=host_files.directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("made", "FILE"))]
    assert len(lines) == 2 * len(files)
    assert all("is not a safetensors file that can be read" in line for line in lines[:4])
    assert lines[4] == "FILE: is no diffusion model that ComfyUI knows"
    assert lines[5] == "FILE: is no VAE that ComfyUI knows"
