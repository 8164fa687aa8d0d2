"""Serving: one clear line where the address or the page cannot be had, and an end on Ctrl+C."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.server import app
from highwater.memory import MemoryManager
from highwater.memory.errors import InvalidInput


@pytest.fixture
def runner(tmp_path, monkeypatch) -> WorkflowRunner:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return WorkflowRunner(MemoryManager(), models_directory=tmp_path / "models", output_directory=tmp_path / "output")


def test_a_port_in_use_is_named(runner):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput) as error:
            app.serve(runner, port=port)
    assert str(error.value) == f"port {port} of 127.0.0.1 is in use; choose another with --port, or 0 for any free one"


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no host", 0), ("127.0.0.1", 70000)])
def test_an_address_that_cannot_be_used_is_named(runner, host, port):
    with pytest.raises(InvalidInput) as error:
        app.serve(runner, host=host, port=port)
    assert str(error.value).startswith(f"cannot listen at {host} port {port}: ")
    assert "\n" not in str(error.value)


def test_a_missing_page_is_named_with_its_remedy(runner, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "comfyui_frontend_package" else find_spec(name, *rest),
    )
    with pytest.raises(InvalidInput, match="run: pip install comfyui-frontend-package"):
        app.serve(runner)


def serve_command(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "highwater", "serve", "--models", str(tmp_path), "--out", str(tmp_path / "output")]
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")}
    return subprocess.Popen(
        [*command, *options], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_command_prints_its_address_and_ends_on_ctrl_c(tmp_path):
    with serve_command(tmp_path, "--port", "0") as process:
        address = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=1200)
    assert address.startswith("Highwater runs at http://127.0.0.1:")
    assert (process.returncode, errors) == (0, "")


def test_the_command_fails_with_one_line(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serve_command(tmp_path, "--port", str(taken.getsockname()[1])) as process,
    ):
        _, errors = process.communicate(timeout=1200)
    assert process.returncode == 2
    assert "is in use" in errors and errors.count("\n") == 1
