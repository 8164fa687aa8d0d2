"""A split diffusion model computes the halves of a step on its devices at once: the same picture to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from highwater.tests.comfyui.graphs import (
    CORE,
    CORE_IN_HALVES,
    Graph,
    Link,
    Loaders,
    lora,
    sample_flux,
)
from highwater.tests.comfyui.host_process import HostProcess

SPLIT = Loaders(placement="gpu:0&gpu:1")


def said(host: HostProcess) -> list[str]:
    """Return what the event log says of micro-batches."""
    return [event["reason"] for event in host.part("events") if event["reason"].startswith("micro-batches")]


@pytest.mark.parametrize("case", ["guided", "two_prompts"])
def test_halves_at_once_are_what_core_computes_one_after_the_other_on_one_device(
    gpu_host: HostProcess, case: str, reference: Callable, ours: Callable
) -> None:
    expected = reference(gpu_host, case, CORE_IN_HALVES)
    gpu_host.forget()
    got = ours(gpu_host, case, SPLIT)
    assert got.keys() == expected.keys()
    assert all(got[name].equal(tensor) for name, tensor in expected.items())
    assert said(gpu_host)[-1] == "micro-batches: its devices compute the halves of a step at the same time"
    (plan,) = (slot["plan"] for slot in gpu_host.part("components") if slot["name"].startswith("tiny_flux"))
    assert "gpu:0&gpu:1/" in plan["placement"]
    assert any(reason.startswith("micro-batches: gpu:0 and gpu:1 compute") for reason in plan["reasons"])


@pytest.mark.parametrize(
    ("case", "loaders", "why"),
    [
        ("plain", SPLIT, "a step has one conditioning and one picture"),
        ("weight_hook", SPLIT, "conditionings have hooks that change weights"),
        (
            "guided",
            Loaders(placement="gpu:0&gpu:1", profile="gpu:0=4MiB,gpu:1=3MiB"),
            "blocks stream, and a second call would fetch them once more",
        ),
    ],
)
def test_what_cannot_be_halves_is_left_to_core(
    gpu_host: HostProcess, case: str, loaders: Loaders, why: str, reference: Callable, ours: Callable
) -> None:
    expected = reference(gpu_host, case)
    gpu_host.forget()
    got = ours(gpu_host, case, loaders)
    assert all(got[name].equal(tensor) for name, tensor in expected.items())
    assert said(gpu_host)[-1] == f"micro-batches: off: {why}"


# -- other packs' code in a step: at once, or in turn with a line, and never another picture

ON = "micro-batches: its devices compute the halves of a step at the same time"


def compare(host: HostProcess, build: Callable[[Graph, Loaders], Link], wanted: Loaders) -> str:
    """Run what a function builds with core's loader and with a split of ours, in one prompt; return what was said."""
    graph = Graph()
    for name, loaders in (("wanted", wanted), ("got", SPLIT)):
        graph.keep(build(graph, loaders), name)
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.error
    got = result.kept("got")
    assert all(torch.equal(got[name], tensor) for name, tensor in result.kept("wanted").items())
    return said(host)[-1]


def alongside_flux(kind: str) -> Callable[[Graph, Loaders], Link]:
    def build(graph: Graph, loaders: Loaders) -> Link:
        model = graph.add("TestAlongside", model=loaders.diffusion_model(graph), kind=kind)
        return sample_flux(graph, model, cfg=3.0, steps=3)

    return build


def sample_sd(*changes: dict[str, object], controlled: bool = False) -> Callable[[Graph, Loaders], Link]:
    """A U-Net behind nodes that change it, each with its inputs, and perhaps with a ControlNet."""

    def build(graph: Graph, loaders: Loaders) -> Link:
        model = loaders.diffusion_model(graph, "deeper_sd.safetensors")
        for inputs in changes:
            model = graph.add(model=model, **inputs)
        positive, negative = (graph.conditioning(seed, width=768) for seed in (1, 2))
        if controlled:
            positive = graph.add(
                "ControlNetApplyAdvanced",
                positive=positive,
                negative=negative,
                control_net=Loaders(kind=loaders.kind).controlnet(graph, "deeper_sd_control.safetensors"),
                image=graph.add("EmptyImage", width=32, height=32, batch_size=1, color=0x336699),
                strength=1.0,
                start_percent=0.0,
                end_percent=1.0,
            )
            negative = [positive[0], 1]
        latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
        return graph.sampler(model, positive, negative, latent, cfg=3.0, steps=1)

    return build


def guided_by_another(graph: Graph, loaders: Loaders) -> Link:
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    positive = graph.add("TestGuide", conditioning=graph.conditioning(1))
    return graph.sampler(loaders.diffusion_model(graph), positive, graph.conditioning(2), latent, cfg=3.0)


