"""The advice in ComfyUI: of models that its dynamic VRAM moves, and of those that no node of ours manages."""

from __future__ import annotations

import re

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess


def advice_after(host: HostProcess, loaders: Loaders) -> list[str]:
    graph = Graph()
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph), steps=4))
    host.run(graph.nodes)
    return [said["text"] for said in host.get("/highwater/report?only=advice")["advice"]]


def test_who_raises_the_budget_of_a_dynamic_model_as_told_has_all_of_it_on_the_device(
    dynamic_host: HostProcess,
) -> None:
    dynamic_host.forget()
    limit, change = advice_after(dynamic_host, Loaders(engine="dynamic", profile="3MiB"))
    assert re.match(r"tiny_flux has [\d.]+[KM]iB of 7\.79MiB on gpu:0; ComfyUI's dynamic VRAM brings the rest", limit)
    found = re.match(r"Give tiny_flux a budget of (\d+MiB) or more: ", change)
    assert found, change
    limit, change = advice_after(dynamic_host, Loaders(engine="dynamic", profile=found[1]))
    assert limit.startswith("Nothing limits it: all weights were resident") and change.startswith("Nothing to change")


def test_a_dynamic_model_of_another_loader_is_not_said_to_be_resident(dynamic_host: HostProcess) -> None:
    dynamic_host.forget()
    assert advice_after(dynamic_host, CORE)[0] == "Not known: ComfyUI itself loads tiny_flux, which is not managed"


def test_a_model_of_another_loader_is_not_said_to_be_resident(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    limit, change = advice_after(gpu_host, Loaders(engine="blocks"))
    assert limit.startswith("Nothing limits it: all weights were resident") and change.startswith("Nothing to change")
    assert advice_after(gpu_host, CORE)[0] == "Not known: ComfyUI itself loads tiny_flux, which is not managed"
