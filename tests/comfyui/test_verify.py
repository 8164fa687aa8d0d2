"""The Verify node: managed models beside core's own load of them in the real host."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Link, Loaders, lora
from highwater.tests.comfyui.host_process import HostProcess, PromptResult

ON_GPUS = {
    "resident": Loaders(),
    "streamed": Loaders(profile="4MiB"),
    "split": Loaders(placement="gpu:0&gpu:1"),
    "split and streamed": Loaders(placement="gpu:0&gpu:1", profile="gpu:0=4MiB,gpu:1=3MiB"),
    "managed and streamed": Loaders(kind="managed", profile="4MiB"),
    "eight bits, streamed": Loaders(precision="fp8 scaled", profile="3MiB"),
}
seeds = itertools.count(100)


@dataclass
class Verified:
    result: PromptResult
    report: list[str]


def run(host: HostProcess, graph: Graph, **inputs: object) -> Verified:
    """Verify what is linked, and go on with the model that comes out; returns what the node says."""
    node = graph.add("HighwaterVerify", **{"text": "a lighthouse", "cfg": 3.0, "seed": next(seeds)} | inputs)
    result = host.run(graph.nodes)
    return Verified(result, result.outputs.get(node[0], {}).get("text", []))


def model_inputs(graph: Graph, model: Link) -> dict[str, Link]:
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    return {
        "model": model,
        "positive": graph.conditioning(1),
        "negative": graph.conditioning(2),
        "latent_image": latent,
    }


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("strength", [None, 0.7])
@pytest.mark.parametrize("mode", ON_GPUS)
def test_a_model_is_as_core_loads_it(gpu_host: HostProcess, mode: str, strength: float | None) -> None:
    graph = Graph()
    model = ON_GPUS[mode].diffusion_model(graph)
    if strength is not None:
        model = lora(graph, model, strength)
    found = run(gpu_host, graph, **model_inputs(graph, model))
    assert found.result.outcome == "success", found.result.error
    assert "equal, bit for bit" in found.report[0], found.report
    assert "ComfyUI's own load of the same file" in found.report[1]
    assert int(found.report[0].partition("(")[2].split()[0]) > 10  # blocks and what is around them
    assert any("weights in eight bits, decoded" in line for line in found.report) == ("eight" in mode)


def merged(graph: Graph, model: Link) -> Link:
    other = ON_GPUS["streamed"].diffusion_model(graph, "other_flux.safetensors")
    return graph.add("ModelMergeSimple", model1=model, model2=other, ratio=0.3)


def shifted(graph: Graph, model: Link) -> Link:
    return graph.add("ModelSamplingFlux", model=model, max_shift=1.5, base_shift=0.5, width=128, height=128)


def skipping(graph: Graph, model: Link) -> Link:
    settings = {"double_layers": "1", "single_layers": "2,3", "start_percent": 0.0, "end_percent": 1.0}
    return graph.add("SkipLayerGuidanceDiTSimple", model=model, **settings)


def elsewhere(graph: Graph, model: Link) -> Link:
    return graph.add("SelectModelDevice", model=model, device="gpu:1")


@pytest.mark.parametrize("change", [merged, shifted, skipping, elsewhere], ids=lambda change: change.__name__)
def test_a_model_that_other_nodes_changed(gpu_host: HostProcess, change: Callable[[Graph, Link], Link]) -> None:
    graph = Graph()
    model = change(graph, ON_GPUS["streamed"].diffusion_model(graph))
    found = run(gpu_host, graph, **model_inputs(graph, model))
    assert found.result.outcome == "success", found.result.error
    assert "equal, bit for bit" in found.report[0], found.report


def test_a_file_in_eight_bits(gpu_host: HostProcess) -> None:
    """Core keeps these as tensors of a class of its own."""
    graph = Graph()
    model = ON_GPUS["streamed"].diffusion_model(graph, "tiny_flux_fp8.safetensors")
    found = run(gpu_host, graph, **model_inputs(graph, model))
    assert "equal, bit for bit" in found.report[0], (found.report, found.result.error)


def test_a_model_that_a_controlnet_guides(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    graph = Graph()
    loaders = Loaders(profile="diffusion=30MiB,control=20MiB")
    model, clip, _ = loaders.checkpoint(graph)
    positive, negative = (graph.add("CLIPTextEncode", text=text, clip=clip) for text in ("high water", ""))
    guided, _ = graph.add(
        "ControlNetApplyAdvanced",
        positive=positive,
        negative=negative,
        control_net=loaders.controlnet(graph),
        image=graph.add("EmptyImage", width=32, height=32, batch_size=1, color=0x336699),
        strength=1.0,
        start_percent=0.0,
        end_percent=1.0,
    )
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    found = run(gpu_host, graph, model=model, positive=[guided, 0], negative=[guided, 1], latent_image=latent)
    assert found.result.outcome == "success", found.result.error
    assert "equal, bit for bit" in found.report[0], found.report


def test_a_model_on_the_cpu(cpu_host: HostProcess) -> None:
    graph = Graph()
    found = run(cpu_host, graph, **model_inputs(graph, Loaders().diffusion_model(graph)))
    assert "equal, bit for bit" in found.report[0], found.report


@pytest.mark.parametrize("profile", ["auto", "4MiB"])
def test_a_flipped_weight_is_found_and_its_block_named(gpu_host: HostProcess, profile: str) -> None:
    gpu_host.forget()
    graph = Graph()
    model = Loaders(profile=profile).diffusion_model(graph)
    flipped = graph.add("TestFlip", model=model, block="diffusion_model.single_blocks.2", run=next(seeds))
    found = run(gpu_host, graph, **model_inputs(graph, flipped))
    assert "DIFFERS, first at diffusion_model.single_blocks.2: " in found.report[0], found.report
    assert "in RAM differs from what ComfyUI reads from the file" in found.report[0]
    assert "diffusion_model.single_blocks.2: output" in found.report[1] or "max abs" in found.report[1]
    assert "from equal inputs" in found.report[1]
    gpu_host.forget()


@pytest.mark.parametrize("has_image", [True, False], ids=["image", "latent alone"])
def test_the_parts_of_a_checkpoint(gpu_host: HostProcess, has_image: bool) -> None:
    """Without an image the VAE decodes the latent of the model's step."""
    gpu_host.forget()
    graph = Graph()
    model, clip, vae = Loaders().checkpoint(graph)
    positive, negative = (graph.add("CLIPTextEncode", text=text, clip=clip) for text in ("high water", ""))
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    found = run(
        gpu_host,
        graph,
        model=model,
        positive=positive,
        negative=negative,
        latent_image=latent,
        clip=clip,
        vae=vae,
        **({"image": image} if has_image else {}),
    )
    assert found.result.outcome == "success", found.result.error
    verdicts = [line for line in found.report if not line.startswith(" ")]
    assert len(verdicts) == 3 and all("equal, bit for bit" in line for line in verdicts), found.report