FEATURES = {"class_type": "TestAlongside", "kind": "features"}
CORES_FEATURES = {"class_type": "FreeU_V2", "b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}
PERTURBED = {"class_type": "TestAlongside", "kind": "perturbed"}
OFF = "micro-batches: off: another node "
PACKS: dict[str, tuple[Callable[[Graph, Loaders], Link], str]] = {
    "step cache": (alongside_flux("step_cache"), f"{OFF}wraps the model's calls"),
    "swapped forward": (alongside_flux("swapped_forward"), f"{OFF}wraps the model's calls"),
    "own calls": (alongside_flux("own_calls"), f"{OFF}wraps the model's calls"),
    "patched method": (alongside_flux("patched_method"), f"{OFF}has replaced Flux.forward_orig"),
    "attention": (alongside_flux("attention"), f"{OFF}patches it with attention.<locals>.override"),
    "layer hooks": (alongside_flux("layer_hooks"), f"{OFF}has hooks on its layers"),
    "injected": (alongside_flux("injected"), f"{OFF}injects modules"),
    "each step": (alongside_flux("each_step"), f"{OFF}is called in each step"),
    "guide": (guided_by_another, f"{OFF}guides it with Guide"),
    "features": (sample_sd(FEATURES), f"{OFF}patches it with features.<locals>.Scale"),
    "perturbed, beside core's features and guide": (sample_sd(CORES_FEATURES, PERTURBED, controlled=True), ON),
    "momentum": (alongside_flux("momentum"), ON),
    "whole sampling": (alongside_flux("whole_sampling"), ON),
}


@pytest.mark.parametrize("pack", PACKS)
def test_with_code_of_other_packs_the_picture_is_as_without_a_split(gpu_host: HostProcess, pack: str) -> None:
    build, expected = PACKS[pack]
    assert compare(gpu_host, build, CORE_IN_HALVES if expected == ON else CORE) == expected


# -- the pictures of a batch


def batch(graph: Graph, loaders: Loaders, *, per_picture: bool) -> Link:
    model = loaders.diffusion_model(graph)
    if loaders.kind == "core":
        model = graph.add("TestItemHalves", model=model)
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=3)
    positive = graph.conditioning(1)
    if per_picture:
        positive = graph.add("TestPerPicture", conditioning=positive, batch=3)
    return graph.sampler(model, positive, graph.conditioning(2), latent)


@pytest.mark.parametrize("per_picture", [False, True])
def test_the_pictures_of_a_batch_are_computed_in_two_halves(gpu_host: HostProcess, per_picture: bool) -> None:
    assert compare(gpu_host, lambda graph, loaders: batch(graph, loaders, per_picture=per_picture), CORE) == ON


def test_a_batch_whose_guide_has_parts_for_nobody_knows_whom_is_one_call(gpu_host: HostProcess) -> None:
    def build(graph: Graph, loaders: Loaders) -> Link:
        model = loaders.diffusion_model(graph)
        latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=4)
        positive = graph.add("TestPerPicture", conditioning=graph.conditioning(1), batch=2)
        return graph.sampler(model, positive, graph.conditioning(2), latent)

    assert compare(gpu_host, build, CORE).startswith("micro-batches: off: a step has one conditioning, ")


# -- weights that are not as they compute


def gguf(graph: Graph, loaders: Loaders) -> Link:
    model = graph.add("TestGGUFModel", unet_name="tiny_flux.safetensors")
    if loaders.kind == "core":
        model = graph.add("TestHalves", model=model)
    else:
        model = graph.add("HighwaterManageModel", model=model, **loaders.request)
    return sample_flux(graph, lora(graph, model, 1.0), cfg=3.0)


def test_packed_weights_of_another_pack_are_unpacked_in_each_half(gpu_host: HostProcess) -> None:
    assert compare(gpu_host, gguf, CORE) == ON


@pytest.mark.parametrize("precision", ["fp8 scaled", "int8"])
def test_encoded_weights_with_a_lora_compute_at_once(gpu_host: HostProcess, precision: str) -> None:
    graph = Graph()
    for name, placement in (("wanted", "gpu:0"), ("got", "gpu:0&gpu:1")):
        model = Loaders(placement=placement, precision=precision).diffusion_model(graph)
        if name == "wanted":
            model = graph.add("TestHalves", model=model)
        graph.keep(sample_flux(graph, lora(graph, model, 1.0), cfg=3.0), name)
    result = gpu_host.run(graph.nodes)
    assert result.outcome == "success", result.error
    assert torch.equal(result.kept("got")["value.samples"], result.kept("wanted")["value.samples"])
    assert said(gpu_host)[-1] == ON
