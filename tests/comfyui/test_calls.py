"""From a widget to a loaded model: each text is read once, and a plan is made once where nothing changes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from highwater.tests.comfyui.graphs import Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess


def diffusion_model(graph: Graph, loaders: Loaders) -> None:
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph)))


def text_encoder(graph: Graph, loaders: Loaders) -> None:
    graph.keep(graph.add("CLIPTextEncode", text="a fox", clip=loaders.text_encoder(graph)))


def vae(graph: Graph, loaders: Loaders) -> None:
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    graph.keep(graph.add("VAEEncode", pixels=image, vae=loaders.vae(graph)))


def vision(graph: Graph, loaders: Loaders) -> None:
    image = graph.add("EmptyImage", width=224, height=224, batch_size=1, color=0x336699)
    graph.keep(graph.add("CLIPVisionEncode", clip_vision=loaders.clip_vision(graph), image=image, crop="center"))


Case = Callable[[Graph, Loaders], None]
CASES: dict[str, Case] = {case.__name__: case for case in (diffusion_model, text_encoder, vae, vision)}
MANAGED = {name: case for name, case in CASES.items() if name != "vision"}


@pytest.fixture(scope="module")
def counting_host(start_gpu_host: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    """A host of its own: its engine's functions count their calls."""
    with start_gpu_host() as host:
        graph = Graph()
        diffusion_model(graph, Loaders())
        assert host.run(graph.nodes).outcome == "success"
        host.get("/highwater_test/calls")
        yield host


def count(host: HostProcess, case: Case, loaders: Loaders) -> dict[str, int]:
    graph = Graph()
    case(graph, loaders)
    host.get("/highwater_test/calls")
    assert host.run(graph.nodes).outcome == "success"
    return host.get("/highwater_test/calls")


texts = (f"{number + 100}MiB" for number in range(1000))


@pytest.mark.parametrize(
    ("kind", "case"),
    [*(("ours", case) for case in CASES.values()), *(("managed", case) for case in MANAGED.values())],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_node_reads_its_texts_once_and_one_plan_is_made(counting_host: HostProcess, kind: str, case: Case) -> None:
    """A checkpoint has three models and so three plans; its texts are read once, too."""
    counting_host.forget()
    loaders = Loaders(kind=kind, profile=next(texts), placement="gpu:0")
    found = count(counting_host, case, loaders)
    assert found["Scanner profile"] == 1
    assert found.get("Scanner placement", 0) <= 1
    assert found["plan_request"] + found.get("replan", 0) == 1
    assert count(counting_host, case, loaders) == {}


def test_three_parts_of_a_checkpoint_have_a_plan_each_and_one_reading(counting_host: HostProcess) -> None:
    counting_host.forget()
    graph = Graph()
    model, clip, vae = Loaders(profile=next(texts), placement="gpu:0").checkpoint(graph)
    for part in (model, clip, vae):
        graph.add("TestHold", value=part)
    counting_host.get("/highwater_test/calls")
    assert counting_host.run(graph.nodes).outcome == "success"
    found = counting_host.get("/highwater_test/calls")
    assert found["Scanner profile"] == 1
    assert found["plan_request"] == 3
