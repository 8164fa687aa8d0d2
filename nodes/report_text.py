"""The report as text, in sections: what the Memory Report node and the command line show of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

__all__ = ["NUM_NODES", "WIDTH", "Section", "describe_all_runs", "describe_now"]

NUM_EVENTS = 6
# As many characters of a line as the box of a node shows, less the indent of a section's lines.
WIDTH = 84
# What goes on in the next line of it is indented so far.
HANGING = 4
LEAST_NAME = 24
LEAST_SECONDS = 1.0
# Of the last run, in the text of a node: a workflow may hold a report behind each of a thousand nodes.
NUM_NODES = 50
# What stands of a node for each device that it used, and its field in the report.
AMOUNTS = {"weights": "weights_bytes", "activations": "activation_bytes", "peak": "peak_bytes"}
IN_RAM = ("pinned", "host")
# What is said before the name of a component.
KIND_WORDS = {
    "diffusion": "diffusion model",
    "text": "text encoder",
    "vae": "VAE",
    "control": "ControlNet",
    "vision": "vision encoder",
}
DONE = {
    "evict": "evicted",
    "load": "loaded",
    "release": "released",
    "keep": "kept",
    "reuse": "reused",
    "drop": "dropped",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of the text; without lines there is nothing to tell."""

    title: str
    lines: Sequence[str]

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"  {line}" for line in self.lines)])


def describe_now(report: Mapping[str, Any]) -> list[Section]:
    """Return where everything is, what the last nodes of the last run took, the last events, and the advice."""
    last = [run["run_id"] for run in report["runs"][-1:]]
    sections = [
        devices_section(report),
        components_section(report, width=WIDTH),
        nodes_section(report, last, names_runs=False, most=NUM_NODES, width=WIDTH),
        last_events(report),
        advice_section(report),
    ]
    return [replace(section, lines=wrapped(section.lines)) for section in sections if section.lines]


def describe_all_runs(report: Mapping[str, Any]) -> list[Section]:
    """Return what the nodes of all runs took, each eviction with its reason, bytes moved per run, and the advice."""
    runs = [run["run_id"] for run in report["runs"]]
    return [nodes_section(report, runs), evictions_section(report), runs_section(report), advice_section(report)]


# -- sections


def devices_section(report: Mapping[str, Any]) -> Section:
    from ..memory.units import format_bytes, format_seconds

    # What ComfyUI loads by itself rests in RAM of its own.
    ours = [component["tiers"] for component in report["components"] if component.get("engine") != "core"]
    in_ram = sum(tiers.get(tier, 0) for tiers in ours for tier in IN_RAM)
    rows = []
    for device in report["devices"]:
        resting = in_ram if device["name"] == "cpu" else 0  # the ledger has what rests in RAM by its tiers
        rows.append(
            [
                device["name"],
                f"{format_bytes(device['free_bytes'])} free of {format_bytes(device['total_bytes'])}",
                f"Highwater {format_bytes(device['managed_bytes'] + resting)}",
                f"other {format_bytes(max(0, device['other_bytes'] - resting))}",
            ]
        )
    loans = [
        f"{device['name']}: {format_bytes(lent['num_bytes'])} are lent to another program for "
        f"{format_seconds(lent['left_s'])} more, {format_bytes(lent['missing_bytes'])} of it not taken yet"
        for device in report["devices"]
        if (lent := device.get("lent")) is not None
    ]
    others = [
        f"{device['name']}: another process (pid {other['pid']}) uses {format_bytes(other['used_bytes'])}, "
        f"{format_bytes(other['idle_bytes'])} of it idle"
        + (f", and asks for {format_bytes(other['need_bytes'])}" if other["need_bytes"] else "")
        for device in report["devices"]
        for other in device.get("neighbours", ())
    ]
    locked = [
        f"{device['name']}: {format_bytes(pinned['num_bytes'])} are page-locked, at most "
        f"{format_bytes(pinned['limit_bytes'])} may be"
        for device in report["devices"]
        if (pinned := device.get("pinned")) is not None and pinned["num_bytes"]
    ]
    return Section(title="Devices", lines=[*align_columns(rows), *locked, *loans, *others])


