"""Lending device memory of ComfyUI to another program: what leaves for it, and what goes on beside it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from highwater.nodes.json_schema import find_fault
from highwater.nodes.route_schemas import answer_schemas
from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostFiles, HostProcess

MIB = 1 << 20
WIDE, WIDE_BYTES = "wide_flux.safetensors", 351_000_000


@pytest.fixture(scope="module")
def lending_host(start_gpu_host: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    """One of its own: the marks of a Watermark node that another test ran would count instead of those set here."""
    with start_gpu_host() as host:
        yield host


@pytest.fixture
def host(lending_host: HostProcess) -> Iterator[HostProcess]:
    lending_host.forget()
    lending_host.post("/highwater/watermark", {"marks": "0:0"})
    yield lending_host
    if device(lending_host)["lent"] is not None:
        lending_host.post("/highwater/lend/give-back", {"device": "gpu:0"})
    lending_host.forget()


def sample(host: HostProcess, loaders: Loaders, name: str = "tiny_flux.safetensors") -> torch.Tensor:
    graph = Graph()
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph, name), size=32, steps=2))
    sampled = host.run(graph.nodes).kept()["value.samples"]
    host.wait_until(lambda: not host.get("/queue")["queue_running"], "an empty queue")
    return sampled


def device(host: HostProcess) -> dict[str, Any]:
    return host.part("devices")[1]


def used_bytes(host: HostProcess) -> int:
    return host.ask_devices("read")["devices"][0]["used_bytes"]


def lend(host: HostProcess, num_bytes: int, duration: str = "10min") -> dict[str, Any]:
    return host.post("/highwater/lend", {"size": f"{num_bytes // MIB}MiB", "for": duration, "device": "gpu:0"})


@pytest.mark.parametrize("loaders", [CORE, Loaders()], ids=str)
def test_idle_models_leave_for_a_loan_whoever_loaded_them(host: HostProcess, loaders: Loaders) -> None:
    """Core's models by core's own way to clear room, also where no node of ours has seen them."""
    expected = sample(host, loaders)
    held = used_bytes(host)
    assert held > 8_000_000
    answer = lend(host, device(host)["total_bytes"] - MIB)
    assert answer["missing_bytes"] == 0 and answer["freed_bytes"] >= held - MIB
    assert used_bytes(host) <= MIB
    assert (
        "lent to another program" in [event for event in host.part("events") if event["kind"] == "lend"][-1]["reason"]
    )
    evicted = [event for event in host.part("events") if event["kind"] == "evict"][-1]
    assert "are lent to another program" in evicted["reason"] and evicted["to"] in ("host", "pinned")
    assert host.post("/highwater/lend/give-back", {"device": "gpu:0"})["lent_bytes"] == answer["lent_bytes"]
    assert torch.equal(sample(host, loaders), expected)


def test_an_idle_dynamic_model_leaves_for_a_loan(dynamic_host: HostProcess) -> None:
    """Page by page, by core's dynamic VRAM; the next run computes the same beside the loan."""
    host = dynamic_host
    host.forget()
    try:
        expected = sample(host, CORE, WIDE)
        host.post("/highwater/watermark", {"marks": "0:0"})
        total = host.total_bytes[0]
        held = used_bytes(host)
        assert held > WIDE_BYTES // 2
        answer = lend(host, total - 150 * MIB)
        assert answer["missing_bytes"] == 0 and answer["freed_bytes"] >= held - 150 * MIB
        assert torch.equal(sample(host, CORE, WIDE), expected)
        host.post("/highwater/lend/give-back", {"device": "gpu:0"})
        assert torch.equal(sample(host, CORE, WIDE), expected)
    finally:
        host.post("/highwater/watermark", {"marks": ""})
        if device(host)["lent"] is not None:
            host.post("/highwater/lend/give-back", {"device": "gpu:0"})
        host.forget()


def test_runs_go_on_and_stream_beside_a_loan(host: HostProcess) -> None:
    """335 MiB of weights where 150 MiB are not lent; all of them are on the device again when it is given back."""
    expected = sample(host, Loaders(), WIDE)
    total = device(host)["total_bytes"]
    lent = lend(host, total - 150 * MIB)["lent_bytes"]
    for _ in range(2):
        with host.books() as books:
            assert torch.equal(sample(host, Loaders(), WIDE), expected)
        assert books[0]["peak_bytes"] <= total - lent
        assert books[0]["h2d_bytes"] > WIDE_BYTES  # two steps
    assert device(host)["lent"]["num_bytes"] == lent
    host.post("/highwater/lend/give-back", {"device": "gpu:0"})
    assert device(host)["lent"] is None
    assert torch.equal(sample(host, Loaders(), WIDE), expected)
    with host.books() as books:
        assert torch.equal(sample(host, Loaders(), WIDE), expected)
    assert books[0]["h2d_bytes"] < MIB  # resident


