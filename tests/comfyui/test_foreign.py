"""Models of other packs, whose patchers are their own: stand-ins of ComfyUI-GGUF's and Nunchaku's classes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from highwater.tests.comfyui.graphs import Graph, Link, Loaders, lora, new_run, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptResult
from highwater.tests.comfyui.test_memory import occupy  # noqa: F401 - a fixture
from highwater.tests.comfyui.test_verify import model_inputs
from highwater.tests.comfyui.test_verify import run as run_verify

MIB = 1 << 20
REQUESTS = {
    "resident": {},
    "streamed": {"profile": "2MiB"},
    "split": {"placement": "gpu:0&gpu:1"},
}


def told(result: PromptResult) -> list[str]:
    return [line for output in result.outputs.values() for line in output.get("text", [])]


def gguf(graph: Graph, request: str | None, name: str = "tiny_flux.safetensors", **inputs: object) -> Link:
    """A model that the stand-in for a GGUF loader loads, behind Manage Model if anything is requested."""
    model = graph.add("TestGGUFModel", unet_name=name, **inputs)
    if request is None:
        return model
    return graph.add("HighwaterManageModel", model=model, **Loaders(**REQUESTS[request]).request)


def sample(host: HostProcess, request: str | None, *strengths: float, **inputs: object) -> list[torch.Tensor]:
    """Sample with one model, once with a LoRA of each strength (0: none); the model stays the same one."""
    graph = Graph()
    model = gguf(graph, request, **inputs)
    for number, strength in enumerate(strengths):
        patched = lora(graph, model, strength) if strength else model
        graph.keep(sample_flux(graph, patched), f"kept{number}")
    result = host.run(graph.nodes)
    assert not [line for line in told(result) if "not managed" in line]
    return [result.kept(f"kept{number}")["value.samples"] for number in range(len(strengths))]


STRENGTHS = (0, 1.0, 0.5, 0, 1.0)


@pytest.fixture(scope="module")
def expected(gpu_host: HostProcess) -> list[torch.Tensor]:
    """What the stand-in gives without us, with a LoRA of each strength."""
    gpu_host.forget()
    samples = sample(gpu_host, None, *STRENGTHS)
    assert not torch.equal(samples[0], samples[1]) and not torch.equal(samples[1], samples[2])
    return samples


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_gguf_model_is_managed_and_computes_as_before(
    gpu_host: HostProcess, expected: list[torch.Tensor], request_: str
) -> None:
    gpu_host.forget()
    for actual, wanted in zip(sample(gpu_host, request_, *STRENGTHS), expected, strict=True):
        assert torch.equal(actual, wanted)
    (slot,) = gpu_host.part("components")
    assert slot["in_effect"]
    if request_ == "streamed":
        assert any(share["streamed_blocks"] for share in slot["plan"]["shares"])
        assert slot["tiers"]["gpu:0"] <= 2 * MIB
    gpu_host.forget()


def test_a_lora_that_the_pack_keeps_on_the_device(gpu_host: HostProcess, expected: list[torch.Tensor]) -> None:
    gpu_host.forget()
    for actual, wanted in zip(
        sample(gpu_host, "streamed", *STRENGTHS[:3], patch_on_device=True), expected, strict=False
    ):
        assert torch.equal(actual, wanted)
    gpu_host.forget()


def test_a_gguf_text_encoder(gpu_host: HostProcess) -> None:
    def encode(profile: str | None) -> torch.Tensor:
        graph = Graph()
        clip = graph.add("TestGGUFText", clip_name="clip_l.safetensors")
        if profile is not None:
            clip = graph.add("HighwaterManageCLIP", clip=clip, **Loaders(profile=profile).request)
        graph.keep(graph.add("CLIPTextEncode", text="a lighthouse at (high:1.2) water", clip=clip))
        result = gpu_host.run(graph.nodes)
        assert not [line for line in told(result) if "not managed" in line]
        return result.kept()["value.0.0"]

    gpu_host.forget()
    wanted = encode(None)
    gpu_host.forget()
    assert torch.equal(encode("100MiB"), wanted)
    (slot,) = gpu_host.part("components")
    assert slot["plan"]["shares"][0]["streamed_blocks"]
    assert 90 * MIB < slot["plan"]["weight_bytes"] < 230 * MIB, "not as many as are in memory"
    gpu_host.forget()


@pytest.mark.expects_errors
@pytest.mark.parametrize("kind", ["interrupt", "error", "out of memory"])
def test_after_trouble_in_a_block_the_next_run_is_right(
    gpu_host: HostProcess, expected: list[torch.Tensor], kind: str
) -> None:
    gpu_host.forget()
    graph = Graph()
    model = lora(graph, gguf(graph, "streamed"), 1.0)
    trouble = graph.add("TestTrouble", model=model, kind=kind, module="diffusion_model.single_blocks.1.linear2", call=2)
    graph.keep(sample_flux(graph, trouble))
    assert gpu_host.run(graph.nodes).outcome == ("interrupted" if kind == "interrupt" else "error")
    for actual, wanted in zip(sample(gpu_host, "streamed", *STRENGTHS), expected, strict=True):
        assert torch.equal(actual, wanted)
    gpu_host.forget()


def test_nothing_stays_when_the_host_forgets(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    before = gpu_host.ask_devices("read")
    sample(gpu_host, "streamed", 0, 1.0)
    gpu_host.forget()
    after = gpu_host.ask_devices("read")
    for device_before, device_after in zip(before["devices"], after["devices"], strict=True):
        assert device_after["used_bytes"] == device_before["used_bytes"]
    assert after["pinned"]["used_bytes"] == before["pinned"]["used_bytes"]


def test_the_other_loaders_model_beside_the_managed_one_and_both_with_loras(
    gpu_host: HostProcess, expected: list[torch.Tensor]
) -> None:
    """One loader's model, once managed and once as it came, in turns: neither has the other's patches."""
    gpu_host.forget()
    graph = Graph()
    own = gguf(graph, None)
    managed = graph.add("HighwaterManageModel", model=own, **Loaders(**REQUESTS["streamed"]).request)
    order = [(own, 1.0), (managed, 0.5), (own, 0), (managed, 1.0), (own, 0.5), (managed, 0)]
    for number, (model, strength) in enumerate(order):
        patched = lora(graph, model, strength) if strength else model
        graph.keep(sample_flux(graph, patched), f"kept{number}")
    result = gpu_host.run(graph.nodes)
    for number, (_, strength) in enumerate(order):
        wanted = expected[STRENGTHS.index(strength)]
        assert torch.equal(result.kept(f"kept{number}")["value.samples"], wanted)
    gpu_host.forget()


def test_a_lora_before_the_manage_node_is_carried(gpu_host: HostProcess, expected: list[torch.Tensor]) -> None:
    gpu_host.forget()
    graph = Graph()
    patched = lora(graph, gguf(graph, None), 1.0)
    managed = graph.add("HighwaterManageModel", model=patched, **Loaders(**REQUESTS["streamed"]).request)
    graph.keep(sample_flux(graph, managed))
    assert torch.equal(gpu_host.run(graph.nodes).kept()["value.samples"], expected[1])
    gpu_host.forget()


@pytest.mark.parametrize("strength", [None, 0.7])
def test_verify_compares_with_the_pack_itself(gpu_host: HostProcess, strength: float | None) -> None:
    gpu_host.forget()
    graph = Graph()
    model = gguf(graph, "streamed")
    if strength is not None:
        model = lora(graph, model, strength)
    found = run_verify(gpu_host, graph, **model_inputs(graph, model))
    assert found.result.outcome == "success", found.result.error
    assert "equal, bit for bit" in found.report[0], found.report
    gpu_host.forget()


def test_a_model_whose_layers_a_probe_finds_to_differ_is_left_to_its_pack(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    graph = Graph()
    model = gguf(graph, "streamed", broken=True)
    graph.keep(sample_flux(graph, model))
    result = gpu_host.run(graph.nodes)
    assert any("not managed: its layer" in line and "computes otherwise from a copy" in line for line in told(result))
    graph = Graph()
    graph.keep(sample_flux(graph, gguf(graph, None, broken=True)), f"kept{next(new_run)}")
    gpu_host.forget()


# -- models that their packs move as a whole


def nunchaku(graph: Graph, kind: str, *, managed: bool) -> Link:
    model = graph.add("TestNunchakuModel", unet_name="tiny_flux.safetensors", kind=kind)
    if not managed:
        return model
    return graph.add("HighwaterManageModel", model=model, **Loaders(profile="4MiB").request)


NOTES = {
    "python": "not managed: another pack's WholePatcher moves it by its own detach and load; 7.79MiB of it are counted",
    "compiled": "cannot be copied: cannot pickle 'Engine' object",
}


def left_bytes(host: HostProcess) -> int:
    """The bytes on the first device of the one model that is not managed."""
    (slot,) = (slot for slot in host.part("components") if slot["engine"] == "core")
    return slot["tiers"].get("gpu:0", 0)


def used_bytes(host: HostProcess) -> int:
    return host.ask_devices("read")["devices"][0]["used_bytes"]


@pytest.mark.parametrize("kind", NOTES)
def test_a_model_that_is_moved_as_a_whole_is_left_to_its_pack(gpu_host: HostProcess, kind: str) -> None:
    gpu_host.forget()
    graph = Graph()
    graph.keep(sample_flux(graph, nunchaku(graph, kind, managed=False)))
    wanted = gpu_host.run(graph.nodes).kept()["value.samples"]
    gpu_host.forget()
    before = used_bytes(gpu_host)
    graph = Graph()
    graph.keep(sample_flux(graph, nunchaku(graph, kind, managed=True)))
    result = gpu_host.run(graph.nodes)
    assert torch.equal(result.kept()["value.samples"], wanted)
    assert any(NOTES[kind] in line for line in told(result)), told(result)
    (slot,) = gpu_host.part("components")
    assert slot["engine"] == "core" and not slot["in_effect"] and slot["last_use_s"] is not None
    seen = slot["plan"]["weight_bytes"]
    assert list(slot["tiers"]) == ["gpu:0"] and seen - 0.01 * MIB < slot["tiers"]["gpu:0"] <= seen
    assert (seen > 7 * MIB) == (kind == "python")  # compiled code shows nothing of what it has
    sampler = next(node for node in reversed(gpu_host.part("nodes")) if node["weights_bytes"].get("gpu:0"))
    assert sampler["weights_bytes"]["gpu:0"] == slot["tiers"]["gpu:0"]
    (device,) = (device for device in gpu_host.part("devices") if device["name"] == "gpu:0")
    assert device["other_bytes"] - before < MIB or kind == "compiled"
    gpu_host.forget()
    assert gpu_host.part("components") == []


@pytest.mark.parametrize("kind", ["python", "whole gguf"])
def test_an_idle_one_leaves_for_a_model_of_ours_and_comes_back(
    gpu_host: HostProcess,
    occupy: Callable[[int], None],  # noqa: F811 - the fixture
    kind: str,
) -> None:
    """Room for one and a half; in the books and on the device, in both directions, and every sample as before."""

    def run(*, ours: bool) -> torch.Tensor:
        graph = Graph()
        left = (
            nunchaku(graph, "python", managed=True)
            if kind == "python"
            else graph.add(
                "HighwaterManageModel",
                model=graph.add("TestGGUFModel", unet_name="tiny_flux.safetensors", broken=True),
                **Loaders().request,
            )
        )
        own = Loaders().diffusion_model(graph, "other_flux.safetensors")
        for model in (left, own):
            graph.add("TestHold", value=model)
        graph.keep(sample_flux(graph, own if ours else left))
        return gpu_host.run(graph.nodes).kept()["value.samples"]

    wanted = {ours: run(ours=ours) for ours in (False, True)}
    num_ooms = gpu_host.ask_devices("read")["devices"][0]["num_ooms"]
    gpu_host.forget()
    occupy((12 if kind == "python" else 9) * MIB)
    for ours in (False, True, False, True):
        assert torch.equal(run(ours=ours), wanted[ours])
        if ours:
            (own,) = (slot for slot in gpu_host.part("components") if slot["engine"] == "blocks")
            resident = sum(share["resident_blocks"] for share in own["plan"]["shares"])
            assert left_bytes(gpu_host) < 4 * MIB and resident == 10 and own["tiers"]["gpu:0"] > 7 * MIB
        else:
            assert left_bytes(gpu_host) > (7 if kind == "python" else 4) * MIB
    evictions = [event for event in gpu_host.part("events") if event["kind"] == "evict"]
    assert any(event["component"].startswith("Flux") for event in evictions)
    assert gpu_host.ask_devices("read")["devices"][0]["num_ooms"] == num_ooms


def test_a_raised_watermark_takes_an_idle_one_off(gpu_host: HostProcess) -> None:
    gpu_host.forget()

    def run(low: str = "", high: str = "") -> torch.Tensor:
        graph = Graph()
        model = nunchaku(graph, "python", managed=True)
        if low:
            graph.add("HighwaterWatermark", device="gpu:0", low=low, high=high)
            graph.add("TestHold", value=model)
        else:
            graph.keep(sample_flux(graph, model))
        result = gpu_host.run(graph.nodes)
        return torch.empty(0) if low else result.kept()["value.samples"]

    wanted = run()
    assert left_bytes(gpu_host) > 7 * MIB
    free = gpu_host.ask_devices("read")["devices"][0]
    most = (free["total_bytes"] - free["used_bytes"]) / MIB + 2
    run(f"{most:.1f}MiB", f"{most:.1f}MiB")
    assert left_bytes(gpu_host) == 0
    event = [each for each in gpu_host.part("events") if each["kind"] == "evict"][-1]
    assert event["component"].startswith("Flux")
    assert event["bytes"] > 7 * MIB and "watermark" in event["reason"]
    run("184.4MiB", "276.7MiB")  # the default of a device this small
    assert torch.equal(run(), wanted)
    gpu_host.forget()


# -- where core's own models are dynamic


def test_under_dynamic_vram_a_gguf_model_is_ours_and_the_node_says_why(dynamic_host: HostProcess) -> None:
    def run(request: str | None) -> tuple[PromptResult, torch.Tensor]:
        graph = Graph()
        graph.keep(sample_flux(graph, lora(graph, gguf(graph, request), 1.0)))
        result = dynamic_host.run(graph.nodes)
        return result, result.kept()["value.samples"]

    dynamic_host.forget()
    _, wanted = run(None)
    dynamic_host.forget()
    result, actual = run("streamed")
    assert torch.equal(actual, wanted)
    assert any("engine blocks: its loader made a BlockPatcher, which" in line for line in told(result)), told(result)
    (slot,) = (slot for slot in dynamic_host.part("components") if slot["engine"] == "blocks")
    assert slot["in_effect"] and slot["tiers"]["gpu:0"] <= 2 * MIB
    dynamic_host.forget()


def test_under_dynamic_vram_a_model_of_another_pack_is_static_and_the_node_says_so(dynamic_host: HostProcess) -> None:
    dynamic_host.forget()
    graph = Graph()
    own = graph.add("UNETLoader", unet_name="other_flux.safetensors", weight_dtype="default")
    graph.keep(sample_flux(graph, own), "kept-own")
    left = nunchaku(graph, "python", managed=True)
    graph.keep(sample_flux(graph, left), "kept-left")
    result = dynamic_host.run(graph.nodes)
    assert result.outcome == "success"
    assert any("dynamic VRAM does not move it, and takes dynamic models off" in line for line in told(result))
    engines = {slot["engine"]: slot["tiers"].get("gpu:0", 0) for slot in dynamic_host.part("components")}
    assert engines["core"] > 7 * MIB, engines
    dynamic_host.forget()
