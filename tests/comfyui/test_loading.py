"""What the loaders and Manage nodes make of files and models that are not what they like best."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Link, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptResult


def told(result: PromptResult) -> list[str]:
    return [line for output in result.outputs.values() for line in output.get("text", [])]


@pytest.mark.parametrize("kind", ["weights", "patcher"])
def test_a_model_in_another_packs_format_is_left_to_it(gpu_host: HostProcess, kind: str) -> None:
    gpu_host.forget()
    graph = Graph()
    foreign = graph.add("TestForeign", model=CORE.diffusion_model(graph, "other_flux.safetensors"), kind=kind)
    managed = graph.add(
        "HighwaterManageModel", model=foreign, profile="4MiB", precision="as stored", placement="default"
    )
    graph.keep(sample_flux(graph, managed))
    graph.keep(sample_flux(graph, foreign), "kept-foreign")
    result = gpu_host.run(graph.nodes)
    name = "PackedTensor" if kind == "weights" else "PackedPatcher"
    assert any("not managed" in line and name in line for line in told(result))
    assert torch.equal(result.kept()["value.samples"], result.kept("kept-foreign")["value.samples"])
    assert gpu_host.part("components") == []
    gpu_host.forget()


def test_a_checkpoint_of_a_diffusion_model_alone(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    graph = Graph()
    node_id, _ = graph.add("HighwaterLoadCheckpoint", ckpt_name="only_sd.safetensors", **Loaders().request)
    graph.add("TestHold", value=[node_id, 0])
    result = gpu_host.run(graph.nodes)
    assert result.outcome == "success"
    for part in ("text encoder", "VAE"):
        assert any(f"only_sd.safetensors contains no {part}" in line for line in told(result))


class WithOurControlNet(Loaders):
    def controlnet(self, graph: Graph, name: str = "shallow_sd_control.safetensors") -> Link:
        return Loaders(placement="cpu").controlnet(graph, name)


def test_a_controlnet_goes_where_the_sampler_is(gpu_host: HostProcess, reference: Callable, ours: Callable) -> None:
    actual = ours(gpu_host, "controlnet", WithOurControlNet(kind="core"))
    for name, expected in reference(gpu_host, "controlnet").items():
        assert torch.equal(actual[name], expected)


def test_the_samplers_bar_shows_a_model_that_is_packed_and_then_loaded(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    graph = Graph()
    model = Loaders().diffusion_model(graph)
    graph.keep(sample_flux(graph, model))
    sampler = next(node for node, found in graph.nodes.items() if found["class_type"] == "KSampler")
    num_messages = len(gpu_host.messages)
    assert gpu_host.run(graph.nodes).outcome == "success"
    shown = [message["data"] for message in gpu_host.messages[num_messages:] if message["type"] == "progress"]
    in_bytes = [(step["value"], step["max"]) for step in shown if step["node"] == sampler and step["max"] > 1000]
    full = [total for done, total in in_bytes if done == total]
    assert len(full) == 2  # core passes on the last step of each, and of the others what its throttle lets through
    assert all(total > 8_000_000 for total in full)
    gpu_host.forget()
