"""Weights of models that ComfyUI's default cache drops, kept by the content of their files."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from highwater.memory.planner.mixed_tiers import LEAST_SPARED_BYTES
from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

pytestmark = pytest.mark.slow(one_in=3)

A, B = "tiny_flux.safetensors", "other_flux.safetensors"


@pytest.fixture
def host(gpu_host: HostProcess) -> Iterator[HostProcess]:
    gpu_host.forget()
    yield gpu_host
    gpu_host.forget()


def sample(host: HostProcess, name: str, loaders: Loaders | None = None, *, strength: float = 0.0) -> torch.Tensor:
    graph = Graph()
    model = (loaders or Loaders()).diffusion_model(graph, name)
    graph.keep(sample_flux(graph, lora(graph, model, strength) if strength else model))
    return host.run(graph.nodes).kept()["value.samples"]


def kept(host: HostProcess) -> dict[str, dict[str, Any]]:
    return {part["id"]: part for part in host.part("components") if part["engine"] == "kept"}


def reused_after(host: HostProcess, moment_s: float) -> dict[str, int]:
    """Return the bytes of each file that were taken from kept weights since then."""
    events = host.events_after(moment_s)
    return {event["component"]: event["bytes"] for event in events if event["kind"] == "reuse"}


def pages_read(path: Path) -> int:
    """Return how many pages of a file the system has in RAM."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapping:
        address = ctypes.c_char.from_buffer(mapping)
        found = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        assert libc.mincore(ctypes.byref(address), ctypes.c_size_t(size), found) == 0
        del address
    return sum(byte & 1 for byte in found.raw)


def test_a_b_a_reads_the_file_of_a_once(host: HostProcess) -> None:
    expected = sample(host, A, CORE)
    host.forget()
    assert torch.equal(sample(host, A), expected)
    sample(host, B)
    (part,) = kept(host).values()
    assert A in part["id"] and sum(part["tiers"].values()) > 8_000_000
    size = (host.base / "models" / "diffusion_models" / A).stat().st_size
    begin_s = host.last_event_s()
    assert torch.equal(sample(host, A), expected)
    assert reused_after(host, begin_s)[A] > 0.95 * size  # the rest is the header
    (part,) = kept(host).values()
    assert B in part["id"]  # A's weights are A's again


def test_the_system_reads_only_samples_of_a_kept_file(host: HostProcess) -> None:
    """The file is a copy of its own: other processes of these tests read the files that they share at any time."""
    folder = host.base / "models" / "diffusion_models"
    path = folder / "read_once.safetensors"
    shutil.copyfile((folder / A).resolve(), path)
    try:
        sample(host, path.name)
        sample(host, B)
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not written yet is not dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        before = pages_read(path)
        if before > 100:
            pytest.skip("NOT TESTED: this file system keeps the pages of a file that is not used")
        begin_s = host.last_event_s()
        sample(host, path.name)
        assert reused_after(host, begin_s)[path.name] > 0.95 * path.stat().st_size
        # Of 2000: its header, and samples of its weights with what the system reads ahead of each.
        assert pages_read(path) - before < 1000
    finally:
        path.unlink()


def test_what_was_kept_is_of_no_object_of_the_host(host: HostProcess) -> None:
    sample(host, A)
    sample(host, B)
    assert len(kept(host)) == 1
    names = [part["name"] for part in host.part("components") if part["engine"] == "blocks"]
    assert names == ["other_flux"]


def test_after_free_nothing_is_kept(host: HostProcess) -> None:
    before = host.ask_devices("read")["pinned"]["used_bytes"]
    sample(host, A)
    sample(host, B)
    assert kept(host)
    host.forget()
    assert not host.part("components")
    assert host.ask_devices("read")["pinned"]["used_bytes"] == before


def test_our_own_free_drops_them(host: HostProcess) -> None:
    """With their page-locked arena: the model that came after them holds none of it."""
    before = host.ask_devices("read")["pinned"]["registered_bytes"]
    sample(host, A)
    one = host.ask_devices("read")["pinned"]["registered_bytes"] - before
    sample(host, B)
    assert kept(host)
    host.post("/highwater/free")
    assert not kept(host)
    assert host.ask_devices("read")["pinned"]["registered_bytes"] - before == one


def test_what_was_asked_to_be_freed_as_a_prompt_begins_is_not_kept_by_it(host: HostProcess) -> None:
    """The host takes its flags when no prompt runs: here after one that drops another model."""
    sample(host, A)
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders().diffusion_model(graph, B)))
    host.post("/free", {"unload_models": True, "free_memory": True})
    host.run(graph.nodes)
    host.wait_until(lambda: not kept(host), "nothing kept")


