"""Run and node boundaries, as ComfyUI's executor would call them; tests/comfyui has the real one."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web

from highwater.headless.comfy_stub.comfy_api import install as install_stand_ins
from highwater.memory import existing_manager, manage
from highwater.memory.manager import default
from highwater.nodes import boundaries
from highwater.nodes.boundaries import Boundaries
from highwater.nodes.prompts import digests_of, name_of_run, names_our_node

OURS = {"1": {"class_type": "HighwaterMemoryReport", "inputs": {}}}
CORE = {
    "1": {"class_type": "EmptyImage", "inputs": {}, "_meta": {"title": "A canvas"}},
    "5:7": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
}
# A request to queue a prompt may hold anything.
MALFORMED = [None, [], "text", {"1": None}, {"1": {"class_type": 3}}, {"1": {"inputs": {}}}]


class FakeServer:
    """What ``PromptServer`` has: one running prompt, a websocket, and handlers of requests."""

    def __init__(self) -> None:
        self.app = web.Application()
        self.running: list[Any] = []
        self.sent: list[dict[str, Any]] = []
        self.handlers: list[Any] = []
        self.prompt_queue = SimpleNamespace(get_current_queue_volatile=lambda: (self.running, []))

    def send_sync(self, event: str, data: dict[str, Any]) -> None:
        assert event == "highwater.memory"
        self.sent.append(data)

    def add_on_prompt_handler(self, handler: Any) -> None:
        self.handlers.append(handler)

    def nodes(self) -> list[tuple[Any, ...]]:
        return [(m["node_id"], m["title"], m["workflow_id"]) for m in self.sent if m["type"] == "node"]


class FakeGraph:
    """A ``DynamicPrompt``: node "1" may have expanded into "1.0.0.2"."""

    def __init__(self, graph: dict[str, Any]) -> None:
        self.graph = graph

    def get_node(self, node_id: str) -> dict[str, Any]:
        return self.graph.get(node_id) or {"class_type": "Expanded", "inputs": {}}

    def get_display_node_id(self, node_id: str) -> str:
        return node_id.partition(".")[0]


@pytest.fixture(autouse=True)
def no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins in a process in which nothing has asked for the manager yet."""
    monkeypatch.setattr(default, "made", [])
    monkeypatch.setattr(boundaries, "installed", [])


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def followed(server: FakeServer) -> Iterator[Boundaries]:
    yield (follower := Boundaries(server, lambda _: None))
    assert not follower.lost


def start(
    follower: Boundaries, graph: dict[str, Any], *, prompt_id: str = "prompt-1", workflow: Any = None
) -> FakeGraph:
    extra_data = {} if workflow is None else {"extra_pnginfo": {"workflow": workflow}}
    follower.server.running = [(0, prompt_id, copy.deepcopy(graph), extra_data, ["1"], {})]
    follower.run_started(prompt_id)
    return FakeGraph(graph)


def runs() -> list[dict[str, Any]]:
    return existing_manager().report()["runs"]


def test_who_does_not_use_the_pack_pays_nothing(followed: Boundaries, server: FakeServer) -> None:
    graph = start(followed, CORE)
    followed.node_started("1", graph)
    followed.node_ended("1")
    followed.run_ended("prompt-1")
    assert existing_manager() is None
    assert server.sent == []


def test_every_node_of_a_run_is_reported_once_with_its_workflow(followed: Boundaries, server: FakeServer) -> None:
    graph = start(followed, {**CORE, "9": OURS["1"]}, workflow={"id": "wf"})
    for node_id in graph.graph:
        followed.node_started(node_id, graph)
        followed.node_ended(node_id)
    followed.run_ended("prompt-1")
    titles = [("1", "A canvas", "wf"), ("5:7", "PreviewImage", "wf"), ("9", "HighwaterMemoryReport", "wf")]
    assert server.nodes() == titles
    assert {m["prompt_id"] for m in server.sent} == {"prompt-1"}
    (run,) = runs()
    assert (run["run_id"], run["name"]) == ("prompt-1", "wf")
    assert run["end_s"] is not None


def test_once_there_is_a_manager_every_run_is_followed(followed: Boundaries, server: FakeServer) -> None:
    start(followed, OURS)
    followed.run_ended("prompt-1")
    graph = start(followed, CORE, prompt_id="prompt-2")
    followed.node_started("1", graph)
    followed.node_ended("1")
    followed.run_ended("prompt-2")
    assert [run["run_id"] for run in runs()] == ["prompt-1", "prompt-2"]
    assert server.nodes() == [("1", "A canvas", None)]