def components_section(report: Mapping[str, Any], *, width: int | None = None) -> Section:
    from ..memory.units import format_bytes

    rows = [
        [
            component["id"] if width is None else shortened(component["id"], width // 3),
            component["precision"],
            ", ".join(f"{name} {format_bytes(n)}" for name, n in sorted(component["tiers"].items()) if n) or "-",
            state_of(component),
        ]
        for component in report["components"]
    ]
    return Section(title="Components", lines=align_columns(rows))


def state_of(component: Mapping[str, Any]) -> str:
    """Return in a few words what moves a component, if another does, and whether it is where it should be."""
    match component.get("engine"):
        case "dynamic":
            return "ComfyUI's dynamic VRAM" + ("" if component["in_effect"] else ", OVER its budget")
        case "core":
            return "not managed"
        case "kept":
            return "kept in RAM in case its file is loaded again"
    return "as planned" if component["in_effect"] else "NOT as planned"


def nodes_section(
    report: Mapping[str, Any],
    run_ids: Iterable[str],
    *,
    names_runs: bool = True,
    most: int | None = None,
    width: int | None = None,
) -> Section:
    """Return the amounts of the nodes of some runs, with the runs' names or without; less than a KiB shows as "-".

    Args:
        most: show only so many of the last nodes, and say so.
        width: the most characters of a line. Where the devices do not fit beside each other they follow each other.
    """
    names = {run["run_id"]: run["name"] for run in report["runs"] if run["run_id"] in {*run_ids}}
    all_nodes = [node for node in report["nodes"] if node["run_id"] in names]
    recent = all_nodes if most is None else all_nodes[-most:]
    used = {name for node in recent for name, peak in node["peak_bytes"].items() if peak}
    nodes = [node for node in recent if is_worth_a_line(node)] if used and width is not None else recent
    devices = [device["name"] for device in report["devices"] if device["name"] in used]
    aligned = node_table(nodes, names, devices, names_runs=names_runs, width=width)
    if width is not None and len(devices) > 1 and max(map(len, aligned), default=0) > width:
        tables = [
            node_table([node for node in nodes if uses(node, device)], names, [device],
                       names_runs=names_runs, width=width)
            for device in devices
        ]  # fmt: skip
        aligned = [line for table in tables for line in table]
    if len(nodes) < len(recent):
        more = len(recent) - len(nodes)
        aligned.append(f"and {more} node{'s' * (more > 1)} without weights or activations, each in less than 1 s")
    if len(recent) < len(all_nodes):
        aligned.append(f"only the last {len(recent)} nodes of this run")
    what = "weights it used, activations, peak of the device" if devices or not nodes else "no GPU was used"
    return Section(title=f"Memory per node and device: {what}", lines=aligned)


def is_worth_a_line(node: Mapping[str, Any]) -> bool:
    """Whether a node took memory of a device, or at least a second."""
    from ..memory.units import KIB

    amounts = [*node["weights_bytes"].values(), *node["activation_bytes"].values()]
    return node["seconds"] >= LEAST_SECONDS or max(amounts, default=0) >= KIB


def uses(node: Mapping[str, Any], device: str) -> bool:
    return bool(node["peak_bytes"].get(device) or node["weights_bytes"].get(device))


def node_table(
    nodes: Sequence[Mapping[str, Any]],
    names: Mapping[str, str],
    devices: Sequence[str],
    *,
    names_runs: bool,
    width: int | None,
) -> list[str]:
    """Return the amounts of nodes on some devices as lines; names of nodes are cut where they exceed the width.

    Args:
        names: of the runs, by id.
    """
    from ..memory.units import KIB, format_bytes

    above = ["", "", "", *(device for device in devices for _ in AMOUNTS)]
    heads = ["run", "node", "seconds", *(what for _ in devices for what in AMOUNTS)]
    rows, last = [], None
    for node in nodes:
        amounts = [node[field].get(device, 0) for device in devices for field in AMOUNTS.values()]
        cells = [format_bytes(amount) if amount >= KIB else "-" for amount in amounts]
        name = "" if node["run_id"] == last else names[node["run_id"]]
        rows.append([name, f"{node['node_id']} {node['title']}", f"{node['seconds']:.2f}", *cells])
        last = node["run_id"]
    lines = [*([above] if devices else []), heads, *rows] if rows else []
    if width is not None and lines:
        numbers = [max(map(len, column)) + 2 for column in list(zip(*lines, strict=True))[2:]]
        for row in rows:
            row[1] = shortened(row[1], max(LEAST_NAME, width - sum(numbers)))
    return align_columns([line[0 if names_runs else 1 :] for line in lines], num_left=2 if names_runs else 1)


def last_events(report: Mapping[str, Any]) -> Section:
    rows = [[f"{event['t_s']:.2f} s", event_text(event)] for event in report["events"][-NUM_EVENTS:]]
    return Section(title="Last events", lines=align_columns(rows))


def evictions_section(report: Mapping[str, Any]) -> Section:
    evictions = [event_text(event) for event in report["events"] if event["kind"] == "evict"]
    return Section(title="Evictions", lines=evictions or ["none"])


def runs_section(report: Mapping[str, Any]) -> Section:
    from ..memory.units import format_bytes

    heads = ["run", "seconds", "evictions", "weights moved to devices"]
    rows = [
        [
            run["name"],
            f"{(run['end_s'] or run['begin_s']) - run['begin_s']:.2f}",
            str(run["num_evictions"]),
            format_bytes(run["bytes_moved"]),
        ]
        for run in report["runs"]
    ]
    return Section(title="Runs", lines=align_columns([heads, *rows], num_left=1))


def advice_section(report: Mapping[str, Any]) -> Section:
    """Return what limits the last run and what to change; nothing before the first run."""
    from .advice import advise

    return Section(title="Advice", lines=[str(text) for text in advise(report)] if report["runs"] else [])


# -- lines


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event as a sentence, such as ``evicted 3.10GiB of text encoder t5 from gpu:0 to host: never used``."""
    from ..memory.units import format_bytes

    done = DONE.get(event["kind"])
    kind = KIND_WORDS.get(event["component_kind"], "")
    what = " ".join(filter(None, [kind, event["component"]]))
    if event["kind"] == "lend":  # of the device, not of a component; no bytes at its end
        amount = f"{format_bytes(event['bytes'])} " if event["bytes"] else ""
        return f"{event['device']}: {amount}{event['reason']}"
    if event.get("to"):
        in_file = event["to"] == "disk"  # where it has been all the time: nothing is written
        where = f"from {event['device']}" + (", kept in its file" if in_file else f" to {event['to']}")
        return f"{done} {format_bytes(event['bytes'])} of {what} {where}: {event['reason']}"
    if event["kind"] == "release":
        places = event["device"].replace("&", " and ")
        return f"{done} {format_bytes(event['bytes'])} of {what} from {places}: {event['reason']}"
    what = f"{done} {format_bytes(event['bytes'])} of {event['component']}" if done is not None else event["kind"]
    if done is None and event["component"]:
        what += f" {event['component']}"
    return ": ".join([event["device"], what, *([event["reason"]] if event["reason"] != done else [])])


def wrapped(lines: Iterable[str]) -> list[str]:
    """Return lines of at most `WIDTH` characters; what goes on is indented."""
    return [
        part
        for line in lines
        for part in (
            [line]
            if len(line) <= WIDTH
            else wrap(line, WIDTH, subsequent_indent=" " * HANGING, drop_whitespace=True, break_on_hyphens=False)
        )
    ]


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def align_columns(rows: Sequence[Sequence[str]], *, num_left: int | None = None) -> list[str]:
    """Return the rows with every column as wide as its widest cell; those behind the first ``num_left`` are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if num_left is None or index < num_left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
