"""Forwards that core records for its compiler, from 0.35 on: nothing of ours is in them that ends the process.

This core has no such compiler: the helper pack makes its calls (`helper_pack/recording.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from highwater.tests.comfyui.fake_cuda.install import NO_OTHER_AIMDO, find_other_aimdo
from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, lora, sample_flux, sd_conditioning
from highwater.tests.comfyui.host_process import HostProcess

pytestmark = pytest.mark.slow(one_in=3)

MODES = {
    "core": CORE,
    "resident": Loaders(engine="blocks"),
    "streamed": Loaders(engine="blocks", profile="4MiB"),
    "eight bits": Loaders(engine="blocks", precision="fp8 scaled", profile="3MiB"),
    "split": Loaders(engine="blocks", placement="gpu:0&gpu:1"),
    "split and streamed": Loaders(engine="blocks", placement="gpu:0&gpu:1", profile="gpu:0=4MiB,gpu:1=3MiB"),
}
STEERED = {"steered": Loaders(kind="managed", engine="dynamic")}
# How often a call pauses: each for its result; a diffusion model of ours for what a second try would need, at its
# beginning; a split for all that is computed elsewhere, too.
NUM_PAUSES = {"core": 1, "steered": 1, "resident": 2, "streamed": 2, "eight bits": 2}


@contextmanager
def recording(start: Callable[..., HostProcess], way: str, **choices: Any) -> Iterator[HostProcess]:
    """Start a host that records in this way."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HIGHWATER_TEST_RECORDS", way)
            host = stack.enter_context(start(**choices))
        yield host


@pytest.fixture(scope="module")
def recording_host(start_gpu_host: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    with recording(start_gpu_host, "stand-in") as host:
        yield host


def flux(host: HostProcess, loaders: Loaders, *, records: bool, with_lora: bool, size: int = 64) -> Any:
    """Return the latent, and what the recordings met.

    A split has one conditioning for each step: it computes two at once, each alone, unless another node takes part.
    """
    cfg = 1.0 if "&" in loaders.placement else 3.0
    graph = Graph()
    model = loaders.diffusion_model(graph)
    if with_lora:
        model = lora(graph, model, 1.0)
    if records:
        model = graph.add("TestRecord", model=model)
    latent = sample_flux(graph, model, cfg=cfg, size=size)
    graph.keep(latent)
    told = graph.add("TestRecorded", after=latent)
    result = host.run(graph.nodes)
    (kept,) = result.kept().values()
    return kept, result.outputs[told[0]]


def assert_recorded_as_it_should(host: HostProcess, mode: str, *, with_lora: bool) -> None:
    loaders = (MODES | STEERED)[mode]
    expected, _ = flux(host, loaders, records=False, with_lora=with_lora)
    latent, told = flux(host, loaders, records=True, with_lora=with_lora)
    assert told["recorded"][0] > 0
    assert told["faults"] == []
    assert torch.equal(latent, expected)
    found = told["pauses"][0] / 2  # two steps, each one call
    pauses = NUM_PAUSES.get(mode)
    assert found == pauses if pauses else found > 2, "a pause of ours may end one of core's"


@pytest.mark.parametrize("with_lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("mode", MODES)
def test_a_diffusion_model_in_a_recording(recording_host: HostProcess, mode: str, with_lora: bool) -> None:
    assert_recorded_as_it_should(recording_host, mode, with_lora=with_lora)


@pytest.mark.parametrize("mode", ["core", "resident", "streamed", "split"])
def test_a_controlnet_in_a_recording(recording_host: HostProcess, mode: str) -> None:
    """The pass of a component begins and ends in the recording, too."""
    loaders = Loaders(engine="blocks", profile="20MiB") if mode == "streamed" else MODES[mode]
    expected, _ = controlled(recording_host, loaders, records=False)
    latent, told = controlled(recording_host, loaders, records=True)
    assert told["recorded"][0] > 0
    assert told["faults"] == []
    assert torch.equal(latent, expected)


def controlled(host: HostProcess, loaders: Loaders, *, records: bool) -> Any:
    graph = Graph()
    model, clip, _ = CORE.checkpoint(graph)
    net = loaders.controlnet(graph)
    positive, negative = sd_conditioning(graph, clip)
    node_id, _ = graph.add(
        "ControlNetApplyAdvanced",
        positive=positive,
        negative=negative,
        control_net=graph.add("TestRecordControl", control_net=net) if records else net,
        image=graph.add("EmptyImage", width=32, height=32, batch_size=1, color=0x336699),
        strength=1.0,
        start_percent=0.0,
        end_percent=1.0,
    )
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    latent = graph.sampler(model, [node_id, 0], [node_id, 1], latent, cfg=3.0, steps=1)
    graph.keep(latent)
    told = graph.add("TestRecorded", after=latent)
    result = host.run(graph.nodes)
    (kept,) = result.kept().values()
    return kept, result.outputs[told[0]]


# -- with comfy-aimdo's own recording, which ends the process


@pytest.fixture(scope="module")
def start_recording_aimdo(start_dynamic_host: Callable[..., HostProcess]) -> Callable[..., HostProcess]:
    folder = find_other_aimdo()
    if folder is None:
        pytest.skip(NO_OTHER_AIMDO)
    return partial(start_dynamic_host, aimdo=folder)


@pytest.fixture(scope="module")
def aimdo_host(start_recording_aimdo: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    with recording(start_recording_aimdo, "aimdo") as host:
        yield host


@pytest.mark.parametrize("mode", ["core", "steered", "eight bits", "split and streamed"])
def test_a_diffusion_model_in_a_recording_of_aimdo(aimdo_host: HostProcess, mode: str) -> None:
    assert_recorded_as_it_should(aimdo_host, mode, with_lora=True)


@pytest.mark.expects_errors
def test_aimdo_ends_a_forward_whose_split_is_not_paused(start_recording_aimdo: Callable[..., HostProcess]) -> None:
    """It raises here; where the driver is told to free what it does not know, the process ends."""
    ends = pytest.raises((AssertionError, RuntimeError), match=r"aimdo memory compile error|waited in vain")
    with recording(start_recording_aimdo, "aimdo unguarded") as host, ends:
        flux(host, MODES["split"], records=True, with_lora=False)
