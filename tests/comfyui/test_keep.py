"""The Keep and Release nodes in ComfyUI: our blocks, core's dynamic VRAM, and what core moves by itself."""

from __future__ import annotations

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptResult

LOADERS = {"blocks": Loaders(engine="blocks"), "core": CORE}


def sample_and_release(host: HostProcess, loaders: Loaders, *, keep: bool = True) -> PromptResult:
    graph = Graph()
    model = loaders.diffusion_model(graph)
    model = graph.add("HighwaterKeep", model=model, keep=keep, at_most="unlimited")
    sampled = sample_flux(graph, model)
    release = graph.add("HighwaterRelease", model=model, after=sampled)
    graph.add("TestHold", value=[release[0], 0])
    graph.keep([release[0], 1])
    return host.run(graph.nodes)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_released_model_leaves_a_static_host_and_comes_back_equal(gpu_host: HostProcess, kind: str) -> None:
    check(gpu_host, LOADERS[kind])


@pytest.mark.parametrize("kind", ["dynamic", "core"])
def test_a_released_model_leaves_dynamic_vram_and_comes_back_equal(dynamic_host: HostProcess, kind: str) -> None:
    check(dynamic_host, Loaders(engine="dynamic") if kind == "dynamic" else CORE)


def check(host: HostProcess, loaders: Loaders) -> None:
    host.forget()
    first, *others = [
        sample_and_release(host, loaders, keep=keep).kept()["value.samples"] for keep in (True, False, True)
    ]
    assert all(torch.equal(first, other) for other in others)
    events = host.part("events")
    released = [event for event in events if "released by a Release node" in event["reason"]]
    assert released and all(event["bytes"] > 0 for event in released)
    assert not any(component["tiers"].get("gpu:0") for component in host.part("components"))
