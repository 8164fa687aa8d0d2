"""The thousandth run behaves like the first: it leaves nothing behind. `make soak` does 1,000 runs, `make test` 24.

Core's own history of prompts is cleared after each run: it keeps every prompt up to the ten-thousandth.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from highwater.tests.comfyui.conftest import DEVICE_BYTES, watermark
from highwater.tests.comfyui.graphs import Graph, Link, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostProcess
from highwater.tests.soak import MOST_BYTES_PER_RUN, bytes_per_run, differences, keep_row

MIB = 1 << 20
NUM_RUNS = int(os.environ.get("HIGHWATER_SOAK_COMFYUI_RUNS", "24"))
IS_SAMPLE = NUM_RUNS < 100
NUM_SEEDS = 3
# As in the head of the table (`tests/soak.py`).
RECORD_ENTRIES = 300
# The models have 8, 5, 5 and 8 MB.
ROOM_BYTES = 11 * MIB


def flux(graph: Graph) -> Link:
    loaders = Loaders()
    latent = sample_flux(graph, loaders.diffusion_model(graph))
    return graph.add("VAEDecode", samples=latent, vae=loaders.vae(graph))


def wan(graph: Graph) -> Link:
    model = Loaders().diffusion_model(graph, "tiny_wan.safetensors")
    positive, negative = (graph.conditioning(number, width=4096) for number in (1, 2))
    latent = graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=5, batch_size=1)
    return graph.sampler(model, positive, negative, latent, cfg=3.0)


def patched_flux(graph: Graph) -> Link:
    return sample_flux(graph, lora(graph, Loaders().diffusion_model(graph, "other_flux.safetensors"), 1.0))


WORKFLOWS: tuple[Callable[[Graph], Link], ...] = (flux, wan, patched_flux)


def run(host: HostProcess, turn: int) -> torch.Tensor:
    """Run one of the workflows; what it loads is dropped as the next one begins, and its weights are kept."""
    workflow, seed = WORKFLOWS[turn % len(WORKFLOWS)], turn // len(WORKFLOWS) % NUM_SEEDS
    graph = Graph()
    graph.keep(workflow(graph))
    for node in graph.nodes.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["seed"] = seed
    (tensor,) = host.run(graph.nodes).kept().values()
    host.post("/history", {"clear": True})
    return tensor


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_runs_leave_nothing_behind(start_gpu_host: Callable[..., HostProcess]) -> None:
    counted = (12, 24) if IS_SAMPLE else (27, NUM_RUNS // 9 * 9)
    runs: list[dict[str, Any]] = []
    with start_gpu_host() as host, watermark(host, DEVICE_BYTES - ROOM_BYTES, DEVICE_BYTES - ROOM_BYTES):
        host.post("/highwater_test/shorten_record", {"num_entries": RECORD_ENTRIES})
        first: dict[int, torch.Tensor] = {}
        for turn in range(NUM_RUNS):
            tensor = run(host, turn)
            assert torch.equal(first.setdefault(turn % (len(WORKFLOWS) * NUM_SEEDS), tensor), tensor), turn
            told = host.get(f"/highwater_test/held{'?count=1' * (turn + 1 in counted)}")
            devices = host.ask_devices("read")
            told["device"] = devices["devices"][0]["used_bytes"]
            told["pinned"] = devices["pinned"]["used_bytes"] + devices["pinned"]["registered_bytes"]
            if turn + 1 in counted:  # a large answer is memory, too
                told["components"] = sorted(part["id"] for part in host.part("components"))
                # None of the last three found its model on the device.
                assert all(run["bytes_moved"] > MIB for run in host.part("runs")[-len(WORKFLOWS) :])
            runs.append(told)
        log = host.log()
    before, after = (runs[turn - 1] for turn in counted)
    assert before["components"] == after["components"]
    assert (before["device"], before["pinned"]) == (after["device"], after["pinned"]), log[-2000:]
    # The host's own threads and files are its own affair.
    ours = [{k: n for k, n in told["held"].items() if k not in ("threads", "files")} for told in (before, after)]
    assert any(name.startswith(".memory") for name in ours[0]) and differences(*ours) == {}
    if IS_SAMPLE:
        return
    measured = runs[NUM_RUNS // 4 :]
    cycle = len(WORKFLOWS) * NUM_SEEDS
    keep_row("ComfyUI", runs, measured, cycle)
    for name in ("rss", "pinned", "device"):
        assert bytes_per_run([told[name] for told in measured], cycle) < MOST_BYTES_PER_RUN, name
