"""Core's dynamic VRAM on simulated GPUs, by comfy-aimdo over a fake driver: what the tests of it stand on.

Nothing here is about the pack: core's own loaders, the driver, and the books that both share with torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from highwater.tests.comfyui.conftest import DEVICE_BYTES, Comparison
from highwater.tests.comfyui.fake_cuda.install import NO_OTHER_AIMDO, find_other_aimdo
from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, new_run, sample_flux
from highwater.tests.comfyui.host_process import HERE, HostFiles, HostProcess, PromptResult
from highwater.tests.comfyui.simulated import simulated_gpus
from highwater.tests.comfyui.test_equal import assert_same

MIB = 1 << 20
PAGE_BYTES = 32 * MIB
WIDE = "wide_flux.safetensors"  # 335 MiB of weights: 11 pages
NUM_PAGES = 11
# Not those with a LoRA or quantized weights: core's dynamic models have an arithmetic of their own for them. Nor text
# encoders, whose weights static models round to half precision at once.
SAME_AS_STATIC = ["plain", "guided", "batch_of_two", "wan", "images", "autoencoder"]
TOY_DEVICE_BYTES = 1024 * MIB
USE_AFTER_EVICTION = "a_use_after_eviction_ends_the_process"


def run_toys(files: HostFiles, folder: Path, aimdo: Path | None, *cases: str) -> tuple[dict[str, int], str]:
    """Return how each case of `fake_cuda.toy` ended, and what it wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sizes = [TOY_DEVICE_BYTES, TOY_DEVICE_BYTES]
    environment |= simulated_gpus(sizes, folder / "books", dynamic="core", aimdo=aimdo)
    command = [str(files.python), str(HERE / "fake_cuda" / "toy.py"), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def assert_toys_pass(files: HostFiles, folder: Path, aimdo: Path | None) -> None:
    ended, told = run_toys(files, folder, aimdo)
    assert ended.pop(USE_AFTER_EVICTION) == signal.SIGSEGV
    assert "reads what is gone" in told
    assert ended
    assert {name: code for name, code in ended.items() if code} == {}, told[-6000:]


@pytest.mark.usefixtures("start_dynamic_host")
def test_pages_and_tensors_share_a_device(host_files: HostFiles, tmp_path: Path) -> None:
    assert_toys_pass(host_files, tmp_path, None)


@pytest.mark.usefixtures("start_dynamic_host")
def test_another_version_shares_a_device_with_torch(host_files: HostFiles, tmp_path: Path) -> None:
    folder = find_other_aimdo()
    if folder is None:
        pytest.skip(NO_OTHER_AIMDO)
    assert_toys_pass(host_files, tmp_path, folder)


# -- the host


def sample(host: HostProcess, name: str = WIDE) -> PromptResult:
    graph = Graph()
    graph.keep(sample_flux(graph, CORE.diffusion_model(graph, name)))
    return host.run(graph.nodes)


def leave(host: HostProcess, free_bytes: int, model: str | None = WIDE) -> None:
    """Have torch take all of the first GPU but so many bytes, while the host keeps a model; -1 gives them back."""
    graph = Graph()
    if model is not None:
        graph.add("TestHold", value=CORE.diffusion_model(graph, model))
    graph.add("TestOccupy", device=0, free_bytes=free_bytes, run=next(new_run))
    host.run(graph.nodes)


def driver(host: HostProcess) -> dict[str, Any]:
    return host.ask_devices("read")["driver"]


def used_bytes(host: HostProcess, device: int = 0) -> int:
    return host.ask_devices("read")["devices"][device]["used_bytes"]


@pytest.fixture(scope="module")
def nvidia_host(start_dynamic_host: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    """Core does what it does for NVIDIA's devices only, too."""
    with start_dynamic_host(dynamic="nvidia") as host:
        yield host


@pytest.mark.parametrize("name", SAME_AS_STATIC)
def test_core_computes_the_same_with_dynamic_vram(
    dynamic_host: HostProcess, gpu_host: HostProcess, reference: Comparison, name: str
) -> None:
    assert_same(reference(dynamic_host, name), reference(gpu_host, name))


def test_pages_are_counted_as_used_and_all_are_given_back(dynamic_host: HostProcess) -> None:
    dynamic_host.forget()
    assert used_bytes(dynamic_host) == driver(dynamic_host)["mapped_bytes"] == 0
    dynamic_host.ask_devices("reset")
    first = sample(dynamic_host).kept()
    done = driver(dynamic_host)
    assert done["mapped_bytes"] == NUM_PAGES * PAGE_BYTES
    assert done["calls"]["cuMemCreate"] == done["calls"]["cuMemMap"] == done["calls"]["cuMemSetAccess"] == NUM_PAGES
    assert (NUM_PAGES - 1) * PAGE_BYTES < done["copied_to_device"] <= NUM_PAGES * PAGE_BYTES
    assert 0 <= used_bytes(dynamic_host) - done["mapped_bytes"] < MIB
    again = sample(dynamic_host).kept()
    assert driver(dynamic_host)["copied_to_device"] == done["copied_to_device"], "copied what was there"
    assert_same(again, first)
    dynamic_host.forget()
    assert [used_bytes(dynamic_host, device) for device in (0, 1)] == [0, 0]
    assert driver(dynamic_host)["calls"]["cuMemRelease"] == NUM_PAGES


def test_what_torch_allocates_evicts_pages(dynamic_host: HostProcess) -> None:
    expected = sample(dynamic_host).kept()
    dynamic_host.ask_devices("reset")
    leave(dynamic_host, 200 * MIB)
    evicted = driver(dynamic_host)["calls"]["cuMemUnmap"]
    assert 0 < evicted < NUM_PAGES
    assert driver(dynamic_host)["mapped_bytes"] == (NUM_PAGES - evicted) * PAGE_BYTES
    leave(dynamic_host, -1)
    assert_same(sample(dynamic_host).kept(), expected)
    assert driver(dynamic_host)["mapped_bytes"] == NUM_PAGES * PAGE_BYTES
    assert evicted * PAGE_BYTES // 2 < driver(dynamic_host)["copied_to_device"] <= (evicted + 1) * PAGE_BYTES


def test_a_full_device_streams_the_model(dynamic_host: HostProcess) -> None:
    expected = sample(dynamic_host).kept()
    leave(dynamic_host, 100 * MIB, model=None)
    try:
        assert_same(sample(dynamic_host).kept(), expected)
        assert driver(dynamic_host)["mapped_bytes"] < NUM_PAGES * PAGE_BYTES
    finally:
        leave(dynamic_host, -1, model=None)


@pytest.mark.parametrize("device", ["gpu:0", "gpu:1"])
def test_pages_are_evictable_bytes_of_their_own_device(dynamic_host: HostProcess, device: str) -> None:
    """For core, which takes them for free."""
    dynamic_host.forget()
    graph = Graph()
    model = graph.add("SelectModelDevice", model=CORE.diffusion_model(graph, WIDE), device=device)
    graph.keep(sample_flux(graph, model))
    dynamic_host.run(graph.nodes).kept()
    index = int(device[-1])
    assert [used_bytes(dynamic_host, number) >= NUM_PAGES * PAGE_BYTES for number in (0, 1)] == [index == 0, index == 1]
    assert used_bytes(dynamic_host, 1 - index) == 0
    graph.add("TestFree", model=model, run=next(new_run))
    (told,) = (output["free"] for output in dynamic_host.run(graph.nodes).outputs.values() if "free" in output)
    assert all(DEVICE_BYTES - MIB < free <= DEVICE_BYTES for free in told), told


def test_core_computes_the_same_on_two_devices_at_once(dynamic_host: HostProcess, gpu_host: HostProcess) -> None:
    """Each in a thread of its own, which makes its device current, and with pages of its own."""
    dynamic_host.forget()
    dynamic_host.ask_devices("reset")
    graph = Graph()
    model = graph.add("MultiGPU_WorkUnits", model=CORE.diffusion_model(graph), max_gpus=2)
    graph.keep(sample_flux(graph, model, cfg=3.0))
    assert_same(dynamic_host.run(graph.nodes).kept(), gpu_host.run(graph.nodes).kept())
    assert driver(dynamic_host)["mapped_bytes"] == 2 * PAGE_BYTES
    assert all(used_bytes(dynamic_host, device) >= PAGE_BYTES for device in (0, 1))


@pytest.mark.expects_errors
@pytest.mark.parametrize(
    "function, nth", [("cuMemCreate", 1), ("cuMemCreate", 5), ("cuMemMap", 2), ("cuMemAddressReserve", 1)]
)
def test_the_host_survives_a_call_that_fails(dynamic_host: HostProcess, function: str, nth: int) -> None:
    expected = sample(dynamic_host).kept()
    dynamic_host.forget()
    dynamic_host.ask_devices("reset")
    dynamic_host.ask_devices("fail_call", function=function, nth=nth)
    result = sample(dynamic_host)
    assert driver(dynamic_host)["calls"][function] >= nth, "was not reached"
    dynamic_host.ask_devices("fail_call", function=function, nth=0)
    if result.outcome == "success":
        assert_same(result.kept(), expected)
    else:
        assert "VBAR allocation failed" in result.brief_error
    assert_same(sample(dynamic_host).kept(), expected)
    dynamic_host.forget()
    assert used_bytes(dynamic_host) == driver(dynamic_host)["mapped_bytes"] == 0


def test_an_unknown_function_is_refused(dynamic_host: HostProcess) -> None:
    with pytest.raises(RuntimeError, match="no function 'cuMemNothing'"):
        dynamic_host.ask_devices("fail_call", function="cuMemNothing", nth=1)


def test_the_second_device_is_current_while_it_computes(nvidia_host: HostProcess, dynamic_host: HostProcess) -> None:
    """Core orders its copies with the stream of the current device, and comfy-aimdo counts for that device."""
    expected = sample(dynamic_host).kept()
    sample(nvidia_host).kept()
    nvidia_host.forget()
    nvidia_host.ask_devices("read")
    before = len(nvidia_host.races)
    graph = Graph()
    model = graph.add("SelectModelDevice", model=CORE.diffusion_model(graph, WIDE), device="gpu:1")
    graph.keep(sample_flux(graph, model))
    assert_same(nvidia_host.run(graph.nodes).kept(), expected)
    assert used_bytes(nvidia_host, 1) >= NUM_PAGES * PAGE_BYTES
    nvidia_host.ask_devices("read")
    assert nvidia_host.races[before:] == []
    nvidia_host.forget()


def test_copies_for_nvidia_come_from_locked_memory(nvidia_host: HostProcess, dynamic_host: HostProcess) -> None:
    """Weights are locked one by one, copied on streams of their own, and unlocked with their model."""
    expected = sample(dynamic_host).kept()
    assert "Using async weight offloading with 2 streams" in nvidia_host.log()
    assert_same(sample(nvidia_host).kept(), expected)
    pinned = nvidia_host.ask_devices("read")["pinned"]
    assert pinned["num_registered"] > 40 and pinned["registered_bytes"] > (NUM_PAGES - 1) * PAGE_BYTES
    leave(nvidia_host, 100 * MIB, model=WIDE)
    assert_same(sample(nvidia_host).kept(), expected)
    leave(nvidia_host, -1, model=None)
    nvidia_host.forget()
    assert nvidia_host.ask_devices("read")["pinned"]["num_registered"] == 0
    assert used_bytes(nvidia_host) == driver(nvidia_host)["mapped_bytes"] == 0
    assert nvidia_host.races == nvidia_host.error_lines() == []


def test_another_version_computes_the_same(
    start_dynamic_host: Callable[..., HostProcess], dynamic_host: HostProcess
) -> None:
    folder = find_other_aimdo()
    if folder is None:
        pytest.skip(NO_OTHER_AIMDO)
    expected = sample(dynamic_host).kept()
    with start_dynamic_host(aimdo=folder) as host:
        (installed,) = folder.glob("comfy_aimdo-*.dist-info")
        assert f"comfy-aimdo version: {installed.name.removesuffix('.dist-info').split('-')[1]}" in host.log()
        assert_same(sample(host).kept(), expected)
        assert driver(host)["mapped_bytes"] == NUM_PAGES * PAGE_BYTES
        leave(host, 100 * MIB, model=None)
        assert_same(sample(host).kept(), expected)
        assert host.races == host.error_lines() == []


def test_the_report_shows_what_core_locks_and_stages_for_a_steered_model(nvidia_host: HostProcess) -> None:
    """Page-locked copies are RAM of the model's; what core copies through lasts as long as a node does."""
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders(profile="100MiB").diffusion_model(graph, WIDE)))
    result = nvidia_host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    (entry,) = (entry for entry in nvidia_host.part("components") if entry["name"] == "wide_flux")
    locked = nvidia_host.ask_devices("read")["pinned"]["used_bytes"]
    assert 0 < entry["tiers"]["pinned"] <= locked
    assert entry["tiers"]["gpu:0"] <= 100 * MIB and entry["in_effect"]
    nodes = (node for node in nvidia_host.part("nodes") if node["run_id"] == result.prompt_id)
    sampler = next(node for node in nodes if node["title"] == "KSampler")
    assert sampler["peak_bytes"]["gpu:0"] >= entry["tiers"]["gpu:0"]
    nvidia_host.forget()
    assert nvidia_host.ask_devices("read")["pinned"]["num_registered"] == 0