def test_a_patched_weight_is_not_kept(host: HostProcess) -> None:
    """A LoRA wrote to the weights: what it did not write to is kept, the rest is read again."""
    expected = sample(host, A, CORE)
    patched = sample(host, A, CORE, strength=1.0)
    host.forget()
    assert torch.equal(sample(host, A, strength=1.0), patched)
    sample(host, B)
    assert torch.equal(sample(host, A), expected)
    sample(host, B)
    assert torch.equal(sample(host, A, strength=1.0), patched)


@pytest.mark.parametrize("how", ["replaced", "in place", "symlink"])
def test_another_file_is_read(host: HostProcess, how: str) -> None:
    folder = host.base / "models" / "diffusion_models"
    name = f"changing_{how.replace(' ', '_')}.safetensors"
    path = folder / name
    target = host.base / f"target_{name}"
    shutil.copyfile((folder / A).resolve(), target if how == "symlink" else path)
    if how == "symlink":
        path.symlink_to(target)
    try:
        first = sample(host, name)
        sample(host, B)
        assert kept(host)
        times = path.stat()
        new = (folder / B).resolve().read_bytes()
        assert len(new) == times.st_size
        if how == "in place":
            with path.open("r+b") as file:
                file.write(new)
        else:
            other = host.base / f"new_{name}"
            other.write_bytes(new)
            os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
            if how == "symlink":
                path.unlink()
                path.symlink_to(other)
            else:
                os.replace(other, path)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        expected = sample(host, B)
        second = sample(host, name)
        assert torch.equal(second, expected) and not torch.equal(second, first)
    finally:
        path.unlink()


def test_a_prompt_that_runs_again_loads_a_file_that_was_replaced(host: HostProcess) -> None:
    """ComfyUI has its result still, and goes by names."""
    folder = host.base / "models" / "diffusion_models"
    path = folder / "changing.safetensors"
    expected = sample(host, B)
    shutil.copyfile((folder / A).resolve(), path)
    try:
        first = sample(host, path.name)
        assert torch.equal(sample(host, path.name), first)
        shutil.copyfile((folder / B).resolve(), path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
        assert torch.equal(sample(host, path.name), expected) and not torch.equal(first, expected)
    finally:
        path.unlink()


# The files of each kind of model. Of most, core converts the weights as it loads them here: bf16 to fp16.
KINDS = {
    "text": ["clip_l"],
    "checkpoint": ["shallow_sd"],
    "controlnet": ["shallow_sd", "shallow_sd_control"],
    "vision": ["clip_vision"],
    "autoencoder": ["autoencoder"],
    "quantized_alone": ["tiny_flux_fp8"],
    "wan": ["tiny_wan"],
}
# What a run reads beside the models: vocabularies, code that is imported late.
OTHER_BYTES = 16 << 20


def bytes_read(host: HostProcess) -> int:
    """Return how many bytes the host has read from disks; what the system keeps of files is not read again."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{host.process.pid}/io").read_text().splitlines())
    return int(lines["read_bytes"])


@pytest.mark.parametrize("name", KINDS)
def test_other_models_come_back_as_core_loads_them_and_are_not_read(
    host: HostProcess, ours: Callable, reference: Callable, name: str
) -> None:
    expected = reference(host, name)
    actual = ours(host, name, Loaders())
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    sample(host, B)
    before, begin_s = bytes_read(host), host.last_event_s()
    actual = ours(host, name, Loaders())
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert bytes_read(host) - before < OTHER_BYTES
    sizes = {f"{file}.safetensors": find_model(host, file).stat().st_size for file in KINDS[name]}
    reused = reused_after(host, begin_s)
    sizes = {file: size for file, size in sizes.items() if size < LEAST_SPARED_BYTES}  # others rest in their files
    text_only = sizes.pop("shallow_sd.safetensors", 0)  # a prompt may use parts of a checkpoint only
    assert not text_only or reused["shallow_sd.safetensors"] > 0.9 * text_only
    assert all(reused[file] > 0.95 * size for file, size in sizes.items())


def find_model(host: HostProcess, name: str) -> Path:
    return next((host.base / "models").glob(f"*/{name}.safetensors"))


def test_a_quantized_model_with_a_lora_comes_back_as_core_loads_it(
    host: HostProcess, ours: Callable, reference: Callable
) -> None:
    """The LoRA wrote to all of its blocks: they are read again."""
    expected = reference(host, "quantized")
    for _ in range(2):
        actual = ours(host, "quantized", Loaders())
        assert all(torch.equal(actual[key], expected[key]) for key in expected)
        sample(host, B)
