"""The advice: what it says holds in numbers, and who follows it has the limit no more."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory import MemoryManager, manage
from highwater.memory.manager import default
from highwater.nodes import advice, remedies
from highwater.nodes.report_answers import make_report
from highwater.nodes.report_text import describe_all_runs, describe_now
from highwater.nodes.texts import MAX_LENGTH, english_texts

MIB = 1 << 20
GIB = 1 << 30
WIDTH = 512
X = torch.ones(1, WIDTH)
SLOW = 1e8
NUM_PASSES = 12
FINE = "Nothing to change"

Build = Callable[..., Any]


@pytest.fixture
def machine(sim: Any, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Return a context manager: simulated devices of these MiB behind slow links, and a manager."""

    @contextmanager
    def build(*mebibytes: float, low: int = 0, high: int = 0) -> Iterator[MemoryManager]:
        monkeypatch.setattr(default, "made", [])
        specs = [sim.SimDeviceSpec(total_bytes=int(size * MIB), h2d_bytes_per_s=SLOW) for size in mebibytes]
        with sim.cluster(specs), torch.no_grad():
            manager = default.default_manager()
            manager.set_watermark("*", low, high)
            manager.set_watermark("host", 0, 0)
            yield manager
            manager.release_all()

    return build


def advise(report: dict[str, Any]) -> list[str]:
    return [str(text) for text in advice.advise(report)]


