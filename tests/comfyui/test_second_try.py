"""A sampling step that runs out of memory is repeated once: the picture is what it would have been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from highwater.tests.comfyui.conftest import watermark
from highwater.tests.comfyui.graphs import CORE, Graph, Link, Loaders, lora, sd_conditioning
from highwater.tests.comfyui.host_process import HostProcess, PromptResult

pytestmark = pytest.mark.expects_errors
MODES = {
    "resident": Loaders(),
    "streamed": Loaders(profile="diffusion=4MiB"),
    "split": Loaders(placement="gpu:0&gpu:1"),
    "fp8": Loaders(precision="fp8 scaled"),
}
STEPS = 3


def ancestral(graph: Graph, model: Link, positive: Link, negative: Link, latent: Link, cfg: float) -> Link:
    link = graph.sampler(model, positive, negative, latent, cfg=cfg, steps=STEPS)
    graph.nodes[link[0]]["inputs"] |= {"sampler_name": "euler_ancestral"}
    return link


def flux(graph: Graph, loaders: Loaders, short: Callable[[Graph, Link], Link]) -> None:
    """With a LoRA, two conditionings in one batch, and noise in each step."""
    model = short(graph, lora(graph, loaders.diffusion_model(graph), 1.0))
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=2)
    graph.keep(ancestral(graph, model, graph.conditioning(1), graph.conditioning(2), latent, 3.0))


def controlled(graph: Graph, loaders: Loaders, short: Callable[[Graph, Link], Link]) -> None:
    """A UNet, which empties the lists that its ControlNet made."""
    model, clip, _ = loaders.checkpoint(graph)
    positive, negative = sd_conditioning(graph, clip)
    image = graph.add("EmptyImage", width=32, height=32, batch_size=1, color=0x336699)
    node_id, _ = graph.add(
        "ControlNetApplyAdvanced",
        positive=positive,
        negative=negative,
        control_net=loaders.controlnet(graph),
        image=image,
        strength=1.0,
        start_percent=0.0,
        end_percent=1.0,
    )
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    graph.keep(ancestral(graph, short(graph, model), [node_id, 0], [node_id, 1], latent, 3.0))


CASES = {"flux": flux, "controlled": controlled}


def run(host: HostProcess, case: str, loaders: Loaders, **short: Any) -> PromptResult:
    graph = Graph()
    if case == "controlled" and loaders.profile != "auto":
        loaders = replace(loaders, profile="diffusion=30MiB")
    settings = {"call": 2, "nth": 0, "free_bytes": -1, "taking_part": "nothing", **short}
    CASES[case](
        graph, loaders, lambda graph, model: graph.add("TestShort", model=model, **settings) if short else model
    )
    return host.run(graph.nodes)


@pytest.fixture(scope="module")
def wanted(gpu_host: HostProcess) -> Callable[[str, str], torch.Tensor]:
    """What comes without trouble: of core's own loaders, but of ours for weights in eight bits."""
    known: dict[tuple[str, bool], torch.Tensor] = {}

    def find(case: str, mode: str) -> torch.Tensor:
        key = case, mode == "fp8"
        if key not in known:
            known[key] = run(gpu_host, case, MODES[mode] if mode == "fp8" else CORE).kept()["value.samples"]
        return known[key]

    return find


def num_repeated(host: HostProcess, begin_s: float) -> int:
    return sum(event["kind"] == "recover" for event in host.events_after(begin_s))


def assert_clean(host: HostProcess) -> None:
    host.forget()
    books = host.ask_devices("read")
    assert [device["used_bytes"] for device in books["devices"]] == [0, 0]


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_failed_allocation_in_a_step_does_not_show(gpu_host: HostProcess, case: str, mode: str, wanted: Any) -> None:
    want, begin_s = wanted(case, mode), gpu_host.last_event_s()
    for call, nth in ((1, 45), (2, 60), (3, 70)):
        gpu_host.forget()  # what it learned of the need leaves nothing to take from the model the next time
        result = run(gpu_host, case, MODES[mode], call=call, nth=nth)
        assert torch.equal(result.kept()["value.samples"], want)
    assert num_repeated(gpu_host, begin_s) == 3
    assert_clean(gpu_host)


def test_a_step_that_finds_too_little_memory_goes_on_with_less_of_the_model(gpu_host: HostProcess, wanted: Any) -> None:
    want, begin_s = wanted("flux", "resident"), gpu_host.last_event_s()
    gpu_host.forget()
    with watermark(gpu_host, 0, 0):  # another program takes what it keeps free, too
        result = run(gpu_host, "flux", Loaders(), call=2, free_bytes=64 << 10)
        (part,) = [part for part in gpu_host.part("components") if part["kind"] == "diffusion"]
    assert torch.equal(result.kept()["value.samples"], want)
    assert num_repeated(gpu_host, begin_s) == 1
    assert part["plan"]["shares"][0]["resident_blocks"] < part["plan"]["shares"][0]["blocks"]
    assert_clean(gpu_host)


@pytest.mark.parametrize("taking_part", ["wrapper", "function wrapper", "hook", "patch", "method"])
def test_where_other_nodes_take_part_the_hosts_exception_goes_on(
    gpu_host: HostProcess, taking_part: str, wanted: Any
) -> None:
    want, begin_s = wanted("flux", "resident"), gpu_host.last_event_s()
    gpu_host.forget()
    result = run(gpu_host, "flux", Loaders(), call=2, nth=60, taking_part=taking_part)
    assert result.outcome == "error" and "OutOfMemory" in result.error
    assert num_repeated(gpu_host, begin_s) == 0
    assert torch.equal(run(gpu_host, "flux", Loaders()).kept()["value.samples"], want)
    assert_clean(gpu_host)
