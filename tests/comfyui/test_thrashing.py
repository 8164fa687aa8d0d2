"""Thrashing and growth in ComfyUI: what is evicted and loaded again and again, what needs more than at the last run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from highwater.tests.comfyui.conftest import DEVICE_BYTES, watermark
from highwater.tests.comfyui.graphs import Graph, Loaders, new_run, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

MIB = 1 << 20
# Of 8.2 MB each the static host has room for one; dynamic ones have 335 MiB each, and there is room for one of them.
SMALL, WIDE = ("tiny_flux", "other_flux"), ("wide_flux", "other_wide_flux")


def sample_both(host: HostProcess, names: tuple[str, str], *loaders: Loaders, size: int = 64) -> list[dict[str, Any]]:
    """Run a prompt that samples with two models after one another; returns the events of that run."""
    begin_s = host.last_event_s()
    graph = Graph()
    for name, loader in zip(names, loaders, strict=True):
        graph.keep(sample_flux(graph, loader.diffusion_model(graph, f"{name}.safetensors"), size=size), name)
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    return host.events_after(begin_s)


def told(events: list[dict[str, Any]], kind: str) -> dict[str, str]:
    return {event["component"]: event["reason"] for event in events if event["kind"] == kind}


@pytest.fixture
def static(gpu_host: HostProcess) -> Iterator[HostProcess]:
    gpu_host.forget()
    with watermark(gpu_host, DEVICE_BYTES - 12 * MIB, DEVICE_BYTES - 12 * MIB):
        yield gpu_host
    gpu_host.forget()


@pytest.fixture
def dynamic(dynamic_host: HostProcess) -> Iterator[HostProcess]:
    dynamic_host.forget()
    graph = Graph()
    graph.add("HighwaterWatermark", device="*", low="0", high="0")
    graph.add("TestOccupy", device=0, free_bytes=700 * MIB, run=next(new_run))
    assert dynamic_host.run(graph.nodes).outcome == "success"
    yield dynamic_host
    graph = Graph()
    graph.add("TestOccupy", device=0, free_bytes=-1, run=next(new_run))
    assert dynamic_host.run(graph.nodes).outcome == "success"
    dynamic_host.forget()


def test_two_models_that_push_each_other_out(static: HostProcess) -> None:
    found = {}
    for _ in range(5):
        found |= told(sample_both(static, SMALL, Loaders(), Loaders()), "thrashing")
    assert found.keys() == set(SMALL)
    for reason in found.values():
        assert reason.startswith("evicted and loaded again 3 times within 5 runs, ")
        assert "a watermark of gpu:0 of low " in reason and reason.endswith(" would stop that")


def test_two_dynamic_models_that_push_each_other_out(dynamic: HostProcess) -> None:
    found = {}
    for _ in range(5):
        found |= told(sample_both(dynamic, WIDE, Loaders(), Loaders()), "thrashing")
    assert found.keys() == set(WIDE)
    for reason in found.values():
        assert reason.startswith("evicted and loaded again 3 times within 5 runs, ")
        assert "placement gpu:1 would stop that: " in reason


def test_a_workflow_that_needs_more(static: HostProcess) -> None:
    encoded, plain = Loaders(precision="fp8 scaled"), Loaders()
    sample_both(static, SMALL, plain, encoded)
    assert not told(sample_both(static, SMALL, plain, encoded), "growth")
    (reason,) = told(sample_both(static, SMALL, plain, plain), "growth").values()
    assert "needs 3." in reason and "more than at its last run: weights of other_flux take 7." in reason
    assert reason.endswith("(since precision as stored, was fp8 scaled)")


def test_a_workflow_that_needs_more_of_dynamic_models(dynamic: HostProcess) -> None:
    eight, plain = (Loaders(kind="managed", weight_dtype=dtype) for dtype in ("fp8_e4m3fn", "default"))
    sample_both(dynamic, SMALL, eight, eight)
    assert not told(sample_both(dynamic, SMALL, eight, eight), "growth")
    (reason,) = told(sample_both(dynamic, SMALL, eight, eight, size=512), "growth").values()
    assert "more than at its last run: activations of " in reason and "weights" not in reason
    (reason,) = told(sample_both(dynamic, SMALL, plain, eight), "growth").values()
    assert "more than at its last run: weights of tiny_flux take 7." in reason
    assert reason.endswith("(since dtype bfloat16, was float8_e4m3fn)")
