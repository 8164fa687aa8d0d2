"""Models that another loader made: shown with size and place as not managed, and managed by the node's menu."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from highwater.tests.comfyui.graphs import CASES, Graph, Link, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostFiles, HostProcess
from highwater.tests.comfyui.page_script import PageScript

DEVICE_BYTES = 1844 << 20


def sample_checkpoint(graph: Graph) -> Link:
    model, clip, vae = Loaders(kind="core").checkpoint(graph)
    positive, negative = (graph.add("CLIPTextEncode", clip=clip, text=text) for text in ("a fox", ""))
    latent = graph.add("EmptyLatentImage", width=64, height=64, batch_size=1)
    return graph.add("VAEDecode", samples=graph.sampler(model, positive, negative, latent), vae=vae)


def test_the_menu_manages_models_of_other_loaders_in_both_renderers(
    host_files: HostFiles,
    models: Path,
    frontend_arguments: list[str],
    in_page: PageScript,
    tmp_path: Path,
) -> None:
    """About 60 s."""
    graph = Graph()
    image = sample_checkpoint(graph)
    graph.keep(image, "image")
    graph.add("HighwaterMemoryReport", after=image)  # the first node of ours in a prompt makes all models count
    graph.keep(sample_flux(graph, graph.add("TestGGUFModel", unet_name="tiny_flux.safetensors")))
    workflow = tmp_path / "workflow.json"
    workflow.write_text(json.dumps(graph.nodes))
    with HostProcess(host_files, models=models, total_bytes=[DEVICE_BYTES], arguments=frontend_arguments) as host:
        in_page.run("manage_menu.mjs", host, [workflow])


def test_models_of_other_loaders_are_reported_with_size_and_place(gpu_host: HostProcess) -> None:
    """Checkpoints, GGUF-like models and text encoders: what nobody manages is counted, and says so."""
    gpu_host.forget()
    graph = Graph()
    image = sample_checkpoint(graph)
    graph.keep(sample_flux(graph, graph.add("TestGGUFModel", unet_name="tiny_flux.safetensors")), "gguf")
    clip = graph.add("TestGGUFText", clip_name="clip_l.safetensors")
    graph.keep(graph.add("CLIPTextEncode", text="a fox", clip=clip), "text")
    graph.add("HighwaterMemoryReport", after=image)
    result = gpu_host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    parts = gpu_host.part("components")
    kinds = sorted(part["kind"] for part in parts)
    assert kinds == ["diffusion", "diffusion", "text", "text", "vae"]
    for part in parts:
        assert part["engine"] == "core" and part["plan"]["reasons"] == ["not managed: no node of Highwater manages it"]
        assert 0 < sum(part["tiers"].values()) <= part["total_bytes"] * 1.01
    assert any("gpu:0" in part["tiers"] for part in parts)
    gpu_host.forget()


@pytest.mark.parametrize("engine", ["core", "dynamic"])
def test_loaders_that_leave_no_files_name_with_their_model_show_it(engine: str, request: pytest.FixtureRequest) -> None:
    """One ControlNet, one CLIP vision model and one loader of each: what they hold can only be theirs."""
    graph = Graph()
    core = Loaders(kind="core")
    CASES["controlnet"](graph, core)
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    encoded = graph.add("CLIPVisionEncode", clip_vision=core.clip_vision(graph), image=image, crop="center")
    graph.keep(encoded, "vision")
    graph.add("HighwaterMemoryReport", after=encoded)

    def assert_shown(host: HostProcess) -> str:
        """Check both; returns the id of the ControlNet."""
        parts = {part["id"]: part for part in host.part("components")}
        rows = {graph.nodes[row["node_id"]]["class_type"]: row["components"] for row in host.part("loaders")}
        found = [parts[id] for name in ("ControlNetLoader", "CLIPVisionLoader") for id in rows[name]]
        assert [part["kind"] for part in found] == ["control", "vision"]
        assert all(part["engine"] == engine and part["last_use_s"] > 0 for part in found)
        assert sorted(rows["CheckpointLoaderSimple"]) == ["shallow_sd/clip", "shallow_sd/model"]
        return found[0]["id"]

    # A host of its own: its loaders must not know earlier runs.
    with request.getfixturevalue("start_gpu_host" if engine == "core" else "start_dynamic_host")() as host:
        result = host.run(graph.nodes)
        assert result.outcome == "success", result.brief_error
        # What is asked of one makes the manager see all of them as models that core moves.
        host.post("/highwater/keep", {"component": assert_shown(host), "keep": True})
        assert_shown(host)


@pytest.mark.parametrize("engine", ["core", "dynamic"])
def test_each_of_several_loaders_shows_its_own_model(engine: str, request: pytest.FixtureRequest) -> None:
    """Two GGUF models and two ControlNets, called like their classes: each is on the badge of the node that read it."""
    graph = Graph()
    small = graph.add("TestGGUFModel", unet_name="tiny_flux.safetensors")
    large = graph.add("TestGGUFModel", unet_name="wide_flux.safetensors")
    graph.keep(sample_flux(graph, lora(graph, small, 1.0)), "small")
    latent = sample_flux(graph, large)
    graph.keep(latent, "large")

    def shown(host: HostProcess) -> list[list[str]]:
        rows = {row["node_id"]: row["components"] for row in host.part("loaders")}
        return [rows.get(link[0], []) for link in (small, large)]

    def assert_shown(host: HostProcess) -> str:
        """Check what both show; returns the id of the large model."""
        parts = {part["id"]: part for part in host.part("components")}
        (first,), (second,) = shown(host)
        assert parts[first]["total_bytes"] < 10e6 < 90e6 < parts[second]["total_bytes"]
        return second

    def run(host: HostProcess) -> None:
        result = host.run(graph.nodes)
        assert result.outcome == "success", result.brief_error

    with request.getfixturevalue("start_gpu_host" if engine == "core" else "start_dynamic_host")() as host:
        run(host)  # no node of ours: nobody looked
        graph.add("HighwaterMemoryReport", after=latent)
        run(host)
        assert shown(host) == [[], []], "the loaders' results are of the run before: nothing tells which is whose"
        host.forget()
        run(host)
        # What is asked of one makes the manager see it as a model that core moves.
        host.post("/highwater/keep", {"component": assert_shown(host), "keep": True})
        host.post("/highwater/keep", {"component": assert_shown(host), "keep": False})
        # A LoRA of another strength is a new result with the same model.
        loader = next(node for node in graph.nodes.values() if node["class_type"].startswith("LoraLoader"))
        loader["inputs"]["strength_model"] = 0.5
        run(host)
        assert_shown(host)


def test_models_of_other_loaders_are_kept_and_released_on_request(gpu_host: HostProcess) -> None:
    """What the buttons of the memory panel ask for; moving is refused, as the host chooses their device."""
    gpu_host.forget()
    graph = Graph()
    latent = sample_flux(graph, graph.add("TestGGUFModel", unet_name="tiny_flux.safetensors"))
    graph.keep(latent, "gguf")
    graph.add("HighwaterMemoryReport", after=latent)
    gpu_host.run(graph.nodes)

    def model() -> dict[str, Any]:
        (found,) = (part for part in gpu_host.part("components") if part["kind"] == "diffusion")
        return found

    loaded = model()
    assert loaded["engine"] == "core" and loaded["tiers"]["gpu:0"] > 0
    gpu_host.post("/highwater/keep", {"component": loaded["id"], "keep": True})
    assert model()["kept"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        gpu_host.post("/highwater/move", {"component": loaded["id"], "placement": "gpu:0"})
    assert "is moved by its host; choose its device in its loader" in json.load(refused.value)["error"]
    (released,) = gpu_host.post("/highwater/release", {"component": loaded["id"]})["released"]
    assert released["left_bytes"] == loaded["tiers"]["gpu:0"]
    assert not model()["tiers"].get("gpu:0")
