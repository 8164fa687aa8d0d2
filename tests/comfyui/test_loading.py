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
        assert any(f"only_sd.safetensors holds no {part}" in line for line in told(result))


class WithOurControlNet(Loaders):
    def controlnet(self, graph: Graph, name: str = "shallow_sd_control.safetensors") -> Link:
        return Loaders(placement="cpu").controlnet(graph, name)


def test_a_controlnet_goes_where_the_sampler_is(gpu_host: HostProcess, reference: Callable, ours: Callable) -> None:
    actual = ours(gpu_host, "controlnet", WithOurControlNet(kind="core"))
    for name, expected in reference(gpu_host, "controlnet").items():
        assert torch.equal(actual[name], expected)
