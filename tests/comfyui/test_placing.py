"""Placements in the real host: they hold for models of every loader, with dynamic VRAM and without, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    sd_conditioning,
)
from highwater.tests.comfyui.host_process import HostProcess, PromptResult
from highwater.tests.comfyui.test_equal import computes_at_once

pytestmark = pytest.mark.slow(one_in=3)

MIB = 1 << 20
KINDS = {"diffusion": "model", "text": "clip", "vae": "vae"}
# What a placement says, and on which devices it puts a model.
PLACES = {"gpu:1": ["gpu:1"], "cuda:1": ["gpu:1"], "gpu:0&gpu:1": ["gpu:0", "gpu:1"], "gpu:1&gpu:0": ["gpu:1", "gpu:0"]}


def told(result: PromptResult) -> str:
    return " | ".join(line for output in result.outputs.values() for line in output.get("text", []))


def where(host: HostProcess, kind: str) -> dict[str, int]:
    """The bytes on each GPU of the one model of a kind that is in effect."""
    (found,) = (part for part in host.part("components") if part["kind"] == kind and part["in_effect"])
    return {device: num_bytes for device, num_bytes in found["tiers"].items() if device.startswith("gpu:")}


def used_bytes(host: HostProcess) -> list[int]:
    return [device["used_bytes"] for device in host.ask_devices("read")["devices"]]


# -- diffusion models of every loader

Load = Callable[[Graph, str], Link]


def managed(graph: Graph, model: Link, placement: str) -> Link:
    if not placement:
        return model
    return graph.add("HighwaterManageModel", model=model, **Loaders(placement=placement).request)


def from_ours(graph: Graph, placement: str) -> Link:
    return (Loaders(placement=placement) if placement else CORE).diffusion_model(graph)


def from_core(graph: Graph, placement: str) -> Link:
    return managed(graph, CORE.diffusion_model(graph), placement)


def from_core_with_lora(graph: Graph, placement: str) -> Link:
    """The LoRA is on the model before the Manage node."""
    return managed(graph, lora(graph, CORE.diffusion_model(graph), 0.5, "other_flux_lora.safetensors"), placement)


def from_core_in_eight_bits(graph: Graph, placement: str) -> Link:
    return managed(graph, CORE.diffusion_model(graph, "tiny_flux_fp8.safetensors"), placement)


def from_gguf(graph: Graph, placement: str) -> Link:
    return managed(graph, graph.add("TestGGUFModel", unet_name="tiny_flux.safetensors"), placement)


LOADERS: dict[str, Load] = {
    load.__name__: load for load in (from_ours, from_core, from_core_with_lora, from_core_in_eight_bits, from_gguf)
}


def sample(host: HostProcess, load: Load, placement: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Sample with a LoRA, and without: what the nodes say, and the latents."""
    graph = Graph()
    model = load(graph, placement)
    graph.keep(sample_flux(graph, lora(graph, model, 1.0)), "patched")
    graph.keep(sample_flux(graph, model), "plain")
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    return told(result), {name: result.kept(name)["value.samples"] for name in ("patched", "plain")}


@pytest.fixture(scope="module")
def expected() -> Callable[[HostProcess, str], Mapping[str, torch.Tensor]]:
    """What a loader's model gives where it came from, without us."""
    known: dict[tuple[int, str], Mapping[str, torch.Tensor]] = {}

    def find(host: HostProcess, loader: str) -> Mapping[str, torch.Tensor]:
        if (host.port, loader) not in known:
            host.forget()
            known[host.port, loader] = sample(host, LOADERS[loader], "")[1]
            host.forget()
        return known[host.port, loader]

    return find


def check_sample(host: HostProcess, loader: str, placement: str, wanted: Mapping[str, torch.Tensor]) -> str:
    host.forget()
    said, actual = sample(host, LOADERS[loader], placement)
    for name, tensor in wanted.items():
        assert torch.equal(actual[name], tensor), name
    assert "not managed" not in said and "ignored" not in said
    bytes_by_device = where(host, "diffusion")
    assert {*bytes_by_device} == {*PLACES[placement]} and all(bytes_by_device.values()), bytes_by_device
    host.forget()
    return said