def test_a_node_that_never_finishes_is_closed_by_the_end_of_its_run(followed: Boundaries, server: FakeServer) -> None:
    graph = start(followed, {**CORE, **OURS})
    followed.node_started("1", graph)
    followed.run_ended("prompt-1")  # an error, or an interrupt
    assert [node_id for node_id, *_ in server.nodes()] == ["1"]
    assert runs()[-1]["end_s"] is not None
    assert existing_manager().measures.node is None
    followed.node_ended("1")
    followed.run_ended("prompt-1")
    assert len(server.nodes()) == 1


def test_a_node_that_waits_is_closed_by_the_next_one(followed: Boundaries, server: FakeServer) -> None:
    graph = start(followed, {**CORE, **OURS})
    followed.node_started("1", graph)  # asks for a lazy input
    followed.node_started("5:7", graph)
    followed.node_ended("5:7")
    followed.node_started("1", graph)
    followed.node_ended("1")
    assert [node_id for node_id, *_ in server.nodes()] == ["1", "5:7", "1"]
    followed.node_ended("5:7")  # a cached node finishes without having started
    followed.run_ended("prompt-1")
    assert len(server.nodes()) == 3


def test_what_a_node_expands_into_is_shown_as_the_node(followed: Boundaries, server: FakeServer) -> None:
    graph = start(followed, OURS)
    followed.node_started("1", graph)
    followed.node_started("1.0.0.2", graph)
    followed.node_ended("1.0.0.2")
    followed.node_ended("1")
    followed.run_ended("prompt-1")
    assert [(node_id, title) for node_id, title, _ in server.nodes()] == [
        ("1", "HighwaterMemoryReport"),
        ("1", "Expanded"),
    ]


def test_an_eviction_names_the_node_that_it_happened_in(followed: Boundaries, server: FakeServer) -> None:
    graph = start(followed, OURS, workflow={"id": "wf"})
    followed.node_started("1", graph)
    existing_manager().event_log.note("evict", "model", 5, "gpu:0", "needed")
    followed.run_ended("prompt-1")
    existing_manager().event_log.note("evict", "model", 5, "gpu:0", "asked for")
    inside, outside = (m for m in server.sent if m["type"] == "event")
    assert (inside["node_id"], inside["workflow_id"], inside["prompt_id"]) == ("1", "wf", "prompt-1")
    assert (outside["node_id"], outside["workflow_id"], outside["prompt_id"]) == (None, None, None)
    assert inside["kind"] == "evict"


@pytest.mark.parametrize("workflow", [[], "text", {"id": 3}, {"id": None}, {}])
def test_a_workflow_without_an_id_is_none(followed: Boundaries, workflow: Any) -> None:
    start(followed, OURS, workflow=workflow)
    assert followed.workflow_id is None
    followed.run_ended("prompt-1")


@pytest.mark.parametrize("graph", MALFORMED)
def test_any_request_can_be_looked_at(graph: Any) -> None:
    assert not names_our_node(graph)


