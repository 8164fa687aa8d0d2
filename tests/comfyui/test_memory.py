"""Who is on the simulated GPUs, by our books and by the devices' own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, new_run, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptResult
from highwater.tests.comfyui.model_files import models_directory

MIB, GIB = 1 << 20, 1 << 30
# What core wants free for computing, whatever there is (its own rule in 0.33).
KEPT_BY_CORE = int(0.8 * GIB)
MODEL_BYTES = 8_160_000  # the tiny Flux, rounded down


@pytest.fixture
def occupy(gpu_host: HostProcess) -> Iterator[Callable[[int], None]]:
    """Return a function that leaves so many bytes of the first GPU for weights; everything is freed again after."""

    def run(free_bytes: int) -> None:
        graph = Graph()
        graph.add("TestOccupy", device=0, free_bytes=free_bytes, run=next(new_run))
        assert gpu_host.run(graph.nodes).outcome == "success"

    gpu_host.forget()
    yield lambda weight_bytes: run(KEPT_BY_CORE + weight_bytes)
    run(-1)
    gpu_host.forget()


def sample(
    host: HostProcess, loaders: Loaders, name: str, *, size: int = 64, steps: int = 2, beside: Loaders | None = None
) -> PromptResult:
    """Sample with one model. ``beside``: the prompt names both tiny models, the other loaded by these loaders.

    The host forgets what a prompt does not name as soon as the RAM that it wants free is not (all of it, by default).
    """
    graph = Graph()
    if beside is not None:
        for other in sorted({"tiny_flux.safetensors", "other_flux.safetensors"} - {name}):
            graph.add("TestHold", value=beside.diffusion_model(graph, other))
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph, name), size=size, steps=steps))
    return host.run(graph.nodes)


def component(host: HostProcess, name: str) -> dict[str, Any]:
    (found,) = (slot for slot in host.part("components") if slot["name"].startswith(name))
    return found


def test_a_model_three_times_the_free_capacity_streams(start_gpu_host: Callable[..., HostProcess]) -> None:
    """2.97 GiB on a device of 1.8 GiB, of which core keeps 0.8 free: 1 GiB is left for weights, in every run."""
    # Else the host would forget the big model before its next prompt.
    with start_gpu_host(arguments=["--cache-ram", "0", "0"]) as host:
        check_streaming(host)


def check_streaming(host: HostProcess) -> None:
    for _ in range(2):
        with host.books() as devices:
            actual = sample(host, Loaders(), "big_flux.safetensors", size=32, steps=1).kept()
        big = component(host, "big_flux")
        assert big["in_effect"]
        assert 0 < big["tiers"]["gpu:0"] <= devices[0]["total_bytes"] - KEPT_BY_CORE
        assert devices[0]["peak_bytes"] <= devices[0]["total_bytes"]
        assert devices[0]["h2d_bytes"] > 1.9 * GIB
        assert devices[0]["num_ooms"] == 0
    host.forget()
    expected = sample(host, CORE, "big_flux.safetensors", size=32, steps=1).kept()
    assert torch.equal(actual["value.samples"], expected["value.samples"])


def test_two_models_take_turns_where_one_fits(gpu_host: HostProcess, occupy: Callable) -> None:
    """A, B, A with room for one and a half: what the events say was copied is what the device counted."""
    occupy(12 * MIB)
    counts = []
    for name in ("tiny_flux", "tiny_flux", "other_flux", "tiny_flux"):
        begin_s = gpu_host.last_event_s()
        with gpu_host.books() as devices:
            result = sample(gpu_host, Loaders(), f"{name}.safetensors", beside=Loaders())
        assert result.outcome == "success"
        report = gpu_host.report()
        events = gpu_host.events_after(begin_s)
        counts.append(
            {
                "h2d": devices[0]["h2d_bytes"],
                "moved": report["runs"][-1]["bytes_moved"],
                "loads": sum(event["bytes"] for event in events if event["kind"] == "load"),
                "evicted": [event["component"] for event in events if event["kind"] == "evict"],
            }
        )
    first_a, again_a, b, last_a = counts
    assert again_a["moved"] == 0 and not again_a["evicted"]  # it was there
    inputs = again_a["h2d"]  # latents and conditioning: the same in every run
    for run in (first_a, b, last_a):
        assert run["h2d"] - inputs == run["moved"]
        assert run["moved"] >= run["loads"] > 0
    assert any(evicted.startswith("tiny_flux") for evicted in b["evicted"])
    assert any(evicted.startswith("other_flux") for evicted in last_a["evicted"])
    assert 0 < last_a["loads"] < first_a["loads"]  # a part of A had stayed


def test_a_model_that_comes_back_takes_room_from_the_idle_one(gpu_host: HostProcess, occupy: Callable) -> None:
    """Core asks for the room before it loads; of the two, the one that comes back is the one idle longest."""
    occupy(12 * MIB)
    for name in ("tiny_flux", "other_flux", "tiny_flux"):
        begin_s = gpu_host.last_event_s()
        sample(gpu_host, Loaders(), f"{name}.safetensors", beside=Loaders())
    evictions = [event for event in gpu_host.events_after(begin_s) if event["kind"] == "evict"]
    assert {event["component"].partition("#")[0] for event in evictions} == {"other_flux"}
    assert component(gpu_host, "tiny_flux")["tiers"]["gpu:0"] >= MODEL_BYTES


@pytest.mark.parametrize("free_before", [None, 500 * MIB], ids=["cold", "loaded"])
def test_a_model_runs_in_what_core_would_keep_free(
    gpu_host: HostProcess, occupy: Callable, free_before: int | None
) -> None:
    """Less is free than core wants for computing, so it allows a tenth of a byte; 130 MiB are enough for our least."""
    if free_before is not None:
        sample(gpu_host, Loaders(), "tiny_flux.safetensors")
    occupy(500 * MIB - KEPT_BY_CORE)
    graph = Graph()
    model = Loaders().diffusion_model(graph, "tiny_flux.safetensors")
    graph.keep(sample_flux(graph, model))
    for _ in range(2):
        assert gpu_host.run(graph.nodes).outcome == "success"
        slot = component(gpu_host, "tiny_flux")
        assert slot["in_effect"]
        assert 0 < slot["tiers"]["gpu:0"] <= 500 * MIB


def test_the_results_of_models_that_take_turns_stay_equal(gpu_host: HostProcess, occupy: Callable) -> None:
    names = ("tiny_flux.safetensors", "other_flux.safetensors")
    expected = {name: sample(gpu_host, CORE, name).kept()["value.samples"] for name in names}
    gpu_host.forget()
    occupy(12 * MIB)
    for name in (*names, *names):
        actual = sample(gpu_host, Loaders(), name, beside=Loaders()).kept()["value.samples"]
        assert torch.equal(actual, expected[name])


def test_a_model_grows_back_when_memory_returns(gpu_host: HostProcess, occupy: Callable) -> None:
    occupy(5 * MIB)
    sample(gpu_host, Loaders(), "tiny_flux.safetensors")
    little = component(gpu_host, "tiny_flux")["tiers"]["gpu:0"]
    assert 0 < little <= 5 * MIB
    occupy(100 * MIB)
    sample(gpu_host, Loaders(), "tiny_flux.safetensors")
    assert component(gpu_host, "tiny_flux")["tiers"]["gpu:0"] > little
    with gpu_host.books() as devices:
        sample(gpu_host, Loaders(), "tiny_flux.safetensors")
    assert devices[0]["h2d_bytes"] < MIB  # resident: nothing but the inputs is copied


def test_a_streamed_model_is_copied_every_step_and_takes_what_its_plan_says(
    gpu_host: HostProcess, occupy: Callable
) -> None:
    sample(gpu_host, Loaders(profile="4MiB"), "tiny_flux.safetensors")
    per_steps = []
    for steps in (2, 4):
        with gpu_host.books() as devices:
            sample(gpu_host, Loaders(profile="4MiB"), "tiny_flux.safetensors", steps=steps)
        per_steps.append(devices[0]["h2d_bytes"])
    assert 2 * 3 * MIB < per_steps[1] - per_steps[0] < 2 * 8 * MIB
    held = component(gpu_host, "tiny_flux")["tiers"]["gpu:0"]
    assert held <= 4 * MIB
    assert gpu_host.ask_devices("read")["devices"][0]["used_bytes"] - held < MIB


@pytest.mark.parametrize(("profile", "precision"), [("auto", "fp8 scaled"), ("1", "by profile")])
def test_eight_bits_take_half(gpu_host: HostProcess, occupy: Callable, profile: str, precision: str) -> None:
    """Half of the blocks, all of the rest (0.6 MiB), and room for the largest block (1.2) in 16 bits."""
    sample(gpu_host, Loaders(profile=profile, precision=precision), "tiny_flux.safetensors")
    assert 0.45 * MODEL_BYTES < component(gpu_host, "tiny_flux")["tiers"]["gpu:0"] < 0.7 * MODEL_BYTES


@pytest.mark.parametrize("profile", ["auto", "3MiB"])
def test_a_quantized_file_moves_as_the_bytes_that_it_has(gpu_host: HostProcess, occupy: Callable, profile: str) -> None:
    """Core's tensors for it report the bytes of bf16, twice as many."""
    file_bytes = (models_directory() / "diffusion_models/tiny_flux_fp8.safetensors").stat().st_size
    sample(gpu_host, Loaders(profile=profile), "tiny_flux_fp8.safetensors")
    (share,) = component(gpu_host, "tiny_flux_fp8")["plan"]["shares"]
    assert (share["streamed_blocks"] > 0) == (profile != "auto")
    held = gpu_host.ask_devices("read")["devices"][0]["used_bytes"]
    assert component(gpu_host, "tiny_flux_fp8")["tiers"]["gpu:0"] <= (file_bytes if profile == "auto" else 3 * MIB)
    assert share["device_bytes"] <= held < share["device_bytes"] + 0.1 * MIB


