"""What our addresses answer, each compared with its schema."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import save_file

from highwater.headless.comfy_stub import comfy_api, folder_paths
from highwater.memory import manage
from highwater.memory.manager import default
from highwater.memory.manager.needs import Need
from highwater.memory.manager.needs_file import NeedsFile
from highwater.nodes.json_schema import find_fault
from highwater.nodes.route_schemas import REQUESTS, answer_schemas
from highwater.nodes.routes import make_routes

comfy_api.install()  # a default profile is read as a node's is

MIB = 1 << 20
FILE = "diffusion_models/net.safetensors"
MODEL = "part/model"
WORDS = {"/highwater/plan": f"?file={FILE}&profile=4"}
BODIES: dict[str, dict[str, Any]] = {
    "/highwater/lend": {"size": "1MiB", "for": "60s"},
    "/highwater/keep": {"component": MODEL, "at_most": "50%"},
    "/highwater/release": {"device": "gpu:0"},
    "/highwater/move": {"component": MODEL, "placement": "cpu"},
    "/highwater/limits": {"keep_loaded": 3, "idle": "10min"},
    "/highwater/watermark": {"marks": "gpu:0=5%:10%"},
    "/highwater/look-ahead": {"on": False},
    "/highwater/default-profile": {"profile": ""},
}
ROUTES = make_routes(is_running=bool, host_features=dict)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sim: Any) -> Iterator[Path]:
    """A host's folder with one model file and one learned need, while a model is loaded on a GPU of 8 MiB."""
    root = tmp_path / "a ComfyUI"
    monkeypatch.setitem(sys.modules, "folder_paths", folder_paths)
    monkeypatch.setattr(folder_paths, "__file__", str(root / "folder_paths.py"))
    monkeypatch.setattr(folder_paths, "models_directory", root / "models")
    monkeypatch.setattr(default, "needs_folder", [(tmp_path / "cache", "")])
    monkeypatch.setattr(default, "made", [])
    (root / "models" / FILE).parent.mkdir(parents=True)
    (root / "custom_nodes" / "highwater").mkdir(parents=True)
    (root / "custom_nodes" / "highwater" / "pyproject.toml").write_text('name = "highwater-memory"')
    (root / "comfyui_version.py").write_text('__version__ = "0.33.0"')
    (tmp_path / "cache").mkdir()
    save_file({f"layers.{number}.weight": torch.ones(64, 64) for number in range(8)}, root / "models" / FILE)
    need = Need(used_s=int(time.time()), seen_bytes=MIB)
    NeedsFile(tmp_path / "cache" / "needs.sqlite3").write([(("0" * 32, "1" * 32), (1,), need)])
    with sim.cluster([sim.SimDeviceSpec(total_bytes=8 * MIB)]), torch.no_grad():
        manager = default.default_manager()
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        with manage({"model": model}, manager=manager, name="part"):
            manager.begin_run("run-1", "a workflow")
            manager.begin_node("7", "KSampler", workflow_id="w")
            model(torch.ones(1, 64))
            manager.end_node()
            manager.end_run()
            yield tmp_path
            manager.release_all()


@pytest.fixture
def ask(host: Path) -> Callable[[str], Any]:
    """Ask an address as the examples above say; return its answer, which must be a good one."""

    def ask(path: str) -> Any:
        async def main() -> Any:
            app = web.Application()
            for method, at, handler in ROUTES:
                app.router.add_route(method, at, handler)
            (method,) = [method for method, at, _ in ROUTES if at == path]
            async with TestClient(TestServer(app)) as client:
                body = BODIES.get(path, {}) if method == "POST" else None
                response = await client.request(method, path + WORDS.get(path, ""), json=body)
                answer = await response.json()
                assert response.status == 200, answer
                return answer

        return asyncio.run(main())

    return ask


def test_every_address_has_the_schema_of_its_answer() -> None:
    assert sorted(answer_schemas()) == sorted(path for _, path, _ in ROUTES)
    assert sorted(REQUESTS) == sorted(path for method, path, _ in ROUTES if method == "POST")


@pytest.mark.parametrize("path", [path for _, path, _ in ROUTES])
def test_every_address_answers_as_its_schema_says(ask: Callable[[str], Any], path: str) -> None:
    if path == "/highwater/lend/give-back":
        ask("/highwater/lend")
    schema, answer = answer_schemas()[path], ask(path)
    assert find_fault(answer, schema, path) is None
    for name in schema["properties"]:
        lacks = {key: value for key, value in answer.items() if key != name}
        assert (find_fault(lacks, schema, path) is None) == (name not in schema["required"])
    assert find_fault({**answer, "colour": 1}, schema, path) is not None


def test_the_answers_of_the_examples_are_not_empty(ask: Callable[[str], Any]) -> None:
    """An empty list is as any schema says."""
    assert ask("/highwater/report")["components"] and ask("/highwater/events")["events"]
    assert ask("/highwater/plan")["plans"]["files"]["components"][0]["shares"]
    assert ask("/highwater/devices")["devices"] and ask("/highwater/doctor")["findings"]
    assert ask("/highwater/profiles")["profiles"] and ask("/highwater/needs")["files"][0]["needs"]
    assert ask("/highwater/release")["released"] and ask("/highwater/needs/forget")["files"]
