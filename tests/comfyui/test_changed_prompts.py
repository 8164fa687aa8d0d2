"""Ten prompts that differ in their text: nothing is read again, and the text encoder stays as far as it can."""

from __future__ import annotations

from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from highwater.memory.units import MIB, PAGE_BYTES
from highwater.memory.weights.page_cache import count_pages
from highwater.tests.comfyui.conftest import DEVICE_BYTES, watermark
from highwater.tests.comfyui.graphs import Graph, Loaders
from highwater.tests.comfyui.host_process import HostProcess
from highwater.tests.comfyui.test_kept_weights import bytes_read, find_model

NUM_PROMPTS = 10
LARGEST_BLOCK_BYTES = 16 * MIB
# What else a process reads from disks in ten prompts, such as code that it has not used before.
OTHER_BYTES = MIB


@pytest.fixture(params=[200, 260], ids=["room for most", "room for nearly all"])
def room(request: pytest.FixtureRequest) -> int:
    """The bytes of the device that weights may have: the parts of the checkpoint have 290 MiB together."""
    return request.param * MIB


@pytest.fixture
def host(gpu_host: HostProcess, room: int) -> Iterator[HostProcess]:
    gpu_host.forget()
    with watermark(gpu_host, DEVICE_BYTES - room, DEVICE_BYTES - room):
        yield gpu_host
    gpu_host.forget()


def run(host: HostProcess, text: str) -> list[dict[str, Any]]:
    """Run a prompt with this text; returns the events of that run."""
    begin_s = host.last_event_s()
    graph = Graph()
    model, clip, vae = Loaders().checkpoint(graph)
    positive, negative = (graph.add("CLIPTextEncode", text=each, clip=clip) for each in (text, "blurry"))
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    latent = graph.sampler(model, positive, negative, latent, cfg=3.0, steps=1)
    graph.keep(graph.add("VAEDecode", samples=latent, vae=vae))
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    return host.events_after(begin_s)


def share_in_ram(path: Path) -> float:
    """Return the share of a file's pages that the system has in RAM."""
    with FileIO(path) as file:
        num_pages = -(-path.stat().st_size // PAGE_BYTES)
        return (count_pages(file, 0, num_pages) or 0) / num_pages


def test_changed_prompts_read_nothing_and_move_little(host: HostProcess, room: int) -> None:
    file = find_model(host, "shallow_sd")
    for text in ("a lighthouse", "a lighthouse at dawn"):
        run(host, text)
    before = bytes_read(host)
    for number in range(NUM_PROMPTS):
        events = run(host, f"a lighthouse at dusk, number {number}")
        on_device = {part["id"]: part["tiers"].get("gpu:0", 0) for part in host.part("components")}
        text, others = on_device.pop("shallow_sd/clip"), sum(on_device.values())
        assert room - others - text < LARGEST_BLOCK_BYTES, "the text encoder has what the others leave"
        assert share_in_ram(file) > 0.99, "the system keeps the pages"
        left = sum(event["bytes"] for event in events if event["kind"] == "evict" and "clip" in event["component"])
        assert left <= others + LARGEST_BLOCK_BYTES
    assert bytes_read(host) - before < OTHER_BYTES
