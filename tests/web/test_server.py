"""The server's promises to the page: every route answers, prompts are checked in full, and run in their order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from highwater.headless.server.page_files import WEB
from highwater.nodes.json_schema import find_fault
from highwater.nodes.route_schemas import message_schemas
from highwater.nodes.routes import make_routes

SHOW_FIVE = {
    "1": {"class_type": "ToyNumber", "inputs": {"value": 5}},
    "2": {"class_type": "ToyShow", "inputs": {"value": ["1", 0]}},
}
DOES_NOT_FIT = {
    "1": {"class_type": "ToyNumber", "inputs": {"value": 1}},
    "2": {"class_type": "ToyFail", "inputs": {"message": "needs 9 MiB, 3 MiB free", "after": ["1", 0]}},
}

# What the page asks for at its start, and the kind of JSON that it expects.
ROUTES = {
    "/embeddings": list,
    "/experiment/models": list,
    "/extensions": list,
    "/features": dict,
    "/global_subgraphs": dict,
    "/highwater/report": dict,
    "/history": dict,
    "/i18n": dict,
    "/internal/folder_paths": dict,
    "/jobs?status=in_progress,pending&limit=200&offset=0": dict,
    "/node_replacements": dict,
    "/object_info": dict,
    "/prompt": dict,
    "/queue": dict,
    "/settings": dict,
    "/system_stats": dict,
    "/templates/index.json": list,
    "/userdata?dir=workflows&recurse=true&split=false&full_info=true": list,
    "/users": dict,
    "/workflow_templates": dict,
}


def wait_graph(tag: int) -> dict[str, Any]:
    return {"1": {"class_type": "ToyWait", "inputs": {"tag": tag}}}


def test_every_route_answers_at_its_path_and_below_api(with_server):
    async def body(server):
        for path, kind in ROUTES.items():
            for prefix in ("", "/api"):
                assert isinstance(await server.get(prefix + path), kind), prefix + path

    with_server(body)


def test_the_page_gets_the_texts_of_all_languages(with_server):
    async def body(server):
        texts = await server.get("/i18n")
        names = {locale: texts[locale]["nodeDefs"]["HighwaterLoadVAE"]["display_name"] for locale in texts}
        assert names == {
            "de": "VAE laden (Highwater)",
            "en": "Load VAE (Highwater)",
            "ja": "VAEを読み込む (Highwater)",
            "zh": "加载VAE (Highwater)",
        }
        assert texts["de"]["settings"]["Highwater_Badges"]["name"] == "Speicher-Badges an Nodes"
        assert texts["de"]["highwater"]["detail"]["title"] == "Speicher dieses Nodes"

    with_server(body)


def test_the_first_visit_opens_the_template_and_the_next_one_does_not(with_server):
    async def body(server):
        first = await server.client.get("/", allow_redirects=False)
        assert first.status == 302
        template = first.headers["Location"].removeprefix("/?template=").partition("&")[0]
        assert (await server.get(f"/api/workflow_templates/highwater/{template}.json"))["nodes"]
        again = await server.client.get("/", allow_redirects=False)
        assert again.status == 200 and "<html" in await again.text()

    with_server(body)


def test_our_scripts_are_listed_and_served(with_server):
    async def body(server):
        scripts = await server.get("/extensions")
        found = sorted(path.relative_to(WEB).as_posix() for path in WEB.rglob("*.js"))  # named in test_contents.py
        assert scripts == [f"/extensions/highwater/{name}" for name in found]
        for script in scripts:
            response = await server.client.get(script)
            assert response.status == 200 and "javascript" in response.headers["Content-Type"]

    with_server(body)


def test_object_info_describes_all_nodes_or_one(with_server):
    async def body(server):
        assert set(await server.get("/object_info")) == {"ToyNumber", "ToyShow", "ToyWait", "ToyFail"}
        one = await server.get("/api/object_info/ToyNumber")
        assert one["ToyNumber"]["input"]["required"]["value"] == ["INT", {"min": 0, "max": 9}]
        assert await server.get("/object_info/Nothing") == {}

    with_server(body)


def test_system_stats_are_the_managers_numbers(with_server):
    async def body(server):
        report = await server.get("/highwater/report")
        stats = await server.get("/system_stats")
        assert [device["name"] for device in stats["devices"]] == [device["name"] for device in report["devices"]]
        assert stats["devices"][0]["vram_total"] == report["devices"][0]["total_bytes"] > 0

    with_server(body)


def test_the_report_can_be_asked_for_in_parts(with_server):
    async def body(server):
        report = await server.get("/highwater/report?only=nodes,components")
        assert set(report) == {"version", "now_s", "server_id", "nodes", "components"}
        refusal = await server.get("/highwater/report?only=node", status=400)
        assert refusal["error"].startswith("only='node' is no part of the report; did you mean 'nodes'?")

    with_server(body)


# Running ---------------------------------------------------------------------------------------------------


def test_a_run_is_told_in_comfyuis_order_with_bytes_for_each_node(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            prompt_id = await page.queue(SHOW_FIVE, workflow_id="graph-1")
            await page.wait_for_end(prompt_id)
            told = [kind for kind in page.types() if kind != "progress_state"]
            assert told == [
                "status",
                "execution_start",
                "execution_cached",
                "executing",
                "highwater.memory",
                "executing",
                "highwater.memory",
                "executed",
                "execution_success",
                "executing",
                "status",
            ]
            memory = [m["data"] for m in page.messages if m["type"] == "highwater.memory"]
            assert [(m["node_id"], m["workflow_id"], m["run_id"]) for m in memory] == [
                ("1", "graph-1", prompt_id),
                ("2", "graph-1", prompt_id),
            ]
            assert [find_fault(m, message_schemas()[m["type"]], "message") for m in memory] == [None, None]
            executed = next(m["data"] for m in page.messages if m["type"] == "executed")
            assert executed == {
                "node": "2",
                "display_node": "2",
                "output": {"text": ["5"]},
                "prompt_id": prompt_id,
            }
            remaining = [
                m["data"]["status"]["exec_info"]["queue_remaining"] for m in page.messages if m["type"] == "status"
            ]
            assert remaining == [1, 0]

    with_server(body)


def test_an_unchanged_graph_is_cached_and_still_shows_its_outputs(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            await page.wait_for_end(await page.queue(SHOW_FIVE))
            page.messages.clear()
            await page.wait_for_end(await page.queue(SHOW_FIVE))
            cached = next(m["data"]["nodes"] for m in page.messages if m["type"] == "execution_cached")
            assert cached == ["1", "2"]
            assert "executed" in page.types() and "highwater.memory" not in page.types()

    with_server(body)


def test_unloading_forgets_results_but_never_under_a_running_prompt(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            await page.wait_for_end(await page.queue(SHOW_FIVE))
            assert (await server.client.post("/api/free", json={"unload_models": True})).status == 200
            page.messages.clear()
            await page.wait_for_end(await page.queue(SHOW_FIVE))
            assert next(m["data"]["nodes"] for m in page.messages if m["type"] == "execution_cached") == []
            running = await page.queue(wait_graph(1))
            await page.receive_until(lambda m: m["type"] == "progress")
            assert (await server.client.post("/api/free", json={"unload_models": True})).status == 409
            server.waiting_node.may_end.set()
            await page.wait_for_end(running)

    with_server(body)


def test_our_own_addresses_are_those_of_the_pack_in_comfyui(with_server):
    """One module makes them for both hosts; `tests/nodes/test_routes.py` says what each does."""

    async def body(server):
        ours = {(method, path) for method, path, _ in make_routes(is_running=bool, host_features=dict)}
        served = {(route.method, route.resource.canonical) for route in server.client.app.router.routes()}
        assert ours <= served
        freed = await server.client.post("/highwater/free", json={})
        assert freed.status == 200
        assert not any((await freed.json())["freed_bytes"].values())  # of whatever devices are here
        async with server.open_page("a") as page:
            running = await page.queue(wait_graph(1))
            await page.receive_until(lambda m: m["type"] == "progress")
            assert (await server.client.post("/highwater/free", json={})).status == 409
            server.waiting_node.may_end.set()
            await page.wait_for_end(running)
        assert set((await server.get("/highwater/report?only=host_features"))["host_features"].values()) == {True}

    with_server(body)


def test_a_run_is_told_to_its_page_and_memory_to_all(with_server):
    async def body(server):
        async with server.open_page("a") as page, server.open_page("b") as other:
            await page.wait_for_end(await page.queue(SHOW_FIVE))
            await other.receive_until(lambda m: m["type"] == "status" and not remaining(m))
            assert set(other.types()) == {"status", "highwater.memory"}

    with_server(body)


def remaining(status: dict[str, Any]) -> int:
    return status["data"]["status"]["exec_info"]["queue_remaining"]


def test_a_failed_node_is_named_with_what_it_raised_and_the_next_prompt_runs(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            failed = await page.queue(DOES_NOT_FIT)
            following = await page.queue(SHOW_FIVE)
            await page.wait_for_end(following)
            error = next(m["data"] for m in page.messages if m["type"] == "execution_error")
            assert (error["prompt_id"], error["node_id"], error["node_type"]) == (failed, "2", "ToyFail")
            assert error["exception_type"] == "highwater.memory.errors.DoesNotFit"
            assert error["exception_message"] == "needs 9 MiB, 3 MiB free"
            assert error["executed"] == ["1"]
            assert error["traceback"]
            jobs = {job["id"]: job for job in (await server.get("/api/jobs"))["jobs"]}
            assert jobs[failed]["status"] == "failed" and jobs[failed]["execution_error"]["node_id"] == "2"
            assert jobs[following]["status"] == "completed"

    with_server(body)


def test_progress_is_passed_on_while_a_node_runs(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            prompt_id = await page.queue(wait_graph(1))
            progress = await page.receive_until(lambda m: m["type"] == "progress")
            assert progress["data"]["node"] == "1" and progress["data"]["max"] == 1000
            state = next(m["data"] for m in page.messages if m["type"] == "progress_state")
            assert state["nodes"]["1"]["state"] == "running"
            server.waiting_node.may_end.set()
            await page.wait_for_end(prompt_id)

    with_server(body)


def test_cancel_stops_the_running_prompt_at_its_next_step(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            prompt_id = await page.queue(wait_graph(1))
            await page.receive_until(lambda m: m["type"] == "progress")
            await server.client.post("/api/interrupt", json={"prompt_id": "another one"})
            assert (await server.get("/api/jobs?status=in_progress"))["jobs"][0]["id"] == prompt_id
            await server.client.post("/api/interrupt")
            await page.wait_for_end(prompt_id)
            assert "execution_interrupted" in page.types()
            assert (await server.get(f"/api/jobs/{prompt_id}"))["status"] == "cancelled"

    with_server(body)


def test_waiting_prompts_can_go_first_and_can_be_taken_out(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            running = await page.queue(wait_graph(0))
            await page.receive_until(lambda m: m["type"] == "progress")
            second, third = await page.queue(wait_graph(1)), await page.queue(wait_graph(2))
            first = await page.queue(wait_graph(3), front=True)
            queue = await server.get("/api/queue")
            assert [entry[1] for entry in queue["queue_running"]] == [running]
            assert [entry[1] for entry in queue["queue_pending"]] == [first, second, third]
            await server.client.post("/api/queue", json={"delete": [second]})
            assert (await server.get("/prompt"))["exec_info"]["queue_remaining"] == 3
            await server.client.post("/api/queue", json={"clear": True})
            assert (await server.get("/prompt"))["exec_info"]["queue_remaining"] == 1
            await server.client.post(f"/api/jobs/{running}/cancel")
            await page.wait_for_end(running)

    with_server(body)


def test_two_pages_queue_at_once_and_one_that_leaves_takes_nothing_with_it(with_server):
    """A prompt of a page that has gone runs to its end; what the other one is told stays its own."""

    async def body(server):
        async with server.open_page("a") as page:
            async with server.open_page("b") as other:
                ids = [await one.queue(wait_graph(n)) for n, one in enumerate((page, other, page, other))]
                await page.receive_until(lambda m: m["type"] == "progress")
                saved = await asyncio.gather(
                    *(server.client.post("/userdata/workflows%2Fw.json", data=b"%d" % n * 99) for n in range(8)),
                    *(server.client.post(f"/settings/{n}", json=n) for n in range(8)),
                )
                assert {answer.status for answer in saved} == {200}
            # The other one has left, while the first prompt runs and two of its own wait.
            await server.client.post(f"/api/jobs/{ids[2]}/cancel")
            server.waiting_node.may_end.set()
            while (await server.get("/prompt"))["exec_info"]["queue_remaining"]:
                await page.receive_until(lambda m: m["type"] == "status")
            history = await server.get("/history")
            assert {id: history[id]["status"]["status_str"] for id in history} == dict.fromkeys(
                [ids[0], ids[1], ids[3]], "success"
            )
            told = {m["data"]["prompt_id"] for m in page.messages if "prompt_id" in m["data"]}
            assert told == {ids[0]}
            settings = await server.get("/settings")
            assert [settings[str(n)] for n in range(8)] == list(range(8))
            content = (server.user / "workflows" / "w.json").read_bytes()
            assert len(content) == 99 and len(set(content)) == 1

    with_server(body)


def test_prompts_run_in_the_order_in_which_they_came(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            graphs = [{**SHOW_FIVE, "1": {"class_type": "ToyNumber", "inputs": {"value": n}}} for n in range(10)]
            ids = [await page.queue(graph) for graph in graphs]
            await page.wait_for_end(ids[-1])
            assert [m["data"]["prompt_id"] for m in page.messages if m["type"] == "execution_start"] == ids
            assert [m["data"]["output"]["text"] for m in page.messages if m["type"] == "executed"] == [
                [str(n)] for n in range(10)
            ]

    with_server(body)


def test_finished_prompts_are_listed_until_they_are_forgotten(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            ids = [await page.queue(SHOW_FIVE, workflow_id="graph-1") for _ in range(3)]
            await page.wait_for_end(ids[-1])
        jobs = await server.get("/api/jobs?status=completed,failed,cancelled&limit=2&offset=0")
        assert [job["id"] for job in jobs["jobs"]] == [ids[2], ids[1]]
        assert jobs["pagination"] == {"offset": 0, "limit": 2, "total": 3, "has_more": True}
        detail = await server.get(f"/api/jobs/{ids[0]}")
        assert detail["workflow"]["prompt"] == SHOW_FIVE and detail["workflow_id"] == "graph-1"
        history = await server.get(f"/history/{ids[0]}")
        assert history[ids[0]]["outputs"] == {"2": {"text": ["5"]}}
        assert history[ids[0]]["status"]["status_str"] == "success"
        await server.client.post("/history", json={"delete": [ids[0]]})
        assert set(await server.get("/history")) == set(ids[1:])
        await server.client.post("/history", json={"clear": True})
        assert await server.get("/history") == {}

    with_server(body)


def test_a_page_that_is_reloaded_learns_what_runs_for_it(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            prompt_id = await page.queue(wait_graph(1))
            await page.receive_until(lambda m: m["type"] == "progress")
        async with server.open_page("a") as page:
            running = await page.receive_until(lambda m: m["type"] == "executing")
            assert running["data"]["node"] == "1"
            server.waiting_node.may_end.set()
            await page.wait_for_end(prompt_id)

    with_server(body)


def test_single_outputs_can_be_run_alone(with_server):
    async def body(server):
        both = {**SHOW_FIVE, "3": {"class_type": "ToyShow", "inputs": {"value": ["1", 0]}}}
        async with server.open_page("a") as page:
            await page.wait_for_end(await page.queue(both, partial_execution_targets=["3"]))
            shown = [m["data"]["node"] for m in page.messages if m["type"] == "executed"]
            assert shown == ["3"]

    with_server(body)


def test_the_server_ends_while_a_prompt_runs(with_server):
    async def body(server):
        async with server.open_page("a") as page:
            await page.queue(wait_graph(1))
            await page.receive_until(lambda m: m["type"] == "progress")

    with_server(body)  # returns: nothing waits for the thousand steps


# Refusing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "node_id", "input_name", "details"),
    [
        (
            {**SHOW_FIVE, "1": {"class_type": "ToyNumber", "inputs": {"value": 12}}},
            "1",
            "value",
            "input 'value' is 12; expected a whole number from 0 to 9",
        ),
        (
            {**SHOW_FIVE, "1": {"class_type": "ToyNumber", "inputs": {"value": 1, "kind": "evn"}}},
            "1",
            "kind",
            "did you mean 'even'?",
        ),
        ({"2": {"class_type": "ToyShow", "inputs": {}}}, "2", "value", "is missing"),
        ({"2": {"class_type": "ToyShow", "inputs": {"value": ["9", 0]}}}, "2", "value", "links to node '9'"),
    ],
)
def test_an_unusable_input_is_marked_on_its_node(with_server, graph, node_id, input_name, details):
    async def body(server):
        response = await server.client.post("/api/prompt", json={"prompt": graph})
        assert response.status == 400
        refusal = await response.json()
        assert refusal["error"]["type"] == "prompt_outputs_failed_validation"
        assert list(refusal["node_errors"]) == [node_id]
        marked = refusal["node_errors"][node_id]
        assert marked["class_type"] == graph[node_id]["class_type"]
        [problem] = marked["errors"]
        assert set(problem) == {"type", "message", "details", "extra_info"}
        assert problem["type"] == "exception_during_inner_validation"
        assert problem["extra_info"] == {"input_name": input_name}
        assert details in problem["details"] and "\n" not in problem["details"]

    with_server(body)


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ({"1": {"class_type": "KSampler", "inputs": {}}}, "missing_node_type", "class_type 'KSampler' is unknown"),
        ({"1": {"class_type": "ToyNumber", "inputs": {"value": 1}}}, "invalid_prompt", "no output node"),
        ({}, "invalid_prompt", "the workflow has no nodes"),
        ({"1": 3}, "invalid_prompt", "node 1 has no class_type"),
        (None, "invalid_prompt", "the request has no 'prompt'"),
    ],
)
def test_an_unusable_graph_is_refused_as_a_whole(with_server, prompt, kind, message):
    async def body(server):
        response = await server.client.post("/prompt", json={"prompt": prompt})
        refusal = await response.json()
        assert (response.status, refusal["error"]["type"], refusal["node_errors"]) == (400, kind, {})
        assert message in refusal["error"]["message"]
        assert (await server.get("/prompt"))["exec_info"]["queue_remaining"] == 0

    with_server(body)


@pytest.mark.parametrize("path", ["/prompt", "/queue", "/interrupt", "/history", "/api/settings"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff"])
def test_a_request_that_is_no_object_gets_one_line(with_server, path, content):
    async def body(server):
        response = await server.client.post(path, data=content)
        assert response.status == 400
        assert "\n" not in (await response.json())["error"]

    with_server(body)


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://elsewhere.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}],
)
def test_pages_of_other_sites_are_refused(with_server, headers):
    async def body(server):
        response = await server.client.post("/prompt", json={"prompt": SHOW_FIVE}, headers=headers)
        assert response.status == 403
        own = {"Origin": f"http://{server.client.host}:{server.client.port}"}
        assert (await server.client.get("/prompt", headers=own)).status == 200

    with_server(body)


def test_a_loading_moves_the_bar_of_its_node():
    from types import SimpleNamespace

    from highwater.headless.server.job import Job
    from highwater.headless.server.prompt_queue import PromptQueue

    published: list[Any] = []
    queue = PromptQueue(SimpleNamespace(), lambda *message: published.append(message))
    job = Job(workflow=SimpleNamespace(), extra_data={}, client_id="page")
    queue.on_event(job, "loading", "3", "tiny/unet", 5, 20)
    (bar, data, _), (state, nodes, _) = published
    assert (bar, data) == ("progress", {"node": "3", "prompt_id": job.id, "value": 5, "max": 20})
    assert state == "progress_state" and nodes["nodes"]["3"]["value"] == 5
