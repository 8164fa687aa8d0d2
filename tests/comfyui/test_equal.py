"""Our loaders beside core's in the same host: the same bits, wherever the weights are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from highwater.tests.comfyui.graphs import CASES, CORE, Graph, Loaders, lora, sample_flux
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
ON_CPU = {"loaded": Loaders(), "managed": Loaders(kind="managed")}
DIFFUSION_CASES = [
    name for name in CASES if name not in ("encoded_image", "text", "vision", "checkpoint", "controlnet")
]
OTHER_CASES = [name for name in CASES if name not in DIFFUSION_CASES]

Tensors = dict[str, torch.Tensor]


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (actual[name].double() - tensor.double()).abs().max()
        assert torch.equal(actual[name], tensor), f"{name} differs by up to {difference:.3g}"


@pytest.mark.parametrize("case", DIFFUSION_CASES)
@pytest.mark.parametrize("mode", ON_GPUS)
def test_a_diffusion_model_on_gpus(
    gpu_host: HostProcess, mode: str, case: str, reference: Callable, ours: Callable
) -> None:
    assert_same(ours(gpu_host, case, ON_GPUS[mode]), reference(gpu_host, case))


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


@pytest.mark.parametrize("case", ["text", "checkpoint", "controlnet"])
def test_another_model_streamed(gpu_host: HostProcess, case: str, reference: Callable, ours: Callable) -> None:
    """CLIP-L has 235 MiB, of which 75 are outside its blocks; the shallow SD 52 MiB."""
    loaders = Loaders(profile="120MiB" if case == "text" else "unlimited")
    assert_same(ours(gpu_host, case, loaders), reference(gpu_host, case))


@pytest.mark.parametrize(
    ("mode", "case"), [(mode, case) for mode in ON_CPU for case in CASES if (mode, case) != ("managed", "vision")]
)
def test_any_model_on_the_cpu(cpu_host: HostProcess, mode: str, case: str, reference: Callable, ours: Callable) -> None:
    assert_same(ours(cpu_host, case, ON_CPU[mode]), reference(cpu_host, case))


@pytest.mark.parametrize("mode", ["resident", "streamed", "split"])
def test_a_lora_leaves_nothing_behind(gpu_host: HostProcess, mode: str, reference: Callable, ours: Callable) -> None:
    """On the same loaded model: without, at one strength, at another, without again."""
    for case in ("plain", "lora_at_1", "lora_at_half", "plain", "lora_at_1"):
        assert_same(ours(gpu_host, case, ON_GPUS[mode]), reference(gpu_host, case))


@pytest.mark.parametrize("case", ["plain", "lora_at_1", "guided"])
@pytest.mark.parametrize("profile", ["auto", "3MiB"])
def test_cores_eight_bit_weights_are_managed_as_they_are(
    gpu_host: HostProcess, profile: str, case: str, ours: Callable
) -> None:
    eight_bits = replace(CORE, weight_dtype="fp8_e4m3fn")
    expected = ours(gpu_host, case, eight_bits)
    assert_same(ours(gpu_host, case, replace(eight_bits, kind="managed", profile=profile)), expected)


@pytest.mark.parametrize("case", ["plain", "lora_at_1", "guided", "wan"])
@pytest.mark.parametrize("profile", ["auto", "3MiB"])
def test_our_eight_bits_are_close(
    gpu_host: HostProcess, profile: str, case: str, reference: Callable, ours: Callable
) -> None:
    """The bytes that it takes stand in test_memory."""
    actual = ours(gpu_host, case, Loaders(precision="fp8 scaled", profile=profile))
    for name, expected in reference(gpu_host, case).items():
        similarity = torch.nn.functional.cosine_similarity(actual[name].flatten(), expected.flatten(), dim=0)
        assert 0.99 < similarity < 1 - 1e-6


@pytest.mark.parametrize("node", ["SelectModelDevice", "MultiGPU_WorkUnits"])
@pytest.mark.parametrize("mode", ["resident", "streamed"])
def test_cores_own_multi_gpu_nodes_take_our_models(gpu_host: HostProcess, node: str, mode: str) -> None:
    settings = {"device": "gpu:1"} if node == "SelectModelDevice" else {"max_gpus": 2}

    def run(loaders: Loaders) -> Tensors:
        graph = Graph()
        model = graph.add(node, model=loaders.diffusion_model(graph), **settings)
        graph.keep(sample_flux(graph, lora(graph, model, 1.0), cfg=3.0))
        return gpu_host.run(graph.nodes).kept()

    assert_same(run(ON_GPUS[mode]), run(CORE))
