"""The examples that need large models, planned for the machines that their notes name.

The files hold a header and a hole: the shapes come from ComfyUI's own classes, the dtypes are those of the files that
the graphs link to.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from highwater.memory.planner.plan import Plan
from highwater.memory.units import GIB
from highwater.nodes.described_hardware import parse_hardware
from highwater.nodes.plans import plan_files
from highwater.tests.comfyui.host_process import HostFiles
from highwater.tests.comfyui.model_files import FP8_SCALE

WORKFLOWS = Path(__file__).parents[2] / "workflows"
SHAPES = Path(__file__).with_name("real_shapes.py")
ITEM_BYTES = {"F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4}
# File -> whose shapes it has, the dtype of its weights, and where the matrices in eight bits are.
FILES = {
    "flux1-schnell.safetensors": ("flux", "BF16", None),
    "clip_l.safetensors": ("clip_l", "F16", None),
    "t5xxl_fp16.safetensors": ("t5xxl", "F16", None),
    "ae.safetensors": ("ae", "F32", None),
    "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors": ("wan", "F16", "blocks."),
    "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors": ("wan", "F16", "blocks."),
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": ("umt5", "F16", "block."),
    "wan_2.1_vae.safetensors": ("wan_vae", "BF16", None),
}
LORA_BYTES = 1_230_000_000  # each of Wan's two, about: their files are the only ones without a stand-in
LOADERS = re.compile(r"HighwaterLoad(DiffusionModel|TextEncoder|VAE)$")
GRAPHS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(WORKFLOWS.glob("*.json"))
    if '"models"' in path.read_text(encoding="utf-8")
}


@pytest.fixture(scope="module")
def files(host_files: HostFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of these files; they take no room on the disk."""
    folder = tmp_path_factory.mktemp("headers")
    command = [str(host_files.python), str(SHAPES), str(folder / "shapes.json")]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=host_files.directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shapes = json.loads((folder / "shapes.json").read_text())
    for name, (model, dtype, packed) in FILES.items():
        write_header(folder / name, shapes[model], dtype, packed)
    return folder


def write_header(path: Path, shapes: Mapping[str, list[int]], dtype: str, packed: str | None) -> None:
    header: dict[str, Any] = {}
    offset = 0

    def add(name: str, shape: list[int], dtype: str) -> None:
        nonlocal offset
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end

    for name, shape in shapes.items():
        is_packed = packed is not None and packed in name and len(shape) == 2 and name.endswith(".weight")
        add(name, shape, "F8_E4M3" if is_packed else dtype)
        if is_packed:
            add(f"{name.removesuffix('.weight')}{FP8_SCALE}", [], "F32")
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(file.tell() + offset)


def plans_of(graph: Mapping[str, Any], files: Path, hardware: str) -> dict[str, Plan]:
    """Return a plan for each loader, made alone: ComfyUI loads each when it is needed, and idle ones leave for it."""
    plans = {}
    for node in graph["nodes"]:
        if LOADERS.match(node["type"]):
            profile, precision, placement, _ = node["widgets_values"][-4:]
            paths = [files / file["name"] for file in node["properties"]["models"]]
            plans[paths[-1].stem] = plan_files(
                paths,
                parse_hardware(hardware).machine(),
                profile=profile,
                placement="auto" if placement == "default" else placement,
                precision=None if precision == "by profile" else precision,
            )
    return plans


def needs(graph: Mapping[str, Any], what: str) -> int:
    """Return how many GB a note says that the example needs: of RAM, or on the disk."""
    (text,) = (node["widgets_values"][0] for node in graph["nodes"] if node["type"] == "MarkdownNote")
    return int(re.search(rf"(\d+) GB {what}", text)[1])


def device_bytes(plan: Plan, device: str) -> int:
    shares = [share for part in plan.components for share in part.shares if share.device == device]
    return sum(share.fixed_bytes + share.resident_bytes + share.staging_bytes for share in shares)


MACHINES = {
    "highwater-flux-8gb": "gpu:0=8GiB",
    "highwater-two-gpus": "gpu:0=10GiB,gpu:1=10GiB",
    "highwater-wan-12gb": "gpu:0=12GiB",
}


def test_each_example_with_links_has_a_machine() -> None:
    assert GRAPHS.keys() == MACHINES.keys()


@pytest.mark.parametrize("name", MACHINES)
def test_an_example_fits_the_machine_of_its_note(files: Path, name: str) -> None:
    graph = GRAPHS[name]
    plans = plans_of(graph, files, f"{MACHINES[name]},host={needs(graph, 'of RAM')}GB")
    host_bytes = sum(part.host_bytes for plan in plans.values() for part in plan.components)
    assert host_bytes < needs(graph, "of RAM") * 10**9
    linked = {file["name"] for node in graph["nodes"] for file in node["properties"].get("models", [])}
    sizes = {file: (files / file).stat().st_size if file in FILES else LORA_BYTES for file in linked}
    assert 0 <= needs(graph, "on the disk") - sum(sizes.values()) / 1e9 < 2, sizes
    for model, plan in plans.items():
        streamed = any(part.streams for part in plan.components)
        is_diffusion = model.startswith(("flux", "wan2.2"))
        if is_diffusion and name in ("highwater-flux-8gb", "highwater-wan-12gb"):
            assert streamed and 5 * GIB < device_bytes(plan, "gpu:0") <= 6 * GIB
        elif is_diffusion:
            assert all(device_bytes(plan, device) > GIB for device in ("gpu:0", "gpu:1"))
        else:
            assert device_bytes(plan, "gpu:0") + device_bytes(plan, "gpu:1") > 0
