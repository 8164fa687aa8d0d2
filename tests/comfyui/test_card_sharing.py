"""ComfyUI beside another process on its card: models leave for it between runs, and it is asked for what runs lack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from highwater.memory.manager.claims.neighbours import ProcessUse
from highwater.tests.comfyui.conftest import DEVICE_BYTES
from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess
from highwater.tests.engine.manager.test_process_slots import Other

MIB = 1 << 20
WIDE = "wide_flux.safetensors"  # 335 MiB of weights
LOADERS = {"blocks": Loaders(engine="blocks"), "dynamic": Loaders(engine="dynamic")}


@pytest.fixture(params=LOADERS)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostProcess]:
    start: Callable[..., HostProcess] = request.getfixturevalue(
        "start_dynamic_host" if request.param == "dynamic" else "start_gpu_host"
    )
    with start(runtime=tmp_path / "run") as host:
        yield host


def picture(host: HostProcess, loaders: Loaders) -> torch.Tensor:
    graph = Graph()
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph, WIDE)))
    return host.run(graph.nodes).kept()["value.samples"]


def held(host: HostProcess) -> int:
    return sum(component["tiers"].get("gpu:0", 0) for component in host.part("components"))


def test_a_model_leaves_between_runs_and_is_asked_for_in_one(host: HostProcess, request, tmp_path: Path) -> None:
    loaders = LOADERS[request.node.callspec.params["host"]]
    expected = picture(host, loaders)
    assert held(host) > 300 * MIB
    others = [Other(path) for path in (tmp_path / "run" / "highwater").iterdir()]
    try:
        uses = [ProcessUse.from_bytes(other.read()[0], DEVICE_BYTES) for other in others]
        other, use = max(zip(others, uses, strict=True), key=lambda pair: pair[1].used_bytes)
        assert use.pid == host.process.pid and use.used_bytes > 300 * MIB

        def say(**amounts: int) -> None:
            none = {"low_bytes": 0, "high_bytes": 0, "used_bytes": 0, "idle_bytes": 0}
            other.write(ProcessUse(pid=4321, **none | amounts).to_bytes())

        say(need_bytes=DEVICE_BYTES, request=1)
        host.wait_until(lambda: held(host) < 64 * MIB, "that the model leaves", timeout_s=60)
        reasons = [event["reason"] for event in host.part("events") if event["kind"] == "evict"]
        assert any("another process (pid 4321) needs 1.80GiB; " in reason for reason in reasons)
        device = next(device for device in host.part("devices") if device["name"] == "gpu:0")
        assert [neighbour["pid"] for neighbour in device["neighbours"]] == [4321]

        # Now the other process has most of the card, and would give it: there is room for a part of the model.
        taken = DEVICE_BYTES - 400 * MIB
        host.ask_devices("occupy", device=0, num_bytes=taken)
        say(used_bytes=taken, idle_bytes=taken)
        asked, ended = [0], threading.Event()

        def listen() -> None:
            while not ended.wait(0.01):
                heard = [ProcessUse.from_bytes(entry, DEVICE_BYTES) for entry in other.read()]
                asked.extend(one.need_bytes for one in heard if one is not None)

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            assert torch.equal(picture(host, loaders), expected)
        finally:
            ended.set()
            listener.join()
        assert 64 * MIB < max(asked) <= taken
        assert ProcessUse.from_bytes(other.read()[0], DEVICE_BYTES).need_bytes == 0
        host.ask_devices("occupy", device=0, num_bytes=0)
        assert torch.equal(picture(host, loaders), expected)
    finally:
        for other in others:
            other.crash()
    assert torch.equal(picture(host, CORE), expected)
