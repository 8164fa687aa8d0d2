"""Requests that somebody made to do harm, and nodes that do it: one line each, and the next prompt runs."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from highwater.headless.comfy_stub.comfy_io import ComfyNode, NodeOutput, Schema, String
from highwater.headless.server import page_requests, prompt_queue

SHOW_FIVE = {
    "1": {"class_type": "ToyNumber", "inputs": {"value": 5}},
    "2": {"class_type": "ToyShow", "inputs": {"value": ["1", 0]}},
}


def strict(text: str) -> Any:
    """Read JSON as a browser does."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


async def still_answers(server) -> None:
    """All that the page asks for at its start can be read, and a prompt runs."""
    for path in ("/history", "/queue", "/jobs", "/settings", "/prompt"):
        response = await server.client.get(path)
        assert response.status == 200, path
        strict(await response.text())
    async with server.open_page("still") as page:
        prompt_id = await page.queue(SHOW_FIVE)
        await page.wait_for_end(prompt_id)
    assert (await server.get(f"/jobs/{prompt_id}"))["status"] == "completed"


GRAPH = json.dumps(SHOW_FIVE)
BODIES = {
    "NaN": f'{{"prompt": {GRAPH}, "extra_data": {{"a": NaN}}}}',
    "Infinity": f'{{"prompt": {GRAPH}, "number": Infinity}}',
    "-Infinity": f'{{"prompt": {GRAPH}, "number": -Infinity}}',
    "1e999": f'{{"prompt": {GRAPH}, "extra_data": {{"a": 1e999}}}}',
    "many digits": f'{{"prompt": {GRAPH}, "number": {"9" * 5000}}}',
    "deep": f'{{"prompt": {GRAPH}, "extra_data": {{"a": {"[" * 500}{"]" * 500}}}}}',
    "deeper": f'{{"prompt": {GRAPH}, "extra_data": {"[" * 200_000}',
    "deep objects": '{"a":' * 300 + "1" + "}" * 300,
    "many values": f'{{"prompt": {GRAPH}, "extra_data": {{"a": [{"0," * page_requests.MAX_JSON_MARKS}0]}}}}',
    "many bytes": json.dumps({"a": "x" * (page_requests.MAX_JSON_BYTES + 1)}),
    "no JSON": "{'a': 1}",
    "no text": b"\xff\xfe\xfa",
    "no UTF-16": b"\x00{\x00",
    "targets that are none": f'{{"prompt": {GRAPH}, "partial_execution_targets": [[1]]}}',
    "targets of text": f'{{"prompt": {GRAPH}, "partial_execution_targets": "2"}}',
    "targets elsewhere": f'{{"prompt": {GRAPH}, "partial_execution_targets": ["{"9" * 5000}"]}}',
    "links of lists": '{"prompt": {"1": {"class_type": "ToyShow", "inputs": {"value": [[[]], 0]}}},'
    ' "partial_execution_targets": ["1"]}',
    "inputs of lists": '{"prompt": {"1": {"class_type": "ToyShow", "inputs": [1]}},'
    ' "partial_execution_targets": ["1"]}',
    "a class of a page": json.dumps({"prompt": {"1": {"class_type": "x" * 100_000, "inputs": {}}}}),
    "a link of a page": json.dumps(
        {"prompt": {"1": {"class_type": "ToyShow", "inputs": {"value": ["x" * 99_999, 0]}}}}
    ),
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("path", ["/prompt", "/settings"])
def test_a_body_that_cannot_be_used_is_one_line_and_leaves_nothing(with_server, kind: str, path: str) -> None:
    async def body(server):
        if (
            path == "/settings"
            and not isinstance(BODIES[kind], bytes)
            and "prompt" in BODIES[kind][:40]
            and ("targets" in kind or "links" in kind or "inputs" in kind or "of a page" in kind)
        ):
            return  # good JSON
        response = await server.client.post(path, data=BODIES[kind])
        assert response.status == 400, await response.text()
        refusal = (await response.json())["error"]
        told = refusal if isinstance(refusal, str) else refusal["message"]
        assert told and "\n" not in told and len(told) < 500
        await still_answers(server)

    with_server(body)


def test_a_body_that_unpacks_to_much_more_is_cut_short(with_server) -> None:
    async def body(server):
        bomb = gzip.compress(b" " * (page_requests.MAX_REQUEST_BYTES + 1))
        for path in ("/prompt", "/userdata/a.json"):
            response = await server.client.post(path, data=bomb, headers={"Content-Encoding": "gzip"})
            assert response.status in (400, 413)
        await still_answers(server)

    with_server(body)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_packed_as_it_says_is_one_line(with_server, encoding: str) -> None:
    async def body(server):
        for path in ("/prompt", "/settings", "/userdata/a.json"):
            content = b"no such thing" * 9
            headers = {"Content-Encoding": encoding, "Connection": "close"}  # nothing can follow such a body
            response = await server.client.post(path, data=content, headers=headers)
            assert response.status == 400, await response.text()
        assert not list(server.user.rglob("*"))
        await still_answers(server)

    with_server(body)


@pytest.mark.parametrize("query", ["max_items=" + "9" * 5000, "max_items=-1", "max_items=1e9", "max_items=²"])
def test_a_count_that_is_none_is_one_line(with_server, query: str) -> None:
    async def body(server):
        for path in (f"/history?{query}", f"/jobs?{query.replace('max_items', 'limit')}"):
            response = await server.client.get(path)
            assert response.status == 400 and "is not allowed" in (await response.json())["error"]

    with_server(body)


def test_requests_are_read_and_answers_written_beside_the_event_loop(
    with_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: dict[str, list[bool]] = {"read": [], "written": []}
    on_loop = threading.current_thread
    reading, writing = page_requests.parse_json, json.dumps

    def read(text: bytes) -> Any:
        places["read"].append(on_loop() is loop_thread)
        return reading(text)

    def write(content: Any, **options: Any) -> str:
        if isinstance(content, dict) and any("prompt" in str(value)[:20] for value in content.values()):
            places["written"].append(on_loop() is loop_thread)
        return writing(content, **options)

    loop_thread = threading.current_thread()
    monkeypatch.setattr(page_requests, "parse_json", read)
    monkeypatch.setattr(page_requests.json, "dumps", write)

    async def body(server):
        await still_answers(server)
        await server.get("/history")

    with_server(body)
    assert places["read"] and not any(places["read"])
    assert places["written"] and not any(places["written"])


# Nodes that do harm ------------------------------------------------------------------------------------------


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot say")


class OfItsOwn(BaseException):
    pass


RAISED = {
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "CancelledError": asyncio.CancelledError(),
    "Unspeakable": Unspeakable(),
    "OfItsOwn": OfItsOwn("x" * 1_000_000),
    "StopIteration": StopIteration(),
}
SHOWN = {"not a number": float("nan"), "no JSON": object(), "bytes": b"x", "itself": []}
SHOWN["itself"].append(SHOWN["itself"])


class ToyHarm(ComfyNode):
    @classmethod
    def define_schema(cls) -> Schema:
        return Schema(node_id="ToyHarm", inputs=[String.Input("kind")], outputs=[], is_output_node=True)

    @classmethod
    def execute(cls, kind: str) -> NodeOutput:
        if kind in RAISED:
            raise RAISED[kind]
        return NodeOutput(ui={"text": [SHOWN[kind]]})


@pytest.mark.parametrize("kind", [*RAISED, *SHOWN])
def test_a_node_does_not_end_the_worker(with_server, toys, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(toys, "ToyHarm", ToyHarm)

    async def body(server):
        async with server.open_page("a") as page:
            prompt_id = await page.queue({"1": {"class_type": "ToyHarm", "inputs": {"kind": kind}}})
            await page.wait_for_end(prompt_id)
        job = await server.get(f"/jobs/{prompt_id}")
        assert job["status"] == "failed"
        assert len(job["execution_error"]["exception_message"]) <= prompt_queue.MAX_ERROR_LENGTH
        await still_answers(server)

    with_server(body)


def test_the_command_line_tells_of_a_node_that_wants_to_end_it(tmp_path) -> None:
    from highwater.headless.runner.runner import NodeFailed, WorkflowRunner
    from highwater.headless.runner.workflow import parse_workflow
    from highwater.memory import MemoryManager

    runner = WorkflowRunner(MemoryManager(), models_directory=tmp_path, output_directory=tmp_path)
    graph = {"1": {"class_type": "ToyHarm", "inputs": {"kind": "SystemExit"}}}
    with pytest.raises(NodeFailed, match=r"node 1 .* failed: SystemExit: 3"):
        runner.run(parse_workflow(graph, node_classes={"ToyHarm": ToyHarm}), name="test")


# What is kept ------------------------------------------------------------------------------------------------


def padded(number: int, num_bytes: int) -> dict[str, Any]:
    graph = {**SHOW_FIVE, "1": {"class_type": "ToyNumber", "inputs": {"value": number}}}
    return {"prompt": graph, "extra_data": {"padding": "x" * num_bytes}}


def test_the_history_is_bounded_by_bytes(with_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_queue, "MAX_FINISHED_BYTES", 250_000)

    async def body(server):
        ids = []
        async with server.open_page("a") as page:
            for number in range(5):
                content = {**padded(number, 100_000), "client_id": "a"}
                response = await server.client.post("/prompt", json=content)
                ids.append((await response.json())["prompt_id"])
                await page.wait_for_end(ids[-1])
            assert list(await server.get("/history")) == ids[-2:]
            response = await server.client.post("/prompt", json={**padded(9, 900_000), "client_id": "a"})
            ids.append((await response.json())["prompt_id"])
            await page.wait_for_end(ids[-1])
            assert list(await server.get("/history")) == ids[-1:]  # the last one is told in any case

    with_server(body)


def test_what_many_values_take_counts_too() -> None:
    assert page_requests.weigh_json(b"[" + b"[]," * 9_999 + b"[]]") > 600_000
    assert page_requests.weigh_json(b'"' + b"x" * 30_000 + b'"') < 31_000


def test_what_nodes_show_counts_too(with_server, toys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_queue, "MAX_FINISHED_BYTES", 10_000)
    monkeypatch.setitem(SHOWN, "much", "x" * 9_000)
    monkeypatch.setitem(toys, "ToyHarm", ToyHarm)

    async def body(server):
        async with server.open_page("a") as page:
            for _ in range(3):
                last = await page.queue({"1": {"class_type": "ToyHarm", "inputs": {"kind": "much"}}})
                await page.wait_for_end(last)
            assert list(await server.get("/history")) == [last]

    with_server(body)


def test_the_queue_is_bounded_by_bytes_and_number(with_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_queue, "MAX_WAITING_BYTES", 250_000)

    async def body(server):
        async with server.open_page("a") as page:
            running = await page.queue({"1": {"class_type": "ToyWait", "inputs": {"tag": 1}}})
            await page.receive_until(lambda m: m["type"] == "progress")
            statuses = []
            for number in range(4):
                response = await server.client.post("/prompt", json=padded(number, 100_000))
                statuses.append(response.status)
            assert statuses == [200, 200, 400, 400]
            assert "2 prompts wait, about" in (await response.json())["error"]
            monkeypatch.setattr(prompt_queue, "MAX_WAITING", 2)
            assert (await server.client.post("/prompt", json=padded(1, 0))).status == 400
            await server.client.post("/queue", json={"clear": True})
            server.waiting_node.may_end.set()
            await page.wait_for_end(running)

    with_server(body)


@pytest.mark.parametrize("id", [{"a": 1}, ["x"], 7, "x" * 100_000])
def test_a_graph_with_a_strange_id_runs(with_server, id: Any) -> None:
    async def body(server):
        async with server.open_page("a") as page:
            prompt_id = await page.queue(SHOW_FIVE, workflow_id=id)
            await page.wait_for_end(prompt_id)
        assert (await server.get(f"/jobs/{prompt_id}"))["status"] == "completed"

    with_server(body)


# The user's files ----------------------------------------------------------------------------------------------

ELSEWHERE = [
    "C:x", "C:\\x", "c:/x", "\\\\host\\share\\x", "//host/share", "a\\b", "a.json:stream", "aux", "NUL.json",
    "a/con.txt", "../x", "a/../../x", "/etc/x", "a//b", "x\0", "x\n", "x\u202ey", "x.", "x ", ".", "a/./b",
]  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE, ids=lambda name: ascii(name)[:25])
def test_a_name_is_refused_before_any_path_is_made_of_it(with_server, name: str, monkeypatch) -> None:
    from pathlib import Path

    resolving, resolved = Path.resolve, []
    monkeypatch.setattr(Path, "resolve", lambda path, **how: (resolved.append(str(path)), resolving(path, **how))[1])

    async def body(server):
        (server.user / "good.json").parent.mkdir(exist_ok=True)
        (server.user / "good.json").write_text("{}")
        resolved.clear()
        escaped = quote(name, safe="")
        for method, path in (
            ("GET", f"/userdata/{escaped}"),
            ("POST", f"/userdata/{escaped}"),
            ("DELETE", f"/userdata/{escaped}"),
            ("POST", f"/userdata/good.json/move/{escaped}"),
            ("POST", f"/userdata/{escaped}/move/good.json"),
            ("GET", f"/view?filename={escaped}"),
            ("GET", f"/view?filename=a.png&subfolder={escaped}"),
            ("GET", f"/userdata?dir={escaped}&recurse=true"),
            ("GET", f"/workflow_templates/highwater/{escaped}"),
        ):
            response = await server.client.request(method, path)
            assert response.status in (400, 404, 405), (method, path)
        assert not any(name.strip("./") in path for path in resolved if name.strip("./"))
        assert sorted(path.name for path in server.user.rglob("*")) == ["good.json"]

    with_server(body)


def test_a_folder_is_no_file_and_nothing_hidden_is_left(with_server) -> None:
    async def body(server):
        (server.user / "workflows" / "sub").mkdir(parents=True)
        (server.user / "workflows" / "a.json").write_text("{}")
        client = server.client
        requests = (
            ("POST", "/userdata/workflows"),
            ("POST", "/userdata/workflows%2Fsub"),
            ("POST", "/userdata/workflows%2Fa.json%2Fb.json"),
            ("POST", "/userdata/" + "x" * 300),
            ("POST", "/userdata/" + "%2F".join(["x" * 200] * 30)),
            ("DELETE", "/userdata/workflows"),
            ("POST", "/userdata/workflows%2Fa.json/move/workflows%2Fsub"),
            ("POST", "/userdata/workflows%2Fa.json/move/workflows%2Fsub?overwrite=true"),
            ("POST", "/userdata/workflows%2Fsub/move/b.json"),
        )
        for method, path in requests:
            response = await client.request(method, path, data=b"new" if method == "POST" else None)
            assert response.status in (400, 404, 409), path
            assert (await response.json())["error"]
        left = sorted(path.relative_to(server.user).as_posix() for path in server.user.rglob("*") if path.is_file())
        assert left == ["workflows/a.json"]
        assert (server.user / "workflows" / "a.json").read_text() == "{}"

    with_server(body)


def test_a_full_disk_leaves_what_was_there(with_server, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def body(server):
        client = server.client
        await client.post("/userdata/a.json", data=b"old")
        await client.post("/settings", json={"a": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            for path in ("/userdata/a.json", "/userdata/b.json", "/settings"):
                response = await client.post(path, data=b'{"a": 2}')
                assert response.status == 507
                assert (await response.json())["error"] == "nothing was saved: No space left on device"
        assert (server.user / "a.json").read_bytes() == b"old"
        assert (await server.get("/settings"))["a"] == 1
        assert sorted(path.name for path in server.user.iterdir()) == ["a.json", "comfy.settings.json"]

    with_server(body)


def test_a_folder_without_permission_is_one_line_and_the_page_still_opens(
    with_server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    async def body(server):
        client = server.client
        await client.post("/userdata/a.json", data=b"old")
        await client.post("/settings", json={"a": 1})
        line = "the system does not allow this: Permission denied"
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "mkstemp", refuse)
            patch.setattr(Path, "unlink", refuse)
            patch.setattr(os, "replace", refuse)
            for method, path in (
                ("POST", "/userdata/a.json"),
                ("POST", "/userdata/b.json"),
                ("POST", "/settings"),
                ("DELETE", "/userdata/a.json"),
                ("POST", "/userdata/a.json/move/c.json"),
            ):
                response = await client.request(method, path, data=b'{"a": 2}')
                assert (response.status, (await response.json())["error"]) == (403, line), path
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", refuse)
            assert "a" not in await server.get("/settings")
            response = await client.post("/settings", json={"b": 2})  # else what cannot be read would be lost
            assert (response.status, (await response.json())["error"]) == (403, line)
        assert (await server.get("/settings"))["a"] == 1
        assert (server.user / "a.json").read_bytes() == b"old"

    with_server(body)
    assert "Traceback" not in caplog.text


def test_settings_stay_small_and_readable(with_server) -> None:
    async def body(server):
        response = await server.client.post("/settings", json={"a": "x" * (5 << 20)})
        assert response.status == 400 and "the settings would have" in (await response.json())["error"]
        for broken in ('{"a": NaN}', "[" * 100_000, '{"a": 1e999}', "\x00"):
            (server.user).mkdir(exist_ok=True)
            (server.user / "comfy.settings.json").write_text(broken)
            response = await server.client.get("/settings")
            assert response.status == 200
            strict(await response.text())

    with_server(body)


@pytest.mark.parametrize(
    "prefix", ["\\\\host\\share\\x", "C:x", "C:\\x", "a:b", "a\\b", "aux/x", "x\0", "../x", "/x", "", "a/.."]
)
def test_a_prefix_of_images_is_refused_before_any_path_is_made_of_it(tmp_path, prefix: str, monkeypatch) -> None:
    from pathlib import Path

    from highwater.headless.comfy_stub.comfy_api import install
    from highwater.headless.comfy_stub.folder_paths import get_save_image_path
    from highwater.memory.errors import InvalidInput
    from highwater.nodes.file_names import prefix_problem

    install()
    from highwater.nodes.image import HighwaterSaveImage

    def fail(*_: Any) -> Any:
        raise AssertionError("a path was made of it")

    monkeypatch.setattr(Path, "resolve", fail)
    with pytest.raises(InvalidInput, match="is not a file name below"):
        get_save_image_path(prefix, str(tmp_path))
    assert prefix_problem(prefix) is not None and HighwaterSaveImage.validate_inputs(prefix) is not True


@pytest.mark.parametrize("prefix", ["Highwater", "a/b", "./a", "a/../b", "v1.", "a-%year%", "模型：二"])
def test_other_prefixes_of_images_are_taken(tmp_path, prefix: str) -> None:
    from highwater.headless.comfy_stub.folder_paths import get_save_image_path
    from highwater.nodes.file_names import prefix_problem

    folder, name, number, subfolder, _ = get_save_image_path(prefix, str(tmp_path))
    assert prefix_problem(prefix) is None
    assert number == 1 and name and folder.startswith(str(tmp_path)) and "\\" not in subfolder
