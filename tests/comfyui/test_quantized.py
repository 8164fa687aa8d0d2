"""Files in ComfyUI's quantized layouts: their bytes stay as they are, and compute what core's full load does."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostFiles, HostProcess
from highwater.tests.comfyui.model_files import flux, flux_lora, models_directory, write_random

pytestmark = pytest.mark.slow(one_in=3)

SCRIPT = Path(__file__).parent / "quantized_files.py"
LAYOUTS = (
    "float8_e4m3fn", "float8_e5m2", "mxfp8", "nvfp4", "int8_tensorwise", "int8_tensorwise_convrot", "convrot_w4a4",
    "asym_w4a8_int8",
)  # fmt: skip
# Rotations are of 256 inputs.
WIDTH, NUM_DOUBLE, NUM_SINGLE = 256, 2, 3
LORA = "lora_256.safetensors"
WAYS = {"resident": Loaders(), "streamed": Loaders(profile="4MiB"), "managed": Loaders(kind="managed", profile="4MiB")}

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def gpu_host(start_gpu_host: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    """Return a host of our own: its comfy_kitchen keeps the matrices that it rotates with on the device for good."""
    with start_gpu_host() as host:
        yield host


@pytest.fixture(scope="module")
def folder(gpu_host: HostProcess, host_files: HostFiles) -> Path:
    """Return the folder with a file for each layout, made by the host's own quantizers once per machine."""
    target = models_directory() / "quantized"
    source, lora_file = target / "source.safetensors", target / LORA
    if not lora_file.exists():
        write_random(source, flux(NUM_DOUBLE, NUM_SINGLE, width=WIDTH), scale=0.05, seed=5)
        write_random(lora_file, flux_lora(NUM_DOUBLE, NUM_SINGLE, width=WIDTH), scale=0.1, seed=6)
    command = [host_files.python, SCRIPT, host_files.directory, source, target]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-len(LAYOUTS) :] == [*LAYOUTS]
    served = gpu_host.base / "models"
    links = {served / "diffusion_models" / path.name: path for path in target.glob("flux_*.safetensors")}
    links = {link: path for link, path in links.items() if path != lora_file} | {served / "loras" / LORA: lora_file}
    for link, path in links.items():
        link.symlink_to(path)
    return target


def sample(host: HostProcess, loaders: Loaders, layout: str, strength: float | None) -> Tensors:
    graph = Graph()
    model = loaders.diffusion_model(graph, f"flux_{layout}.safetensors")
    graph.keep(sample_flux(graph, model if strength is None else lora(graph, model, strength, LORA)))
    return host.run(graph.nodes).kept()


@pytest.fixture(scope="module")
def expected(gpu_host: HostProcess, folder: Path) -> Callable[[str, float | None], Tensors]:
    """Return what core computes with all of the model on the device."""
    known: dict[tuple[str, float | None], Tensors] = {}

    def find(layout: str, strength: float | None) -> Tensors:
        if (layout, strength) not in known:
            gpu_host.forget()
            known[layout, strength] = sample(gpu_host, CORE, layout, strength)
            gpu_host.forget()
        return known[layout, strength]

    return find


@pytest.mark.parametrize("strength", [None, 0.7])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_computes_what_cores_full_load_does(
    gpu_host: HostProcess, expected: Callable, layout: str, way: str, strength: float | None
) -> None:
    want = expected(layout, strength)
    got = sample(gpu_host, WAYS[way], layout, strength)
    assert all(bool(tensor.isfinite().all()) and float(tensor.std()) > 1e-3 for tensor in want.values())
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_bytes_go_to_the_device_as_the_file_has_them(gpu_host: HostProcess, folder: Path, layout: str) -> None:
    gpu_host.forget()
    with gpu_host.books() as devices:
        sample(gpu_host, Loaders(), layout, None)
    file_bytes = (folder / f"flux_{layout}.safetensors").stat().st_size
    assert 0.9 * file_bytes < devices[0]["h2d_bytes"] < 1.1 * file_bytes + (1 << 20)
    (part,) = gpu_host.get("/highwater/report")["components"]
    assert part["plan"]["weight_bytes"] < 1.02 * file_bytes
    gpu_host.forget()
