"""The Limits node in ComfyUI: its limits count again whenever its workflow runs, and move models between runs only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from highwater.tests.comfyui.graphs import Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

OFF = {"keep_loaded": None, "idle_s": None}


@pytest.fixture
def unlimited_host(gpu_host: HostProcess) -> Iterator[HostProcess]:
    gpu_host.forget()
    yield gpu_host
    assert gpu_host.post("/highwater/limits", {"keep_loaded": None, "idle": None}) == OFF


def sample(host: HostProcess, max_loaded: int, idle_minutes: float) -> torch.Tensor:
    """Sample with two models under limits; returns what both made."""
    graph = Graph()
    graph.add("HighwaterLimits", max_loaded=max_loaded, idle_minutes=idle_minutes)
    for name in ("tiny_flux", "other_flux"):
        model = Loaders(engine="blocks").diffusion_model(graph, f"{name}.safetensors")
        kept = sample_flux(graph, model)
        graph.add("TestHold", value=kept)
    graph.keep(kept)
    return host.run(graph.nodes).kept()["value.samples"]


def num_loaded(host: HostProcess) -> int:
    return sum(bool(component["tiers"].get("gpu:0")) for component in host.part("components"))


def test_the_limits_count_whenever_the_workflow_runs(unlimited_host: HostProcess) -> None:
    host = unlimited_host
    first = sample(host, 0, 0.0)
    assert host.post("/highwater/limits") == OFF and num_loaded(host) == 2
    for _ in range(2):  # the second time with the same words, after others were set
        assert torch.equal(sample(host, 1, 90.0), first)
        assert host.post("/highwater/limits") == {"keep_loaded": 1, "idle_s": 5400.0}
        assert num_loaded(host) == 1
        host.post("/highwater/limits", {"keep_loaded": None, "idle": None})
    reasons = [event["reason"] for event in host.part("events") if event["kind"] == "evict"]
    assert any("at most 1 component stays loaded" in reason for reason in reasons)
