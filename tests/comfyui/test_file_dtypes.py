"""Under core's dynamic VRAM our own loaders take what they take without it: the dtypes, the bytes, the results.

Core itself keeps a file's dtype in RAM there, and the file mapped read-only: a write in place would end the host.
"""

from __future__ import annotations

import functools
import itertools
from collections import ChainMap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from highwater.tests.comfyui.graphs import Graph, Loaders, lora, sample_flux, sd_conditioning
from highwater.tests.comfyui.host_process import HostProcess, PromptResult
from highwater.tests.comfyui.model_files import ensure_model_file_in, models_directory
from highwater.tests.comfyui.test_equal import assert_same
from highwater.tests.comfyui.test_kept_weights import OTHER_BYTES, bytes_read, reused_after
from highwater.tests.comfyui.test_verify import model_inputs
from highwater.tests.comfyui.test_verify import run as verify

FP32, FP16, FP8 = torch.float32, torch.float16, torch.float8_e4m3fn
# Which of two engines loads matters on the dynamic host only.
blocks = functools.partial(Loaders, engine="blocks")
Case = Callable[[Graph, Loaders, Path], None]
# What core leaves as memory was, because the file lacks it.
NOT_IN_THE_FILE = {"clip_l.transformer.text_projection.weight"}
run_numbers = itertools.count(1)


# -- what is computed


def flux(graph: Graph, loaders: Loaders, path: Path) -> None:
    model = loaders.diffusion_model(graph, path.name)
    graph.keep(sample_flux(graph, model))
    graph.keep(sample_flux(graph, lora(graph, model, 1.0)), "kept-lora")


def text(graph: Graph, loaders: Loaders, path: Path) -> None:
    clip = loaders.text_encoder(graph, path.name)
    graph.keep(graph.add("CLIPTextEncode", text="a lighthouse at (high:1.2) water", clip=clip))


def image(graph: Graph, loaders: Loaders, path: Path) -> None:
    vae = loaders.vae(graph, path.name)
    pixels = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    latent = graph.add("VAEEncode", pixels=pixels, vae=vae)
    graph.keep(latent, "kept-latent")
    graph.keep(graph.add("VAEDecode", samples=latent, vae=vae))


def vision(graph: Graph, loaders: Loaders, path: Path) -> None:
    pixels = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    encoder = loaders.clip_vision(graph, path.name)
    graph.keep(graph.add("CLIPVisionEncode", clip_vision=encoder, image=pixels, crop="center"))


def checkpoint(graph: Graph, loaders: Loaders, path: Path) -> None:
    """All three parts, with a LoRA on two."""
    model, clip, vae = loaders.checkpoint(graph, path.name)
    node_id, _ = graph.add(
        "LoraLoader",
        model=model,
        clip=clip,
        lora_name="shallow_sd_lora.safetensors",
        strength_model=1.0,
        strength_clip=0.7,
    )
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    latent = graph.sampler([node_id, 0], *sd_conditioning(graph, [node_id, 1]), latent, cfg=3.0, steps=1)
    graph.keep(graph.add("VAEDecode", samples=latent, vae=vae))


def control(graph: Graph, loaders: Loaders, path: Path) -> None:
    model, clip, _ = loaders.checkpoint(graph)
    positive, negative = sd_conditioning(graph, clip)
    pixels = graph.add("EmptyImage", width=32, height=32, batch_size=1, color=0x336699)
    node_id, _ = graph.add(
        "ControlNetApplyAdvanced",
        positive=positive,
        negative=negative,
        control_net=loaders.controlnet(graph, path.name),
        image=pixels,
        strength=1.0,
        start_percent=0.0,
        end_percent=1.0,
    )
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    graph.keep(graph.sampler(model, [node_id, 0], [node_id, 1], latent, cfg=3.0, steps=1))


