"""The text of a report: node and command line say the same of the same, and every number stands in its column."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from highwater.memory import MemoryManager
from highwater.memory.manager.report import Event, NodeReport, Report, RunReport, empty_report
from highwater.memory.units import KIB, MIB, format_bytes
from highwater.nodes.report_text import NUM_NODES, WIDTH, Section, describe_all_runs, describe_now

MOST = 1 << 40
WHAT = ("weights", "activations", "peak")
amounts = st.dictionaries(st.sampled_from(["gpu:0", "gpu:1"]), st.integers(0, MOST))
names = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=12)


def node(number: int, run: int, peaks: dict[str, int], weights: dict[str, int], title: str) -> NodeReport:
    return NodeReport(
        node_id=str(number),
        title=title,
        run_id=str(run),
        workflow_id=None,
        seconds=number / 8,
        peak_bytes=peaks,
        weights_bytes=weights,
        activation_bytes={},
        bytes_moved=0,
        tiers={},
    )


def device(name: str) -> dict[str, Any]:
    return {"name": name, "free_bytes": 1, "total_bytes": 2, "managed_bytes": 3, "other_bytes": 4}


def make_report(nodes: list[NodeReport], events: list[Event], num_runs: int) -> dict[str, Any]:
    runs = [
        RunReport(run_id=str(run), name=f"run{run}", begin_s=run, end_s=run + 0.5, bytes_moved=run, num_evictions=0)
        for run in range(num_runs)
    ]
    report = Report(devices=[], components=[], nodes=nodes, runs=runs, events=events, samples=[]).to_json()
    return report | {"devices": [device(name) for name in ("cpu", "gpu:0", "gpu:1")]}


def only(sections: list[Section], title: str) -> Section:
    (found,) = (section for section in sections if section.title.startswith(title))
    return found


@given(st.lists(st.tuples(st.integers(0, 2), amounts, amounts, names), min_size=1, max_size=8))
def test_every_amount_of_every_node_stands_below_its_device(drawn: list[tuple[int, Any, Any, str]]) -> None:
    nodes = [node(number, *values) for number, values in enumerate(sorted(drawn, key=lambda values: values[0]))]
    report = make_report(nodes, [], 3)
    lines = only(describe_all_runs(report), "Memory per node").lines
    used = sorted({name for one in nodes for name, peak in one.peak_bytes.items() if peak})
    above, heads, *rows = lines if used else ("", *lines)
    assert above.split() == [name for name in used for _ in WHAT] and heads.split() == [
        "run",
        "node",
        "seconds",
        *WHAT * len(used),
    ]
    for one, row in zip(nodes, rows, strict=True):
        found = [amounts.get(name, 0) for name in used for amounts in (one.weights_bytes, {}, one.peak_bytes)]
        cells = [f"{one.seconds:.2f}", *(format_bytes(number) if number >= KIB else "-" for number in found)]
        assert row.split()[-len(cells) :] == cells
        assert row[: len(row) - len(row.lstrip())] or row.startswith("run")
    assert len({len(line) for line in (heads, *rows)}) == 1  # the last column is on the right


@example([(2, {"gpu:0": 0}, {"gpu:0": KIB}, "0" * 12), (2, {"gpu:0": 1030, "gpu:1": 1542}, {"gpu:0": KIB}, "0")])
@given(st.lists(st.tuples(st.integers(0, 2), amounts, amounts, names), min_size=1, max_size=8))
def test_the_node_tells_what_each_node_of_the_last_run_took_in_lines_that_fit(drawn: list[tuple[Any, ...]]) -> None:
    nodes = [node(number, *values) for number, values in enumerate(drawn)]
    last = [one for one in nodes if one.run_id == "2"]
    report = make_report(nodes, [], 3)
    sections = describe_now(report)
    assert all(len(line) <= WIDTH for section in sections for line in section.lines)
    lines = [line for section in sections if section.title.startswith("Memory per node") for line in section.lines]
    is_used = any(peak for one in last for peak in one.peak_bytes.values())
    told = [one for one in last if not is_used or one.seconds >= 1 or max([0, *one.weights_bytes.values()]) >= KIB]
    used = {name for one in told for name, peak in one.peak_bytes.items() if peak}
    for one in told:
        own = " ".join(line for line in lines if line.startswith(f"{one.node_id} {one.title[:3]}")).split()
        for name in used & one.peak_bytes.keys():
            found = [amounts.get(name, 0) for amounts in (one.weights_bytes, one.peak_bytes)]
            assert {format_bytes(number) for number in found if number >= KIB} <= {*own}
    others = [line for line in lines if line.endswith("weights or activations, each in less than 1 s")]
    counted = [f"and {len(last) - len(told)} node{'s' * (len(last) - len(told) > 1)}"] * (len(told) < len(last))
    assert [line.partition(" without")[0] for line in others] == counted


@given(st.integers(1, 3 * NUM_NODES))
def test_the_node_shows_the_last_nodes_of_a_long_run_and_says_so(count: int) -> None:
    nodes = [node(number, 0, {"gpu:0": MOST}, {"gpu:0": MOST}, "n") for number in range(count)]
    lines = only(describe_now(make_report(nodes, [], 1)), "Memory per node").lines
    shown = [line.split()[0] for line in lines[2 : 2 + NUM_NODES]]
    assert shown == [str(number) for number in range(count)][-NUM_NODES:]
    assert lines[2 + NUM_NODES :] == (["only the last 50 nodes of this run"] if count > NUM_NODES else [])


def test_devices_that_do_not_fit_beside_each_other_follow_each_other() -> None:
    both = {"gpu:0": 3 * MIB, "gpu:1": MIB}
    long = "Load Diffusion Model (Highwater) of the first stage"
    nodes = [node(1, 0, both, both, long), node(2, 0, {"gpu:1": MIB}, {"gpu:1": MIB}, "Sample")]
    assert only(describe_now(make_report(nodes, [], 1)), "Memory per node").lines == [
        "                                                         gpu:0        gpu:0    gpu:0",
        "node                                          seconds  weights  activations     peak",
        "1 Load Diffusion Model (Highwater) of the f…     0.12  3.00MiB            -  3.00MiB",
        "                                                         gpu:1        gpu:1    gpu:1",
        "node                                          seconds  weights  activations     peak",
        "1 Load Diffusion Model (Highwater) of the f…     0.12  1.00MiB            -  1.00MiB",
        "2 Sample                                         0.25  1.00MiB            -  1.00MiB",
    ]


def test_a_long_line_goes_on_below_and_names_of_components_are_cut() -> None:
    reason = "flux needs 4.00GiB; 1.00GiB free, 512MiB reserved; least recently used, 3.2 s ago, next use unknown"
    event = Event(
        t_s=1.0, kind="evict", component="t5xxl", bytes=3 << 30, device="gpu:0", reason=reason, to="host"
    )  # fmt: skip
    report = make_report([], [event], 1)
    state = {"precision": "as stored", "in_effect": True, "engine": "kept", "tiers": {"pinned": MIB}}
    report["components"] = [{"id": "c" * 60, **state}]
    lines = only(describe_now(report), "Last events").lines
    assert (
        len(lines) == 2
        and lines[1].startswith("    ")
        and " ".join("".join(lines).split()) in (f"1.00 s evicted 3.00GiB of t5xxl from gpu:0 to host: {reason}")
    )
    assert only(describe_now(report), "Components").lines[0].startswith(f"{'c' * 27}…  as stored")


def test_an_eviction_is_the_same_sentence_in_both() -> None:
    event = {"component": "tiny/unet", "bytes": 3 << 20, "device": "gpu:0"}
    events = [
        Event(t_s=1.0, kind="evict", reason="least recently used", **event),
        Event(t_s=2.0, kind="release", reason="its time is up", **event | {"device": "gpu:0&pinned"}),
        Event(t_s=3.0, kind="watermark", reason="keep free: low 1MiB", **event | {"component": ""}),
        Event(t_s=4.0, kind="error", reason="out of memory", **event),
    ]
    report = make_report([], events, 1)
    line = "gpu:0: evicted 3.00MiB of tiny/unet: least recently used"
    assert only(describe_all_runs(report), "Evictions").lines == [line]
    assert only(describe_now(report), "Last events").lines == [
        f"1.00 s  {line}",
        "2.00 s  released 3.00MiB of tiny/unet from gpu:0 and pinned: its time is up",
        "3.00 s  gpu:0: watermark: keep free: low 1MiB",
        "4.00 s  gpu:0: error tiny/unet: out of memory",
    ]


@pytest.mark.parametrize(
    ("to", "told"), [("host", " to host"), ("pinned", " to pinned"), ("disk", ", kept in its file")]
)
def test_an_eviction_names_what_it_is_and_where_it_goes(to: str, told: str) -> None:
    """Nothing is written to a file that has the weights all the time."""
    reason = "flux needs 4.00GiB; next use unknown, reload 0.3 s; fully evicted"
    event = Event(
        t_s=1.0, kind="evict", component="t5xxl", bytes=3 << 30, device="gpu:0", reason=reason,
        component_kind="text", to=to,
    )  # fmt: skip
    line = f"evicted 3.00GiB of text encoder t5xxl from gpu:0{told}: {reason}"
    assert only(describe_all_runs(make_report([], [event], 1)), "Evictions").lines == [line]


def test_an_empty_report_has_no_sections_but_what_the_command_line_always_tells() -> None:
    assert describe_now(empty_report()) == []
    assert [(section.title.partition(" ")[0], len(section.lines)) for section in describe_all_runs(empty_report())] == [
        ("Memory", 0),
        ("Evictions", 1),
        ("Runs", 1),
        ("Advice", 0),
    ]


def test_a_machine_without_gpus_has_no_empty_columns_and_counts_what_rests_in_ram() -> None:
    report = make_report([node(1, 0, {}, {}, "Load Pipeline")], [], 1)
    component = {
        "id": "tiny/unet",
        "precision": "as stored",
        "in_effect": True,
        "engine": "blocks",
        "tiers": {"host": 30 * KIB, "pinned": 8 * KIB},
    }
    report |= {"devices": [device("cpu") | {"other_bytes": 50 * KIB}], "components": [component]}
    assert only(describe_now(report), "Memory per node").lines == [
        "node             seconds",
        "1 Load Pipeline     0.12",
    ]
    (row,) = only(describe_now(report), "Devices").lines
    assert "Highwater 38KiB" in row and "other 12KiB" in row


def test_what_comfyui_keeps_in_ram_is_not_ours_and_what_is_page_locked_is_told() -> None:
    report = make_report([], [], 1)
    state = {"precision": "as stored", "in_effect": True}
    report["components"] = [
        {"id": "ours", "engine": "kept", "tiers": {"pinned": 8 * KIB, "host": 2 * KIB}, **state},
        {"id": "theirs", "engine": "core", "tiers": {"host": 30 * KIB}, **state},
    ]
    pinned = {"num_bytes": 8 * KIB, "limit_bytes": 20 * KIB}
    report["devices"] = [device("cpu") | {"managed_bytes": 0, "other_bytes": 50 * KIB, "pinned": pinned}]
    row, locked = only(describe_now(report), "Devices").lines
    assert "Highwater 10KiB" in row and "other 40KiB" in row
    assert locked == "cpu: 8KiB are page-locked, at most 20KiB may be"


def test_what_is_said_of_components_that_are_not_where_a_plan_put_them() -> None:
    report = make_report([node(1, 0, {}, {}, "Load Pipeline")], [], 1)
    said = {("blocks", True): "as planned", ("blocks", False): "NOT as planned", ("core", False): "not managed"}
    report["components"] = [
        {"id": "unet", "precision": "as stored", "in_effect": in_effect, "engine": engine, "tiers": {}}
        for engine, in_effect in said
    ]
    lines = only(describe_now(report), "Components").lines
    assert [line.rpartition("  ")[2] for line in lines] == list(said.values())


def test_a_loan_stands_with_its_device_and_in_the_events() -> None:
    manager = MemoryManager(devices=[])
    manager.event_log.note("lend", "", 24 * MIB, "gpu:0", "lent to another program for 60 s")
    manager.event_log.note("lend", "", 0, "gpu:0", "24.0MiB were lent: given back")
    device = {"name": "gpu:0", "free_bytes": 0, "total_bytes": 0, "managed_bytes": 0, "other_bytes": 0}
    lent = {"num_bytes": 24 * MIB, "missing_bytes": 8 * MIB, "left_s": 59.0}
    report = {**manager.report(), "devices": [{**device, "lent": lent}, {**device, "name": "gpu:1", "lent": None}]}
    devices, events = describe_now(report)
    told = "gpu:0: 24.0MiB are lent to another program for 59 s more, 8.00MiB of it not taken yet"
    assert " ".join(" ".join(devices.lines[2:]).split()) == told
    assert [line.split(" s  ")[1] for line in events.lines] == [
        "gpu:0: 24.0MiB lent to another program for 60 s",
        "gpu:0: 24.0MiB were lent: given back",
    ]
