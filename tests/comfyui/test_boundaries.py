"""Runs and nodes as the real host tells of them, what reaches the page, and the pack's addresses on its server."""

from __future__ import annotations

import json
import urllib.error
import uuid
from pathlib import Path
from typing import Any

import pytest

from highwater.nodes.json_schema import find_fault
from highwater.nodes.route_schemas import message_schemas
from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostFiles, HostProcess, PromptResult

OURS = Loaders()


def workflow_of(workflow_id: str) -> dict[str, Any]:
    return {"extra_pnginfo": {"workflow": {"id": workflow_id}}}


def told(host: HostProcess, prompt_id: str) -> list[dict[str, Any]]:
    """Return what the page was told of the nodes of a prompt, once its run is over and all has arrived."""

    def arrived() -> list[dict[str, Any]]:
        sent = [message["data"] for message in host.messages if message["type"] == "highwater.memory"]
        return [data for data in sent if data["prompt_id"] == prompt_id and data["type"] == "node"]

    def is_over() -> bool:
        report = host.get("/highwater/report?only=runs,nodes&limit=all")
        in_books = [node for node in report["nodes"] if node["run_id"] == prompt_id]
        ends = [run["end_s"] for run in report["runs"] if run["run_id"] == prompt_id]
        return None not in ends and len(arrived()) == len(in_books)

    host.wait_until(is_over, f"the end of run {prompt_id}", timeout_s=30)
    assert [find_fault(data, message_schemas()["node"], "message") for data in arrived()] == [None] * len(arrived())
    return arrived()


def run(host: HostProcess, nodes: dict[str, Any], workflow_id: str | None = None) -> PromptResult:
    return host.run(nodes, **(workflow_of(workflow_id) if workflow_id else {}))


def small_graph() -> dict[str, Any]:
    """Two of core's nodes, one of them inside of a subgraph, and one of ours."""
    colour = uuid.uuid4().int % 0xFFFFFF  # nothing of it is cached
    image = {"width": 16, "height": 16, "batch_size": 1, "color": colour}
    return {
        "5:7": {"class_type": "EmptyImage", "inputs": image, "_meta": {"title": "A canvas"}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["5:7", 0]}},
        "9": {"class_type": "HighwaterMemoryReport", "inputs": {"after": ["5:7", 0]}},
    }


def sampling_with(kind: str) -> dict[str, Any]:
    graph = Graph()
    model = graph.add("TestTrouble", model=OURS.diffusion_model(graph), kind=kind, call=2)
    graph.nodes[model[0]]["inputs"]["module"] = "diffusion_model.single_blocks.1.linear2"
    graph.keep(sample_flux(graph, model))
    return graph.nodes


def id_of(nodes: dict[str, Any], class_type: str) -> str:
    return next(node_id for node_id, node in nodes.items() if node["class_type"] == class_type)


def test_nothing_is_done_before_the_first_prompt_with_a_node_of_ours(host_files: HostFiles, models: Path) -> None:
    """A host of its own, 10 s: in the shared ones the pack has been used."""
    with HostProcess(host_files, models=models) as host:
        nodes = small_graph()
        ours = nodes.pop("9")
        assert run(host, nodes).outcome == "success"
        report = host.report()
        assert report["runs"] == report["nodes"] == report["devices"] == []
        assert set(report["host_features"].values()) == {True}
        assert host.post("/highwater/free") == {"freed_bytes": {}}
        assert host.part("devices") == []

        assert host.post("/highwater/follow")["devices"]  # as the panel does when it is opened
        others = small_graph()
        del others["9"]
        followed = run(host, others, "others").prompt_id
        assert [run["run_id"] for run in host.part("runs")] == [followed]
        assert {node["node_id"] for node in host.part("nodes")} == {"5:7", "2"}

        result = run(host, {**small_graph(), "9": ours}, "first")
        assert {node["node_id"] for node in told(host, result.prompt_id)} == {"5:7", "2", "9"}
        assert [run["run_id"] for run in host.part("runs")] == [followed, result.prompt_id]
        assert host.error_lines() == []


def test_every_node_is_told_with_its_execution_id_and_its_workflow(host: HostProcess) -> None:
    nodes = small_graph()
    result = run(host, nodes, "wf-1")
    reports = {node["node_id"]: node for node in told(host, result.prompt_id)}
    assert reports.keys() == nodes.keys()
    assert {node["workflow_id"] for node in reports.values()} == {"wf-1"}
    assert reports["5:7"]["title"] == "A canvas"
    assert reports["2"]["title"] == "PreviewImage"
    last = host.part("runs")[-1]
    assert (last["run_id"], last["name"]) == (result.prompt_id, "wf-1")

    again = run(host, nodes, "wf-2")  # all cached, but for the report, which is made every time
    assert [(node["node_id"], node["workflow_id"]) for node in told(host, again.prompt_id)] == [("9", "wf-2")]
    assert {node["workflow_id"] for node in told(host, run(host, small_graph()).prompt_id)} == {None}


