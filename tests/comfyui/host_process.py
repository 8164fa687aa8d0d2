"""An unmodified ComfyUI as a subprocess: found, started in a temporary base directory, spoken to over HTTP, stopped.

Knows nothing of pytest: the benchmarks start hosts with it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import safetensors.torch
import torch

from highwater.memory.user_folders import cache_folder
from highwater.tests.comfyui.simulated import simulated_gpus

__all__ = [
    "HostDidNotStart",
    "HostFiles",
    "HostProcess",
    "PromptRefused",
    "PromptResult",
    "bytecode_directory",
    "find_host",
]

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
START_TIMEOUT_S = 180
PROMPT_TIMEOUT_S = 120
REQUEST_TIMEOUT_S = 60
# By default a host that is short of RAM (a tenth of it) also forgets results of the prompt that runs: for a test that
# would be another host whenever the machine is busy. In GiB that are free: never those, all others always.
FORGETS_OTHERS = ("--cache-ram", "0", "1000000")


class Patience:
    """A wait that ends after so many seconds of an idle machine: on one as busy as twice its cores, twice as many."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds
        self.seen_s = time.monotonic()

    def is_over(self) -> bool:
        """Whether the time is up, by the machine's load since this was asked last."""
        now_s = time.monotonic()
        self.left_s -= (now_s - self.seen_s) / crowding()
        self.seen_s = now_s
        return self.left_s < 0


def crowding() -> float:
    """Return how many times slower a process runs than alone, by the machine's load; at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFiles:
    """Where a ComfyUI and its Python are."""

    directory: Path
    python: Path


def find_host(variable: str = "COMFYUI_DIR", default: str | None = "~/comfy/ComfyUI") -> HostFiles | None:
    """Return the host that an environment variable names, else the one at the default place; None without any."""
    named = os.environ.get(variable) or default
    if not named:
        return None
    directory = Path(named).expanduser()
    if not (directory / "main.py").is_file():
        return None
    beside = directory.parent / "venv" / "bin" / "python"
    python = os.environ.get(variable.removesuffix("DIR") + "PYTHON") or (beside if beside.exists() else sys.executable)
    return HostFiles(directory=directory, python=Path(python))


def bytecode_directory() -> Path:
    """Return where bytecode goes: the host's folder stays as it is, and the next start takes a third of the time.

    That is the user's cache, or the folder of temporary files where none is known: a GPU machine may lack platformdirs.
    """
    folder = None
    with contextlib.suppress(ModuleNotFoundError):
        folder = cache_folder()
    return Path(folder or Path(tempfile.gettempdir(), "highwater"), "comfyui-bytecode")


class HostDidNotStart(RuntimeError):
    """The host ended, or did not listen, as it started; the message has the end of its log."""


class PromptRefused(Exception):
    """The host refused a prompt before running it; the argument is what it answered."""

    @property
    def text(self) -> str:
        """All that a user reads: the nodes' messages with their details."""
        answer = self.args[0]
        errors = [error for node in answer["node_errors"].values() for error in node["errors"]]
        return "; ".join(f"{error['message']}: {error['details']}" for error in errors) or str(answer["error"])


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """How a prompt ended; ``outputs`` is what its nodes sent to the page."""

    prompt_id: str
    outcome: str  # success, error or interrupted
    outputs: dict[str, Any]
    error: str
    output_directory: Path = field(repr=False)

    @property
    def brief_error(self) -> str:
        """The message and the innermost lines of the traceback."""
        message, *lines = self.error.splitlines() or [""]
        return "\n".join([message, *lines[-4:]])

    def kept(self, name: str = "kept") -> dict[str, torch.Tensor]:
        """Return the tensors that a TestKeep node of this prompt wrote."""
        assert self.outcome == "success", f"the prompt ended with {self.outcome}: {self.brief_error}"
        return safetensors.torch.load_file(self.output_directory / f"{name}.safetensors")