def test_the_time_of_a_loan_ends_by_itself(host: HostProcess) -> None:
    sample(host, Loaders())
    lend(host, MIB, "1s")
    host.wait_until(lambda: device(host)["lent"] is None, "the end of the loan")
    host.wait_until(
        lambda: [event for event in host.part("events") if event["kind"] == "lend"][-1]["reason"].endswith(
            "time is up"
        ),
        "its event",
    )


def test_the_report_s_node_shows_a_loan(host: HostProcess) -> None:
    sample(host, Loaders())
    lend(host, 24 * MIB)
    graph = Graph()
    graph.add("HighwaterMemoryReport", after=sample_flux(graph, Loaders().diffusion_model(graph)))
    outputs = host.run(graph.nodes).outputs
    told = "\n".join(text for output in outputs.values() for text in output.get("text", []))
    assert "gpu:0: 24.0MiB are lent to another program for " in told


def test_a_prompt_that_runs_keeps_what_it_computes_with(host: HostProcess) -> None:
    """The whole device is refused; what leaves when the node ends is told as missing."""
    sample(host, Loaders())
    graph = Graph()
    model = Loaders().diffusion_model(graph)
    inputs = {"kind": "wait for interrupt", "module": "diffusion_model.single_blocks.1.linear2", "call": 1}
    graph.keep(sample_flux(graph, graph.add("TestTrouble", model=model, **inputs)))
    num_messages = len(host.messages)
    prompt_id = host.queue(graph.nodes)
    host.wait_for_message("highwater_test.waiting", num_messages)
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            lend(host, device(host)["total_bytes"])
        assert refused.value.code == 409
        assert "tiny_flux computes with" in json.loads(refused.value.read())["error"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            host.post("/highwater/release", {"device": "gpu:0"})
        assert refused.value.code == 409
        with pytest.raises(urllib.error.HTTPError) as refused:
            host.post("/highwater/move", {"component": "tiny_flux", "placement": "gpu:0&gpu:1@50%"})
        assert refused.value.code == 409
    finally:
        host.post("/interrupt")
    assert host.wait_for(prompt_id).outcome == "interrupted"


def test_a_model_is_split_over_another_device_while_its_node_stays(host: HostProcess) -> None:
    """On its first device it stays: ComfyUI chose that."""
    expected = sample(host, Loaders())
    (component,) = [part["id"] for part in host.part("components") if part["name"] == "tiny_flux"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        host.post("/highwater/move", {"component": component, "placement": "gpu:1"})
    assert refused.value.code == 400 and "as its host chose" in json.loads(refused.value.read())["error"]
    answer = host.post("/highwater/move", {"component": component, "placement": "gpu:0&gpu:1@50%"})
    assert answer["placement"].startswith("tiny_flux=gpu:0&gpu:1@")
    assert torch.equal(sample(host, Loaders()), expected)
    (tiers,) = [part["tiers"] for part in host.part("components") if part["id"] == component]
    assert tiers["gpu:0"] > 0 and tiers["gpu:1"] > 0
    assert find_fault(host.report(), answer_schemas()["/highwater/report"], "report") is None
    host.forget()


BODIES = {
    "lend": {"size": "1MiB", "for": "1min", "device": "gpu:0"},
    "lend/give-back": {"device": "gpu:0"},
    "keep": {"component": "tiny_flux"},
    "release": {"device": "gpu:0"},
    "move": {"component": "tiny_flux", "placement": "gpu:0&gpu:1@50%"},
    "limits": {"keep_loaded": 1},
    "free": {},
}
LAN_NAME = "box.local:8188"  # ComfyUI itself compares the origin under names of this machine only


def refusal(host: HostProcess, path: str, **headers: str) -> int:
    """Return the status with which a host refuses a request that changes something."""
    headers = {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    data, url = json.dumps(BODIES[path]).encode(), f"http://127.0.0.1:{host.port}/highwater/{path}"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, data, headers, method="POST"), timeout=60)
    return refused.value.code


@pytest.mark.parametrize("path", BODIES)
def test_pages_of_other_sites_are_refused(host: HostProcess, path: str) -> None:
    sample(host, Loaders())
    before = used_bytes(host), device(host)["lent"], host.post("/highwater/limits")
    assert refusal(host, path, Origin="http://evil.example") == 403
    assert refusal(host, path, Origin="http://evil.example", Host=LAN_NAME) == 403
    assert refusal(host, path, Sec_Fetch_Site="same-site", Host=LAN_NAME) == 403
    assert refusal(host, path, Content_Type="text/plain") == 415  # what a form may send
    assert (used_bytes(host), device(host)["lent"], host.post("/highwater/limits")) == before


@pytest.mark.comfyui_cpu
def test_a_host_that_answers_other_sites_changes_nothing_for_them(host_files: HostFiles, models: Path) -> None:
    with HostProcess(host_files, models=models, arguments=["--enable-cors-header"]) as host:
        for headers in ({"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Origin": "null"}):
            assert refusal(host, "limits", **headers) == 403
            assert refusal(host, "free", **headers) == 403
        assert host.post("/highwater/limits") == {"keep_loaded": None, "idle_s": None}
