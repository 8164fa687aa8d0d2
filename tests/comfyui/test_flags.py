"""Where the host was told to keep its models: by its own flags, and on the CPU of a host that has GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from highwater.tests.comfyui.graphs import CASES, CORE, Graph, Link, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

Tensors = dict[str, torch.Tensor]


def run(host: HostProcess, case: str, loaders: Loaders) -> Tensors:
    """As `ours`, which also wants models to be in effect after the run: some flags make core unload them."""
    graph = Graph()
    CASES[case](graph, loaders)
    result = host.run(graph.nodes)
    assert [line for output in result.outputs.values() for line in output.get("text", [])] == []
    return {f"kept {name}": tensor for name, tensor in result.kept().items()}


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("flags", ["--lowvram", "--highvram --disable-smart-memory", "--novram --cache-none"])
def test_flags_of_the_host_do_not_change_the_result(
    start_gpu_host: Callable[..., HostProcess], gpu_host: HostProcess, reference: Callable, flags: str
) -> None:
    """From core's own in a host without flags; core's own LoRAs differ from that under --novram.

    Of the first three a host takes one; the others have nothing to do with them and need no host of their own.
    """
    with start_gpu_host(arguments=flags.split()) as host:
        assert_same(run(host, "plain", CORE), reference(gpu_host, "plain"))
        for case, loaders in (("lora_at_1", Loaders()), ("plain", Loaders(profile="4MiB"))):
            assert_same(run(host, case, loaders), reference(gpu_host, case))
        assert host.error_lines() == []
        assert host.ask_devices("read")["races"] == []


def test_models_stay_across_prompts_with_the_flag_that_the_readme_names(
    start_gpu_host: Callable[..., HostProcess],
) -> None:
    """By default the host forgets a loader that the next prompt does not name. Here 1 GB free is enough to keep it."""
    names = ("tiny_flux", "other_flux")
    with start_gpu_host(arguments=["--cache-ram", "1", "1"]) as host:
        for name in (*names, "tiny_flux"):
            graph = Graph()
            graph.keep(sample_flux(graph, Loaders().diffusion_model(graph, f"{name}.safetensors")))
            assert host.run(graph.nodes).outcome == "success"
        report = host.report()
    assert {component["name"] for component in report["components"] if component["in_effect"]} == set(names)
    assert [run["bytes_moved"] > 0 for run in report["runs"]] == [True, True, False]


class CoreOnCpu(Loaders):
    """Core's loaders, each followed by core's node that selects the CPU."""

    def diffusion_model(self, graph: Graph, name: str = "tiny_flux.safetensors") -> Link:
        return graph.add("SelectModelDevice", model=super().diffusion_model(graph, name), device="cpu")

    def text_encoder(self, graph: Graph, name: str = "clip_l.safetensors") -> Link:
        return graph.add("SelectCLIPDevice", clip=super().text_encoder(graph, name), device="cpu")


@pytest.mark.parametrize(
    "case",
    [
        "text",
        "plain",
        "lora_at_1",
    ],
)
def test_the_cpu_of_a_host_with_gpus_computes_as_cores(gpu_host: HostProcess, case: str) -> None:
    gpu_host.forget()  # else the devices are also asked whether weights of earlier tests were written there
    with gpu_host.books() as devices:
        actual = run(gpu_host, case, Loaders(placement="cpu"))
    assert [device["num_kernels"] for device in devices] == [0, 0]
    assert_same(actual, run(gpu_host, case, CoreOnCpu(kind="core")))