def make_model(num_blocks: int = 8) -> torch.nn.Sequential:
    """Return a model with blocks of a MiB each."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks)))
    return model.eval().requires_grad_(False)


def run(manager: MemoryManager, *models: torch.nn.Module) -> list[str]:
    """Run a workflow with a node for each model; returns what the report then says."""
    manager.begin_run(str(manager.event_log.num_runs), "workflow")
    for number, model in enumerate(models):
        manager.begin_node(str(number), "Sample", workflow_id="w")
        for _ in range(NUM_PASSES):
            model(X)
        torch.accelerator.synchronize(0)
        manager.end_node()
    manager.end_run()
    told = make_report(manager, {})["advice"]
    assert make_report(manager, {}, "advice")["advice"] == told
    (limit, change) = (said["text"] for said in told)
    assert all(0 < len(line) <= MAX_LENGTH for line in (limit, change))
    return [limit, change]


def test_who_raises_the_budget_as_told_streams_no_more(machine: Build) -> None:
    model = make_model()
    with machine(32) as manager, manage({"net": model}, "auto,net=3MiB", placement="gpu:0", manager=manager) as managed:
        limit, change = run(manager, model)
        blocks = manager.report()["components"][0]["plan"]["shares"][0]
        streamed, count = blocks["streamed_blocks"], blocks["blocks"]
        told = rf"The last run waited .+ of .+ for weights that stream to gpu:0 \(net, {streamed} of {count} blocks\)"
        assert re.fullmatch(told, limit), limit
        found = re.match(r"Raise the budget of net \(net=3MiB\) to (\d+MiB): it holds all blocks, ", change)
        assert found, change
        managed.reprofile(f"auto,net={found[1]}")
        assert not manager.plans()["net"].streams
        run(manager, model)
        assert run(manager, model) == [
            "Nothing limits it: all weights were resident, and nothing was loaded again.",
            "Nothing to change.",
        ]


def test_a_budget_beyond_the_device_is_not_told(machine: Build) -> None:
    model = make_model(16)
    with machine(8) as manager, manage({"net": model}, "auto,net=3MiB", placement="gpu:0", manager=manager) as managed:
        _, change = run(manager, model)
        found = re.fullmatch(r"Raise the budget of net \(net=3MiB\) to (\d+MiB): fewer of its blocks stream", change)
        assert found, change
        before = manager.report()["components"][0]["plan"]["shares"][0]["streamed_blocks"]
        managed.reprofile(f"auto,net={found[1]}")
        assert 0 < manager.report()["components"][0]["plan"]["shares"][0]["streamed_blocks"] < before


def test_who_lowers_the_watermark_as_told_streams_no_more(machine: Build) -> None:
    model = make_model()
    marked = machine(12, low=7 * MIB, high=8 * MIB)
    with marked as manager, manage({"net": model}, placement="gpu:0", manager=manager):
        _, change = run(manager, model)
        found = re.match(r"Set the watermark of gpu:0 to low (\d+MiB), high (\d+MiB): then all blocks", change)
        assert found, change
        manager.set_watermark("gpu:0", found[1], found[2])
        run(manager, model)
        assert not manager.plans()["net"].streams and run(manager, model)[1].startswith(FINE)


def test_who_moves_it_to_the_device_that_has_room_streams_no_more(machine: Build) -> None:
    model = make_model()
    with machine(5, 16) as manager, manage({"net": model}, placement="gpu:0", manager=manager) as managed:
        _, change = run(manager, model)
        assert re.match(r"Choose placement gpu:1 for net: it needs 8\.\d+MiB, 16\.0MiB are free there", change), change
        managed.reprofile("auto", placement="gpu:1")
        assert not manager.plans()["net"].streams and run(manager, model)[1].startswith(FINE)


def test_who_chooses_fp8_as_told_streams_no_more(machine: Build) -> None:
    model = make_model()
    marked = machine(6, low=MIB // 8, high=MIB // 8)
    with marked as manager, manage({"net": model}, placement="gpu:0", manager=manager) as managed:
        _, change = run(manager, model)
        assert re.match(r"Choose precision 'fp8 scaled' for net: it takes \d\.\d+MiB, .* and no block streams", change)
        row = manager.report()["components"][0]
        managed.reprofile("auto", precision="fp8 scaled")
        plan = manager.plans()["net"]
        assert not plan.streams and plan.shares[0].device_bytes == row["encoded_bytes"]
        assert manager.report()["components"][0]["encoded_bytes"] is None  # it is no less then


def test_fp8_is_not_told_where_weights_have_one_byte_already(machine: Build) -> None:
    model = make_model().to(torch.float8_e4m3fn)
    with machine(64) as manager, manage({"net": model}, placement="gpu:0", manager=manager):
        assert manager.report()["components"][0]["encoded_bytes"] is None


def test_where_nothing_helps_it_says_what_is_missing(machine: Build) -> None:
    model = make_model(24).half()
    with machine(4) as manager, manage({"net": model}, precision="fp8 scaled", placement="gpu:0", manager=manager):
        manager.begin_run("r", "w")
        manager.begin_node("1", "n")
        for _ in range(NUM_PASSES):
            model(X.half())
        torch.accelerator.synchronize(0)
        manager.end_run()
        _, change = advise(manager.report())
        assert re.fullmatch(r"Nothing to change here: gpu:0 lacks \d\.\d+MiB to hold all of net", change), change


def test_components_that_take_turns_and_who_has_room_elsewhere_do_so_no_more(machine: Build) -> None:
    one, two = make_model(), make_model(6)
    with (
        machine(10, 8) as manager,
        manage({"one": one}, placement="gpu:0", manager=manager),
        manage({"two": two}, placement="gpu:0", manager=manager) as second,
    ):
        run(manager, one, two)
        limit, change = run(manager, one, two)
        amount = manager.report()["runs"][-1]["reloaded_bytes"]
        assert amount.keys() == {"one", "two"} and min(amount.values()) >= 4 * MIB
        assert re.fullmatch(
            r"\d+\.\dMiB of weights were loaded again: (one and two|two and one) take turns on gpu:0", limit
        )
        assert re.match(r"Choose placement gpu:1 for two: it needs 6\.\d+MiB, 8\.00MiB are free there", change)
        second.reprofile("auto", placement="gpu:1")
        run(manager, one, two)
        assert run(manager, one, two)[1] == "Nothing to change."


def test_what_leaves_between_runs_on_request_takes_no_turns(machine: Build) -> None:
    model = make_model()
    with machine(16) as manager, manage({"net": model}, placement="gpu:0", manager=manager):
        run(manager, model)
        manager.commands.free_between_runs("released on request")
        limit, change = run(manager, model)
        assert limit.startswith("Nothing limits it: all weights were resident, after 8.0")
        assert change == "Nothing to change: the next run finds them loaded."
        assert manager.report()["runs"][-1]["reloaded_bytes"] == {}


def test_without_a_manager_or_a_run_there_is_nothing_to_tell(machine: Build) -> None:
    assert [said["text"] for said in make_report(None, {})["advice"]] == advise({})
    assert advise({})[0] == "Nothing is known yet: no workflow with a node of Highwater has run."
    with machine(8) as manager:
        assert describe_now(manager.report())[-1].title != "Advice"
        assert run(manager) == ["Nothing limits it: no model had to compute.", "Nothing to change."]
        for sections in (describe_now(manager.report()), describe_all_runs(manager.report())):
            assert sections[-1].title == "Advice" and list(sections[-1].lines) == advise(manager.report())


# -- what needs a machine that the tests have not


def make_case(**component: Any) -> dict[str, Any]:
    """Return the report of a run of 10 s with one component of 12 GiB, of which 9 stream to a device of 8 GiB."""
    share = {
        "device": "gpu:0",
        "blocks": 60,
        "resident_blocks": 15,
        "streamed_blocks": 45,
        "fixed_bytes": 0,
        "resident_bytes": 3 * GIB,
        "streamed_bytes": 9 * GIB,
        "staging_bytes": GIB,
        "scratch_bytes": 0,
        "limit_bytes": 4 * GIB,
        "limited_by": "4.00GiB available on gpu:0",
    }
    plan = {
        "tier": "pinned",
        "pinned_bytes": 12 * GIB,
        "host_bytes": 12 * GIB,
        "placement": "flux=gpu:0",
        "shares": [share],
    }
    row = {"id": "flux", "engine": "blocks", "total_bytes": 12 * GIB, "plan": plan | component.pop("plan", {})}
    ram = {"name": "cpu", "total_bytes": 64 * GIB, "free_bytes": 20 * GIB, "own_watermark": {"low_bytes": 6 * GIB}}
    ram["pinned"] = {"num_bytes": 2 * GIB, "limit_bytes": 50 * GIB}
    gpu = {"name": "gpu:0", "total_bytes": 8 * GIB, "free_bytes": GIB, "other_bytes": 3 * GIB}
    gpu["watermark"] = {"low_bytes": GIB, "high_bytes": GIB}
    node = {"run_id": "r", "components": ["flux"], "seconds": 10.0, "waited_s": 4.0, "activation_bytes": {"gpu:0": GIB}}
    return {
        "devices": [ram, gpu],
        "components": [row | component],
        "nodes": [node],
        "runs": [{"run_id": "r", "begin_s": 2.0, "end_s": 12.4}],
        "events": [],
    }


def test_weights_that_are_read_from_disk_rest_in_ram_if_that_has_room() -> None:
    report = make_case(plan={"tier": "disk", "pinned_bytes": 0})
    share = report["components"][0]["plan"]["shares"][0]
    share["read_bytes"] = share["streamed_bytes"]
    assert advise(report) == [
        "The last run read 9.00GiB from disk in each pass (flux, 45 of 60 blocks)",
        "Choose placement gpu:0:pinned for flux: it needs 12.0GiB of RAM, 14.0GiB are available",
    ]
    report["devices"][0]["pinned"]["limit_bytes"] = 3 * GIB
    assert advise(report)[1].startswith("Choose placement gpu:0:host for flux")
    report["devices"][0]["free_bytes"] = 16 * GIB
    assert advise(report)[1] == "Nothing to change here: the RAM lacks 2.00GiB to hold flux"
    report["components"][0]["encoded_bytes"] = 6 * GIB
    assert advise(report)[1].startswith("Choose precision 'fp8 scaled' for flux: it rests in 6.00GiB of RAM")


def test_of_a_component_that_rests_in_part_in_ram_the_rest_of_it_has_to_fit() -> None:
    report = make_case(tiers={"pinned": 4 * GIB})
    report["components"][0]["plan"]["shares"][0]["read_bytes"] = 8 * GIB
    assert advise(report)[0] == "The last run read 8.00GiB from disk in each pass (flux, 45 of 60 blocks)"
    report["devices"][0]["free_bytes"] = 13 * GIB
    assert advise(report)[1] == "Nothing to change here: the RAM lacks 1.00GiB to hold flux"
    report["devices"][0]["free_bytes"] = 14 * GIB
    assert advise(report)[1].startswith("Choose placement gpu:0:pinned for flux: it needs 12.0GiB of RAM, 12.0GiB are")


def test_pageable_weights_are_page_locked_if_the_machine_may() -> None:
    report = make_case(plan={"tier": "host", "pinned_bytes": 0})
    report["nodes"][0]["waited_s"] = 0.0  # such copies are not measured
    assert advise(report) == [
        "Computing stops for each copy from pageable RAM to gpu:0 (flux, 45 of 60 blocks)",
        "Choose placement gpu:0:pinned for flux: copies then run beside computing",
    ]
    report["devices"][0]["pinned"]["limit_bytes"] = 3 * GIB
    assert advise(report)[1] == "Nothing to change here: gpu:0 lacks 8.00GiB to hold all of flux"


def test_fp8_is_told_only_where_it_helps() -> None:
    report = make_case(encoded_bytes=6 * GIB)
    assert advise(report) == [
        "The last run waited 4.0 of 10.4 s for weights that stream to gpu:0 (flux, 45 of 60 blocks)",
        "Choose precision 'fp8 scaled' for flux: at most 3.00GiB stream in each pass, not 9.00GiB",
    ]
    report["components"][0]["encoded_bytes"] = int(3.9 * GIB)
    assert advise(report)[1].endswith("3.90GiB, 4.00GiB are allowed, and no block streams")
    report["components"][0]["encoded_bytes"] = 12 * GIB
    assert advise(report)[1] == "Nothing to change here: gpu:0 lacks 8.00GiB to hold all of flux"


def test_a_second_device_takes_all_of_it_or_a_part() -> None:
    report = make_case()
    second = {"name": "gpu:1", "total_bytes": 24 * GIB, "free_bytes": 14 * GIB, "other_bytes": 10 * GIB}
    report["devices"].append(second | {"watermark": {"low_bytes": GIB, "high_bytes": 2 * GIB}})
    assert advise(report)[1] == "Choose placement gpu:1 for flux: it needs 12.0GiB, 13.0GiB are free there"
    report["devices"][2]["free_bytes"] = 10 * GIB
    assert advise(report)[1] == "Split flux with placement gpu:0&gpu:1: 9.00GiB are free on gpu:1"
    report["devices"][2]["free_bytes"] = 9 * GIB
    assert advise(report)[1].startswith("Nothing to change here")


def test_waits_of_less_than_a_twentieth_limit_nothing() -> None:
    report = make_case()
    report["nodes"][0]["waited_s"] = 0.3
    assert advise(report) == [
        "Nothing limits it: flux, 45 of 60 blocks stream while others compute (waited 0.3 of 10.4 s)",
        "Nothing to change.",
    ]


def test_what_ran_out_of_memory_comes_first() -> None:
    report = make_case()
    failed = {"kind": "error", "run_id": "r", "device": "gpu:0", "component": "flux"}
    told = "flux ran out of memory on gpu:0: 2.00GiB more were asked for"
    report["events"] = [failed | {"reason": f"{told}; the next run keeps 3.00GiB free for flux"}]
    assert advise(report) == [f"The last run failed: {told}", "Run it again: the next run keeps 3.00GiB free for flux"]
    helps = "no plan leaves more: choose a smaller size; the next run loads it as usual"
    report["events"] = [failed | {"reason": f"{told}; {helps}"}]
    assert advise(report)[1] == "What helps: choose a smaller size"
    report["events"] = [failed | {"reason": told}]
    assert advise(report)[1] == "Choose a smaller size, or fewer frames"
    report["events"] = [failed | {"kind": "recover", "reason": f"{told}; 1GiB were freed"}]
    assert advise(report) == [f"A call was repeated: {told}", "Nothing to change: the next run keeps more memory free."]


def test_computing_on_the_cpu_beside_a_gpu_that_has_room() -> None:
    report = make_case()
    report["components"][0]["plan"]["shares"][0] |= {"device": "cpu", "resident_bytes": 0, "streamed_bytes": GIB}
    report["devices"][1]["free_bytes"] = 3 * GIB
    assert advise(report) == [
        "flux computes on the CPU, as its placement says",
        "Choose placement gpu:0 for flux: it needs 1.00GiB, 2.00GiB are free there",
    ]
    report["devices"][1]["free_bytes"] = GIB
    assert advise(report)[1] == "Nothing to change."
    del report["devices"][1]
    assert advise(report)[0] == "No GPU was found: flux computes on the CPU"


def test_what_comfyui_brings_page_by_page() -> None:
    plan = {"shares": [], "placement": "gpu:0", "budget_bytes": 3 * GIB, "page_bytes": 32 * MIB}
    tiers = {"gpu:0": GIB}
    report = make_case(engine="dynamic", total_bytes=4 * GIB - 40 * MIB, tiers=tiers, plan=plan, node_id="4")
    assert advise(report) == [
        "flux has 1.00GiB of 3.96GiB on gpu:0; ComfyUI's dynamic VRAM brings the rest when it computes",
        "Give flux a budget of 4096MiB or more: 4.00GiB are available",
    ]
    report["components"][0]["total_bytes"] = 5 * GIB
    assert advise(report)[1] == "Nothing to change here: gpu:0 lacks 1.00GiB to hold all of it"


def test_models_that_only_comfyui_loads_are_named() -> None:
    report = make_case(engine="core", plan={"shares": []})
    report["nodes"][0]["components"] = []
    told = "Not known: ComfyUI itself loads flux, which is not managed"
    assert advise(report)[0] == told
    report["components"][0] |= {"engine": "dynamic", "tiers": {"gpu:0": 12 * GIB}}  # no node of ours asked for it
    assert advise(report)[0] == told
    report["nodes"][0]["components"] = ["flux"]
    report["components"][0]["plan"]["placement"] = "gpu:0"
    assert advise(report)[0] == told
    report["nodes"][0]["components"] = []
    report["nodes"][0]["activation_bytes"] = {}
    assert advise(report)[0] == "Nothing limits it: no model had to compute."


def test_what_is_not_managed_is_not_said_to_be_resident() -> None:
    report = make_case(node_id="4")
    report["components"][0]["plan"]["shares"][0] |= {"streamed_blocks": 0}
    assert advise(report)[0] == "Nothing limits it: all weights were resident, and nothing was loaded again."
    report["components"].append({"id": "clip", "engine": "core", "plan": {}})
    assert advise(report)[0] == "Nothing limits it: all managed weights were resident, and nothing was loaded again."


def test_a_run_that_has_just_begun_is_not_the_last_one() -> None:
    report = make_case()
    told = advise(report)
    report["runs"].append({"run_id": "s", "begin_s": 13.0, "end_s": None})
    assert advise(report) == told
    report["nodes"].append({"run_id": "s", "components": ["flux"], "seconds": 4.0, "waited_s": 1.0})
    assert advise(report)[0].startswith("This run waited 1.0 of 4.0 s")


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every part of a report."""
    if isinstance(value, dict | list):
        keys = value.keys() if isinstance(value, dict) else range(len(value))
        return [path, *(place for key in keys for place in places(value[key], (*path, key)))]
    return [path]