STREAMED, MANAGED, ON_CPU = blocks(profile="4MiB"), blocks(kind="managed"), blocks(placement="cpu")
FLUX, FLUX_FP8 = "diffusion_models/tiny_flux.safetensors", "diffusion_models/tiny_flux_fp8.safetensors"
# The loader's method, the file, its dtype (None: as it is), what is computed with it, and by which loaders in turn.
FILES: dict[str, tuple[str, str, torch.dtype | None, Case | None, list[Loaders]]] = {
    "flux": ("diffusion_model", FLUX, None, None, [blocks()]),
    "flux fp32": ("diffusion_model", FLUX, FP32, flux, [blocks(), STREAMED, MANAGED, ON_CPU]),
    "flux fp16": ("diffusion_model", FLUX, FP16, flux, [STREAMED]),
    "flux fp8": ("diffusion_model", FLUX, FP8, flux, [blocks()]),
    "flux quantized": ("diffusion_model", FLUX_FP8, None, flux, [blocks(), STREAMED]),
    "wan fp32": ("diffusion_model", "diffusion_models/tiny_wan.safetensors", FP32, None, [blocks()]),
    "clip fp32": ("text_encoder", "text_encoders/clip_l.safetensors", FP32, text, [blocks()]),
    "taesd fp32": ("vae", "vae/tiny_vae.safetensors", FP32, image, [blocks(), MANAGED]),
    "taesd fp16": ("vae", "vae/tiny_vae.safetensors", FP16, None, [blocks()]),
    "autoencoder": ("vae", "vae/autoencoder.safetensors", None, None, [blocks()]),
    "control fp32": ("controlnet", "controlnet/shallow_sd_control.safetensors", FP32, control, [blocks()]),
    "vision fp32": ("clip_vision", "clip_vision/clip_vision.safetensors", FP32, vision, [blocks()]),
    "checkpoint fp32": ("checkpoint", "checkpoints/shallow_sd.safetensors", FP32, checkpoint, [blocks(), MANAGED]),
}


@pytest.fixture(scope="module", autouse=True)
def forgotten(dynamic_host: HostProcess, gpu_host: HostProcess) -> Iterator[None]:
    yield
    for host in (dynamic_host, gpu_host):
        host.forget()


def place(hosts: list[HostProcess], name: str, dtype: torch.dtype | None) -> Path:
    """Give hosts a model file; returns it."""
    if dtype is None:
        return models_directory() / name
    path = ensure_model_file_in(dtype, name)
    for host in hosts:
        link = host.base / "models" / name.partition("/")[0] / path.name
        if not link.exists():
            link.symlink_to(path)
    return path


def look(host: HostProcess, method: str, path: Path, loaders: Loaders, *, write: bool = False) -> PromptResult:
    """Load a file and look at the weights before they are used, and write to them in the end."""
    graph = Graph()
    loaded = getattr(loaders, method)(graph, path.name)
    for link in loaded if isinstance(loaded, tuple) else (loaded,):
        graph.add("TestWeights", value=link, write=write, run=next(run_numbers))
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    return result


def told(result: PromptResult, what: str) -> list[Any]:
    return [item for output in result.outputs.values() for item in output.get(what, [])]


def assert_same_weights(actual: PromptResult, expected: PromptResult) -> None:
    ours, theirs = (dict(ChainMap(*told(result, "weights"))) for result in (actual, expected))
    assert ours.keys() == theirs.keys()
    for weights in (ours, theirs):
        for name in weights.keys() & NOT_IN_THE_FILE:
            del weights[name][-1]  # the check sum
    assert {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]} == {}


def compute(host: HostProcess, case: Case, path: Path, loaders: Loaders) -> dict[str, torch.Tensor]:
    graph = Graph()
    case(graph, loaders, path)
    result = host.run(graph.nodes)
    names = [node["inputs"]["name"] for node in graph.nodes.values() if node["class_type"] == "TestKeep"]
    return {f"{kept} {key}": tensor for kept in names for key, tensor in result.kept(kept).items()}


def used_bytes(host: HostProcess) -> list[int]:
    """Return what is used of each device, and what is page-locked, whoever has it."""
    devices = host.ask_devices("read")
    return [*(device["used_bytes"] for device in devices["devices"]), devices["pinned"]["used_bytes"]]


