"""The example for authors of other packs: a cache of its own that is shown, kept, and freed in turn with models."""

from __future__ import annotations

from typing import Any

from highwater.memory.units import MIB
from highwater.tests.comfyui.graphs import Graph, Link, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

NAME = "frame cache"
FRAME_BYTES = 4096 * 4096 * 3 * 4


def frames(graph: Graph, name: str, size: int = 4096) -> Link:
    image = graph.add("EmptyImage", width=size, height=size, batch_size=1, color=0x336699)
    return graph.add("ExampleCacheFrames", image=image, name=name)


def test_a_cache_of_another_pack_is_shown_kept_and_freed(start_gpu_host: Any) -> None:
    with start_gpu_host() as host:
        graph = Graph()
        frame = frames(graph, "a")
        graph.add("HighwaterMemoryReport", after=frame)
        run(host, graph)
        cache = row(host)
        assert (cache["engine"], cache["node_id"], cache["tiers"]) == ("registered", frame[0], {"gpu:0": FRAME_BYTES})
        (released,) = host.post("/highwater/release", {"component": NAME})["released"]
        assert released["left_bytes"] == FRAME_BYTES and not row(host)["tiers"]

        # Two frames, and models for which one of them has to leave.
        graph = Graph()
        both = [frames(graph, name) for name in "bc"]
        run(host, kept(graph, both))
        assert row(host)["tiers"] == {"gpu:0": 2 * FRAME_BYTES}
        low = host_device(host)["total_bytes"] - FRAME_BYTES * 3 // 2
        host.post("/highwater/watermark", {"marks": f"{low // MIB}MiB:{low // MIB}MiB"})
        graph = Graph()
        graph.keep(sample_flux(graph, Loaders().diffusion_model(graph)))
        run(host, graph)
        assert row(host)["tiers"].get("gpu:0", 0) <= FRAME_BYTES
        event = [event for event in host.part("events") if event["component"] == NAME][-1]
        assert event["kind"] == "evict" and event["bytes"] == FRAME_BYTES and "watermark" in event["reason"]
        assert "Traceback" not in host.log()


def kept(graph: Graph, links: list[Link]) -> Graph:
    for number, link in enumerate(links):
        graph.keep(link, f"frame{number}")
    return graph


def run(host: HostProcess, graph: Graph) -> None:
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error


def row(host: HostProcess) -> dict[str, Any]:
    (found,) = [part for part in host.part("components") if part["id"] == NAME]
    return found


def host_device(host: HostProcess) -> dict[str, Any]:
    return next(device for device in host.part("devices") if device["name"] == "gpu:0")
