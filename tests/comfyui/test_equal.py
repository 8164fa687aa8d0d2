"""Our loaders beside core's in the same host: the same bits, wherever the weights are.

Before that, what the comparisons stand on: core's own results, on the CPU and on the simulated GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from highwater.tests.comfyui.graphs import CASES, CORE, CORE_IN_HALVES, Graph, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

# The tiny Flux has 7.8 MiB: a block takes up to 1.2, what is outside the blocks 0.6.
ON_GPUS = {
    "resident": Loaders(),
    "streamed": Loaders(profile="4MiB"),
    "split": Loaders(placement="gpu:0&gpu:1"),
    "split and streamed": Loaders(placement="gpu:0&gpu:1", profile="gpu:0=4MiB,gpu:1=3MiB"),
    "second GPU": Loaders(placement="gpu:1"),
    "managed": Loaders(kind="managed"),
    "managed and streamed": Loaders(kind="managed", profile="4MiB"),
}
# Modes that have nothing but what two others have, and cases that bring nothing new to those.
LIKE_ANOTHER_MODE = ["split and streamed", "second GPU", "managed and streamed"]
LIKE_ANOTHER_CASE = ["plain", "lora_at_half", "two_loras", "model_sampling", "guided", "batch_of_two"]
ON_CPU = {"loaded": Loaders(), "managed": Loaders(kind="managed")}
# Cases whose results cannot differ from those of another case, and the other.
DIFFERENT = [
    ("plain", "lora_at_1"),
    ("lora_at_1", "lora_at_half"),
    ("lora_at_1", "two_loras"),
    ("plain", "model_sampling"),
    ("guided", "skipped_blocks"),
    ("guided", "two_prompts"),
    ("guided", "weight_hook"),
    ("plain", "merge"),
]
OTHER_CASES = ["encoded_image", "autoencoder", "text", "vision", "checkpoint", "lora_on_text", "controlnet"]
DIFFUSION_CASES = [name for name in CASES if name not in OTHER_CASES]
# CLIP-L has 236 MiB, of which 74 are outside its blocks; the shallow SD 49, its ControlNet 29; the autoencoder 160.
STREAMED = {
    "autoencoder": "vae=100MiB",
    "text": "120MiB",
    "checkpoint": "diffusion=30MiB,text=120MiB",
    "lora_on_text": "diffusion=30MiB,text=120MiB",
    "controlnet": "diffusion=30MiB,text=120MiB,control=20MiB",
}

Tensors = dict[str, torch.Tensor]


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (actual[name].double() - tensor.double()).abs().max()
        assert torch.equal(actual[name], tensor), f"{name} differs by up to {difference:.3g}"


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("case", CASES)
def test_the_result_is_finite_and_not_constant(host: HostProcess, case: str, reference: Callable) -> None:
    for tensor in reference(host, case).values():
        if tensor.is_floating_point() and tensor.numel() > 1:
            assert tensor.isfinite().all() and tensor.float().std() > 1e-3


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_a_case_adds_changes_the_result(host: HostProcess, one: str, other: str, reference: Callable) -> None:
    first, second = (next(iter(reference(host, case).values())) for case in (one, other))
    assert (first - second).abs().max() > 0.01


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("case", CASES)
def test_the_simulated_gpus_compute_what_the_cpu_does(
    cpu_host: HostProcess, gpu_host: HostProcess, case: str, reference: Callable
) -> None:
    """Not bit-equal: core computes in 32 bits on the CPU and in 16 on a GPU."""
    for on_cpu, on_gpu in zip(reference(cpu_host, case).values(), reference(gpu_host, case).values(), strict=True):
        a, b = on_cpu.double().flatten(), on_gpu.double().flatten()
        assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.99


def computes_at_once(host: HostProcess) -> bool:
    """Whether a split computed the conditionings of its last steps at once, each alone; core may batch them."""
    said = [event["reason"] for event in host.part("events") if event["reason"].startswith("micro-batches")]
    names = [slot["id"] for slot in host.part("components") if len(slot["plan"].get("shares", ())) > 1]
    return bool(names and said) and "at the same time" in said[-1]


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        (mode, case)
        for mode in ON_GPUS
        for case in DIFFUSION_CASES
        if mode not in LIKE_ANOTHER_MODE or case not in LIKE_ANOTHER_CASE
    ],
)
def test_a_diffusion_model_on_gpus(
    gpu_host: HostProcess, mode: str, case: str, reference: Callable, ours: Callable
) -> None:
    actual = ours(gpu_host, case, ON_GPUS[mode])
    assert_same(actual, reference(gpu_host, case, CORE_IN_HALVES if computes_at_once(gpu_host) else CORE))


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        *(("resident", case) for case in OTHER_CASES),
        *((mode, case) for mode in ("second GPU", "managed") for case in OTHER_CASES if case != "vision"),
    ],
)
def test_another_model_on_gpus(
    gpu_host: HostProcess, mode: str, case: str, reference: Callable, ours: Callable
) -> None:
    assert_same(ours(gpu_host, case, ON_GPUS[mode]), reference(gpu_host, case))


@pytest.mark.parametrize("case", STREAMED)
def test_another_model_streamed(gpu_host: HostProcess, case: str, reference: Callable, ours: Callable) -> None:
    expected = reference(gpu_host, case)
    gpu_host.forget()
    assert_same(ours(gpu_host, case, Loaders(profile=STREAMED[case])), expected)
    without = "vae" if case != "autoencoder" else ""  # that of a checkpoint has no blocks
    components = [component for component in gpu_host.part("components") if component["kind"] != without]
    assert len(components) == STREAMED[case].count("MiB")
    for component in components:
        (share,) = component["plan"]["shares"]
        assert share["resident_blocks"] < share["blocks"], component["id"]
        assert 0 < component["tiers"]["gpu:0"] < component["plan"]["weight_bytes"], component["id"]


def test_the_lora_on_a_text_encoder_matters(gpu_host: HostProcess, reference: Callable) -> None:
    """Else the comparisons with core would be of nothing."""
    kept = reference(gpu_host, "lora_on_text")
    patched, plain = (tensor for name, tensor in kept.items() if "text value.0.0" in name)
    assert not torch.allclose(patched, plain, atol=0.1)


@pytest.mark.parametrize("case", ["checkpoint", "controlnet"])
def test_a_unet_is_split(gpu_host: HostProcess, case: str, reference: Callable, ours: Callable) -> None:
    """Its skips join outputs of early blocks, on one device, with those of late blocks, on the other."""
    actual = ours(gpu_host, case, ON_GPUS["split"])
    plans = [entry["plan"] for entry in gpu_host.part("components") if entry["kind"] == "diffusion"]
    assert [len(plan["shares"]) for plan in plans if "shares" in plan] == [2]  # core's own may still be there
    assert_same(actual, reference(gpu_host, case, CORE_IN_HALVES if computes_at_once(gpu_host) else CORE))


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        (mode, case)
        for mode in ON_CPU
        for case in CASES
        if mode == "loaded" or case not in [*LIKE_ANOTHER_CASE, "vision"]
    ],
)
def test_any_model_on_the_cpu(cpu_host: HostProcess, mode: str, case: str, reference: Callable, ours: Callable) -> None:
    assert_same(ours(cpu_host, case, ON_CPU[mode]), reference(cpu_host, case))


@pytest.mark.parametrize("mode", ["resident", "streamed", "split"])
def test_a_lora_leaves_nothing_behind(gpu_host: HostProcess, mode: str, reference: Callable, ours: Callable) -> None:
    """On the same loaded model: without, at one strength, at another, without again."""
    for case in ("plain", "lora_at_1", "lora_at_half", "plain", "lora_at_1"):
        assert_same(ours(gpu_host, case, ON_GPUS[mode]), reference(gpu_host, case))


@pytest.mark.parametrize("mode", ["resident", "streamed", "split", "managed and streamed"])
def test_a_lora_leaves_nothing_behind_on_quantized_weights(gpu_host: HostProcess, mode: str) -> None:
    """A quantized weight and its scale change together; core moves the model between two LoRAs."""

    def run(loaders: Loaders, strength: float | None) -> Tensors:
        graph = Graph()
        model = loaders.diffusion_model(graph, "tiny_flux_fp8.safetensors")
        graph.add("TestHold", value=model)
        graph.keep(sample_flux(graph, model if strength is None else lora(graph, model, strength)))
        return gpu_host.run(graph.nodes).kept()

    expected = {strength: run(CORE, strength) for strength in (None, 1.0, -0.5)}
    gpu_host.forget()
    for strength in (None, 1.0, -0.5, None, 1.0, 1.0, None):
        assert_same(run(ON_GPUS[mode], strength), expected[strength])


@pytest.mark.parametrize("case", ["plain", "lora_at_1", "guided"])
@pytest.mark.parametrize("profile", ["auto", "3MiB"])
def test_cores_eight_bit_weights_are_managed_as_they_are(
    gpu_host: HostProcess, profile: str, case: str, ours: Callable
) -> None:
    eight_bits = replace(CORE, weight_dtype="fp8_e4m3fn")
    expected = ours(gpu_host, case, eight_bits)
    assert_same(ours(gpu_host, case, replace(eight_bits, kind="managed", profile=profile)), expected)


@pytest.mark.parametrize("case", ["plain", "lora_at_1", "guided", "wan", "weight_hook", "merge"])
@pytest.mark.parametrize("profile", ["auto", "3MiB"])
def test_our_eight_bits_are_close(
    gpu_host: HostProcess, profile: str, case: str, reference: Callable, ours: Callable
) -> None:
    """The bytes that it takes stand in test_memory."""
    actual = ours(gpu_host, case, Loaders(precision="fp8 scaled", profile=profile))
    for name, expected in reference(gpu_host, case).items():
        similarity = torch.nn.functional.cosine_similarity(actual[name].flatten(), expected.flatten(), dim=0)
        assert 0.99 < similarity < 1 - 1e-6


@pytest.mark.parametrize(("profile", "precision"), [("auto", "fp8 scaled"), ("4MiB", "as stored")])
def test_what_comes_into_a_manage_node_stays_as_it_is(gpu_host: HostProcess, profile: str, precision: str) -> None:
    """Both outputs are in use, in every order, with a LoRA on either; then all of it is unloaded."""
    managed = Loaders(kind="managed", profile=profile, precision=precision)

    def run(which: str, strength: float | None, *, beside: bool = True) -> Tensors:
        graph = Graph()
        models = {"core": CORE.diffusion_model(graph)}
        if beside:
            models["managed"] = graph.add("HighwaterManageModel", model=models["core"], **managed.request)
        for model in models.values():
            graph.add("TestHold", value=model)
        model = models[which] if strength is None else lora(graph, models[which], strength)
        graph.keep(sample_flux(graph, model))
        return gpu_host.run(graph.nodes).kept()

    expected = {strength: run("core", strength, beside=False) for strength in (None, 1.0)}
    first = {}
    for which, strength in itertools.product(("managed", "core", "managed", "core"), (None, 1.0, None)):
        actual = run(which, strength)
        if which == "core" or precision == "as stored":
            assert_same(actual, expected[strength])
        else:
            assert_same(actual, first.setdefault(strength, actual))
    gpu_host.forget()
    assert_same(run("core", None), expected[None])


@pytest.mark.parametrize("node", ["SelectModelDevice", "MultiGPU_WorkUnits"])
@pytest.mark.parametrize("mode", ["resident", "streamed", "managed and streamed"])
def test_cores_own_multi_gpu_nodes_take_our_models(gpu_host: HostProcess, node: str, mode: str) -> None:
    settings = {"device": "gpu:1"} if node == "SelectModelDevice" else {"max_gpus": 2}

    def run(loaders: Loaders) -> Tensors:
        graph = Graph()
        model = graph.add(node, model=loaders.diffusion_model(graph), **settings)
        graph.keep(sample_flux(graph, lora(graph, model, 1.0), cfg=3.0))
        return gpu_host.run(graph.nodes).kept()

    gpu_host.forget()
    actual = run(ON_GPUS[mode])
    if node == "SelectModelDevice":  # what was asked for holds on the other device, too
        (entry,) = (found for found in gpu_host.part("components") if "gpu:1" in found["tiers"])
        assert (entry["plan"]["shares"][0]["streamed_blocks"] > 0) == ("streamed" in mode)
    assert_same(actual, run(CORE))