def footprint(host: HostProcess, before: list[int]) -> dict[str, Any]:
    """Return the bytes that models take: by our books, and by the devices' own beyond those of before."""
    components = [part for part in host.part("components") if part["engine"] == "blocks"]
    return {
        "components": {part["id"]: (part["tiers"], part["plan"]["weight_bytes"]) for part in components},
        "devices": [now - then for now, then in zip(used_bytes(host), before, strict=True)],
    }


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("file", FILES)
def test_a_file_becomes_what_it_is_without_dynamic_vram(
    dynamic_host: HostProcess, gpu_host: HostProcess, file: str
) -> None:
    """Where core's own two ways differ in results, as with a LoRA, ours is the static one."""
    method, name, dtype, case, ways = FILES[file]
    hosts = (dynamic_host, gpu_host)
    path = place([*hosts], name, dtype)
    for loaders in ways:
        for host in hosts:
            host.forget()
        before = {host: used_bytes(host) for host in hosts}
        dynamic, static = (look(host, method, path, loaders) for host in hosts)
        assert_same_weights(dynamic, static)
        if loaders.kind == "ours":
            assert told(dynamic, "mapped") == []
        if case is not None:
            actual, expected = (compute(host, case, path, loaders) for host in hosts)
            assert_same(actual, expected)
            assert footprint(dynamic_host, before[dynamic_host]) == footprint(gpu_host, before[gpu_host])


@pytest.mark.parametrize("file", FILES)
def test_a_write_in_place_stays_in_ram(dynamic_host: HostProcess, file: str) -> None:
    method, name, dtype, *_ = FILES[file]
    path = place([dynamic_host], name, dtype)
    dynamic_host.forget()
    before = ends(path)
    look(dynamic_host, method, path, blocks(), write=True)
    assert ends(path) == before


def ends(path: Path) -> tuple[bytes, bytes]:
    with path.open("rb") as file:
        first = file.read(1 << 20)
        file.seek(-(1 << 20), 2)
        return first, file.read()


def flux_alone(graph: Graph, loaders: Loaders, path: Path) -> None:
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph, path.name)))


@pytest.mark.slow(one_in=3)
@pytest.mark.parametrize("file", ["flux fp32", "clip fp32", "taesd fp32", "vision fp32", "control fp32"])
def test_what_was_converted_is_kept_when_core_drops_its_model(dynamic_host: HostProcess, file: str) -> None:
    """A, B, A: A's file is read once."""
    _, name, dtype, case, _ = FILES[file]
    path = place([dynamic_host], name, dtype)
    assert case is not None
    case = flux_alone if case is flux else case
    dynamic_host.forget()
    expected = compute(dynamic_host, case, path, blocks())
    other = models_directory() / "diffusion_models" / "other_flux.safetensors"
    for _ in range(2):
        compute(dynamic_host, flux_alone, other, blocks())
        before, begin_s = bytes_read(dynamic_host), dynamic_host.last_event_s()
        assert_same(compute(dynamic_host, case, path, blocks()), expected)
        num_bytes = bytes_read(dynamic_host) - before
        reused = reused_after(dynamic_host, begin_s)
        assert reused[path.name] > 0.9 * path.stat().st_size  # the rest is the header, and what is joined or split
        assert num_bytes < max(OTHER_BYTES, path.stat().st_size / 4), reused


# -- what other nodes make of it


@pytest.mark.parametrize("loaders", [STREAMED, MANAGED], ids=["ours", "managed"])
def test_verify_finds_ours_equal_to_what_core_reads(dynamic_host: HostProcess, loaders: Loaders) -> None:
    path = place([dynamic_host], FLUX, FP32)
    graph = Graph()
    model = lora(graph, loaders.diffusion_model(graph, path.name), 0.7)
    found = verify(dynamic_host, graph, **model_inputs(graph, model))
    assert "equal, bit for bit" in found.report[0], (found.report, found.result.error)


