"""The process of ComfyUI after it freed its memory: RAM, page-locked and device bytes are those of before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from highwater.memory.transfer.host_heap import has_trim
from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

MIB = 1 << 20
TOLERANCE_BYTES = 16 * MIB
# What a first run imports stays, and what torch's kernels keep for the sizes of a model: these are from runs before.
SMALL, LARGE = "tiny_flux.safetensors", "wide_flux.safetensors"


def read(host: HostProcess) -> dict[str, Any]:
    pages = int(Path(f"/proc/{host.process.pid}/statm").read_text().split()[1])
    devices = host.ask_devices("read")
    return {
        "rss": pages * 4096,
        "pinned": devices["pinned"]["registered_bytes"],
        "devices": [device["used_bytes"] for device in devices["devices"]],
    }


def sample(host: HostProcess, name: str, loaders: Loaders) -> None:
    graph = Graph()
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph, name), size=32, steps=1))
    assert host.run(graph.nodes).outcome == "success"


@pytest.mark.skipif(not has_trim(), reason="this C library has no malloc_trim")
def test_all_memory_is_back_after_free(
    start_gpu_host: Callable[..., HostProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice 335 MiB of weights: what the C library keeps of the second load goes back, too.

    In one heap for all threads: glibc gives back the end of the main thread's heap only.
    """
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    with start_gpu_host() as host:
        sample(host, SMALL, Loaders())
        sample(host, LARGE, CORE)
        host.forget()
        before = read(host)
        assert before["pinned"] == 0 and not any(before["devices"])
        for _ in range(2):
            sample(host, LARGE, Loaders(profile="1,quantize=none"))  # all of it in RAM
            loaded = read(host)
            assert loaded["rss"] > before["rss"] + 300 * MIB and loaded["pinned"] > 300 * MIB
            host.post("/free", {"unload_models": True, "free_memory": True})

            def is_back() -> bool:
                now = read(host)
                return now["rss"] <= before["rss"] + TOLERANCE_BYTES and {**now, "rss": 0} == {**before, "rss": 0}

            host.wait_until(is_back, f"the memory of before, {before}; loaded: {loaded}")
