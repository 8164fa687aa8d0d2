"""A model of ComfyUI's that rests in its file is its own module still, and costs no RAM where it fits its device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from highwater.memory.units import MIB
from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is mapped")

MODEL = "other_flux.safetensors"


def run(
    host: HostProcess, loaders: Loaders, *, unloads: bool | None = None, part: str = ""
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Sample, do the deeds unless ``unloads`` is None, and sample again; returns both results and what deeds said."""
    graph = Graph()
    model = loaders.diffusion_model(graph, MODEL)
    first = sample_flux(graph, model)
    graph.keep(first, "first")
    if unloads is not None:
        path = str((host.base / "models" / "diffusion_models" / MODEL).resolve())
        model = graph.add("TestDeeds", model=model, after=first, path=path, unloads=unloads, part=part)
    graph.keep(sample_flux(graph, model, seed=5), "second")
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    told = [output["deeds"][0] for output in result.outputs.values() if "deeds" in output]
    return [result.kept(name)["value.samples"] for name in ("first", "second")], told[0] if told else {}


@pytest.mark.parametrize("part", ["", "diffusion_model"], ids=["the model", "its largest part"])
@pytest.mark.parametrize("unloads", [True, False], ids=["at rest", "on its device"])
def test_each_use_of_a_model_in_its_file_does_what_the_table_says(
    gpu_host: HostProcess, unloads: bool, part: str
) -> None:
    """The table in docs/python.md."""
    gpu_host.forget()
    expected, _ = run(gpu_host, CORE)
    gpu_host.forget()
    actual, told = run(gpu_host, Loaders(profile="auto,disk=all"), unloads=unloads, part=part)
    assert all(map(torch.equal, actual, expected))
    is_module, has_forward, has_other, shape, _ = told["describe"]
    assert is_module and has_forward and not has_other and all(shape)
    assert told["modes"] == [True, True, True]
    assert told["to cpu"] is told["to device"] is told["copy"] is True
    refused = ("pickle",) if part else ("deepcopy", "pickle")
    assert all(told[deed].startswith("UnsafeState: ") and "\n" not in told[deed] for deed in refused)
    assert not part or told["deepcopy"] is True, "a part is copied, read for the copy alone"
    num_entries, num_of_file = told["state"]
    assert num_of_file > 0.8 * num_entries  # core has other names for some
    (component,) = gpu_host.part("components")
    assert component["plan"]["file_bytes"] > 0.9 * component["plan"]["weight_bytes"]
    gpu_host.forget()


def private_bytes(host: HostProcess) -> int:
    """Return the dirty pages that only the host has, without those that are its simulated devices' memory."""
    lines = Path(f"/proc/{host.process.pid}/smaps_rollup").read_text().splitlines()[1:]
    private = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
    return private - sum(device["used_bytes"] for device in host.ask_devices("read")["devices"])


def test_a_model_that_fits_its_device_has_next_to_no_private_ram(start_gpu_host: Callable[..., HostProcess]) -> None:
    """335 MiB of weights, of which no copy is made."""
    with start_gpu_host() as host:
        for name in ("tiny_flux.safetensors", "wide_flux.safetensors"):  # the first imports what stays
            graph = Graph()
            graph.keep(sample_flux(graph, Loaders().diffusion_model(graph, name), size=32, steps=1))
            before = private_bytes(host)
            assert host.run(graph.nodes).outcome == "success"
        (component,) = (part for part in host.part("components") if part["name"] == "wide_flux")
        assert component["tiers"]["gpu:0"] > 300 * MIB
        assert private_bytes(host) - before <= 64 * MIB