# `test_equal` has our loader on every place without dynamic VRAM.
DIFFUSION = [
    ("from_ours", "cuda:1"),
    ("from_core", "gpu:1"),
    ("from_core", "gpu:0&gpu:1"),
    ("from_core_with_lora", "gpu:1&gpu:0"),
    ("from_core_in_eight_bits", "gpu:0&gpu:1"),
    ("from_gguf", "gpu:1"),
    ("from_gguf", "gpu:0&gpu:1"),
    ("from_gguf", "gpu:1&gpu:0"),
]


@pytest.mark.parametrize(("loader", "placement"), DIFFUSION)
def test_a_diffusion_model(gpu_host: HostProcess, expected: Callable, loader: str, placement: str) -> None:
    check_sample(gpu_host, loader, placement, expected(gpu_host, loader))


@pytest.mark.parametrize(("loader", "placement"), DIFFUSION)
def test_a_diffusion_model_with_dynamic_vram(
    dynamic_host: HostProcess, gpu_host: HostProcess, expected: Callable, loader: str, placement: str
) -> None:
    """What dynamic VRAM cannot do is ours, and the node says why; core's dynamic models add a LoRA in another way."""
    is_dynamic = loader == "from_ours" and len(PLACES[placement]) == 1
    wanted = expected(dynamic_host if is_dynamic else gpu_host, loader)
    said = check_sample(dynamic_host, loader, placement, wanted)
    assert ("engine blocks: " in said) == (not is_dynamic)


@pytest.mark.parametrize(
    ("first", "second", "streams"), [("5MiB", "4MiB", False), ("4MiB", "3MiB", True)], ids=["resident", "streamed"]
)
def test_a_model_larger_than_each_of_two_unequal_budgets_with_a_lora(
    gpu_host: HostProcess, first: str, second: str, streams: bool
) -> None:
    """Its 7.8 MiB are on both devices, and its results are those of core on one."""

    def latent(loaders: Loaders) -> torch.Tensor:
        gpu_host.forget()
        graph = Graph()
        graph.keep(sample_flux(graph, lora(graph, loaders.diffusion_model(graph), 1.0), cfg=3.0))
        (found,) = gpu_host.run(graph.nodes).kept().values()
        return found

    wanted = latent(CORE if streams else CORE_IN_HALVES)  # streamed blocks are fetched once: both halves in one call
    got = latent(Loaders(placement="gpu:0&gpu:1", profile=f"gpu:0={first},gpu:1={second}"))
    assert torch.equal(got, wanted)
    held = where(gpu_host, "diffusion")
    assert {*held} == {"gpu:0", "gpu:1"} and all(held.values())
    (plan,) = (slot["plan"] for slot in gpu_host.part("components") if slot["name"].startswith("tiny_flux"))
    assert any(share["streamed_blocks"] for share in plan["shares"]) == streams


# -- the parts of a checkpoint

PARTS = {"diffusion": "gpu:0&gpu:1", "text": "gpu:1", "vae": "gpu:1"}
PART_PLACES = {"diffusion": {"gpu:0", "gpu:1"}, "text": {"gpu:1"}, "vae": {"gpu:1"}}


def parts_by_nodes(graph: Graph) -> tuple[Link, Link, Link]:
    """Core's loader, and a Manage node for each part."""
    parts = CORE.checkpoint(graph)
    return tuple(  # type: ignore[return-value]
        graph.add(f"HighwaterManage{node}", **{name: part}, **Loaders(placement=PARTS[kind]).request)
        for (kind, name), node, part in zip(KINDS.items(), ("Model", "CLIP", "VAE"), parts, strict=True)
    )


def parts_by_text(graph: Graph) -> tuple[Link, Link, Link]:
    placement = ",".join(f"{kind}={place}" for kind, place in PARTS.items())
    return Loaders(placement=placement).checkpoint(graph)


def make_image(host: HostProcess, load: Callable[[Graph], tuple[Link, Link, Link]]) -> tuple[str, torch.Tensor]:
    graph = Graph()
    model, clip, vae = load(graph)
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    latent = graph.sampler(model, *sd_conditioning(graph, clip), latent, cfg=3.0, steps=1)
    graph.keep(graph.add("VAEDecode", samples=latent, vae=vae))
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    return told(result), next(iter(result.kept().values()))


