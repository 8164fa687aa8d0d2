"""The addresses that the pack adds to ComfyUI's server, answered by aiohttp."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from highwater.memory import default_manager, existing_manager, manage
from highwater.memory.manager import default
from highwater.nodes.routes import add_routes


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Any]]:
    """Ask a server of its own, whose process has no manager yet: (method, path) -> (status, JSON)."""
    monkeypatch.setattr(default, "made", [])
    queue = SimpleNamespace(get_current_queue_volatile=lambda: (running, []))
    server = SimpleNamespace(routes=web.RouteTableDef(), prompt_queue=queue)
    running: list[Any] = []
    add_routes(server)

    def ask(method: str, path: str, *, is_running: bool = False) -> tuple[int, Any]:
        running[:] = [(0, "prompt-1", {}, {}, [], {})] if is_running else []

        async def main() -> tuple[int, Any]:
            app = web.Application()
            app.add_routes(server.routes)
            async with TestClient(TestServer(app)) as client:
                response = await client.request(method, path)
                return response.status, await response.json()

        return asyncio.run(main())

    return ask


def test_the_page_may_ask_before_anything_is_managed(ask: Callable[..., tuple[int, Any]]) -> None:
    status, report = ask("GET", "/highwater/report")
    assert status == 200
    assert report["version"] == 1
    assert report["nodes"] == report["components"] == report["devices"] == []
    assert report["host_features"]["run_boundaries"] == "missing: not inside of ComfyUI"
    assert ask("POST", "/highwater/free") == (200, {"freed_bytes": {}})
    assert existing_manager() is None


def test_only_gives_the_named_parts_and_the_version(ask: Callable[..., tuple[int, Any]]) -> None:
    default_manager()
    status, report = ask("GET", "/highwater/report?only=devices,host_features")
    assert status == 200
    assert list(report) == ["devices", "version", "host_features"]
    assert report["devices"][0]["name"] == "cpu"


@pytest.mark.parametrize("only", ["", "nodes,colour"])
def test_an_unknown_part_is_refused_by_name(ask: Callable[..., tuple[int, Any]], only: str) -> None:
    status, answer = ask("GET", f"/highwater/report?only={only}")
    assert status == 400
    assert f"only={only.split(',')[-1]!r} is no part of the report" in answer["error"]
    assert "host_features" in answer["error"]


def test_nothing_is_freed_while_a_prompt_runs(ask: Callable[..., tuple[int, Any]], sim: Any) -> None:
    manager = default_manager()
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    with manage({"model": model}, manager=manager, placement="gpu:0"), torch.no_grad():
        model(torch.ones(1, 64, device=manager.devices["gpu:0"].torch_device))
        held = manager.ledger.used("gpu:0")
        assert held
        status, answer = ask("POST", "/highwater/free", is_running=True)
        assert status == 409
        assert "a prompt is running" in answer["error"]
        assert manager.ledger.used("gpu:0") == held
        status, answer = ask("POST", "/highwater/free")
        assert (status, answer["freed_bytes"]["gpu:0"]) == (200, held)
        assert manager.ledger.used("gpu:0") == 0
        model(torch.ones(1, 64, device=manager.devices["gpu:0"].torch_device))
        assert manager.ledger.used("gpu:0") == held