def test_a_weight_that_the_file_lacks_is_none_that_differs(gpu_host: HostProcess) -> None:
    """Core leaves such a weight as the memory was: often zeros, in each of its loads."""
    gpu_host.forget()
    graph = Graph()
    key = "clip_l.transformer.text_projection.weight"
    _, clip, _ = Loaders().checkpoint(graph)
    found = run(gpu_host, graph, clip=graph.add("TestWrite", clip=clip, key=key))
    assert found.result.outcome == "success", found.result.error
    assert "equal, bit for bit" in found.report[0], found.report
    assert any("missing in the file" in line and key in line for line in found.report), found.report
    gpu_host.forget()


def test_a_text_encoder_and_a_vae_alone(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    graph = Graph()
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    clip = Loaders(profile="text=120MiB").text_encoder(graph)
    vae = Loaders(profile="vae=100MiB").vae(graph, "autoencoder.safetensors")
    found = run(gpu_host, graph, clip=clip, vae=vae, image=image)
    assert found.result.outcome == "success", found.result.error
    verdicts = [line for line in found.report if not line.startswith(" ")]
    assert len(verdicts) == 2 and all("equal, bit for bit" in line for line in verdicts), found.report


def test_what_is_loaded_and_what_is_sampled_is_as_before(gpu_host: HostProcess) -> None:
    """The model goes on to a sampler, before and after; nothing of core's copy stays."""
    gpu_host.forget()

    def sample(verified: bool) -> tuple[torch.Tensor, list[str]]:
        graph = Graph()
        model = lora(graph, ON_GPUS["streamed"].diffusion_model(graph), 0.5)
        inputs = model_inputs(graph, model)
        if verified:
            model = graph.add("HighwaterVerify", text="", cfg=3.0, seed=next(seeds), **inputs)
        graph.keep(graph.sampler(model, inputs["positive"], inputs["negative"], inputs["latent_image"], cfg=3.0))
        result = gpu_host.run(graph.nodes)
        return result.kept()["value.samples"], [one["id"] for one in gpu_host.part("components")]

    expected, components = sample(False)
    before = gpu_host.part("components")
    again, _ = sample(True)
    assert torch.equal(again, expected)
    assert [one["tiers"] for one in gpu_host.part("components")] == [one["tiers"] for one in before]
    once_more, after = sample(False)
    assert torch.equal(once_more, expected) and after == components


@pytest.mark.expects_errors
@pytest.mark.parametrize("what", ["unmanaged", "nothing", "no latent", "no image"])
def test_bad_input_is_one_line(gpu_host: HostProcess, what: str) -> None:
    graph = Graph()
    core = replace(CORE).diffusion_model(graph, "other_flux.safetensors")
    inputs: dict[str, Link] = {}
    words = "nothing to verify"
    if what == "unmanaged":
        inputs, words = model_inputs(graph, core), "Flux is not managed; connect the output of a Highwater loader"
    elif what == "no latent":
        inputs, words = {"model": core}, "connect both"
    elif what == "no image":
        inputs, words = {"vae": CORE.vae(graph)}, "vae needs image or latent_image"
    found = run(gpu_host, graph, **inputs)
    assert found.result.outcome == "error"
    assert words in found.result.error.splitlines()[0]


@pytest.mark.expects_errors
def test_an_interrupt_or_an_error_in_it_leaves_the_model_as_it_was(gpu_host: HostProcess) -> None:
    gpu_host.forget()

    def plain() -> torch.Tensor:
        graph = Graph()
        inputs = model_inputs(graph, ON_GPUS["streamed"].diffusion_model(graph))
        graph.keep(graph.sampler(inputs["model"], inputs["positive"], inputs["negative"], inputs["latent_image"]))
        return gpu_host.run(graph.nodes).kept()["value.samples"]

    expected = plain()
    for kind, call in itertools.product(("interrupt", "error", "out of memory"), (1, 2, 3)):
        graph = Graph()
        model = graph.add(
            "TestTrouble",
            model=ON_GPUS["streamed"].diffusion_model(graph),
            kind=kind,
            module="diffusion_model.single_blocks.1.linear2",
            call=call,
        )
        found = run(gpu_host, graph, **model_inputs(graph, model), cfg=1.0)
        if kind == "error" and call < 3:  # core's own load has no such error
            assert "fails, but not in the reference" in found.report[0] or "fails only when nothing" in found.report[0]
        else:
            assert found.result.outcome == ("interrupted" if kind == "interrupt" else "error")
        assert torch.equal(plain(), expected), (kind, call)


def test_an_old_host_verifies_too(old_host: HostProcess) -> None:
    graph = Graph()
    model = Loaders().diffusion_model(graph, "tiny_wan.safetensors")
    positive, negative = (graph.conditioning(seed, width=4096) for seed in (1, 2))
    latent = graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=5, batch_size=1)
    found = run(old_host, graph, model=model, positive=positive, negative=negative, latent_image=latent)
    assert "equal, bit for bit" in found.report[0], found.report
