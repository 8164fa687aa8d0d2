"""Lend, keep, release and limits: asked of a server, and by the command line of one that listens."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import torch
from aiohttp import web

from highwater.headless.cli import main
from highwater.headless.comfy_stub import comfy_api
from highwater.headless.commands import running_host
from highwater.memory import manage
from highwater.memory.manager import default
from highwater.nodes.json_schema import find_fault
from highwater.nodes.report_answers import make_report, select_events
from highwater.nodes.route_schemas import answer_schemas
from highwater.nodes.routes import make_routes

comfy_api.install()  # a default profile is read as a node's is

MIB = 1 << 20
X = torch.ones(1, 64)


class Server:
    """A server with our routes alone, in a thread, whose process has 8 MiB of gpu:0 and one model there."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.app = web.Application()
        for method, path, handler in make_routes(is_running=lambda: bool(self.running), host_features=dict):
            self.app.router.add_route(method, path, handler)
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()
        assert self.ready.wait(60)

    def serve(self) -> None:
        async def start() -> None:
            self.runner = web.AppRunner(self.app)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
            self.ready.set()

        self.loop.run_until_complete(start())
        self.loop.run_forever()
        self.loop.run_until_complete(self.runner.cleanup())
        self.loop.close()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(60)


@pytest.fixture
def server(sim: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(default, "made", [])
    with sim.cluster([sim.SimDeviceSpec(total_bytes=8 * MIB)]), torch.no_grad():
        manager = default.default_manager()
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        managed = manage({"model": model}, manager=manager, name="part")
        model(X)
        found = Server()
        found.manager, found.model, found.managed = manager, model, managed
        yield found
        found.stop()
        manager.release_all()


@pytest.fixture
def post(server: Server) -> Callable[..., tuple[int, Any]]:
    import urllib.error
    import urllib.request

    def post(path: str, body: Any = None) -> tuple[int, Any]:
        data = json.dumps({} if body is None else body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(server.url + path, data, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer = json.load(response)
                assert find_fault(answer, answer_schemas()[path], path) is None
                return response.status, answer
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return post


def test_a_component_is_released_and_kept_by_its_id(server: Server, post: Callable) -> None:
    status, answer = post("/highwater/keep", {"component": "part/model", "at_most": "50%"})
    assert (status, answer) == (200, {"component": "part/model", "keep": True, "at_most": "50%"})
    assert server.manager.members["part/model"].evict_last
    assert post("/highwater/keep", {"component": "part/model", "keep": False})[0] == 200
    assert not server.manager.members["part/model"].evict_last
    status, answer = post("/highwater/release", {"component": "part/model"})
    assert status == 200 and answer["released"][0]["freed_bytes"] > 0
    assert not server.manager.ledger.used("gpu:0")


def test_the_report_is_as_its_schema_says(server: Server, post: Callable) -> None:
    schema, manager = answer_schemas()["/highwater/report"], server.manager
    post("/highwater/lend", {"size": "1MiB", "for": "60s"})
    manager.begin_run("r", "run")
    manager.begin_node("1", "Sampler", workflow_id="w")
    server.model(X)
    report = make_report(manager, {"events": True, "free": "missing: no"})
    assert report["open_nodes"] and report["devices"][1]["lent"]
    assert find_fault(report, schema, "report") is None
    manager.end_node()
    manager.end_run()
    post("/highwater/release", {"device": "gpu:0"})
    report = make_report(manager, {}, limit="1")
    assert report["nodes"] and report["left_out"]["events"] and find_fault(report, schema, "report") is None
    assert find_fault(make_report(None, {}), schema, "report") is None
    events = select_events(manager, {"kind": "lend,load"})
    assert events["events"] and find_fault(events, answer_schemas()["/highwater/events"], "events") is None
    for broken in ({**report, "colour": 1}, {**report, "nodes": [{}]}, {**report, "version": "2"}):
        assert find_fault(broken, schema, "report") is not None


def test_the_report_says_when_a_component_is_used_and_what_was_asked_for_it(server: Server, post: Callable) -> None:
    manager, member = server.manager, server.managed.members[0]

    def row() -> dict[str, Any]:
        (component,) = make_report(manager, {}, only="components")["components"]
        return component

    assert (row()["next_use"], row()["kept"], row()["moved"]) == (None, False, False)
    manager.foresee([[], [], [member.id]])
    post("/highwater/keep", {"component": member.id})
    assert (row()["next_use"], row()["kept"]) == (2, True)
    assert post("/highwater/move", {"component": member.id, "placement": "cpu"})[0] == 200
    assert row()["moved"]
    server.managed.reprofile("auto")
    assert not row()["moved"], "its own placement counts again"
    report = make_report(manager, {}, only="components")
    assert report["now_s"] >= row()["last_use_s"] > 0


def test_the_report_says_what_lies_beside_the_weights_and_what_stays_free(server: Server, post: Callable) -> None:
    def rows() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = make_report(server.manager, {}, only="devices")["devices"]
        return found

    ram, gpu = rows()
    assert gpu["activation_bytes"] == 0 and gpu["managed_bytes"] > 0
    activation = torch.ones(1 << 18, device=server.manager.devices["gpu:0"].torch_device)
    assert rows()[1]["activation_bytes"] == activation.nbytes
    assert ram["activation_bytes"] is None and gpu["pinned"] is None
    rests = make_report(server.manager, {}, only="components")["components"][0]["tiers"]
    assert ram["pinned"]["limit_bytes"] >= ram["pinned"]["num_bytes"] >= rests.get("pinned", 0)
    assert {row["own_watermark"]["source"] for row in (ram, gpu)} == {"default"}
    post("/highwater/watermark", {"marks": "gpu:0=1MiB:2MiB,host=1MiB:3MiB"})
    found = [row["own_watermark"] for row in rows()]
    setting = {"low_text": "1MiB", "source": "setting"}
    assert found[1] == {"low_bytes": MIB, "high_bytes": 2 * MIB, "high_text": "2MiB", **setting}
    assert found[0] == {"low_bytes": MIB, "high_bytes": 3 * MIB, "high_text": "3MiB", **setting}


def test_everything_leaves_a_device_or_nothing_does(server: Server, post: Callable) -> None:
    other = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    with manage(other, manager=server.manager, name="other") as managed:
        other(X)
        held = server.manager.ledger.used("gpu:0")
        with server.manager.lease(managed.members[0]):
            status, answer = post("/highwater/release", {"device": "gpu:0"})
        assert status == 409 and "other/model: computes now" in answer["error"]
        assert server.manager.ledger.used("gpu:0") == held
        status, answer = post("/highwater/release", {"device": "gpu:0"})
        assert status == 200 and not server.manager.ledger.used("gpu:0")
        assert {departure["component"] for departure in answer["released"]} == {"part/model", "other/model"}


@pytest.mark.parametrize(
    "body", [{"component": "part/model"}, {"component": "part/model", "device": "gpu:0"}, {"device": "gpu:0"}]
)
def test_nothing_is_released_while_a_prompt_runs(server: Server, post: Callable, body: dict[str, str]) -> None:
    server.running[:] = [(0, "prompt-1", {}, {}, [], {})]
    held = server.manager.ledger.used("gpu:0")
    status, answer = post("/highwater/release", body)
    assert status == 409 and "a prompt is running" in answer["error"]
    there = {"component": "part/model", "placement": "cpu"}
    assert post("/highwater/free")[0] == post("/highwater/move", there)[0] == 409
    server.running.clear()
    server.manager.begin_run("r", "run")
    assert post("/highwater/release", body)[0] == post("/highwater/free")[0] == 409
    server.manager.end_run()
    assert server.manager.ledger.used("gpu:0") == held


def test_what_moves_nothing_now_is_taken_while_a_prompt_runs(server: Server, post: Callable) -> None:
    held = server.manager.ledger.used("gpu:0")
    server.running[:] = [(0, "prompt-1", {}, {}, [], {})]
    for path, body in (
        ("keep", {"component": "part/model"}),
        ("limits", {"keep_loaded": 1, "idle": "1s"}),
        ("watermark", {"marks": "100%:100%"}),
    ):
        assert post(f"/highwater/{path}", body)[0] == 200
    assert server.manager.ledger.used("gpu:0") == held


def test_limits_are_set_and_taken_away(server: Server, post: Callable) -> None:
    assert post("/highwater/limits", {"keep_loaded": 2, "idle": "10min"}) == (200, {"keep_loaded": 2, "idle_s": 600.0})
    assert server.manager.idle.limits.num_loaded == 2
    assert post("/highwater/limits") == (200, {"keep_loaded": 2, "idle_s": 600.0})
    assert post("/highwater/limits", {"keep_loaded": None}) == (200, {"keep_loaded": None, "idle_s": 600.0})
    assert post("/highwater/limits", {"idle": None}) == (200, {"keep_loaded": None, "idle_s": None})


def test_reading_ahead_is_turned_off_and_on(server: Server, post: Callable) -> None:
    for on in (False, True):
        assert post("/highwater/look-ahead", {"on": on}) == (200, {"on": on})
        assert server.manager.leases.look_ahead.is_on is on


def test_two_requests_at_once_set_both_limits(server: Server, post: Callable) -> None:
    """As the page makes them when it opens."""
    for number in range(1, 21):
        bodies = [{"keep_loaded": number}, {"idle": f"{number}min"}]
        with ThreadPoolExecutor(2) as pool:
            assert [status for status, _ in pool.map(partial(post, "/highwater/limits"), bodies)] == [200, 200]
        limits = server.manager.idle.limits
        assert (limits.num_loaded, limits.idle_s) == (number, 60.0 * number)


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("keep", {}, "component is missing"),
        ("keep", {"component": "part/model", "keep": "maybe"}, "keep 'maybe'; allowed"),
        ("keep", {"component": "part/model", "keep": None}, "keep None; allowed: true or false"),
        ("keep", {"component": 7}, "component 7; allowed: the id of a component"),
        ("keep", {"component": "part/model", "at_most": "9GiB"}, "keep 9GiB"),
        ("release", {}, "component or device"),
        ("limits", {"keep_loaded": 0}, "keep_loaded 0; allowed: 1 to 1000"),
        ("limits", {"keep_loaded": "2"}, "keep_loaded"),
        ("limits", {"keep_loaded": True}, "keep_loaded True"),
        ("limits", {"keep_loaded": 1.5}, "keep_loaded 1.5"),
        ("limits", {"idle": "60"}, "idle"),
        ("limits", {"idle": 60}, "idle 60; allowed: a time such as 60s"),
        ("limits", {"colour": "red"}, "'colour' is unknown"),
        ("lend", {}, "size is missing in the request; needed: size, for"),
        ("lend", {"size": "8", "for": "60s"}, "size"),
        ("lend", {"size": "1MiB", "for": "1"}, "for"),
        ("lend", {"size": "9GiB", "for": "60s"}, "lend 9.00GiB"),
        ("lend", {"size": "0", "for": "60s"}, "0"),
        ("lend", {"size": "1MiB", "for": None}, "for None"),
        ("watermark", {}, "marks is missing"),
        ("watermark", {"marks": "1GiB"}, "1GiB"),
        ("watermark", {"marks": 1}, "marks 1"),
        ("watermark", {"marks": "2%:1%"}, "2%"),
        ("watermark", {"marks": "moon=1%:2%"}, "column 1: device 'moon' is unknown"),
        ("watermark", {"device": "gpu:0", "marks": "0:0"}, "'device'"),
        ("look-ahead", {}, "on is missing"),
        ("look-ahead", {"on": 1}, "on 1; allowed: true or false"),
        ("default-profile", {}, "profile is missing"),
        ("default-profile", {"profile": 4}, "profile 4; allowed: a profile such as 4"),
        ("default-profile", {"profile": "8"}, "'8'"),
        ("default-profile", {"profile": "4;prefetch=2"}, "';' is unexpected"),
        ("free", {"device": "gpu:0"}, "'device' is unknown"),
        ("move", {"component": "part/model"}, "placement is missing"),
        ("move", {"component": "part/model", "placement": "gpu:9@"}, "column 6: "),
        ("keep", [], "the request []; allowed: an object"),
        ("keep", "part/model", "allowed: an object"),
        ("free", 1e308, "an object"),
    ],
)
def test_bad_input_is_one_line_that_names_it(server: Server, post: Callable, path: str, body: Any, told: str) -> None:
    held = server.manager.ledger.used("gpu:0")
    status, answer = post(f"/highwater/{path}", body)
    assert status == 400 and told in answer["error"], answer
    assert len(answer["error"].splitlines()) == 1 and len(answer["error"]) < 400
    assert not server.manager.capacity.loans.running() and server.manager.ledger.used("gpu:0") == held


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("keep", {"component": "nothing"}, "'nothing'"),
        ("move", {"component": "nothing", "placement": "cpu"}, "'nothing'"),
        ("move", {"component": "part/model", "placement": "gpu:9"}, "'gpu:9'"),
        ("move", {"component": "part/model", "placement": "gpu:0&cuda:3@30%"}, "'gpu:3'"),
        ("release", {"component": ""}, "''"),
        ("release", {"component": "part/model", "device": "gpu:9"}, "'gpu:9'"),
        ("release", {"device": "gpu:9"}, "'gpu:9'"),
        ("lend", {"size": "1MiB", "for": "60s", "device": "gpu:1"}, "'gpu:1'; did you mean 'gpu:0'? allowed: gpu:0"),
        ("lend", {"size": "1MiB", "for": "60s", "device": "cpu"}, "'cpu' is not allowed here; allowed: gpu:0"),
        ("lend/give-back", {"device": "*"}, "'*'; allowed: gpu:0"),
        ("lend/give-back", {"device": "x"}, "'x'"),
        ("keep", {"component": "../../etc/passwd"}, "part/model"),
        ("release", {"device": "x" * 9_000}, "gpu:0"),
    ],
)
def test_what_is_not_there_is_404_with_what_is(
    server: Server, post: Callable, path: str, body: dict[str, str], told: str
) -> None:
    status, answer = post(f"/highwater/{path}", body)
    assert status == 404 and told in answer["error"] and "allowed: " in answer["error"]
    assert len(answer["error"]) < 600


