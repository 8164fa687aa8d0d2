"""The Keep and Release nodes in ComfyUI: our blocks, core's dynamic VRAM, and what core moves by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptResult

MIB = 1 << 20
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


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_kept_model_stays_on_its_device_across_prompts_with_the_cache_that_keeps_results(
    start_gpu_host: Callable[..., HostProcess], is_kept: bool
) -> None:
    """Room for two of three models that take turns: of the two idle ones the kept one stays, else the one used last."""
    names = ("tiny_flux", "other_flux", "tiny_flux_fp8")

    def sample(host: HostProcess, name: str, *, keep: bool = False) -> torch.Tensor:
        graph = Graph()
        model = Loaders().diffusion_model(graph, f"{name}.safetensors")
        if keep:
            model = graph.add("HighwaterKeep", model=model, keep=True, at_most="unlimited")
        graph.keep(sample_flux(graph, model))
        return host.run(graph.nodes).kept()["value.samples"]

    with start_gpu_host(arguments=["--cache-lru", "100"]) as host:
        graph = Graph()
        graph.add("HighwaterWatermark", device="*", low="0", high="0")
        graph.add("TestOccupy", device=0, free_bytes=int(0.8 * (1 << 30)) + 18 * MIB, run=1)
        assert host.run(graph.nodes).outcome == "success"
        first = sample(host, names[0], keep=is_kept)
        for name in names[1:]:
            sample(host, name)
        loaded = {part["name"] for part in host.part("components") if part["tiers"].get("gpu:0", 0) > 7 * MIB}
        assert (names[0] in loaded) == is_kept
        begin_s = host.last_event_s()
        assert torch.equal(sample(host, names[0]), first)
        loads = [event["component"] for event in host.events_after(begin_s) if event["kind"] == "load"]
        assert bool(loads) != is_kept


def encode_and_sample(host: HostProcess, profile: str) -> torch.Tensor:
    """Encode two texts, then sample another model; the samples."""
    graph = Graph()
    loaders = Loaders(profile=profile)
    clip = loaders.text_encoder(graph)
    texts = [graph.add("CLIPTextEncode", clip=clip, text=text) for text in ("a fox", "a wolf")]
    for number, text in enumerate(texts):
        graph.keep(text, name=f"text{number}")
    sampled = sample_flux(graph, loaders.diffusion_model(graph))
    graph.keep(sampled)
    return host.run(graph.nodes).kept()["value.samples"]


def on_device(host: HostProcess) -> set[str]:
    return {part["kind"] for part in host.part("components") if part["tiers"].get("gpu:0")}


@pytest.mark.parametrize("profile, left", [("auto", {"text", "diffusion"}), ("unload=text", {"diffusion"}),
                                           ("auto,unload=all", set())])  # fmt: skip
def test_a_model_leaves_after_use_where_its_profile_says_so(
    gpu_host: HostProcess, profile: str, left: set[str]
) -> None:
    gpu_host.forget()
    begin_s = gpu_host.last_event_s()
    first = encode_and_sample(gpu_host, profile)
    assert on_device(gpu_host) == left
    assert torch.equal(encode_and_sample(gpu_host, profile), first)
    assert on_device(gpu_host) == left
    reasons = [event["reason"] for event in gpu_host.events_after(begin_s) if event["kind"] == "evict"]
    assert any("its profile unloads it after use" in reason for reason in reasons) == (profile != "auto")
