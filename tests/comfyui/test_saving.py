"""Files that core's save nodes write of our models: the same bytes as of core's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import safetensors.torch
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Link, Loaders, lora
from highwater.tests.comfyui.host_process import HostProcess

MODES = {
    "resident": Loaders(),
    "streamed": Loaders(profile="4MiB"),
    "split": Loaders(placement="gpu:0&gpu:1"),
    "managed and streamed": Loaders(kind="managed", profile="4MiB"),
}

# Another name makes the host save what it has saved.
numbers = itertools.count()


def merged(graph: Graph, loaders: Loaders, one: str, other: str) -> Link:
    models = {f"model{number}": loaders.diffusion_model(graph, name) for number, name in ((1, one), (2, other))}
    return graph.add("ModelMergeSimple", **models, ratio=0.3)


def merged_wan(graph: Graph, loaders: Loaders) -> Link:
    return merged(graph, loaders, "tiny_wan.safetensors", "other_wan.safetensors")


def merged_flux_with_lora(graph: Graph, loaders: Loaders) -> Link:
    return lora(graph, merged(graph, loaders, "tiny_flux.safetensors", "other_flux.safetensors"), 0.7)


def eight_bits_with_lora(graph: Graph, loaders: Loaders) -> Link:
    return lora(graph, loaders.diffusion_model(graph, "tiny_flux_fp8.safetensors"), 0.7)


CASES: list[Callable[[Graph, Loaders], Link]] = [merged_wan, merged_flux_with_lora, eight_bits_with_lora]


def save(host: HostProcess, case: Callable[[Graph, Loaders], Link], loaders: Loaders) -> dict[str, torch.Tensor]:
    graph = Graph()
    graph.add("ModelSave", model=case(graph, loaders), filename_prefix=f"saved/model{next(numbers)}")
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    (path,) = (result.output_directory / "saved").glob("*.safetensors")
    saved = safetensors.torch.load_file(path)
    path.unlink()
    return saved


@pytest.fixture(scope="module")
def of_core(gpu_host: HostProcess) -> Callable[[Callable[[Graph, Loaders], Link]], dict[str, torch.Tensor]]:
    """What core saves in a case; run once."""
    known: dict[str, dict[str, torch.Tensor]] = {}

    def find(case: Callable[[Graph, Loaders], Link]) -> dict[str, torch.Tensor]:
        if case.__name__ not in known:
            known[case.__name__] = save(gpu_host, case, CORE)
        return known[case.__name__]

    return find


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_saved_model_equals_cores(gpu_host: HostProcess, case: Callable, mode: str, of_core: Callable) -> None:
    expected = of_core(case)
    gpu_host.forget()
    actual = save(gpu_host, case, MODES[mode])
    assert actual.keys() == expected.keys()
    different = [name for name in expected if as_bytes(actual[name]) != as_bytes(expected[name])]
    assert different == []


@pytest.mark.parametrize("mode", MODES)
def test_a_model_saved_with_and_without_a_lora_equals_cores(gpu_host: HostProcess, mode: str) -> None:
    """Core moves the model in between, which puts other wrappers around quantized weights."""

    def with_lora(graph: Graph, loaders: Loaders, strength: float) -> Link:
        model = loaders.diffusion_model(graph, "tiny_flux_fp8.safetensors")
        graph.add("TestHold", value=model)
        return lora(graph, model, strength) if strength else model

    strengths = (0.7, 0.0, 0.7, -1.0)
    cases = {strength: partial(with_lora, strength=strength) for strength in strengths}
    expected = {strength: save(gpu_host, case, CORE) for strength, case in cases.items()}
    gpu_host.forget()
    for strength in strengths:
        actual = save(gpu_host, cases[strength], MODES[mode])
        assert [name for name in actual if as_bytes(actual[name]) != as_bytes(expected[strength][name])] == []


def as_bytes(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