def test_the_setting_says_what_stays_free_where_no_node_does(server: Server, post: Callable) -> None:
    manager = server.manager
    held = manager.ledger.used("gpu:0")
    status, answer = post("/highwater/watermark", {"marks": "0:1%,host=1%:2%"})
    gpu, host = answer["watermarks"]["gpu:0"], answer["watermarks"]["host"]
    written = {"low_text": "0", "high_text": "1%", "source": "setting"}
    assert status == 200 and gpu == {"low_bytes": 0, "high_bytes": 8 * MIB // 100, **written}
    assert host["source"] == "setting" and 0 < 2 * host["low_bytes"] <= host["high_bytes"] + 1
    assert manager.ledger.used("gpu:0") == held

    assert post("/highwater/watermark", {"marks": "100%:100%"})[0] == 200
    assert manager.ledger.used("gpu:0") == 0  # idle: it leaves at once
    manager.set_watermark("gpu:0", MIB, MIB)
    status, answer = post("/highwater/watermark", {"marks": "100%:100%,host=1%:2%"})
    unwritten = {"low_text": "", "high_text": "", "source": "set"}
    assert answer["watermarks"]["gpu:0"] == {"low_bytes": MIB, "high_bytes": MIB, **unwritten}
    status, answer = post("/highwater/watermark", {"marks": ""})
    sources = {name: mark["source"] for name, mark in answer["watermarks"].items()}
    assert (status, sources) == (200, {"gpu:0": "set", "host": "default"})


def test_a_setting_moves_nothing_while_a_prompt_runs(server: Server, post: Callable) -> None:
    held = server.manager.ledger.used("gpu:0")
    server.running[:] = [(0, "prompt-1", {}, {}, [], {})]
    assert post("/highwater/watermark", {"marks": "100%:100%"})[0] == 200
    assert server.manager.ledger.used("gpu:0") == held
    server.running.clear()
    server.manager.begin_run("r", "run")
    server.manager.end_run()
    assert server.manager.ledger.used("gpu:0") == 0


def test_a_refused_setting_changes_nothing_and_says_why(server: Server, post: Callable) -> None:
    assert post("/highwater/watermark", {"marks": "1MiB:2MiB"})[0] == 200
    status, answer = post("/highwater/watermark", {"marks": "gpu:0=1MiB;2MiB"})
    assert status == 400 and "column 11: ':' and the high mark must follow" in answer["error"]
    assert server.manager.capacity.watermarks.of("gpu:0").low_bytes == MIB


@pytest.mark.parametrize(
    ("marks", "low_bytes", "told"),
    [
        ("gpu:0=2MiB:3MiB", 2 * MIB, []),
        (
            "gpu:0=2MiB:3MiB,gpu:1=1GiB:2GiB",
            2 * MIB,
            ["watermark gpu:1: this machine has no gpu:1, so that is left out; it has gpu:0, host"],
        ),
        ("gpu:0=1MiB:9MiB,2MiB:3MiB", 2 * MIB, ["watermark 9.00MiB: gpu:0 has 8.00MiB only, so that is left out"]),
        (
            "gpu:0=50%:3MiB,2MiB:3MiB",
            2 * MIB,
            ["watermark 50%:3.00MiB: gpu:0 would have low 50% (4.00MiB) above high 3.00MiB, so that is left out"],
        ),
        ("1GiB:2GiB", 8 * MIB // 10, ["watermark 2.00GiB: gpu:0 has 8.00MiB only, so that is left out"]),
    ],
)
def test_a_setting_of_another_machine_counts_as_far_as_it_fits(
    server: Server, post: Callable, marks: str, low_bytes: int, told: list[str]
) -> None:
    assert post("/highwater/watermark", {"marks": "1MiB:2MiB"})[0] == 200
    status, answer = post("/highwater/watermark", {"marks": marks})
    assert (status, answer["notes"]) == (200, told)
    assert answer["watermarks"]["gpu:0"]["low_bytes"] == low_bytes


def run(capsys: pytest.CaptureFixture[str], *arguments: str, command: str = "lend") -> tuple[int, str, str]:
    code = main([command, *arguments])
    return code, *capsys.readouterr()


def test_the_command_lends_and_gives_back(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = run(capsys, "6MiB", "--for", "60s", "--url", server.url)
    assert (code, error) == (0, "")
    assert out.startswith("6.00MiB of gpu:0 are lent for 60 s: ")
    assert server.manager.report()["devices"][1]["lent"]["num_bytes"] == 6 * MIB
    code, out, error = run(capsys, "1MiB", "--for", "60s", "--url", server.url)
    assert (code, out, len(error.splitlines())) == (1, "", 1) and "lent already" in error
    code, out, error = run(capsys, "--give-back", "--url", f"{server.url}/", "--json")
    assert (code, json.loads(out)) == (0, {"device": "gpu:0", "lent_bytes": 6 * MIB})
    code, out, error = run(capsys, "--give-back", "--url", server.url)
    assert (code, error) == (1, "highwater: nothing of gpu:0 is lent\n")


def test_what_computes_is_refused_with_exit_code_1(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with server.manager.lease(server.managed.members[0]):
        code, _, error = run(capsys, "8MiB", "--for", "60s", "--url", server.url)
    assert code == 1 and "part/model computes with" in error and len(error.splitlines()) == 1


def test_the_commands_keep_and_release(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    url, member = ("--url", server.url), server.manager.members["part/model"]
    code, out, error = run(capsys, "part/model", "--at-most", "1MiB", *url, command="keep")
    assert (code, out, error) == (0, "part/model is evicted last, up to 1MiB of a device\n", "")
    assert member.evict_last
    code, out, _ = run(capsys, "part/model", *url, command="keep")
    assert (code, out) == (0, "part/model is evicted last\n")
    code, out, _ = run(capsys, "part/model", "--off", *url, command="keep")
    assert (code, out) == (0, "part/model is evicted in the usual order\n") and not member.evict_last
    code, out, error = run(capsys, "part/model", "--at-most", "9GiB", *url, command="keep")
    assert (code, out, len(error.splitlines())) == (2, "", 1) and "gpu:0 has 8.00MiB" in error
    code, out, error = run(capsys, "part/other", *url, command="release")
    assert (code, out, len(error.splitlines())) == (2, "", 1) and "part/model" in error
    code, out, error = run(capsys, "part/model", "--device", "gpu:0", *url, command="release")
    assert (code, error) == (0, "") and out.startswith("released part/model: ") and not out.count("another program")
    code, out, _ = run(capsys, "--device", "gpu:0", *url, command="release")
    assert (code, out) == (0, "nothing was there to release\n")
    server.model(X)
    code, out, _ = run(capsys, "--device", "gpu:0", "--json", *url, command="release")
    assert code == 0 and [part["component"] for part in json.loads(out)["released"]] == ["part/model"]
    server.running[:] = [(0, "prompt-1", {}, {}, [], {})]
    code, out, error = run(capsys, "--device", "gpu:0", *url, command="release")
    assert (code, out) == (1, "") and "a prompt is running" in error


def test_the_command_sets_limits_and_prints_them(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    def limits(*arguments: str) -> str:
        code, out, error = run(capsys, *arguments, "--url", server.url, command="limits")
        assert (code, error) == (0, "")
        return out

    assert limits() == "any number loaded, no idle unload\n"
    assert limits("--max-loaded", "2") == "at most 2 loaded, no idle unload\n"
    assert limits("--idle", "10min") == "at most 2 loaded, unloaded after 600 s idle\n"
    assert limits("--max-loaded", "off") == "any number loaded, unloaded after 600 s idle\n"
    assert json.loads(limits("--idle", "off", "--json")) == {"keep_loaded": None, "idle_s": None}


@pytest.mark.parametrize(
    "command",
    [("lend", "1MiB", "--for", "60s"), ("keep", "a"), ("release", "a"), ("limits",)],
)
def test_a_host_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        code, out, error = run(capsys, *command[1:], "--url", url, command=command[0])
    assert (code, out, len(error.splitlines())) == (1, "", 1)
    assert f"no Highwater answers at {url}" in error


class SilentHost:
    """Takes connections and never answers, or sends the begin of an answer one byte at a time."""

    def __init__(self, *, drips: bool) -> None:
        self.drips = drips
        self.ended = threading.Event()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(0.05)
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        with ExitStack() as taken:
            while not self.ended.wait(0.05):
                with suppress(TimeoutError):
                    connection = taken.enter_context(self.listening.accept()[0])
                    if self.drips:
                        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                        while not self.ended.wait(0.05):
                            connection.sendall(b" ")

    def __enter__(self) -> SilentHost:
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        self.thread.join()
        self.listening.close()


@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize("command", [("lend", "1MiB", "--for", "60s"), ("limits", "--json")])
def test_a_host_that_hangs_is_waited_for_aloud_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], drips: bool
) -> None:
    monkeypatch.setattr(running_host, "NOTICE_S", 0.2)
    monkeypatch.setattr(running_host, "TIMEOUT_S", 1.0)
    with SilentHost(drips=drips) as host:
        code, out, error = run(capsys, *command[1:], "--url", host.url, command=command[0])
    waiting, failed = error.splitlines()
    assert (code, out) == (1, "")
    assert waiting == f"highwater: {host.url} has not answered yet: waiting up to 1 s"
    assert failed.startswith(f"highwater: {host.url} has not answered within 1 s: it is busy or hangs")


@pytest.mark.parametrize(
    "arguments",
    [(), ("8GiB",), ("--for", "60s"), ("8", "--for", "60s"), ("8GiB", "--for", "60"), ("8GiB", "--for", "2d"),
     ("8GiB", "--for", "60s", "--url", "here"), ("8GiB", "--for", "60s", "--url", "file:///etc/passwd"),
     ("8GiB", "--for", "60s", "--url", "http://a:99999"), ("8GiB", "--for", "60s", "--url", "http://a/ b"),
     ("8GiB", "--give-back"), ("8GiB", "--for", "60s", "--url", "http://[")],
)  # fmt: skip
def test_bad_words_are_one_line_with_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: tuple) -> None:
    code, out, error = run(capsys, *arguments)
    assert (code, out, len(error.splitlines())) == (2, "", 1), error


@pytest.mark.parametrize(
    "arguments",
    [("keep",), ("keep", "a", "--at-most", "8"), ("keep", "a", "--off", "--at-most", "8GiB"), ("keep", "a", "b"),
     ("keep", "a", "--url", "here"), ("release",), ("release", "--url", "http://127.0.0.1:1"),
     ("limits", "--max-loaded", "0"), ("limits", "--max-loaded", "-1"), ("limits", "--max-loaded", "many"),
     ("limits", "--max-loaded", "\N{SUPERSCRIPT TWO}"), ("limits", "--idle", "10"), ("limits", "--idle", "8d")],
)  # fmt: skip
def test_bad_words_of_the_other_commands_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, out, error = run(capsys, *arguments[1:], command=arguments[0])
    assert (code, out, len(error.splitlines())) == (2, "", 1), error