@pytest.mark.parametrize("load", [parts_by_nodes, parts_by_text])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_each_part_of_a_checkpoint_on_its_own_devices(
    gpu_host: HostProcess, request: pytest.FixtureRequest, kind: str, load: Callable
) -> None:
    host = gpu_host if kind == "static" else request.getfixturevalue("dynamic_host")
    gpu_host.forget()
    _, wanted = make_image(gpu_host, CORE.checkpoint)
    host.forget()
    said, actual = make_image(host, load)
    assert torch.equal(actual, wanted)
    assert "not managed" not in said and "ignored" not in said
    for part, devices in PART_PLACES.items():
        assert {*where(host, part)} == devices, part
    host.forget()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_part_without_a_placement_is_where_comfyui_chooses(
    gpu_host: HostProcess, request: pytest.FixtureRequest, kind: str
) -> None:
    host = gpu_host if kind == "static" else request.getfixturevalue("dynamic_host")
    host.forget()
    _, wanted = make_image(host, CORE.checkpoint)
    host.forget()
    _, actual = make_image(host, lambda graph: Loaders(placement="text=gpu:1").checkpoint(graph))
    assert torch.equal(actual, wanted)
    assert [{*where(host, part)} for part in KINDS] == [{"gpu:0"}, {"gpu:1"}, {"gpu:0"}]
    engines = {part["engine"] for part in host.part("components")}
    assert engines == ({"blocks"} if kind == "static" else {"dynamic"})
    host.forget()


# -- text encoders, VAEs, ControlNets


def encode(graph: Graph, placement: str, kind: str) -> Link:
    loaders = Loaders(kind=kind, placement=placement)
    clip = loaders.text_encoder(graph)
    return graph.add("CLIPTextEncode", text="a lighthouse at (high:1.2) water", clip=clip)


def encode_gguf(graph: Graph, placement: str, kind: str) -> Link:
    clip = graph.add("TestGGUFText", clip_name="clip_l.safetensors")
    if kind != "core":
        clip = graph.add("HighwaterManageCLIP", clip=clip, **Loaders(placement=placement).request)
    return graph.add("CLIPTextEncode", text="a lighthouse", clip=clip)


def decode(graph: Graph, placement: str, kind: str) -> Link:
    vae = Loaders(kind=kind, placement=placement).vae(graph, "autoencoder.safetensors")
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    return graph.add("VAEDecode", samples=graph.add("VAEEncode", pixels=image, vae=vae), vae=vae)


OTHERS = {"text": encode, "gguf text": encode_gguf, "vae": decode}


OTHER_CASES = [
    ("text", "ours", "gpu:1"),
    ("text", "managed", "gpu:1&gpu:0"),
    ("gguf text", "managed", "gpu:1"),
    ("gguf text", "managed", "gpu:0&gpu:1"),
    ("vae", "ours", "gpu:1"),
    ("vae", "managed", "gpu:1"),
]


@pytest.mark.parametrize(("part", "kind", "placement"), OTHER_CASES)
@pytest.mark.parametrize("memory", ["static", "dynamic"])
def test_a_text_encoder_or_vae(
    gpu_host: HostProcess, request: pytest.FixtureRequest, memory: str, part: str, kind: str, placement: str
) -> None:
    """What dynamic VRAM cannot do computes as static models do, which core's dynamic text encoders differ from."""
    host = gpu_host if memory == "static" else request.getfixturevalue("dynamic_host")
    is_dynamic = kind == "ours" and memory == "dynamic"

    def run(host: HostProcess, kind: str) -> tuple[str, dict[str, torch.Tensor]]:
        graph = Graph()
        graph.keep(OTHERS[part](graph, placement, kind))
        result = host.run(graph.nodes)
        assert result.outcome == "success", result.brief_error
        return told(result), result.kept()

    source = host if is_dynamic or part != "text" else gpu_host
    source.forget()
    _, wanted = run(source, "core")
    host.forget()
    said, actual = run(host, kind)
    for name, tensor in wanted.items():
        assert torch.equal(actual[name], tensor), name
    assert "not managed" not in said and "ignored" not in said
    assert {*where(host, part.split()[-1])} == {*PLACES[placement]}
    host.forget()


def guided(host: HostProcess, load: Loaders, guides: Loaders) -> PromptResult:
    graph = Graph()
    model, clip, _ = load.checkpoint(graph)
    positive, negative = sd_conditioning(graph, clip)
    image = graph.add("EmptyImage", width=32, height=32, batch_size=1, color=0x336699)
    node, _ = graph.add(
        "ControlNetApplyAdvanced", positive=positive, negative=negative, control_net=guides.controlnet(graph),
        image=image, strength=1.0, start_percent=0.0, end_percent=1.0,
    )  # fmt: skip
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    graph.keep(graph.sampler(model, [node, 0], [node, 1], latent, cfg=3.0, steps=1))
    return host.run(graph.nodes)