def test_a_split_model_computes_on_both(gpu_host: HostProcess, occupy: Callable) -> None:
    with gpu_host.books() as devices:
        sample(gpu_host, Loaders(placement="gpu:0&gpu:1"), "tiny_flux.safetensors")
    assert all(device["h2d_bytes"] > 2 * MIB and device["num_kernels"] > 100 for device in devices)
    assert devices[0]["peer_bytes"] > 0
    tiers = component(gpu_host, "tiny_flux")["tiers"]
    assert tiers["gpu:0"] + tiers["gpu:1"] >= MODEL_BYTES


@pytest.mark.parametrize(
    "loaders", [CORE, Loaders(), Loaders(profile="4MiB"), Loaders(placement="gpu:0&gpu:1")], ids=str
)
def test_nothing_stays_when_the_host_forgets(gpu_host: HostProcess, occupy: Callable, loaders: Loaders) -> None:
    before = gpu_host.ask_devices("read")
    sample(gpu_host, loaders, "tiny_flux.safetensors")
    gpu_host.forget()
    after = gpu_host.ask_devices("read")
    for device_before, device_after in zip(before["devices"], after["devices"], strict=True):
        assert device_after["used_bytes"] == device_before["used_bytes"]
    assert after["pinned"]["used_bytes"] == before["pinned"]["used_bytes"]


