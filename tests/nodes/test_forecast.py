"""What graphs tell of the components to come, whatever they are; and what the host's queue tells of graphs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.manager import default
from highwater.memory.manager.forecast import KnownComponent
from highwater.nodes.boundaries import Boundaries
from highwater.nodes.forecast.prompt_graph import PromptGraph
from highwater.nodes.forecast.queue_forecast import MAX_PROMPTS, QueueForecast
from highwater.nodes.host.waiting_queue import read_queue


def part(name: str, kind: str, node_id: str | None = None, workflow_id: str | None = None) -> KnownComponent:
    return KnownComponent(id=name, name=name, kind=kind, node_id=node_id, workflow_id=workflow_id)


FLUX = [part("t5xxl", "text"), part("flux", "diffusion"), part("ae", "vae")]
WAN = [part("umt5", "text"), part("wan", "diffusion"), part("wan_vae", "vae")]


def graph(names: list[KnownComponent], *, seed: int = 1, prompt: str = "a fox", ours: bool = True) -> dict[str, Any]:
    """A workflow as ComfyUI's pages make them, of loaders, a LoRA, two prompts, a sampler and a decoder."""
    text, model, vae = (f"folder/{each.name}.safetensors" for each in names)
    load = "HighwaterLoad{}" if ours else "{}Loader"
    return {
        "1": {"class_type": load.format("DiffusionModel"), "inputs": {"unet_name": model}},
        "2": {"class_type": load.format("TextEncoder"), "inputs": {"clip_name1": text, "type": "flux"}},
        "3": {"class_type": load.format("VAE"), "inputs": {"vae_name": vae}},
        "4": {
            "class_type": "LoraLoader",
            "inputs": {"model": ["1", 0], "clip": ["2", 0], "lora_name": "x.safetensors"},
        },
        "5": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["4", 1], "text": prompt}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["4", 1], "text": ""}},
        "7": {"class_type": "EmptyLatentImage", "inputs": {"width": 64}},
        "8": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["4", 0],
                "positive": ["5", 0],
                "negative": ["6", 0],
                "latent_image": ["7", 0],
                "seed": seed,
            },
        },
        "9": {"class_type": "VAEDecode", "inputs": {"samples": ["8", 0], "vae": ["3", 0]}},
        "10": {"class_type": "SaveImage", "inputs": {"images": ["9", 0]}},
    }


def names(steps: list[frozenset[str]]) -> list[str]:
    return ["+".join(sorted(step)) for step in steps]


def test_a_graph_of_loaders_prompts_sampler_and_decoder_is_read() -> None:
    forecast = QueueForecast()
    forecast.read("a", graph(FLUX))
    forecast.read("b", graph(WAN, ours=False))
    told = forecast.foresee("a", None, (), ["b"], [*FLUX, *WAN])
    assert names(told.steps) == ["t5xxl", "t5xxl", "flux", "ae", "umt5", "umt5", "wan", "wan_vae"]


def test_what_runs_now_comes_first_and_what_has_run_no_more() -> None:
    forecast = QueueForecast()
    forecast.read("a", graph(FLUX))
    told = forecast.foresee("a", "8", {"1", "2", "3", "4", "5", "6", "7"}, [], FLUX)
    assert (names(told.steps), told.num_running) == (["flux", "ae"], 1)
    told = forecast.foresee("a", "7", {"1", "2", "4", "5", "6"}, [], FLUX)  # which computes nothing
    assert (names(told.steps), told.num_running) == (["", "flux", "ae"], 1)
    assert forecast.foresee("a", "expanded.1", (), [], FLUX).num_running == 1, "a node that is not in the graph"


def test_what_the_host_has_kept_does_not_run() -> None:
    """A prompt with another seed samples and decodes; with another text it encodes that one, too."""
    forecast = QueueForecast()
    for prompt_id, made in {
        "a": graph(FLUX),
        "b": graph(FLUX, seed=2),
        "c": graph(FLUX, seed=3, prompt="a hen"),
    }.items():
        forecast.read(prompt_id, made)
    told = forecast.foresee("a", None, forecast.prompts["a"].order, ["b", "c"], FLUX)
    assert names(told.steps) == ["flux", "ae", "t5xxl", "flux", "ae"]