@pytest.mark.parametrize("loaders", [blocks(), MANAGED], ids=["ours", "managed"])
def test_verify_finds_our_vae_equal_to_what_core_reads(dynamic_host: HostProcess, loaders: Loaders) -> None:
    path = place([dynamic_host], "vae/tiny_vae.safetensors", FP32)
    graph = Graph()
    pixels = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x336699)
    found = verify(dynamic_host, graph, vae=loaders.vae(graph, path.name), image=pixels)
    assert "equal, bit for bit" in found.report[0], (found.report, found.result.error)


def merge_and_save(graph: Graph, loaders: Loaders, path: Path) -> None:
    models = {f"model{number}": loaders.diffusion_model(graph, path.name) for number in (1, 2)}
    merged = graph.add("ModelMergeSimple", **models, ratio=0.3)
    graph.add("ModelSave", model=lora(graph, merged, 0.7), filename_prefix=f"saved/model{next(run_numbers)}")


def save_checkpoint(graph: Graph, loaders: Loaders, path: Path) -> None:
    model, clip, vae = loaders.checkpoint(graph, path.name)
    prefix = f"saved/checkpoint{next(run_numbers)}"
    graph.add("CheckpointSave", model=model, clip=clip, vae=vae, filename_prefix=prefix)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (merge_and_save, FLUX),
        pytest.param(save_checkpoint, "checkpoints/shallow_sd.safetensors", marks=pytest.mark.slow),
    ],
)
def test_what_is_saved_is_the_same(dynamic_host: HostProcess, gpu_host: HostProcess, case: Case, name: str) -> None:
    path = place([dynamic_host, gpu_host], name, FP32)
    saved = []
    for host in (dynamic_host, gpu_host):
        graph = Graph()
        case(graph, STREAMED if case is merge_and_save else blocks(), path)
        result = host.run(graph.nodes)
        assert result.outcome == "success", result.brief_error
        (file,) = (result.output_directory / "saved").glob("*.safetensors")
        saved.append(safetensors.torch.load_file(file))
        file.unlink()
    for tensors in saved:
        for key in [key for key in tensors if key.endswith("text_projection.weight")]:
            del tensors[key]
    assert_same(*saved)


def hooked(graph: Graph, loaders: Loaders, path: Path) -> None:
    """A LoRA that holds for one conditioning only: core writes it into the weights between two calls."""
    hooks = graph.add("CreateHookLoraModelOnly", lora_name="tiny_flux_lora.safetensors", strength_model=0.8)
    positive = graph.add(
        "ConditioningSetProperties", cond_NEW=graph.conditioning(1), strength=1.0, set_cond_area="default", hooks=hooks
    )
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    model = loaders.diffusion_model(graph, path.name)
    graph.keep(graph.sampler(model, positive, graph.conditioning(2), latent, cfg=3.0))


def on_two_devices(graph: Graph, loaders: Loaders, path: Path) -> None:
    """Core loads a second one by what we left it for that."""
    model = graph.add("MultiGPU_WorkUnits", model=loaders.diffusion_model(graph, path.name), max_gpus=2)
    graph.keep(sample_flux(graph, model, cfg=3.0))


@pytest.mark.parametrize("loaders", [STREAMED, MANAGED], ids=["ours", "managed"])
@pytest.mark.parametrize("case", [hooked, on_two_devices])
def test_the_same_results_with_other_nodes(
    dynamic_host: HostProcess, gpu_host: HostProcess, case: Case, loaders: Loaders
) -> None:
    path = place([dynamic_host, gpu_host], FLUX, FP32)
    hosts = (dynamic_host, gpu_host)
    for host in hosts:
        host.forget()
    before = {host: used_bytes(host) for host in hosts}
    actual, expected = (compute(host, case, path, loaders) for host in hosts)
    assert_same(actual, expected)
    dynamic, static = (footprint(host, before[host]) for host in hosts)
    if case is on_two_devices:  # what core converted after reading is not in RAM once for both, as the rest is
        assert dynamic["devices"][:2] == static["devices"][:2]
        assert dynamic["devices"][2] >= static["devices"][2] > 0
    else:
        assert dynamic == static
