"""One amount on Load Checkpoint is for all its parts together, whatever moves them."""

from __future__ import annotations

import pytest
import torch

from highwater.tests.comfyui.graphs import Graph, Loaders, checkpoint
from highwater.tests.comfyui.host_process import HostProcess

MIB = 1 << 20
PAGE_BYTES = 32 * MIB


def run(host: HostProcess, loaders: Loaders) -> tuple[torch.Tensor, dict[str, int]]:
    """Return a picture, and what each part has of the device afterwards."""
    host.forget()
    graph = Graph()
    checkpoint(graph, loaders)
    (picture,) = host.run(graph.nodes).kept().values()
    parts = [part for part in host.part("components") if part["id"].startswith("shallow_sd/")]
    return picture, {part["id"]: part["tiers"].get("gpu:0", 0) for part in parts}


@pytest.mark.parametrize("engine", ["blocks", "dynamic"])
def test_an_amount_is_for_all_parts(request: pytest.FixtureRequest, engine: str) -> None:
    host: HostProcess = request.getfixturevalue("dynamic_host" if engine == "dynamic" else "gpu_host")
    expected, alone = run(host, Loaders(engine=engine))
    assert len(alone) == 3 and sum(alone.values()) > max(alone.values()) + PAGE_BYTES, alone
    most = max(alone.values()) + PAGE_BYTES
    picture, held = run(host, Loaders(engine=engine, profile=f"{most // MIB}MiB"))
    assert 0 < sum(held.values()) <= most, (held, alone)
    assert torch.equal(picture, expected)
    host.forget()