@pytest.mark.parametrize(("keeps", "then"), [(False, ["t5xxl", "t5xxl", "flux", "ae"]), (True, [])])
def test_whether_results_of_earlier_prompts_stay_is_the_hosts(keeps: bool, then: list[str]) -> None:
    forecast = QueueForecast()
    forecast.note_results(are_kept=keeps)
    for prompt_id, made in {"a": graph(FLUX), "b": graph(WAN), "again": graph(FLUX)}.items():
        forecast.read(prompt_id, made)
    told = forecast.foresee("a", None, forecast.prompts["a"].order, ["b", "again"], [*FLUX, *WAN])
    assert names(told.steps) == ["umt5", "umt5", "wan", "wan_vae", *then]


def test_nodes_tell_what_they_load_and_compute_with() -> None:
    """No name tells of these two nodes what they are."""
    made = {
        "1": {"class_type": "Odd", "inputs": {"which": "a"}},
        "2": {"class_type": "Stranger", "inputs": {"thing": ["1", 0], "seed": 1}},
    }
    found = [part("odd", "diffusion", "1", "wf"), part("helper", "control", "1", "wf")]
    forecast = QueueForecast()
    forecast.read("a", made, workflow_id="wf")
    assert forecast.foresee("a", None, (), [], found).steps == []
    for node_id, used in (("1", []), ("2", ["helper", "odd"])):
        forecast.learn("a", {"node_id": node_id, "components": used}, found)
    forecast.read("b", {**made, "2": {"class_type": "Stranger", "inputs": {"thing": ["1", 0], "seed": 2}}})
    assert names(forecast.foresee("a", None, ("1", "2"), ["b"], found).steps) == ["helper", "odd"]
    gone = [part("other", "diffusion")]
    assert forecast.foresee("a", None, ("1", "2"), ["b"], gone).steps == []


def test_a_manage_node_is_found_by_its_id_or_by_the_file_before_it() -> None:
    made = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "flux.safetensors"}},
        "2": {"class_type": "HighwaterManageModel", "inputs": {"model": ["1", 0], "profile": "auto"}},
        "3": {"class_type": "KSampler", "inputs": {"model": ["2", 0]}},
    }
    for found in (part("managed", "diffusion", "2", "wf"), part("flux", "diffusion", "17", "other")):
        forecast = QueueForecast()
        forecast.read("a", made, workflow_id="wf")
        assert names(forecast.foresee("a", None, (), [], [found]).steps) == [found.id]


def test_of_two_samplers_each_gets_its_own_model() -> None:
    made = graph(FLUX)
    made["11"] = {"class_type": "UNETLoader", "inputs": {"unet_name": "wan.safetensors"}}
    made["12"] = {"class_type": "KSampler", "inputs": {"model": ["11", 0], "latent_image": ["8", 0]}}
    made["9"]["inputs"]["samples"] = ["12", 0]
    forecast = QueueForecast()
    forecast.read("a", made)
    told = forecast.foresee("a", None, (), [], [*FLUX, *WAN])
    assert names(told.steps) == ["t5xxl", "t5xxl", "flux", "wan", "ae"]


def test_the_parts_of_a_pipeline_come_in_the_order_in_which_they_were_used() -> None:
    parts = [KnownComponent(id=f"tiny/{n}", name=n, kind=k, node_id="1", workflow_id="w") for n, k in
             (("transformer", "diffusion"), ("vae", "vae"), ("text_encoder", "text"))]  # fmt: skip
    made = {
        "1": {"class_type": "HighwaterLoadPipeline", "inputs": {"pipeline": "tiny"}},
        "2": {"class_type": "HighwaterSamplePipeline", "inputs": {"pipeline": ["1", 0], "seed": 1}},
    }
    forecast = QueueForecast(keeps_results=True)
    forecast.read("a", made, workflow_id="w")
    assert sorted(names(forecast.foresee("a", None, (), [], parts).steps)) == sorted(each.id for each in parts)
    used = ["tiny/text_encoder", "tiny/transformer", "tiny/vae"]
    forecast.learn("a", {"node_id": "2", "components": used}, parts)
    told = forecast.foresee("a", "2", ["1"], [], parts)
    assert (names(told.steps), told.num_running) == (used, 3)