@pytest.mark.expects_errors
@pytest.mark.parametrize("kind", ["interrupt", "error", "out of memory"])
def test_a_run_that_breaks_off_is_closed_with_its_node(host: HostProcess, kind: str) -> None:
    nodes = sampling_with(kind)
    result = run(host, nodes, "wf-trouble")
    assert result.outcome == ("interrupted" if kind == "interrupt" else "error")
    sampler = id_of(nodes, "KSampler")
    assert [node["node_id"] for node in told(host, result.prompt_id)][-1] == sampler
    assert sampler not in {node["node_id"] for node in told(host, run(host, small_graph()).prompt_id)}
    report = host.report()
    assert all(run["end_s"] is not None for run in report["runs"])
    assert not any(component["leased"] for component in report["components"])
    assert set(report["host_features"].values()) == {True}


def test_cores_own_loader_shows_its_model_and_its_sampler_what_it_added(host: HostProcess) -> None:
    """No node of ours manages it: its bytes are weights all the same, and it is found by the file of its loader."""
    graph = Graph()
    sampled = sample_flux(graph, CORE.diffusion_model(graph, "wide_flux.safetensors"))
    graph.keep(sampled)
    graph.add("HighwaterMemoryReport", after=sampled)
    result = run(host, graph.nodes, workflow_id := f"wf-{uuid.uuid4()}")
    report = host.get("/highwater/report?only=components,loaders,nodes")
    loader = id_of(graph.nodes, "UNETLoader")
    (row,) = (row for row in report["loaders"] if row["workflow_id"] == workflow_id and row["node_id"] == loader)
    (part,) = (part for part in report["components"] if part["id"] in row["components"])
    assert part["engine"] == "core" and part["name"] == "wide_flux"
    assert sum(part["tiers"].values()) == part["total_bytes"] > 300 << 20
    nodes = {node["node_id"]: node for node in report["nodes"] if node["run_id"] == result.prompt_id}
    sampler = nodes[sampled[0]]
    if host.total_bytes:
        assert 300 << 20 < part["tiers"]["gpu:0"] < sampler["peak_bytes"]["gpu:0"]
        assert 0 < sampler["activation_bytes"]["gpu:0"] < 100 << 20
    else:
        assert part["tiers"].keys() == {"host"}


def test_nothing_is_freed_while_a_prompt_runs_and_all_that_is_idle_after(host: HostProcess) -> None:
    num_messages = len(host.messages)
    prompt_id = host.queue(sampling_with("wait for interrupt"))
    host.wait_for_message("highwater_test.waiting", num_messages)
    with pytest.raises(urllib.error.HTTPError) as refused:
        host.post("/highwater/free")
    assert refused.value.code == 409
    host.post("/interrupt")
    assert host.wait_for(prompt_id).outcome == "interrupted"
    told(host, prompt_id)

    host.wait_until(lambda: not host.get("/queue")["queue_running"], "an empty queue")
    freed = host.post("/highwater/free")["freed_bytes"]
    assert (sum(freed.values()) > 0) == bool(host.total_bytes)
    accelerators = [device for device in host.part("devices") if device["name"] != "cpu"]
    assert [device["managed_bytes"] for device in accelerators] == [0] * len(host.total_bytes)


def test_after_everything_was_freed_the_same_run_gives_the_same(host: HostProcess) -> None:
    graph = Graph()
    graph.keep(sample_flux(graph, OURS.diffusion_model(graph)))
    before = host.run(graph.nodes).kept()["value.samples"]
    host.wait_until(lambda: not host.get("/queue")["queue_running"], "an empty queue")
    host.post("/highwater/free")
    sampler = id_of(graph.nodes, "KSampler")
    for conditioning in ("positive", "negative"):
        graph.nodes[graph.nodes[sampler]["inputs"][conditioning][0]]["inputs"]["run"] += 1_000_000  # sample again
    assert before.equal(host.run(graph.nodes).kept()["value.samples"])


def test_the_report_can_be_asked_for_in_parts(host: HostProcess) -> None:
    always = {"now_s", "server_id", "version"}
    assert host.get("/api/highwater/report?only=host_features").keys() == {"host_features", *always}
    with pytest.raises(urllib.error.HTTPError) as refused:
        host.get("/highwater/report?only=colour")
    assert refused.value.code == 400
    assert "only='colour' is no part of the report" in json.loads(refused.value.read())["error"]
