"""The server under test with toy nodes, and the tools that run the page: node, npm packages, Chromium.

The nodes are toys, so that these tests need no pipeline; the runner, the queue and the manager are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from aiohttp import ClientWebSocketResponse
from aiohttp.test_utils import TestClient, TestServer
from filelock import FileLock

from highwater.headless.comfy_stub.comfy_api import install
from highwater.headless.comfy_stub.comfy_io import AnyType, Combo, ComfyNode, Int, NodeOutput, Schema, String
from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.server.app import make_app
from highwater.memory import DoesNotFit, MemoryManager

HERE = Path(__file__).parent
install()


class ToyNumber(ComfyNode):
    @classmethod
    def define_schema(cls) -> Schema:
        return Schema(
            node_id="ToyNumber",
            inputs=[Int.Input("value", min=0, max=9), Combo.Input("kind", options=["odd", "even"], optional=True)],
            outputs=[Int.Output(display_name="number")],
        )

    @classmethod
    def execute(cls, value: int, kind: str = "odd") -> NodeOutput:
        return NodeOutput(value)


class ToyShow(ComfyNode):
    """An output node; shows what it gets."""

    @classmethod
    def define_schema(cls) -> Schema:
        return Schema(node_id="ToyShow", inputs=[AnyType.Input("value")], outputs=[], is_output_node=True)

    @classmethod
    def execute(cls, value: Any) -> NodeOutput:
        return NodeOutput(ui={"text": [str(value)]})


class ToyWait(ComfyNode):
    """An output node that runs, reporting progress, until it may end."""

    started = threading.Event()
    may_end = threading.Event()

    @classmethod
    def define_schema(cls) -> Schema:
        return Schema(node_id="ToyWait", inputs=[Int.Input("tag")], outputs=[], is_output_node=True)

    @classmethod
    def execute(cls, tag: int) -> NodeOutput:
        from highwater.nodes.progress import report_progress

        for step in range(1000):
            cls.started.set()
            report_progress(step, 1000)
            if cls.may_end.wait(0.01):
                break
        return NodeOutput(ui={"text": [str(tag)]})


class ToyFail(ComfyNode):
    """An output node for which there is no room."""

    @classmethod
    def define_schema(cls) -> Schema:
        return Schema(
            node_id="ToyFail", inputs=[String.Input("message"), AnyType.Input("after")], outputs=[], is_output_node=True
        )

    @classmethod
    def execute(cls, message: str, after: Any) -> NodeOutput:
        raise DoesNotFit(message)


TOYS = {toy.GET_SCHEMA().node_id: toy for toy in (ToyNumber, ToyShow, ToyWait, ToyFail)}


@pytest.fixture
def toys() -> dict[str, type[ComfyNode]]:
    """The nodes of the server; a test may add some while it runs."""
    return TOYS


@dataclass
class Page:
    """One open page: its client id, and the messages that have come."""

    client: TestClient
    socket: ClientWebSocketResponse
    id: str
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def receive_until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Read messages up to the wanted one and return it; fails after 20 s."""
        while True:
            message = await asyncio.wait_for(self.socket.receive_json(), timeout=600)
            self.messages.append(message)
            if wanted(message):
                return message

    async def queue(self, graph: Any, *, workflow_id: str | None = None, **extra: Any) -> str:
        """Queue a graph as the page does; returns the prompt's id."""
        pnginfo = {"extra_pnginfo": {"workflow": {"id": workflow_id}}} if workflow_id else {}
        body = {"client_id": self.id, "prompt": graph, "extra_data": pnginfo, **extra}
        response = await self.client.post("/api/prompt", json=body)
        assert response.status == 200, await response.text()
        return (await response.json())["prompt_id"]

    async def wait_for_end(self, prompt_id: str) -> None:
        """Read until the page is told that nothing of this prompt executes any more, and the queue's new state."""
        await self.receive_until(lambda m: m["type"] == "executing" and m["data"] == ended(prompt_id))
        await self.receive_until(lambda m: m["type"] == "status")

    def types(self) -> list[str]:
        return [message["type"] for message in self.messages]


def ended(prompt_id: str) -> dict[str, Any]:
    return {"node": None, "display_node": None, "prompt_id": prompt_id}


@dataclass
class Server:
    client: TestClient
    user: Path
    output: Path
    waiting_node: type[ToyWait] = ToyWait

    async def get(self, path: str, status: int = 200) -> Any:
        response = await self.client.get(path)
        assert response.status == status, (path, response.status, await response.text())
        return await response.json()

    @contextlib.asynccontextmanager
    async def open_page(self, client_id: str) -> AsyncIterator[Page]:
        async with self.client.ws_connect(f"/ws?clientId={client_id}") as socket:
            page = Page(self.client, socket, client_id)
            await page.receive_until(lambda m: m["type"] == "status")
            assert page.messages[0]["data"]["sid"] == client_id
            page.messages.clear()
            yield page


@pytest.fixture
def with_server(tmp_path: Path) -> Callable[[Callable[[Server], Any]], None]:
    """Run an async test body against a server of its own."""

    def run(body: Callable[[Server], Any]) -> None:
        async def main() -> None:
            ToyWait.started.clear()
            ToyWait.may_end.clear()
            output, user = tmp_path / "output", tmp_path / "user"
            output.mkdir()
            runner = WorkflowRunner(MemoryManager(), models_directory=tmp_path / "models", output_directory=output)
            app = make_app(runner, TOYS, user_directory=user)
            server = TestServer(app)
            await server.start_server(lingering_time=0.2)  # seconds that a client whose body is not read may go on
            async with TestClient(server) as client:
                await body(Server(client, user, output))

        asyncio.run(main())

    return run


# The tools of the page ---------------------------------------------------------------------------------------


def untested(reason: str) -> NoReturn:
    """Skip loudly; on CI nothing else would notice, so fail there."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(f"NOT TESTED: {reason}")


@pytest.fixture(scope="session")
def node() -> str:
    """The node executable, 20 or newer."""
    found = shutil.which("node")
    if found is None:
        untested("the web page's scripts need node 20 or newer")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").split(".")[0]) < 20:
        untested(f"the web page's scripts need node 20 or newer, {found} is {version}")
    return found


@pytest.fixture(scope="session")
def packages(node: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``node_modules`` as the lock file says; installed when that file has changed (some seconds, network)."""
    modules = HERE / "node_modules"
    lock = hashlib.sha256((HERE / "package-lock.json").read_bytes()).hexdigest()
    stamp = modules / ".highwater-lock"
    with FileLock(tmp_path_factory.getbasetemp().parent / "npm.lock"):  # the folder of all workers of a run
        if not stamp.is_file() or stamp.read_text() != lock:
            npm = shutil.which("npm")
            if npm is None:
                untested("the browser test needs npm")
            command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
            result = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=1200)
            if result.returncode:
                untested(f"npm ci failed: {result.stderr.strip().splitlines()[-1:]}")
            stamp.write_text(lock)
    return modules


@pytest.fixture(scope="session")
def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        untested("the browser test needs Chromium (apt-get install chromium), or its path in CHROMIUM")
    return found