def test_our_failure_is_logged_once_and_never_raised(
    server: FakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = Boundaries(server, lambda _: None)
    graph = start(follower, {**CORE, **OURS})
    monkeypatch.setattr(existing_manager(), "begin_node", lambda *_, **__: 1 / 0)
    with caplog.at_level(logging.ERROR, logger="highwater"):
        follower.node_started("1", graph)
        follower.node_started("5:7", graph)
    follower.run_ended("prompt-1")
    assert len(caplog.records) == 1
    assert "division by zero" in caplog.text
    assert follower.lost == {"node_boundaries": "failed: ZeroDivisionError: division by zero"}
    boundaries.installed.append(follower)
    assert boundaries.features() == {
        "run_boundaries": True,
        "events": True,
        "forecast": True,
        "free": True,
        **follower.lost,
    }
    assert runs()[-1]["end_s"] is not None


# -- what is registered with the host


def test_a_host_without_providers_is_said_to_lack_them(server: FakeServer) -> None:
    install_stand_ins()  # has none, as ComfyUI before 0.33
    boundaries.install(server)
    assert server.handlers == []
    for state in boundaries.features().values():
        assert str(state).startswith("missing: this ComfyUI has no cache providers")


def test_outside_of_the_host_no_feature_works() -> None:
    assert set(boundaries.features().values()) == {"missing: this process is not ComfyUI"}


def test_the_provider_comes_with_the_first_prompt_that_names_a_node_of_ours(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Any] = []
    caching = SimpleNamespace(register_provider=registered.append)
    latest = SimpleNamespace(
        Caching=SimpleNamespace(CacheProvider=object), ComfyAPISync=lambda: SimpleNamespace(caching=caching)
    )
    monkeypatch.setitem(sys.modules, "comfy_api.latest", latest)
    boundaries.install(server)
    assert set(boundaries.features().values()) == {True}
    (look_at,) = server.handlers
    for graph in [*MALFORMED, CORE]:
        assert look_at({"prompt": graph}) == {"prompt": graph}
    assert look_at({}) == {}
    assert registered == []
    for _ in range(2):
        assert look_at({"prompt": OURS}) == {"prompt": OURS}
    (provider,) = registered
    assert provider.should_cache(None) is False
    server.running = [(0, "prompt-1", CORE, {}, ["1"], {})]
    provider.on_prompt_start("prompt-1")  # core's nodes only: no manager, and no handler to add
    provider.on_prompt_end("prompt-1")
    assert existing_manager() is None


def test_a_provider_that_cannot_be_registered_is_said_and_the_prompt_goes_on(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = SimpleNamespace(Caching=SimpleNamespace(CacheProvider=object), ComfyAPISync=lambda: None)
    monkeypatch.setitem(sys.modules, "comfy_api.latest", latest)
    boundaries.install(server)
    assert server.handlers[0]({"prompt": OURS}) == {"prompt": OURS}
    assert str(boundaries.features()["run_boundaries"]).startswith("failed: AttributeError")


def test_a_prompt_that_begins_tells_its_loaders() -> None:
    """Also under another id of the same workflow, and where the host has the result of another workflow's loader."""
    loader = {"class_type": "HighwaterLoadVAE", "inputs": {"vae_name": "a.safetensors"}}
    first = {"1": loader, "2": {"class_type": "VAEDecode", "inputs": {"vae": ["1", 0]}}}
    server = FakeServer()
    boundaries.installed.append(follows := Boundaries(server, lambda _: None))
    kept = []  # the host keeps what a loader returned

    def run(graph: dict[str, Any], workflow: str, *started: str) -> list[tuple[str, str, list[str]]]:
        extra = {"extra_pnginfo": {"workflow": {"id": workflow}}}
        server.running = [(0, "prompt", graph, extra, [])]
        follows.run_started("prompt")
        for node_id in started:
            follows.node_started(node_id, FakeGraph(graph))
            if graph[node_id] is loader:
                kept.append(manage({"a": torch.nn.Linear(2, 2)}, placement="cpu", node_id=node_id))
            follows.node_ended(node_id)
        follows.run_ended("prompt")
        assert follows.lost == {}
        return sorted((row["workflow_id"], row["node_id"], row["components"]) for row in boundaries.loader_rows())

    assert boundaries.loader_rows() == []
    assert run(first, "A", "1", "2") == [("A", "1", ["a"])]
    assert run(first, "B") == [("A", "1", ["a"]), ("B", "1", ["a"])]
    assert run({"7:1": loader, "8": {**loader}}, "A") == [("A", "7:1", ["a"]), ("A", "8", ["a"]), ("B", "1", ["a"])]


def test_digests_follow_values_and_links_however_deep() -> None:
    def chain(number: int, value: str) -> dict[str, Any]:
        rest = {str(n): {"class_type": "N", "inputs": {"x": [str(n - 1), 0]}} for n in range(1, number)}
        return {"0": {"class_type": "N", "inputs": {"x": value}}, **rest}

    one, other = digests_of(chain(5000, "a")), digests_of(dict(reversed(chain(5000, "a").items())))
    assert one == other and len(set(one.values())) == 5000
    assert not set(one.values()) & set(digests_of(chain(5000, "b")).values())
    loop = {"1": {"class_type": "N", "inputs": {"x": ["2", 0]}}, "2": {"class_type": "N", "inputs": {"x": ["1", 0]}}}
    assert digests_of(loop).keys() == {"1", "2"}


def test_prompts_without_a_workflow_are_runs_of_one_if_their_nodes_and_links_are_equal() -> None:
    """What a run needed is compared with the last one of its name, and kept for each name."""

    def graph(seed: int, class_type: str = "Sample", source: str = "1") -> dict[str, Any]:
        return {
            "1": {"class_type": "Load", "inputs": {"name": f"model {seed}"}},
            "2": {"class_type": class_type, "inputs": {"model": [source, 0], "seed": seed}},
        }

    name = name_of_run(graph(1), None)
    assert name.startswith("prompt ") and name == name_of_run(graph(2), None)
    assert name == name_of_run(dict(reversed(graph(3).items())), None)
    others = [graph(1, "Other"), graph(1, source="2"), {**graph(1), "3": graph(1)["1"]}, {}]
    assert len({name, *(name_of_run(other, None) for other in others)}) == 5
    assert name_of_run(graph(1), "an id") == "an id"