def test_core_clears_room_from_our_models_and_we_from_cores(gpu_host: HostProcess, occupy: Callable) -> None:
    occupy(12 * MIB)
    assert sample(gpu_host, Loaders(), "tiny_flux.safetensors", beside=CORE).outcome == "success"
    assert component(gpu_host, "tiny_flux")["tiers"]["gpu:0"] >= MODEL_BYTES
    assert sample(gpu_host, CORE, "other_flux.safetensors", beside=Loaders()).outcome == "success"
    assert component(gpu_host, "tiny_flux")["tiers"].get("gpu:0", 0) < MODEL_BYTES
    assert sample(gpu_host, Loaders(), "tiny_flux.safetensors", beside=CORE).outcome == "success"
    assert gpu_host.ask_devices("read")["devices"][0]["num_ooms"] == 0


@pytest.mark.expects_errors
def test_what_ran_out_of_memory_fits_the_next_time_and_so_it_stays(start_gpu_host: Callable) -> None:
    """A sampling that needs 5 MiB less than there is, with a model of 8 MiB that can compute in 2.

    In a host of its own: what is learned stays, and would change the plans of other tests.
    """
    with start_gpu_host() as host:

        def occupy(free_bytes: int) -> None:
            graph = Graph()
            graph.add("TestOccupy", device=0, free_bytes=free_bytes, run=next(new_run))
            assert host.run(graph.nodes).outcome == "success"

        def greedy(num_bytes: int) -> PromptResult:
            graph = Graph()
            model = Loaders().diffusion_model(graph)
            inputs = {"kind": "greedy", "module": "diffusion_model.single_blocks.1.linear2", "call": 0}
            model = graph.add("TestTrouble", model=model, num_bytes=num_bytes, **inputs)
            graph.keep(sample_flux(graph, model, steps=2))
            return host.run(graph.nodes)

        occupy(KEPT_BY_CORE + 12 * MIB)
        expected = greedy(1).kept()["value.samples"]
        need = KEPT_BY_CORE + 7 * MIB
        failed = greedy(need)
        assert failed.outcome == "error"
        assert re.search(r"Highwater: .* ran out of memory on gpu:0: .*; the next run keeps \S+ free for", failed.error)
        occupy(KEPT_BY_CORE + 12 * MIB)
        for _ in range(3):
            assert torch.equal(greedy(need).kept()["value.samples"], expected)
        (plan,) = (slot["plan"] for slot in host.part("components") if "gpu:0" in slot["tiers"])
        assert plan["shares"][0]["streamed_blocks"]
        assert "free for activations: an earlier run needed it" in " ".join(plan["reasons"])
        assert (host.base / "user" / "__highwater" / "needs.sqlite3").is_file()
        assert not (host.base / "cache" / "highwater" / "needs.sqlite3").exists()