class HostProcess:
    """A running ComfyUI. Use it as a context manager."""

    def __init__(
        self,
        files: HostFiles,
        *,
        models: Path,
        with_pack: bool = True,
        pack: Path = REPOSITORY,
        total_bytes: Sequence[int] = (),
        strict: bool = True,
        dynamic: str = "",
        on_gpu: bool = False,
        aimdo: Path | None = None,
        runtime: Path | None = None,
        slowed: float = 1,
        arguments: Sequence[str] = (),
    ) -> None:
        """Prepare the base directory; nothing runs yet.

        Args:
            models: the folder of `model_files.ensure_model_files`.
            pack: the folder of the pack, if it is installed.
            total_bytes: the size of each simulated GPU; none means the CPU.
            strict: the simulated GPUs defer copies and look for races.
            dynamic: "core" turns core's dynamic VRAM on, by comfy-aimdo over the driver of `fake_cuda`; with "nvidia"
                core also does what it does for NVIDIA's devices only: streams and page-locked copies of weights.
            on_gpu: it takes the machine's GPU, and as many threads as it likes; for measurements.
            aimdo: the folder of another comfy-aimdo than the one that is installed.
            runtime: the folder through which hosts share simulated GPUs; None: each has its own.
            slowed: by how much the simulated GPUs' memory and links are slower: that for a model so much smaller.
            arguments: more for the host's command line; by default its cache forgets what a prompt does not name.
        """
        self.files = files
        self.base = Path(tempfile.mkdtemp(prefix="highwater-comfyui-"))
        self.total_bytes = list(total_bytes)
        self.strict = strict
        self.dynamic = dynamic
        self.on_gpu = on_gpu
        self.aimdo = aimdo
        self.runtime = runtime
        self.slowed = slowed
        for path in models.glob("*/*.safetensors"):  # one by one: a test may add a file of its own
            (self.base / "models" / path.parent.name).mkdir(parents=True, exist_ok=True)
            (self.base / "models" / path.parent.name / path.name).symlink_to(path)
        for folder in ("custom_nodes", "input", "output", "temp", "user"):
            (self.base / folder).mkdir()
        (self.base / "custom_nodes" / "highwater_test").symlink_to(HERE / "helper_pack")
        if with_pack:
            (self.base / "custom_nodes" / "highwater").symlink_to(pack)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.arguments = [
            *("--base-directory", str(self.base), "--port", str(self.port)),
            *("--disable-api-nodes", "--disable-auto-launch", "--log-stdout"),
            *("--database-url", f"sqlite:///{self.base}/comfyui.db"),
            *([] if total_bytes or on_gpu else ["--cpu"]),
            *(["--reserve-vram", "0"] if total_bytes else []),
            *(["--enable-dynamic-vram"] if dynamic else []),
            *(["--async-offload", "2", "--disable-cuda-graphs"] if dynamic == "nvidia" else []),
            *(FORGETS_OTHERS if not any(argument.startswith("--cache-") for argument in arguments) else []),
            *arguments,
        ]
        self.client_id = uuid.uuid4().hex
        self.messages: list[dict[str, Any]] = []
        self.races: list[str] = []
        self.arrived = threading.Condition()

    # -- starting and stopping

    def __enter__(self) -> HostProcess:
        started_s = time.monotonic()
        with open(self.base / "log.txt", "w") as log:
            self.process = subprocess.Popen(
                [str(self.files.python), "main.py", *self.arguments],
                cwd=self.files.directory,
                env=self.environment(),
                stdin=subprocess.PIPE,  # the helper pack ends the host when this process, and so the pipe, is gone
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self.wait_until_it_listens()
            threading.Thread(target=asyncio.run, args=(self.listen(),), daemon=True).start()
            with self.arrived:
                self.wait_until(lambda: bool(self.messages), "a word over the websocket")
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - started_s
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.base, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        environment = {
            **os.environ,
            **({} if self.on_gpu else {"OMP_NUM_THREADS": "1"}),
            "NO_COLOR": "1",
            "PYTHONPYCACHEPREFIX": str(bytecode_directory()),
            "XDG_CACHE_HOME": str(self.base / "cache"),  # the user's keeps what real runs taught
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if self.total_bytes:
            environment |= simulated_gpus(
                self.total_bytes,
                self.base / "books",
                strict=self.strict,
                dynamic=self.dynamic,
                aimdo=self.aimdo,
                runtime=self.runtime,
                slowed=self.slowed,
            )
        return environment

    def wait_until_it_listens(self) -> None:
        patience = Patience(START_TIMEOUT_S)
        while not patience.is_over():
            if self.process.poll() is not None:
                raise HostDidNotStart(
                    f"ComfyUI ended with {self.process.returncode} as it started:\n{self.log()[-4000:]}"
                )
            with contextlib.suppress(OSError):
                self.get("/system_stats")
                return
            time.sleep(0.1)
        raise HostDidNotStart(f"ComfyUI did not listen within {START_TIMEOUT_S} s:\n{self.log()[-4000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10 * crowding())
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdin.close()

    def log(self) -> str:
        return COLOURS.sub("", (self.base / "log.txt").read_text(errors="replace"))

    def error_lines(self) -> list[str]:
        """Return the lines of the log at level ERROR, and the last line of every traceback."""
        lines = self.log().splitlines()
        return [line for line in lines if re.match(r"(\[?(ERROR|CRITICAL)\b|\S*(Error|Exception)\b.*:)", line)]

    # -- HTTP

    def request(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S * crowding()) as response:
            content = response.read()
        return json.loads(content) if content and response.headers.get_content_type() == "application/json" else content

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def post(self, path: str, body: Any = None) -> Any:
        return self.request("POST", path, {} if body is None else body)

    def report(self) -> dict[str, Any]:
        """Return the manager's books as the page gets them; after some hundred prompts that is much."""
        return self.get("/highwater/report?limit=all")

    def part(self, name: str) -> Any:
        """Return one part of the report."""
        return self.get(f"/highwater/report?only={name}&limit=all")[name]

    def last_event_s(self) -> float:
        """Return when the newest event happened. Their number tells nothing: the record is full after a while."""
        return max((event["t_s"] for event in self.part("events")), default=-1.0)

    def events_after(self, moment_s: float) -> list[dict[str, Any]]:
        """Return the events since then."""
        return [event for event in self.part("events") if event["t_s"] > moment_s]

    def queue(self, graph: dict[str, Any], **extra_data: Any) -> str:
        """Queue an API-format graph; returns the prompt's id. Raises `PromptRefused`."""
        body = {"prompt": graph, "client_id": self.client_id, "extra_data": extra_data}
        try:
            return self.post("/prompt", body)["prompt_id"]
        except urllib.error.HTTPError as error:
            raise PromptRefused(json.loads(error.read())) from None

    def run(self, graph: dict[str, Any], **extra_data: Any) -> PromptResult:
        return self.wait_for(self.queue(graph, **extra_data))

    def wait_for(self, prompt_id: str) -> PromptResult:
        ends = {"execution_success": "success", "execution_error": "error", "execution_interrupted": "interrupted"}

        def end() -> dict[str, Any] | None:
            for message in self.messages:
                if message["type"] in ends and message["data"].get("prompt_id") == prompt_id:
                    return message
            return None

        self.wait_until(end, f"the end of prompt {prompt_id}")
        message = end()
        assert message is not None
        data = message["data"]
        error = f"{data.get('exception_type', '')} {data.get('exception_message', '')}".strip()
        error += "\n" + "".join(data.get("traceback", [])) if error else ""
        history: dict[str, Any] = {}
        patience = Patience(10)
        while not history and not patience.is_over():  # written right after the message is sent
            history = self.get(f"/history/{prompt_id}").get(prompt_id, {})
            if not history:
                time.sleep(0.01)
        return PromptResult(
            prompt_id=prompt_id,
            outcome=ends[message["type"]],
            outputs=history.get("outputs", {}),
            error=error,
            output_directory=self.base / "output",
        )

    def forget(self) -> None:
        """Unload every model and forget every result, as the page's button does, and what was learned of needs.

        Returns when it is done.
        """
        self.post("/highwater_test/forget_needs")
        self.post("/free", {"unload_models": True, "free_memory": True})
        settings = {"seed": 0, "num_tokens": 1, "width": 1, "pooled_width": 1}
        for _ in range(2):  # the worker looks at the flags after a prompt
            graph = {
                "1": {"class_type": "TestConditioning", "inputs": settings},
                "2": {"class_type": "TestKeep", "inputs": {"value": ["1", 0], "name": uuid.uuid4().hex}},
            }
            self.run(graph)

    # -- the websocket

    async def listen(self) -> None:
        url = f"http://127.0.0.1:{self.port}/ws?clientId={self.client_id}"
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as connection:
            async for message in connection:
                if message.type == aiohttp.WSMsgType.TEXT:
                    with self.arrived:
                        self.messages.append(json.loads(message.data))
                        self.arrived.notify_all()

    def wait_until(self, condition: Any, what: str, timeout_s: float = PROMPT_TIMEOUT_S) -> None:
        """Wait for something to be true of the messages; raises when the host dies first."""
        patience = Patience(timeout_s)
        with self.arrived:
            while not condition():
                if self.process.poll() is not None or patience.is_over():
                    self.write_stacks()
                    raise RuntimeError(f"waited in vain for {what}; the host's log:\n{self.log()[-8000:]}")
                self.arrived.wait(1)

    def write_stacks(self) -> None:
        """Make the host write what all its threads are doing to its log."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)

    def wait_for_message(self, kind: str, after: int = 0) -> dict[str, Any]:
        """Return the first message of a type from a position of `messages` on."""

        def found() -> list[dict[str, Any]]:
            return [message for message in self.messages[after:] if message["type"] == kind]

        self.wait_until(found, f"a message {kind}", timeout_s=60)
        return found()[0]

    # -- the simulated devices' own books

    def ask_devices(self, do: str, **arguments: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.base / "books"))
            with connection.makefile("rw") as file:
                file.write(json.dumps({"do": do, **arguments}) + "\n")
                file.flush()
                reply = json.loads(file.readline())
        if "error" in reply:
            raise RuntimeError(reply["error"])
        if do == "read":
            self.races += reply["result"]["races"]  # reading takes them off the devices' list
        return reply["result"]

    @contextlib.contextmanager
    def books(self) -> Iterator[list[dict[str, int]]]:
        """Yield a list that holds, after the body, what each device did in it: differences, and peaks of the body."""
        self.ask_devices("reset")
        devices: list[dict[str, int]] = []
        yield devices
        devices += self.ask_devices("read")["devices"]
