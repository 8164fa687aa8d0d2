"""Storage forms in the real host: each of its kinds of models, each part of a checkpoint, and the node Precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

Tensors = dict[str, torch.Tensor]
WIDGETS = {
    "storage": "float8_e4m3fn", "scale": "usual", "compute": "the model's", "granularity": "block",
    "skips": "declared", "exclude": "", "exclude_classes": "", "error_limit": 0.0, "component": "*",
}  # fmt: skip


def kept(host: HostProcess, graph: Graph) -> Tensors:
    """Return what the graph keeps, named as the fixture `reference` does."""
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    return {f"kept {name}": tensor for name, tensor in result.kept().items()}


def similarity(actual: Tensors, expected: Tensors) -> float:
    assert actual.keys() == expected.keys()
    pairs = [(actual[name].double().flatten(), expected[name].double().flatten()) for name in expected]
    assert all(one.isfinite().all() for one, _ in pairs)
    return min(float(torch.cosine_similarity(one, other, dim=0)) for one, other in pairs)


def precisions(host: HostProcess) -> dict[str, str]:
    return {part["kind"]: part["precision"] for part in host.get("/highwater/report")["components"]}


@pytest.mark.parametrize("precision", ["fp8 plain", "fp8 per row", "e5m2 scaled"])
@pytest.mark.parametrize(
    ("case", "profile"),
    [("lora_at_1", "3MiB"), ("text", "120MiB"), ("autoencoder", "vae=100MiB"), ("controlnet", "auto")],
)
def test_every_kind_of_model_rests_in_every_form(
    gpu_host: HostProcess, case: str, profile: str, precision: str, reference: Callable, ours: Callable
) -> None:
    """Streamed it computes the same bits as resident, and nearly what core does."""
    gpu_host.forget()
    resident = ours(gpu_host, case, Loaders(precision=precision))
    assert precision in precisions(gpu_host).values()
    expected = reference(gpu_host, case)
    assert 0.95 < similarity(resident, expected) < 1 - 1e-7
    if profile != "auto":
        gpu_host.forget()
        streamed = ours(gpu_host, case, Loaders(precision=precision, profile=profile))
        assert all(torch.equal(streamed[name], resident[name]) for name in resident)


def test_each_part_of_a_checkpoint_has_its_own(gpu_host: HostProcess, reference: Callable, ours: Callable) -> None:
    gpu_host.forget()
    actual = ours(gpu_host, "checkpoint", Loaders(precision="text=fp8 scaled,diffusion=fp8 per row,vae=as stored"))
    assert precisions(gpu_host) == {"text": "fp8 scaled", "diffusion": "fp8 per row", "vae": "as stored"}
    assert 0.95 < similarity(actual, reference(gpu_host, "checkpoint")) < 1 - 1e-7


def flux_with(host: HostProcess, profile: str = "auto", strength: float | None = None, **widgets: Any) -> Tensors:
    graph = Graph()
    options = graph.add("HighwaterPrecision", **WIDGETS | widgets)
    request = Loaders(profile=profile).request
    model = graph.add(
        "HighwaterLoadDiffusionModel", unet_name="tiny_flux.safetensors", **request, precision_options=options
    )
    graph.keep(sample_flux(graph, model if strength is None else lora(graph, model, strength)))
    return kept(host, graph)


@pytest.mark.parametrize("strength", [None, 1.0])
def test_every_granularity_computes_the_same_bits(gpu_host: HostProcess, strength: float | None) -> None:
    gpu_host.forget()
    blocks = flux_with(gpu_host, strength=strength)
    for granularity, profile in (("layer", "auto"), ("layer", "3MiB"), ("component", "auto")):
        gpu_host.forget()
        others = flux_with(gpu_host, profile, strength, granularity=granularity)
        assert all(torch.equal(others[name], blocks[name]) for name in blocks), (granularity, profile)
    ours = Loaders(precision="fp8 scaled")
    gpu_host.forget()
    graph = Graph()
    model = ours.diffusion_model(graph)
    graph.keep(sample_flux(graph, model if strength is None else lora(graph, model, strength)))
    same = kept(gpu_host, graph)
    assert all(torch.equal(same[name], blocks[name]) for name in blocks), "the defaults are those of fp8 scaled"


def test_what_is_excluded_computes_as_cores_does(gpu_host: HostProcess, reference: Callable) -> None:
    gpu_host.forget()
    actual = flux_with(gpu_host, exclude=".")
    expected = reference(gpu_host, "plain")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    gpu_host.forget()
    actual = flux_with(gpu_host, exclude="img_mlp, linear2")
    assert 0.99 < similarity(actual, expected) < 1 - 1e-7


@pytest.mark.expects_errors
def test_another_compute_dtype_is_refused_in_one_line(gpu_host: HostProcess) -> None:
    graph = Graph()
    options = graph.add("HighwaterPrecision", **WIDGETS | {"compute": "float32"})
    request = Loaders().request
    model = graph.add(
        "HighwaterLoadDiffusionModel", unet_name="tiny_flux.safetensors", **request, precision_options=options
    )
    graph.keep(sample_flux(graph, model))
    result = gpu_host.run(graph.nodes)
    assert result.outcome == "error" and "compute_dtype float32 was asked for" in result.error


def test_core_alone_is_as_before(gpu_host: HostProcess, reference: Callable, ours: Callable) -> None:
    """Nothing of a precision stays in the host."""
    flux_with(gpu_host, granularity="layer")
    gpu_host.forget()
    actual = ours(gpu_host, "plain", CORE)
    assert all(torch.equal(actual[name], tensor) for name, tensor in reference(gpu_host, "plain").items())
