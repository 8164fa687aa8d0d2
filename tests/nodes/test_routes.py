"""The addresses that the pack adds to ComfyUI's server, answered by aiohttp."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import save_file

from highwater.headless.cli import main
from highwater.headless.comfy_stub import comfy_api, folder_paths
from highwater.memory import default_manager, existing_manager, manage
from highwater.memory.manager import default
from highwater.memory.manager.needs import Need
from highwater.memory.manager.needs_file import NeedsFile
from highwater.nodes.json_schema import find_fault
from highwater.nodes.pipelines.pipeline_folders import list_pipelines
from highwater.nodes.route_schemas import answer_schemas
from highwater.nodes.routes import add_routes

comfy_api.install()  # a host's process has these modules


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Any]]:
    """Ask a server of its own, whose process has no manager yet: (method, path) -> (status, JSON)."""
    monkeypatch.setattr(default, "made", [])
    queue = SimpleNamespace(get_current_queue_volatile=lambda: (running, []))
    server = SimpleNamespace(routes=web.RouteTableDef(), prompt_queue=queue)
    running: list[Any] = []
    add_routes(server)

    def ask(method: str, path: str, *, is_running: bool = False, accept: str = "*/*") -> tuple[int, Any]:
        running[:] = [(0, "prompt-1", {}, {}, [], {})] if is_running else []

        async def main() -> tuple[int, Any]:
            app = web.Application()
            app.add_routes(server.routes)
            async with TestClient(TestServer(app)) as client:
                body = {} if method == "POST" else None
                response = await client.request(method, path, headers={"Accept": accept}, json=body)
                is_json = response.content_type == "application/json"
                return response.status, await (response.json() if is_json else response.text())

        return asyncio.run(main())

    return ask


def test_the_page_may_ask_before_anything_is_managed(ask: Callable[..., tuple[int, Any]]) -> None:
    status, report = ask("GET", "/highwater/report")
    assert status == 200
    assert report["version"] == 2
    assert report["nodes"] == report["components"] == report["devices"] == []
    assert report["host_features"]["run_boundaries"] == "missing: this process is not ComfyUI"
    assert ask("POST", "/highwater/free") == (200, {"freed_bytes": {}})
    assert existing_manager() is None


def test_who_wants_to_see_what_no_node_of_ours_does_has_it_measured(ask: Callable[..., tuple[int, Any]]) -> None:
    assert ask("GET", "/highwater/report")[1]["devices"] == [] and existing_manager() is None
    status, answer = ask("POST", "/highwater/follow")
    assert (status, answer) == (200, {"devices": [*default_manager().devices]})
    assert [device["name"] for device in ask("GET", "/highwater/report")[1]["devices"]] == answer["devices"]
    assert ask("POST", "/highwater/follow") == (200, answer)


def test_only_gives_the_named_parts_and_the_version(ask: Callable[..., tuple[int, Any]]) -> None:
    default_manager()
    status, report = ask("GET", "/highwater/report?only=devices,host_features")
    assert status == 200
    assert list(report) == ["devices", "now_s", "version", "host_features", "server_id"]
    assert report["server_id"] == ask("GET", "/highwater/report")[1]["server_id"] != ""
    assert report["devices"][0]["name"] == "cpu"


@pytest.mark.parametrize("only", ["", "nodes,colour"])
def test_an_unknown_part_is_refused_by_name(ask: Callable[..., tuple[int, Any]], only: str) -> None:
    status, answer = ask("GET", f"/highwater/report?only={only}")
    assert status == 400
    assert f"only={only.split(',')[-1]!r} is no part of the report" in answer["error"]
    assert "host_features" in answer["error"]


def test_after_gives_what_came_since_and_the_time_itself(ask: Callable[..., tuple[int, Any]]) -> None:
    manager = default_manager()
    for number in range(2):
        manager.begin_run(f"run-{number}", "a workflow")
        manager.begin_node("7", "KSampler")
        manager.end_node()
        manager.end_run()
    whole = ask("GET", "/highwater/report?only=runs,nodes,samples,events")[1]
    first = whole["runs"][0]["end_s"]
    status, report = ask("GET", f"/highwater/report?only=runs,nodes,samples,events&after={first}")
    assert (status, report["after_s"]) == (200, first)
    assert [[run["run_id"] for run in told["runs"]] for told in (whole, report)] == [["run-0", "run-1"], ["run-1"]]
    assert [node["run_id"] for node in report["nodes"]] == ["run-1"]
    assert find_fault(report, answer_schemas()["/highwater/report"], "report") is None


@pytest.mark.parametrize(
    ("words", "told"),
    [("after=soon", "after='soon'; allowed: seconds, such as 12.5, as a report's now_s or an event's t_s"),
     ("after=", "after=''; allowed: seconds"), ("after=-1", "after='-1'; allowed: seconds"),
     ("after=nan", "after='nan'; allowed: seconds"), ("afer=3", "'afer' is unknown; did you mean 'after'?"),
     ("only=runs&since=3", "'since' is unknown; allowed: only, limit, after")],
)  # fmt: skip
@pytest.mark.parametrize("is_managed", [False, True])
def test_a_report_that_cannot_be_asked_for_is_one_line(
    ask: Callable[..., tuple[int, Any]], words: str, told: str, is_managed: bool
) -> None:
    if is_managed:
        default_manager()
    status, answer = ask("GET", f"/highwater/report?{words}")
    assert (status, list(answer)) == (400, ["error"])
    assert answer["error"].startswith(told) and "\n" not in answer["error"]


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


def test_profiles_devices_and_needs_are_told_as_by_the_command_line(
    ask: Callable[..., tuple[int, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(default, "needs_folder", [(tmp_path, "")])
    for command in ("profiles", "devices"):
        status, answer = ask("GET", f"/highwater/{command}")
        main([command, "--json"])
        told = json.loads(capsys.readouterr().out)
        assert status == 200 and answer.keys() == told.keys()
        if command == "profiles":
            assert answer == told
        else:
            assert [device["name"] for device in answer["devices"]] == [device["name"] for device in told["devices"]]
    path = str(tmp_path / "needs.sqlite3")
    assert ask("GET", "/highwater/needs") == (200, {"files": [{"path": path, "needs": []}]})
    file = NeedsFile(tmp_path / "needs.sqlite3")
    file.write([(("0" * 32, "1" * 32), (1,), Need(used_s=int(time.time())))])
    assert len(ask("GET", "/highwater/needs")[1]["files"][0]["needs"]) == 1
    assert ask("POST", "/highwater/needs/forget") == (200, {"files": [{"path": path, "num_forgotten": 1}]})
    assert ask("GET", "/highwater/needs")[1]["files"][0]["needs"] == []


def test_what_is_learned_in_this_process_only_has_no_file(ask: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(default, "needs_folder", [(None, "")])
    assert ask("GET", "/highwater/needs") == (200, {"files": []})


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    monkeypatch.setattr(folder_paths, "models_directory", folder)
    monkeypatch.setitem(sys.modules, "folder_paths", folder_paths)
    (folder / "vae").mkdir(parents=True)
    (folder / "diffusion_models").mkdir()
    layers = {f"layers.{number}.weight": torch.ones(64, 64) for number in range(8)}
    save_file(layers, folder / "diffusion_models" / "net.safetensors")
    save_file({"decoder.weight": torch.ones(8, 8)}, folder / "vae" / "ae.safetensors")
    return folder


def test_a_plan_of_the_hosts_files_moves_nothing(ask: Callable[..., Any], models: Path) -> None:
    files = "file=diffusion_models/net.safetensors&file=vae/ae.safetensors"
    status, answer = ask("GET", f"/highwater/plan?{files}&profile=4")
    assert status == 200, answer
    assert [part["component"] for part in answer["plans"]["files"]["components"]] == ["net", "ae"]
    assert answer["text"].startswith("component ")
    assert not default_manager().members


def test_a_checkpoint_is_planned_as_the_parts_that_its_loader_makes(ask: Callable[..., Any], models: Path) -> None:
    (models / "checkpoints").mkdir()
    names = ["model.diffusion_model.blocks.0.weight", "model.diffusion_model.blocks.1.weight", "model_ema.decay"]
    names += ["cond_stage_model.layers.0.weight", "first_stage_model.decoder.weight"]
    weights = {name: torch.ones(64, 64) for name in names}
    save_file(weights, models / "checkpoints" / "sd.safetensors")
    save_file({names[0]: weights[names[0]]}, models / "checkpoints" / "alone.safetensors")
    files = "file=checkpoints/sd.safetensors&file=checkpoints/alone.safetensors"
    status, answer = ask("GET", f"/highwater/plan?{files}&profile=4&precision=as%20stored")
    assert status == 200, answer
    planned = [(part["component"], part["weight_bytes"]) for part in answer["plans"]["files"]["components"]]
    of_one = 64 * 64 * 4
    assert planned == [("sd.model", 2 * of_one), ("sd.clip", of_one), ("sd.vae", of_one), ("alone.model", of_one)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "no model to plan"),
        ("file=vae/no.safetensors", "'no.safetensors' is not in the folder vae"),
        ("file=../vae/ae.safetensors", "'..' is not a model folder"),
        ("file=custom_nodes/ae.safetensors", "'custom_nodes' is not a model folder; allowed: checkpoints"),
        ("file=vae/../../secret.safetensors", "is not in the folder vae"),
        ("file=ae.safetensors", "allowed: folder/name"),
        ("file=vae/ae.ckpt", "allowed: folder/name"),
        ("file=vae/ae.safetensors&profile=9", "9"),
        ("file=vae/ae.safetensors&placement=gpu:77", "gpu:77"),
        ("file=vae/ae.safetensors&colour=red", "colour='red'"),
        ("pipeline=../x", "pipeline"),
        ("file=vae/ae.safetensors&precision=none", "precision"),
    ],
)
def test_a_plan_that_cannot_be_made_says_why(ask: Callable[..., Any], models: Path, words: str, told: str) -> None:
    (models.parent / "secret.safetensors").write_bytes((models / "vae" / "ae.safetensors").read_bytes())
    status, answer = ask("GET", f"/highwater/plan?{words}")
    assert status == 400 and told in answer["error"] and "\n" not in answer["error"]


def test_the_host_is_examined_from_inside(
    ask: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the flags that it runs with."""
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.33.0"')
    host = SimpleNamespace(__file__=str(tmp_path / "folder_paths.py"), base_path="/elsewhere")  # --base-directory
    monkeypatch.setitem(sys.modules, "folder_paths", host)
    monkeypatch.setattr(sys, "argv", ["main.py", "--cuda-device", "1"])
    status, answer = ask("GET", "/highwater/doctor")
    texts = [finding["text"] for finding in answer["findings"]]
    assert status == 200 and answer["comfyui"] == str(tmp_path)
    assert f"0.33.0 at {tmp_path}, running with --cuda-device 1" in texts
    assert "--cuda-device 1 selects the devices that torch sees" in texts
    assert answer["features"]["run_boundaries"] == "missing: this process is not ComfyUI"
    status, page = ask("GET", "/highwater/doctor", accept="text/html,application/xhtml+xml,*/*;q=0.8")
    first, _, *lines = page.splitlines()
    assert status == 200 and first == f"Highwater: {answer['num_warnings']} warnings"
    assert all(any(text in line for line in lines) for text in texts)
    assert lines[0].startswith("WARNING ") and lines[-1].startswith("ok ")


