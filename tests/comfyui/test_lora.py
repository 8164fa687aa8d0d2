"""LoRAs are core's: whatever it takes works on our models, wherever their weights are, from the next step on.

The numbers are those of defects that were found in mmgp 3.8.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, CORE_IN_HALVES, Graph, Loaders, lora
from highwater.tests.comfyui.host_process import HostProcess
from highwater.tests.comfyui.test_equal import computes_at_once

MODEL = "only_sd.safetensors"  # 49 MiB, with convolutions and norms that have biases
MODES = {
    "resident": Loaders(),
    "streamed": Loaders(profile="30MiB"),
    "stored on another GPU": Loaders(placement="gpu:0:gpu:1", profile="30MiB"),
    "split": Loaders(placement="gpu:0&gpu:1"),
}


def sample(host: HostProcess, loaders: Loaders, lora_name: str | None = None) -> torch.Tensor:
    graph = Graph()
    ours = loaders.kind != "core"
    node = "HighwaterLoadCheckpoint" if ours else "CheckpointLoaderSimple"
    model = graph.add(node, ckpt_name=MODEL, **(loaders.request if ours else {}))
    graph.add("TestHold", value=model)
    if loaders.halves:
        model = graph.add("TestHalves", model=model)
    if lora_name is not None:
        model = lora(graph, model, 1.0, f"{lora_name}.safetensors")
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    positive, negative = (graph.conditioning(seed, width=768) for seed in (1, 2))
    graph.keep(graph.sampler(model, positive, negative, latent, cfg=3.0, steps=1))
    (image,) = host.run(graph.nodes).kept().values()
    return image


@pytest.fixture(scope="module")
def core_sample() -> Callable[[HostProcess, str, str | None], torch.Tensor]:
    """What core gives with a LoRA, or with none, as a mode computes the conditionings; run once per host."""
    return functools.cache(
        lambda host, mode, lora_name: sample(host, CORE_IN_HALVES if mode == "split" else CORE, lora_name)
    )


def assert_equals_core(host: HostProcess, mode: str, lora_name: str, core_sample: Callable) -> None:
    plain, expected = core_sample(host, mode, None), core_sample(host, mode, lora_name)
    assert not torch.equal(expected, plain)  # one host computes the same bits again: this is the LoRA
    host.forget()
    assert torch.equal(sample(host, MODES[mode], lora_name), expected)
    assert computes_at_once(host) == (mode == "split")
    assert torch.equal(sample(host, MODES[mode]), plain)


@pytest.mark.parametrize("name", ["sd_norm_differences", "sd_convolution_differences"])
@pytest.mark.parametrize("mode", MODES)
def test_7_differences_of_norms_biases_and_convolutions_take_effect(
    gpu_host: HostProcess, mode: str, name: str, core_sample: Callable
) -> None:
    assert_equals_core(gpu_host, mode, name, core_sample)


@pytest.mark.parametrize("mode", MODES)
def test_8_a_lora_on_convolutions_works_and_unknown_keys_do_not_reject_it(
    gpu_host: HostProcess, mode: str, core_sample: Callable
) -> None:
    core_sample(gpu_host, mode, "sd_convolution_lora")
    before = len(gpu_host.log())
    assert_equals_core(gpu_host, mode, "sd_convolution_lora", core_sample)
    told = gpu_host.log()[before:]
    for key in ("lora_unet_no_such_block_3.lora_up.weight", "of_another_program"):
        assert f"lora key not loaded: {key}" in told


@pytest.mark.parametrize("mode", MODES)
def test_9_a_lora_takes_effect_at_once_on_a_resident_model(
    gpu_host: HostProcess, mode: str, core_sample: Callable
) -> None:
    """And the next one, and none again; the model is on its device each time."""
    names = [None, "sd_convolution_lora", "sd_norm_differences", None]
    wanted = {name: core_sample(gpu_host, mode, name) for name in names}
    gpu_host.forget()
    for name in names:
        assert torch.equal(sample(gpu_host, MODES[mode], name), wanted[name])
        (slot,) = gpu_host.part("components")
        assert slot["tiers"]["gpu:0"] and slot["in_effect"]
        assert bool(slot["tiers"].get("gpu:1")) == (mode in ("split", "stored on another GPU"))