def test_only_so_many_prompts_are_looked_at() -> None:
    forecast = QueueForecast()
    ids = [str(number) for number in range(2 * MAX_PROMPTS)]
    for turn, prompt_id in enumerate(ids[:MAX_PROMPTS]):
        forecast.read(prompt_id, graph(FLUX, seed=turn))
    assert len(forecast.foresee(None, None, (), ids, FLUX).steps) == 2 + 2 * MAX_PROMPTS
    forecast.forget_others(["0"])
    assert list(forecast.prompts) == ["0"]


# -- anything may stand in a queue

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("a.safetensors"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
links = st.tuples(st.sampled_from("12345"), st.integers(0, 2)).map(list)
odd_nodes = st.fixed_dictionaries(
    {},
    optional={
        "class_type": st.sampled_from(["KSampler", "HighwaterLoadVAE"]) | values,
        "inputs": st.dictionaries(st.sampled_from(["model", "vae", "x", "pipeline"]), links | values, max_size=4)
        | values,
    },
)
graphs = st.dictionaries(st.sampled_from("12345"), odd_nodes | values, max_size=5) | values


@given(running=graphs, waiting=st.lists(graphs, max_size=3), now=st.none() | st.sampled_from("123x"))
def test_no_graph_is_too_odd(running: Any, waiting: list[Any], now: str | None) -> None:
    forecast = QueueForecast()
    found = [part("a", "diffusion", "1"), part("b/vae", "vae", "2")]
    forecast.read("now", running, workflow_id=None)
    for number, made in enumerate(waiting):
        forecast.read(str(number), made, outputs=["1", "nowhere"])
    if now is not None:
        forecast.learn("now", {"node_id": now, "components": ["a", "gone"]}, found)
    told = forecast.foresee("now", now, ["2"], [str(number) for number in range(len(waiting))], found)
    assert all(step <= {"a", "b/vae"} for step in told.steps) and told.num_running <= len(told.steps)


@given(made=graphs)
def test_the_order_of_any_graph_has_what_a_node_needs_before_it_unless_that_is_a_cycle(made: Any) -> None:
    prompt = PromptGraph(made)
    assert len(set(prompt.order)) == len(prompt.order) <= len(prompt.nodes)
    assert set(prompt.to_run((), ())) == set(prompt.order)
    assert not prompt.to_run(prompt.order, ())
    assert not prompt.to_run((), prompt.digests.values()) or not prompt.digests


@given(made=graphs, data=st.data())
def test_what_is_left_of_a_run_is_the_same_whether_it_was_asked_before_or_not(made: Any, data: st.DataObject) -> None:
    prompt, done = PromptGraph(made), set[str]()
    kept = data.draw(st.sets(st.sampled_from([*prompt.digests.values(), "another"]), max_size=2))
    for node_id in data.draw(st.permutations([*prompt.nodes, "nowhere"])):
        assert [*prompt.to_run(done, kept)] == [*PromptGraph(made).to_run(done, kept)]
        done.add(node_id)


@given(
    entries=st.lists(
        st.tuples(st.integers(0, 9) | st.floats() | st.text(max_size=1), st.text(min_size=1), graphs, st.none())
        | st.lists(values, max_size=6)
        | values,
        max_size=6,
    )
)
def test_any_queue_can_be_read(entries: list[Any]) -> None:
    queue = read_queue(SimpleNamespace(prompt_queue=SimpleNamespace(get_current_queue_volatile=lambda: ([], entries))))
    assert queue.lost is None
    assert len(queue.waiting) <= len(entries)


def test_a_queue_is_read_in_the_order_in_which_it_runs() -> None:
    numbers = [5, 2.5, -1, 7, 3]
    random.Random(0).shuffle(numbers)
    entries = [(number, f"p{number}", {}, {"id": number}, ["9"], {}) for number in numbers]
    volatile = SimpleNamespace(get_current_queue_volatile=lambda: (entries[:1], entries[1:]))
    queue = read_queue(SimpleNamespace(prompt_queue=volatile))
    assert [prompt.id for prompt in queue.waiting] == [f"p{number}" for number in sorted(numbers[1:])]
    assert queue.running_prompt(f"p{numbers[0]}").outputs == ("9",)
    assert queue.running_prompt("other") is None


@pytest.mark.parametrize(
    ("server", "lost"),
    [
        (SimpleNamespace(), "missing: this ComfyUI does not tell its queue"),
        (SimpleNamespace(prompt_queue=SimpleNamespace()), "missing: this ComfyUI does not tell its queue"),
        (
            SimpleNamespace(prompt_queue=SimpleNamespace(get_current_queue_volatile=lambda: 1 / 0)),
            "failed: ZeroDivision",
        ),
        (SimpleNamespace(prompt_queue=SimpleNamespace(get_current_queue_volatile=lambda: None)), "failed: TypeError"),
    ],
)
def test_a_host_without_the_call_is_said_to_lack_it(server: Any, lost: str) -> None:
    queue = read_queue(server)
    assert str(queue.lost).startswith(lost)
    assert (queue.running, queue.waiting) == ((), ())


# -- through the host's boundaries, to the manager


def test_the_manager_hears_of_the_running_prompt_and_of_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "made", [])
    told: list[list[str]] = []
    waiting: list[Any] = []
    running = [(0, "now", graph(FLUX), {}, ["10"])]
    queue = SimpleNamespace(get_current_queue_volatile=lambda: (running, waiting))
    server = SimpleNamespace(prompt_queue=queue, send_sync=lambda *_: None)
    follower = Boundaries(server, lambda _: None)
    manager = follower.manage()
    monkeypatch.setattr(manager, "known_components", lambda: [*FLUX, *WAN])
    monkeypatch.setattr(manager, "foresee", lambda steps, num_running: told.append(names(steps)))
    dynamic_prompt = SimpleNamespace(get_node=graph(FLUX).__getitem__, get_display_node_id=str)
    follower.run_started("now")
    assert told[-1] == ["t5xxl", "t5xxl", "flux", "ae"]
    for node_id in "12456":
        follower.node_started(node_id, dynamic_prompt)
    waiting += [(2, "later", graph(FLUX, seed=5), {}, ["10"]), (1, "next", graph(WAN), {}, ["10"])]
    follower.node_started("8", dynamic_prompt)
    assert told[-1] == ["flux", "ae", "umt5", "umt5", "wan", "wan_vae", "t5xxl", "t5xxl", "flux", "ae"]
    follower.run_ended("now")
    assert told[-1] == ["umt5", "umt5", "wan", "wan_vae", "t5xxl", "t5xxl", "flux", "ae"]
    assert not follower.lost


def test_an_odd_graph_in_the_queue_costs_the_forecast_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "made", [])
    running = [(0, "now", {"1": {"class_type": "HighwaterMemoryReport", "inputs": {}}}, {}, ["1"])]
    waiting = [(1, "odd", {"1": None, "2": {"inputs": {"model": ["2", 0]}}}, None, None), "nonsense", (None, "x", 3, 4)]
    queue = SimpleNamespace(get_current_queue_volatile=lambda: (running, waiting))
    follower = Boundaries(SimpleNamespace(prompt_queue=queue, send_sync=lambda *_: None), lambda _: None)
    follower.run_started("now")
    follower.run_ended("now")
    assert not follower.lost