def test_the_variables_are_those_that_the_process_was_started_with() -> None:
    code = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = '7'; "
    code += "from highwater.nodes.command_answers import start_environment; "
    code += "print(start_environment()['CUDA_VISIBLE_DEVICES'])"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "0"


def test_tiny_pipelines_are_made_where_the_host_looks(ask: Callable[..., Any], models: Path) -> None:
    status, answer = ask("POST", "/highwater/tiny-pipelines")
    assert status == 200 and set(answer["pipelines"]) == {"tiny-flux", "tiny-sd", "tiny-wan"}
    assert all((models / folder / "model_index.json").is_file() for folder in answer["pipelines"].values())
    assert not any(Path(folder).is_absolute() for folder in answer["pipelines"].values())
    assert set(list_pipelines()) == set(answer["pipelines"])
    status, plan = ask("GET", "/highwater/plan?pipeline=tiny-flux&profile=12MiB")
    assert status == 200 and "transformer: " in plan["text"]


def test_tiny_pipelines_are_made_without_the_network(tmp_path: Path) -> None:
    """In ComfyUI, where nothing keeps the libraries from asking it."""
    code = """if True:
        import socket, sys
        def refuse(*_): raise AssertionError("asked the network")
        socket.socket.connect = socket.getaddrinfo = refuse
        from highwater.nodes.pipelines.tiny_pipelines import ensure_pipelines
        print(len(ensure_pipelines(sys.argv[1])))
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert told.stdout.split()[-1:] == ["3"], told.stderr


def test_a_broken_installation_of_diffusers_is_told_in_one_line(
    ask: Callable[..., Any], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails as a whole, or when one of its parts is used."""

    class Broken:
        __version__ = "99.0"

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"Failed to import diffusers.{name}\n(look up to see its traceback)")

    monkeypatch.setitem(sys.modules, "diffusers", Broken())
    status, answer = ask("POST", "/highwater/tiny-pipelines")
    assert status == 400 and "\n" not in answer["error"]
    assert "Failed to import diffusers." in answer["error"]

    class Finder:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "diffusers":
                raise AttributeError("module 'torch' has no attribute 'xpu'")

    monkeypatch.delitem(sys.modules, "diffusers")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    status, answer = ask("POST", "/highwater/tiny-pipelines")
    assert status == 400
    assert answer["error"].startswith("diffusers cannot be imported: ") and "pip install" in answer["error"]
