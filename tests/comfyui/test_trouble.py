"""Interrupts, errors and bad values in the host: said on the node, nothing half-loaded, and the queue goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptRefused

pytestmark = pytest.mark.expects_errors
MODES = {
    "resident": Loaders(),
    "streamed": Loaders(profile="4MiB"),
    "split": Loaders(placement="gpu:0&gpu:1"),
}


def troubled(loaders: Loaders, kind: str, module: str = "diffusion_model.single_blocks.1.linear2") -> Graph:
    graph = Graph()
    model = graph.add("TestTrouble", model=loaders.diffusion_model(graph), kind=kind, module=module, call=2)
    graph.keep(sample_flux(graph, model, steps=4))
    return graph


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("wait for interrupt", "interrupted"),
        ("interrupt", "interrupted"),
        ("error", "error"),
        ("out of memory", "error"),
    ],
)
def test_trouble_in_a_block_leaves_a_clean_host(
    gpu_host: HostProcess, mode: str, kind: str, outcome: str, reference: Callable, ours: Callable
) -> None:
    """In the middle of a block of the second step. The interrupt that is waited for comes over HTTP."""
    num_messages = len(gpu_host.messages)
    prompt_id = gpu_host.queue(troubled(MODES[mode], kind).nodes)
    if kind == "wait for interrupt":
        gpu_host.wait_for_message("highwater_test.waiting", after=num_messages)
        gpu_host.post("/interrupt")
    result = gpu_host.wait_for(prompt_id)
    assert result.outcome == outcome, result.brief_error
    assert kind != "out of memory" or "OutOfMemory" in result.error
    for case in ("plain", "lora_at_1"):
        for name, tensor in reference(gpu_host, case).items():
            assert torch.equal(ours(gpu_host, case, MODES[mode])[name], tensor)
    gpu_host.forget()
    books = gpu_host.ask_devices("read")
    assert [device["used_bytes"] for device in books["devices"]] == [0, 0]
    assert books["pinned"]["used_bytes"] == 0


def test_an_interrupt_on_the_cpu_leaves_a_clean_host(
    cpu_host: HostProcess, reference: Callable, ours: Callable
) -> None:
    num_messages = len(cpu_host.messages)
    prompt_id = cpu_host.queue(troubled(Loaders(), "wait for interrupt").nodes)
    cpu_host.wait_for_message("highwater_test.waiting", after=num_messages)
    cpu_host.post("/interrupt")
    assert cpu_host.wait_for(prompt_id).outcome == "interrupted"
    for name, tensor in reference(cpu_host, "plain").items():
        assert torch.equal(ours(cpu_host, "plain", Loaders())[name], tensor)


@pytest.mark.parametrize("nth", [1, 5, 60, 150, 300])
def test_any_allocation_that_fails_while_loading_leaves_a_clean_host(
    gpu_host: HostProcess, nth: int, reference: Callable, ours: Callable
) -> None:
    """Core answers an out-of-memory error by unloading everything; the next prompt starts from there."""
    gpu_host.forget()
    gpu_host.ask_devices("fail_alloc", device=0, nth=nth)
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders(profile="4MiB").diffusion_model(graph)))
    result = gpu_host.run(graph.nodes)
    gpu_host.ask_devices("fail_alloc", device=0, nth=0)
    assert result.outcome == "success" or "OutOfMemory" in result.error
    for name, tensor in reference(gpu_host, "plain").items():
        assert torch.equal(ours(gpu_host, "plain", Loaders(profile="4MiB"))[name], tensor)


# -- bad values


def marked_inputs(refused: PromptRefused) -> set[str]:
    """What the page shows in red."""
    errors = [error for node in refused.args[0]["node_errors"].values() for error in node["errors"]]
    return {error["extra_info"]["input_name"] for error in errors}


def prompt_with(**values: Any) -> Graph:
    graph = Graph()
    inputs = {"unet_name": "tiny_flux.safetensors", **Loaders().request, **values}
    graph.keep(sample_flux(graph, graph.add("HighwaterLoadDiffusionModel", **inputs)))
    return graph


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"profile": "lots"}, ["lots"]),
        ({"profile": "6"}, ["6", "GiB"]),
        ({"precision": "int3"}, ["int3"]),
        ({"placement": "moon"}, ["moon", "default"]),
        ({"placement": 7}, ["7", "default"]),
        ({"profile": 6}, ["6", "GiB"]),
        ({"unet_name": "absent.safetensors"}, ["absent.safetensors"]),
    ],
    ids=str,
)
def test_a_bad_value_is_refused_on_the_node_before_anything_runs(
    host: HostProcess, values: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(PromptRefused) as refused:
        host.queue(prompt_with(**values).nodes)
    assert all(word in refused.value.text for word in named)
    assert "Traceback" not in refused.value.text
    ((_, errors),) = refused.value.args[0]["node_errors"].items()
    assert errors["class_type"] == "HighwaterLoadDiffusionModel"
    assert marked_inputs(refused.value) == set(values)


def test_a_device_that_is_not_here_becomes_the_default_and_the_node_says_so(
    host: HostProcess, reference: Callable
) -> None:
    graph = prompt_with(placement="gpu:7")
    result = host.run(graph.nodes)
    (told,) = [output["text"] for output in result.outputs.values() if "text" in output]
    assert any("gpu:7" in line for line in told)
    for tensor in reference(host, "plain").values():
        assert torch.equal(result.kept()["value.samples"], tensor)


def watermark(**values: Any) -> Graph:
    graph = Graph()
    graph.add("HighwaterWatermark", **{"device": "*", "low": "1MiB", "high": "2MiB", **values})
    return graph


@pytest.mark.parametrize(
    ("values", "marked", "named"),
    [
        ({"device": "moon"}, ["device"], ["moon", "'*', 'gpu:0', 'gpu:1'"]),
        ({"device": "cpu"}, ["device"], ["cpu", "'*', 'gpu:0', 'gpu:1'"]),
        # The host shows what a node says of two inputs on both.
        ({"low": "512"}, ["low", "high"], ["low '512' has no unit"]),
        ({"low": "3MiB"}, ["low", "high"], ["low 3.00MiB is above high 2.00MiB"]),
    ],
    ids=str,
)
def test_a_bad_watermark_is_refused_before_anything_runs(
    gpu_host: HostProcess, values: dict[str, Any], marked: list[str], named: list[str]
) -> None:
    with pytest.raises(PromptRefused) as refused:
        gpu_host.queue(watermark(**values).nodes)
    assert all(word in refused.value.text for word in named)
    assert marked_inputs(refused.value) == set(marked)


def test_a_watermark_for_a_device_that_is_not_here_is_for_all_and_the_node_says_so(gpu_host: HostProcess) -> None:
    try:
        (told,) = gpu_host.run(watermark(device="gpu:7").nodes).outputs.values()
        assert "this machine has no gpu:7, so it applies to every device (*)" in told["text"][0]
        marks = {device["name"]: device["watermark"] for device in gpu_host.part("devices")}
        assert marks["gpu:0"] == marks["gpu:1"] == {"low_bytes": 1 << 20, "high_bytes": 2 << 20}
    finally:  # the default again: 10 and 15% of a device this small
        assert gpu_host.run(watermark(low="184.4MiB", high="276.6MiB").nodes).outcome == "success"


def test_what_a_larger_machine_was_told_leaves_a_smaller_one_as_it_is(gpu_host: HostProcess) -> None:
    """A shared workflow runs: profile and watermark name devices and sizes that are not here, and the nodes say so."""
    result = gpu_host.run(prompt_with(profile="gpu:7=4GiB,-24GiB,reserve=30GiB").nodes)
    assert result.outcome == "success", result.brief_error
    told = "\n".join(line for output in result.outputs.values() for line in output.get("text", []))
    assert "this machine has no gpu:7, so that is left out; it has cpu, gpu:0, gpu:1" in told
    assert "no device has more than the 24GiB that should stay free" in told
    assert "no device has more than the 30GiB that should stay free" in told
    marks = [device["watermark"] for device in gpu_host.part("devices")]
    (told,) = gpu_host.run(watermark(low="1GiB", high="999GiB").nodes).outputs.values()
    assert [line.partition(" has ")[0] for line in told["text"]] == [f"watermark 999GiB: gpu:{n}" for n in (0, 1)]
    assert [device["watermark"] for device in gpu_host.part("devices")] == marks


@pytest.mark.parametrize(
    ("node", "widget", "folder", "source", "said"),
    [
        ("LoadVAE", "vae_name", "vae", "diffusion_models/tiny_flux", "is not a VAE that ComfyUI can load"),
        ("LoadTextEncoder", "clip_name1", "text_encoders", "diffusion_models/tiny_flux", "is not a text encoder: "),
        ("LoadDiffusionModel", "unet_name", "diffusion_models", "vae/tiny_vae", "is not a diffusion model that ComfyU"),
        ("LoadCheckpoint", "ckpt_name", "checkpoints", "vae/tiny_vae", "is not a checkpoint that ComfyUI can load"),
        (
            "LoadControlNet",
            "control_net_name",
            "controlnet",
            "vae/tiny_vae",
            "is not a ControlNet that ComfyUI can load",
        ),
        (
            "LoadCLIPVision",
            "clip_name",
            "clip_vision",
            "vae/tiny_vae",
            "is not a CLIP vision model that ComfyUI can load",
        ),
    ],
)
def test_a_file_that_holds_something_else_is_named_in_one_line(
    cpu_host: HostProcess, node: str, widget: str, folder: str, source: str, said: str
) -> None:
    models = cpu_host.base / "models"
    (models / folder / "wrong.safetensors").symlink_to((models / f"{source}.safetensors").resolve())
    graph = Graph()
    more = {"type": "stable_diffusion"} if node == "LoadTextEncoder" else {}
    graph.add(
        "TestHold", value=graph.add(f"Highwater{node}", **{widget: "wrong.safetensors"}, **Loaders().request, **more)
    )
    try:
        result = cpu_host.run(graph.nodes)
    finally:
        (models / folder / "wrong.safetensors").unlink()
    assert result.outcome == "error"
    first, second, *_ = result.error.splitlines()
    assert "InvalidInput" in first and f"{folder}/wrong.safetensors: {said}" in first
    assert second.lstrip().startswith("File ")  # the traceback: the message has one line


@pytest.mark.parametrize(
    ("damage", "suffix"),
    [
        ("truncated", "safetensors"),
        ("truncated", "SafeTensors"),
        ("no header", "safetensors"),
        ("no header", "SFT"),
        ("another model", "safetensors"),
    ],
)
def test_a_file_that_cannot_be_loaded_stops_its_node_only(
    gpu_host: HostProcess, damage: str, suffix: str, reference: Callable, ours: Callable
) -> None:
    folder = gpu_host.base / "models" / "diffusion_models"
    good = (folder / "tiny_flux.safetensors").read_bytes()
    content = {
        "truncated": good[: len(good) // 2],
        "no header": b"\xff" * 64,
        "another model": (gpu_host.base / "models" / "vae" / "tiny_vae.safetensors").read_bytes(),
    }[damage]
    (folder / f"{damage}.{suffix}").write_bytes(content)
    gpu_host.forget()
    result = gpu_host.run(prompt_with(unet_name=f"{damage}.{suffix}").nodes)
    (folder / f"{damage}.{suffix}").unlink()
    assert result.outcome == "error"
    assert f"{damage}.{suffix}" in result.error.splitlines()[0]
    assert ("that ComfyUI can load" in result.error) == (damage == "another model")  # else its header was read first
    assert gpu_host.part("components") == []
    assert [device["used_bytes"] for device in gpu_host.ask_devices("read")["devices"]] == [0, 0]
    for name, tensor in reference(gpu_host, "plain").items():
        assert torch.equal(ours(gpu_host, "plain", Loaders())[name], tensor)


def test_a_model_of_another_loader_goes_on_after_ours_failed(gpu_host: HostProcess, ours: Callable) -> None:
    assert gpu_host.run(troubled(Loaders(), "error").nodes).outcome == "error"
    assert ours(gpu_host, "plain", CORE)
