"""What the loaders and Manage nodes make of files and models that are not what they like best."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from highwater.tests.comfyui.graphs import CASES, CORE, Graph, Link, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptResult

pytestmark = pytest.mark.slow(one_in=3)


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
    (slot,) = gpu_host.part("components")
    assert slot["engine"] == "core" and not slot["in_effect"] and slot["tiers"]["gpu:0"] > 7_000_000
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


@pytest.mark.expects_errors
@pytest.mark.parametrize("kind", ["ours", "managed"])
@pytest.mark.parametrize("part", ["clip", "vae"])
def test_a_part_that_a_checkpoint_lacks_fails_with_cores_words(host: HostProcess, kind: str, part: str) -> None:
    """Where it is used, as behind core's own loader; what the file has works."""

    def run(loaders: Loaders) -> PromptResult:
        graph = Graph()
        model, clip, vae = loaders.checkpoint(graph, "only_sd.safetensors")
        if part == "clip":
            graph.keep(graph.add("CLIPTextEncode", text="a fox", clip=clip))
        else:
            latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
            positive, negative = (graph.conditioning(seed, width=768) for seed in (1, 2))
            latent = graph.sampler(model, positive, negative, latent, steps=1)
            graph.keep(graph.add("VAEDecode", samples=latent, vae=vae))
        return host.run(graph.nodes)

    expected, actual = (run(loaders) for loaders in (CORE, Loaders(kind=kind)))
    assert expected.outcome == actual.outcome == "error"
    assert actual.error.partition("\n  File")[0] == expected.error.partition("\n  File")[0]
    assert "is invalid: None" in actual.error
    host.forget()


@pytest.mark.parametrize("kind", ["ours", "managed"])
def test_the_parts_of_a_checkpoint_are_named_by_its_file(gpu_host: HostProcess, kind: str) -> None:
    gpu_host.forget()
    graph = Graph()
    CASES["checkpoint"](graph, Loaders(kind=kind))
    assert gpu_host.run(graph.nodes).outcome == "success"
    names = {component["id"] for component in gpu_host.part("components")}
    assert names == {f"shallow_sd/{part}" for part in ("model", "clip", "vae")}
    gpu_host.forget()


@pytest.mark.expects_errors
def test_a_budget_that_is_too_small_for_several_parts_is_told_at_once(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    graph = Graph()
    CASES["checkpoint"](graph, Loaders(profile="0.25MiB"))
    result = gpu_host.run(graph.nodes)
    assert result.outcome == "error"
    message = result.error.partition("\n  File")[0]
    for part in ("model", "clip", "vae"):
        assert f"shallow_sd/{part} needs" in message
    gpu_host.forget()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is mapped")
@pytest.mark.parametrize(
    "name", ["plain", "lora_at_1", "weight_hook", "merge", "text", "quantized", "autoencoder", "wan"]
)
def test_cores_own_models_rest_in_their_files_where_the_profile_says_so(
    gpu_host: HostProcess, reference: Callable, ours: Callable, name: str
) -> None:
    gpu_host.forget()
    expected, actual = reference(gpu_host, name), ours(gpu_host, name, Loaders(profile="auto,disk=all"))
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    plans = [part["plan"] for part in gpu_host.part("components") if part["engine"] == "blocks"]
    if name in ("text", "quantized", "wan"):  # converted as they are read, or no plain tensors
        told = [reason for plan in plans for reason in plan["reasons"]]
        assert any("tier disk is not available" in line or "no file has these" in line for line in told)
    else:
        assert any(plan["file_bytes"] > 0.9 * plan["weight_bytes"] for plan in plans)
    gpu_host.forget()


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
