"""What guides a diffusion model computes where that does, or the sampler refuses: core would sample without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, CORE_IN_HALVES, Graph, Loaders
from highwater.tests.comfyui.host_process import HostProcess, PromptResult
from highwater.tests.comfyui.test_equal import computes_at_once

MODEL = "deeper_sd.safetensors"
CONTROL, LORA = "deeper_sd_control.safetensors", "deeper_sd_control_lora.safetensors"
ADAPTER = "sd_adapter.safetensors"
IGNORED = "could not be applied"


@pytest.fixture(autouse=True)
def nothing_was_left_out(gpu_host: HostProcess, models: Path) -> Iterator[None]:
    before = gpu_host.log().count(IGNORED)
    yield
    assert gpu_host.log().count(IGNORED) == before


def guided(
    host: HostProcess,
    model: Loaders,
    *guides: tuple[Loaders, str],
    device: str | None = None,
    workers: int = 0,
    cfg: float = 3.0,
) -> PromptResult:
    """Sample with a model and a chain of guides. ``device``: of core's Select Model Device behind the loader."""
    graph = Graph()
    diffusion = model.diffusion_model(graph, MODEL)
    if device is not None:
        diffusion = graph.add("SelectModelDevice", model=diffusion, device=device)
    if workers:
        diffusion = graph.add("MultiGPU_WorkUnits", model=diffusion, max_gpus=workers)
    positive, negative = (graph.conditioning(seed, num_tokens=77, width=768) for seed in (1, 2))
    image = graph.add("EmptyImage", width=32, height=32, batch_size=1, color=0x336699)
    for loaders, name in guides:
        node_id, _ = graph.add(
            "ControlNetApplyAdvanced",
            positive=positive,
            negative=negative,
            control_net=loaders.controlnet(graph, name),
            image=image,
            strength=1.0,
            start_percent=0.0,
            end_percent=1.0,
        )
        positive, negative = [node_id, 0], [node_id, 1]
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    graph.keep(graph.sampler(diffusion, positive, negative, latent, cfg=cfg, steps=1))
    return host.run(graph.nodes)


def samples(result: PromptResult) -> torch.Tensor:
    return result.kept()["value.samples"]


CHAINS = {
    "controlnet": [CONTROL],
    "adapter": [ADAPTER],
    "adapter and controlnet": [ADAPTER, CONTROL],
    "controlnet and adapter": [CONTROL, ADAPTER],
    "control-lora": [LORA],
}


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(
    "model",
    [Loaders(), Loaders(profile="30MiB"), Loaders(placement="gpu:1"), Loaders(placement="gpu:0&gpu:1")],
    ids=["resident", "streamed", "gpu:1", "split"],
)
def test_guides_compute_where_the_model_does(gpu_host: HostProcess, chain: str, model: Loaders) -> None:
    names = CHAINS[chain]
    if chain == "control-lora" and model.placement == "gpu:1":
        return
    for loaders in (Loaders(), Loaders(placement="cpu")):
        gpu_host.forget()
        actual = samples(guided(gpu_host, model, *((loaders, name) for name in names)))
        core = CORE_IN_HALVES if computes_at_once(gpu_host) else CORE
        assert torch.equal(actual, samples(guided(gpu_host, core, *((CORE, name) for name in names))))


@pytest.mark.parametrize("chain", [chain for chain in CHAINS if chain != "control-lora"])
def test_guides_of_a_model_on_the_cpu(gpu_host: HostProcess, chain: str) -> None:
    """It computes in another dtype there, so what the guides change is compared."""
    names = CHAINS[chain]
    on_cpu = Loaders(placement="cpu")
    expected = samples(guided(gpu_host, CORE, *((CORE, name) for name in names))) - samples(guided(gpu_host, CORE))
    actual = samples(guided(gpu_host, on_cpu, *((Loaders(), name) for name in names)))
    change = actual - samples(guided(gpu_host, on_cpu))
    assert (change - expected).norm() < 0.2 * expected.norm()
    selected = samples(guided(gpu_host, Loaders(), *((Loaders(), name) for name in names), device="cpu"))
    assert torch.equal(selected, actual)


def test_a_controlnet_goes_with_one_model_after_the_other(gpu_host: HostProcess) -> None:
    for placement in ("gpu:0", "gpu:1", "cpu", "gpu:1", "gpu:0"):
        result = guided(gpu_host, Loaders(placement=placement), (Loaders(), CONTROL))
        assert result.outcome == "success", result.brief_error


REFUSALS = [
    (Loaders(placement="gpu:1"), Loaders(placement="gpu:0"), CONTROL, None, "set its placement to default or gpu:1"),
    (Loaders(), Loaders(placement="gpu:1"), CONTROL, None, "set its placement to default or gpu:0"),
    (Loaders(placement="cpu"), Loaders(placement="gpu:1"), CONTROL, None, "set its placement to default or cpu"),
    (Loaders(placement="cpu"), CORE, CONTROL, None, "Highwater's Load ControlNet"),
    (Loaders(placement="gpu:1"), CORE, CONTROL, None, "Highwater's Load ControlNet"),
    (Loaders(placement="cpu"), Loaders(), LORA, None, "set the model's placement to gpu:0"),
    (Loaders(placement="gpu:1"), CORE, LORA, None, "set the model's placement to gpu:0"),
    (CORE, Loaders(), CONTROL, "cpu", "Highwater's Load Diffusion Model"),
    (CORE, Loaders(), CONTROL, "gpu:1", "Highwater's Load Diffusion Model"),
    (CORE, Loaders(placement="gpu:1"), CONTROL, None, "Highwater's Load Diffusion Model"),
    (Loaders(precision="fp8 scaled"), Loaders(), LORA, None, "precision as stored"),
]


@pytest.mark.expects_errors
@pytest.mark.parametrize(("model", "guide", "name", "device", "remedy"), REFUSALS)
def test_what_cannot_compute_with_the_model_is_refused(
    gpu_host: HostProcess, model: Loaders, guide: Loaders, name: str, device: str | None, remedy: str
) -> None:
    result = guided(gpu_host, model, (guide, name), device=device)
    assert result.outcome == "error"
    message = result.error.splitlines()[0]
    assert "InvalidInput" in message and remedy in message and "allowed:" in message


@pytest.mark.parametrize("model", [Loaders(), Loaders(profile="30MiB")], ids=["resident", "streamed"])
def test_core_splits_a_guided_model_over_two_devices(gpu_host: HostProcess, model: Loaders) -> None:
    expected = samples(guided(gpu_host, CORE, (CORE, CONTROL), workers=2))
    actual = samples(guided(gpu_host, model, (Loaders(), CONTROL), workers=2))
    assert torch.equal(actual, expected)
    again = samples(guided(gpu_host, model, (Loaders(), CONTROL)))
    assert torch.equal(again, samples(guided(gpu_host, CORE, (CORE, CONTROL))))