@pytest.mark.parametrize("placement", ["gpu:1", "gpu:1&gpu:0"])
@pytest.mark.parametrize("memory", ["static", "dynamic"])
def test_our_controlnet_follows_the_model_that_it_guides(
    gpu_host: HostProcess, request: pytest.FixtureRequest, memory: str, placement: str
) -> None:
    """Core would send it to its default device, and sample without it."""
    host = gpu_host if memory == "static" else request.getfixturevalue("dynamic_host")
    host.forget()
    found = []
    for _ in range(2):
        result = guided(host, Loaders(kind="managed", placement=placement), Loaders())
        assert result.outcome == "success", result.brief_error
        found.append(result.kept()["value.samples"])
    core = CORE_IN_HALVES if computes_at_once(host) else CORE
    assert {*where(host, "diffusion")} == {*PLACES[placement]}
    assert {*where(host, "control")} == {PLACES[placement][0]}
    host.forget()
    gpu_host.forget()
    wanted = guided(gpu_host, core, CORE).kept()["value.samples"]
    assert all(torch.equal(each, wanted) for each in found)


@pytest.mark.expects_errors
def test_cores_dynamic_controlnet_is_refused_elsewhere(dynamic_host: HostProcess) -> None:
    """The same of a static one is in `test_guides`."""
    dynamic_host.forget()
    result = guided(dynamic_host, Loaders(kind="managed", placement="gpu:1"), CORE)
    assert result.outcome == "error"
    assert "load it with Highwater's Load ControlNet, or set the model's placement to gpu:0" in result.error
    dynamic_host.forget()


@pytest.mark.expects_errors
def test_a_dynamic_controlnet_stays_where_it_was_loaded_and_says_so(dynamic_host: HostProcess) -> None:
    dynamic_host.forget()
    assert guided(dynamic_host, Loaders(kind="managed", placement="gpu:1"), Loaders()).outcome == "success"
    result = guided(dynamic_host, Loaders(kind="managed", placement="gpu:0"), Loaders())
    assert result.outcome == "error"
    assert "set the engine of its Load ControlNet to blocks, which follows every model" in result.error
    blocks = Loaders(engine="blocks")
    for placement in ("gpu:1", "gpu:0"):
        result = guided(dynamic_host, Loaders(kind="managed", placement=placement), blocks)
        assert result.outcome == "success", result.brief_error
    dynamic_host.forget()


def test_the_host_tells_what_selects_its_devices(gpu_host: HostProcess) -> None:
    told = gpu_host.get("/highwater/devices")["findings"]
    assert [finding["text"] for finding in told] == ["CUDA_VISIBLE_DEVICES='' selects the devices that torch sees"]
    assert all(finding in gpu_host.get("/highwater/doctor")["findings"] for finding in told)
    assert "no run boundaries" not in gpu_host.log()


# -- what cannot be


def test_a_device_that_is_not_here_is_told_and_another_used(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    graph = Graph()
    graph.keep(sample_flux(graph, from_ours(graph, "gpu:0&gpu:7")))
    result = gpu_host.run(graph.nodes)
    assert result.outcome == "success"
    assert "this machine has no gpu:7, so default is used" in told(result)
    gpu_host.forget()
    said, _ = make_image(gpu_host, lambda graph: Loaders(placement="text=gpu:7,vae=gpu:1").checkpoint(graph))
    assert "this machine has no gpu:7, so what names it is left out" in said
    assert [{*where(gpu_host, part)} for part in KINDS] == [{"gpu:0"}, {"gpu:0"}, {"gpu:1"}]
    gpu_host.forget()


@pytest.mark.parametrize("placement", ["gpu:1", "gpu:0&gpu:1"])
def test_a_model_that_its_pack_moves_says_that_the_placement_is_not_in_effect(
    gpu_host: HostProcess, placement: str
) -> None:
    gpu_host.forget()
    graph = Graph()
    model = graph.add("TestNunchakuModel", unet_name="tiny_flux.safetensors", kind="python")
    graph.keep(sample_flux(graph, managed(graph, model, placement)))
    result = gpu_host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    (line,) = [line for output in result.outputs.values() for line in output.get("text", []) if "not managed" in line]
    assert f"; placement {placement} is not in effect: it computes on gpu:0; choose another device in its own" in line
    gpu_host.forget()