WHOLE = make_case(encoded_bytes=6 * GIB)
WHOLE["runs"][0]["reloaded_bytes"] = {"flux": GIB}
WHOLE["events"] = [
    {"kind": "evict", "run_id": "r", "component": "flux", "bytes": GIB, "device": "gpu:0", "reason": "x"}
]
WHOLE["components"].append({**copy.deepcopy(WHOLE["components"][0]), "id": "w" * 300, "engine": "dynamic"})
PLACES = [place for place in places(WHOLE) if place]
odd = st.sampled_from(
    [None, 0, -1, 1, 1 << 60, 0.5, float("nan"), float("inf"), "", "gpu:0", "x" * 400, [], {}, [None], True]
)


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.one_of(st.just("gone"), odd)), max_size=12))
def test_there_are_always_two_short_lines(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    report = copy.deepcopy(WHOLE)
    for (*path, last), value in changes:
        holder: Any = report
        for key in path:
            is_there = key in (
                holder if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
            )
            holder = holder[key] if is_there else None
        if isinstance(holder, dict):
            if value == "gone":
                holder.pop(last, None)
            else:
                holder[last] = value
        elif isinstance(holder, list) and isinstance(last, int) and last < len(holder):
            holder[last] = value
    texts = advice.advise(report)
    # What the page makes of them is what they say, but for where the whole is cut.
    for told in (text.to_json() for text in texts):
        assert told["key"].removeprefix("advice.") in english_texts()["advice"]
        assert all(len(value) <= MAX_LENGTH for value in told["values"].values())
    lines = [str(text) for text in texts]
    assert len(lines) == 2 and all(isinstance(line, str) and 0 < len(line) <= MAX_LENGTH for line in lines)


def test_every_text_of_advice_is_said_somewhere() -> None:
    """A key that is only in `locales/` would be translated for nothing, and one that is only here has no text."""
    code = "".join(Path(module.__file__ or "").read_text("utf-8") for module in (advice, remedies))
    named = set(re.findall(r'say\(\s*"(\w+)"', code)) | {"none_managed", "not_managed"}
    named |= {f"{which}_run_{what}" for which in ("this", "last") for what in re.findall(r'of_run\(run, "(\w+)"', code)}
    named |= {f"{which}{what}" for which in ("all", "managed") for what in re.findall(r'f"{which}(\w+)"', code)}
    assert named == english_texts()["advice"].keys()
