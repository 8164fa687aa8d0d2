"""The report and the events as they are asked for: bounded, in parts, and with no folder in them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import highwater.memory
from highwater.memory import MemoryManager
from highwater.memory.errors import InvalidInput, without_folders
from highwater.memory.manager.report import EVENT_KINDS
from highwater.nodes.report_answers import make_report, select_events

NUM_PROMPTS = 1_000
LISTS = ("nodes", "runs", "events", "samples")


@pytest.fixture(scope="module")
def busy() -> MemoryManager:
    """A manager after a thousand prompts of three nodes, each with an eviction."""
    manager = MemoryManager()
    for number in range(NUM_PROMPTS):
        manager.begin_run(f"{number:08d}-0000-4000-8000-0123456789ab", f"workflow {number % 3}")
        for node in range(3):
            manager.begin_node(str(node), f"Load Diffusion Model {node}", workflow_id=f"workflow-{number % 3}")
            reason = (
                f"{number} MiB needed for flux1-dev/transformer: 57.0MiB free, 24.0MiB reserved; used least recently"
            )
            manager.event_log.note("evict", "umt5-xxl/text_encoder", number, "gpu:0", reason)
            manager.end_node()
        manager.end_run()
    return manager


def size(report: dict[str, Any]) -> int:
    return len(json.dumps(report))


def test_the_report_of_a_thousand_prompts_is_short(busy: MemoryManager) -> None:
    loaders = [{"node_id": str(n), "workflow_id": "a" * 36, "components": ["flux1-dev"]} for n in range(999)]
    report = make_report(busy, {}, find_loaders=lambda: loaders)
    whole = busy.report() | {"loaders": loaders}
    assert size(whole) > 500_000 and 40_000 < size(report) < 100_000
    for name in (*LISTS, "loaders"):
        number = len(report[name])
        assert report[name] == whole[name][len(whole[name]) - number :]
        assert number + report.get("left_out", {}).get(name, 0) == len(whole[name])


def test_what_has_come_since_an_earlier_report(busy: MemoryManager) -> None:
    """Together with what was over then it is the whole report."""
    whole = busy.report()
    after_s = sorted(node["begin_s"] + node["seconds"] for node in whole["nodes"])[-3]
    report = make_report(busy, {}, "nodes,runs,events,samples,devices", limit="all", after=str(after_s))
    assert report["after_s"] == after_s
    assert report["nodes"] == [node for node in whole["nodes"] if node["begin_s"] + node["seconds"] > after_s]
    assert 0 < len(report["nodes"]) <= 2
    assert report["runs"] == [run for run in whole["runs"] if run["end_s"] is None or run["end_s"] > after_s]
    for name in ("events", "samples"):
        assert report[name] == [entry for entry in whole[name] if entry["t_s"] > after_s]
    assert report["devices"] and "left_out" not in report
    busy.begin_run("open", "open")
    try:
        later = make_report(busy, {}, "runs,samples", after=str(report["now_s"] + 1e6))
        assert [run["run_id"] for run in later["runs"]] == ["open"] and later["samples"] == []
    finally:
        busy.end_run()


def test_what_has_come_since_is_short_too(busy: MemoryManager) -> None:
    """Who asks for all since the start gets as little of it as who asks for no time."""
    report = make_report(busy, {}, after="0")
    assert 40_000 < size(report) < 100_000 and report.keys() - {"after_s"} == make_report(busy, {}).keys()
    assert {"nodes", "events"} <= report["left_out"].keys()
    last = make_report(busy, {}, "nodes,runs,events,samples", after=str(report["now_s"]))
    assert [last[name] for name in LISTS] == [[], [], [], []] and size(last) < 300
    assert make_report(None, {}, after="5")["after_s"] == 5


@pytest.mark.parametrize("after", ["", "soon", "nan", "-1", "inf", "1e999", "1,5", "9" * 5000])
def test_a_time_that_is_none_is_one_line(after: str) -> None:
    for ask in (lambda: make_report(None, {}, after=after), lambda: select_events(None, {"after": after})):
        with pytest.raises(
            InvalidInput, match=r"^after='.*allowed: seconds, such as 12\.5, as a report's now_s"
        ) as error:
            ask()
        assert len(str(error.value)) < 300 and "\n" not in str(error.value)


@pytest.mark.parametrize("limit", ["0", "1", "37", "100000", "all"])
def test_as_many_entries_as_asked_for(busy: MemoryManager, limit: str) -> None:
    report, whole = make_report(busy, {}, "nodes,events", limit=limit), busy.report()
    for name in ("nodes", "events"):
        number = min(len(whole[name]), 100_000 if limit == "all" else int(limit))
        assert report[name] == whole[name][len(whole[name]) - number :]
    assert ("left_out" in report) == (limit in ("0", "1", "37"))


def test_fewer_parts_have_more_entries(busy: MemoryManager) -> None:
    """A page asks for nodes, and not for the timeline."""
    alone, beside = make_report(busy, {}, "nodes"), make_report(busy, {})
    assert len(alone["nodes"]) > 2 * len(beside["nodes"]) and size(alone) < 100_000


def test_what_a_short_list_leaves_is_for_the_others() -> None:
    """The runs are few and the nodes many: these have more room than a part of it for each list."""
    manager = MemoryManager()
    manager.begin_run("r", "a long run")
    for number in range(3 * NUM_PROMPTS):
        manager.begin_node(str(number), f"Load Diffusion Model {number}")
        manager.end_node()
    manager.end_run()
    both, alone = make_report(manager, {}, "nodes,runs"), make_report(manager, {}, "nodes")
    assert len(both["runs"]) == 1 and len(alone["nodes"]) < 3 * NUM_PROMPTS
    assert size({"nodes": both["nodes"]}) > 0.9 * (size({"nodes": alone["nodes"]}) - size({"runs": both["runs"]}))


def test_an_entry_that_is_longer_than_all_others_is_left_out_too() -> None:
    manager = MemoryManager()
    manager.begin_run("r", "x" * 1_000_000)
    manager.end_run()
    assert size(make_report(manager, {})) < 100_000
    assert make_report(manager, {}, "runs")["left_out"] == {"runs": 1}
    assert len(make_report(manager, {}, limit="1")["runs"]) == 1


@pytest.mark.parametrize("limit", ["", "-1", "1.5", "many", "²", "9" * 5000, "1000001"])
def test_a_limit_that_is_none_is_one_line(limit: str) -> None:
    for ask in (lambda: make_report(None, {}, limit=limit), lambda: select_events(None, {"limit": limit})):
        with pytest.raises(InvalidInput, match="allowed: a whole number from 0 to 1000000, or all") as error:
            ask()
        assert len(str(error.value)) < 300


def test_events_by_run_node_kind_and_time(busy: MemoryManager) -> None:
    events = busy.report()["events"]
    last = events[-1]["run_id"]

    def select(**words: str) -> list[dict[str, Any]]:
        return select_events(busy, {"limit": "all", **words})["events"]

    assert select() == events
    assert select(run=last) == [event for event in events if event["run_id"] == last]
    assert select(run=last, node="1") == [event for event in select(run=last) if event["node_id"] == "1"] != []
    assert select(kind="load,plan") == select(run="none") == select(run="") == select(node="77") == []
    assert select(kind="load,evict") == events
    middle = events[len(events) // 2]["t_s"]
    assert select(after=str(middle)) == [event for event in events if event["t_s"] > middle]
    assert select(after=str(events[-1]["t_s"])) == []
    short = select_events(busy, {"kind": "evict"})
    assert short["events"] == events[-len(short["events"]) :]
    assert short["left_out"] == len(events) - len(short["events"]) > 0 and size(short) < 100_000
    assert select_events(None, {}) == {"events": [], "left_out": 0}


@pytest.mark.parametrize(
    ("words", "told"),
    [({"kind": "evicted"}, "did you mean 'evict'"), ({"kind": ""}, "allowed: plan"), ({"after": "nan"}, "seconds"),
     ({"after": "-1"}, "seconds"), ({"after": "inf"}, "seconds"), ({"after": "soon"}, "seconds"),
     ({"colour": "red"}, "'colour' is unknown; allowed: run, node")],
)  # fmt: skip
def test_events_that_cannot_be_asked_for_are_one_line(words: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(told)):
        select_events(None, words)


def test_every_kind_that_the_engine_notes_is_a_known_one() -> None:
    noted = set()
    for path in Path(highwater.memory.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "note":
                first = call.args[0] if call.args else None
                if len(call.args) >= 5 and isinstance(first, ast.Constant):
                    noted.add(first.value)
    assert noted == set(EVENT_KINDS)


# What names a file --------------------------------------------------------------------------------------------

NAMES = st.text(st.characters(categories=["L", "N"], include_characters="._-"), min_size=1).filter(
    lambda name: set(name) != {"."}
)
ROOTS = st.sampled_from(["/", "C:\\", "d:/", "\\\\host\\", "file:///"])
AROUND = st.sampled_from(
    [("", ""), ("cannot read ", ": it ends early"), ("file:", ""), ("(", ")"), ("--path=", ", twice"), ("'", "'"),
     ('"', '"'), ("see https://example.org/a/b and ", " 3/4 of part/model")]
)  # fmt: skip


@given(ROOTS, st.lists(NAMES, min_size=1, max_size=4), NAMES, AROUND)
@example("/", ["home", "jo"], "x.safetensors", ("'", "'"))
def test_of_an_absolute_path_only_the_last_name_is_told(
    root: str, folders: list[str], name: str, around: tuple[str, str]
) -> None:
    separator = "\\" if "\\" in root else "/"
    path = root + separator.join([*folders, name])
    assert without_folders(around[0] + path + around[1]) == around[0] + name + around[1]


def test_of_a_quoted_path_with_spaces_too() -> None:
    assert without_folders("'/home/jo smith/my models/a.safetensors' ends early") == "'a.safetensors' ends early"


@pytest.mark.parametrize(
    "text",
    ["part/model", "1 / 2", "3/4", "https://example.org/a/b", "a \\ b", "fp8/bf16", "/", "", "gpu:0", "~/x", "../a/b"],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert without_folders(text) == text


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for part in parts for text in strings(part)]


def test_no_absolute_path_stands_in_a_report(tmp_path: Path) -> None:
    manager = MemoryManager()
    heard: list[dict[str, Any]] = []
    manager.subscribe(heard.append)
    reason = f"{tmp_path}/shared: other users can write there; run: chmod go-w {tmp_path}/shared"
    manager.event_log.note("error", "model", 0, "gpu:0", f"out of memory while loading '{tmp_path}/a.safetensors'")
    manager.capacity.neighbours.unshared["cpu"] = reason
    report = make_report(manager, {"events": f"failed: FileNotFoundError: {tmp_path}/b.json"})
    assert [text for text in strings([report, heard]) if str(tmp_path.parent) in text] == []
    assert report["events"][-1]["reason"] == heard[0]["reason"] == "out of memory while loading 'a.safetensors'"
    assert report["host_features"]["events"] == "failed: FileNotFoundError: b.json"
    assert report["devices"][0]["unshared"] == "shared: other users can write there; run: chmod go-w shared"
