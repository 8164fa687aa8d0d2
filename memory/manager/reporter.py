"""Makes the report out of what members, ledger and log have."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from itertools import islice, takewhile
from typing import Any

from ..options.marks import HOST
from ..transfer.devices import Device, DeviceMemory, HostMemory
from ..transfer.pinned_memory import pin_limit_bytes, pinned_used_bytes
from .forecast import KnownComponent
from .live_capacity import LiveCapacity
from .measures import Measures
from .report import (
    ComponentState,
    DeviceReport,
    Event,
    NodeReport,
    Report,
    RunReport,
    component_report,
    device_report,
    fields_of,
    node_fields,
)
from .watermark import Watermark

__all__ = ["Reporter"]

EVERYTHING = frozenset({"components", "devices", "open_nodes", "nodes", "runs", "events", "samples"})


class Reporter:
    """Reports devices, components, nodes, runs and events. Where nothing else is said the caller holds the lock."""

    def __init__(self, capacity: LiveCapacity, measures: Measures) -> None:
        self.capacity = capacity
        self.measures = measures
        self.members = capacity.members
        self.steered = capacity.steered
        self.kept = capacity.kept
        self.ledger = measures.ledger
        self.event_log = measures.event_log

    def devices(self) -> list[DeviceReport]:
        """Return what each device has in all, free, and of managed weights; asks the driver, takes no lock."""
        return list(map(self.device, self.capacity.devices.values()))

    def device(self, device: Device) -> DeviceReport:
        """Return one row of `devices`."""
        name, memory, marks = device.name, device.memory(), self.capacity.watermarks
        own = marks.of_host(memory.total) if device.is_cpu else marks.of(name)
        counted = not (device.is_cpu or device.is_uncounted)
        return device_report(
            device,
            memory,
            Watermark(low_bytes=0, high_bytes=0) if device.is_cpu else self.capacity.joined_mark(name),
            marks.report(HOST if device.is_cpu else name, own),
            self.ledger,
            self.measures.peaks[name],
            sum(self.steered.by_component(name).values()),
            self.capacity.loans.describe(name),
            self.capacity.neighbours.on(name),
            self.capacity.neighbours.why_not(name),
            activation_bytes=self.measures.beside_weights(name, memory.allocated) if counted else None,
            pinned=self.pinned(memory) if device.is_cpu else None,
        )

    def pinned(self, memory: DeviceMemory) -> dict[str, int]:
        """Return what of the RAM is page-locked, by this process and as far as its hosts tell, and how much may be."""
        used = pinned_used_bytes() + self.steered.pinned_bytes()
        ram = HostMemory(total_bytes=memory.total, free_bytes=memory.free)
        return {"num_bytes": used, "limit_bytes": used + pin_limit_bytes(ram, used_bytes=used)}

    def known_components(self) -> list[KnownComponent]:
        """Return what hosts find every component by, kept weights and what they move themselves too; takes no lock."""
        ours = [
            KnownComponent(
                id=member.id,
                name=member.name,
                kind=member.managed.component.kind,
                node_id=member.node_id,
                workflow_id=member.workflow_id,
            )
            for member in list(self.members.values())
        ]
        steered = []
        for other in self.steered.components():
            node_id, workflow_id = other.asked_by()
            steered.append(
                KnownComponent(
                    id=other.id,
                    name=other.name,
                    kind=other.kind,
                    node_id=node_id,
                    workflow_id=workflow_id,
                    names_file=other.names_file,
                    result=other.result,
                )
            )
        return [*ours, *steered, *self.capacity.kept.known()]

    def end_node(self) -> dict[str, Any]:
        """Close the open node; returns its report and sends it to the listeners."""
        node = self.measures.node
        if node is None:
            return {}
        tiers: Counter[str] = Counter()
        for member in self.members.values():
            # Equal node ids in two workflows are two nodes.
            if (member.node_id, member.workflow_id) == (node.node_id, node.workflow_id):
                tiers.update(self.ledger.bytes_by_place(member.id))
        for other in self.steered.components():
            if other.asked_by() == (node.node_id, node.workflow_id):
                tiers.update({**other.device_bytes(), **other.host_bytes()})
        self.measures.steered_by_node()
        report = self.measures.end_node(node, dict(tiers))
        told = node_fields(report)
        self.event_log.tell({"type": "node", **told, "devices": [fields_of(device) for device in self.devices()]})
        return told

    def some(self, parts: Collection[str] = EVERYTHING, after_s: float = -1.0) -> Callable[[], Report]:
        """Copy what there is so far, and return what makes the report of it without the lock.

        Args:
            parts: all others are empty, and cost nothing.
            after_s: of nodes and runs those that had not ended at this time, of events and samples those after it.
        """
        log = self.event_log
        report = self.copy(
            newer(log.nodes, lambda node: node.begin_s + node.seconds > after_s) if "nodes" in parts else (),
            newer(log.runs, lambda run: run.end_s is None or run.end_s > after_s) if "runs" in parts else (),
            newer(log.events, lambda event: event.t_s > after_s) if "events" in parts else (),
            parts,
        )
        if "samples" not in parts:
            return report
        timeline = log.timeline.copy()
        return lambda: replace(report(), samples=timeline.samples(after_s))

    def recent(self, number: int) -> Callable[[], Report]:
        """As `some`, with only so many of the last nodes, runs and events, and without the timeline."""
        log = self.event_log
        return self.copy(*(newest(entries, number) for entries in (log.nodes, log.runs, log.events)))

    def copy(
        self,
        nodes: Iterable[NodeReport],
        runs: Iterable[RunReport],
        events: Iterable[Event],
        parts: Collection[str] = ("components", "devices", "open_nodes"),
    ) -> Callable[[], Report]:
        has_components = "components" in parts
        states = (
            [ComponentState(member, self.capacity.forecast.next_use(member.id)) for member in self.members.values()]
            if has_components
            else []
        )
        found = (self.steered, self.measures.observed, self.kept) if has_components else ()
        others = [row for rows in found for row in rows.reports()]
        ledger, devices = self.ledger.copy(), self.devices() if "devices" in parts else []
        node = self.measures.node if "open_nodes" in parts else None
        copied = {
            "now_s": round(self.event_log.now_s, 6),
            "nodes": list(nodes),
            "runs": list(runs),
            "events": list(events),
            "open_nodes": [self.measures.report_of(node, {})] if node is not None else [],
        }

        def report() -> Report:
            components = [*(component_report(state, ledger) for state in states), *others]
            return Report(devices=devices, components=components, samples=[], **copied)  # type: ignore[arg-type]

        return report


def newer(entries: deque[Any], is_newer: Callable[[Any], bool]) -> list[Any]:
    """Return the last entries as far as they are newer, the oldest first; looks at one older entry only."""
    found = list(takewhile(is_newer, reversed(entries)))
    found.reverse()
    return found


def newest(entries: deque[Any], number: int) -> list[Any]:
    """Return the last ``number`` entries, the oldest first."""
    found = list(islice(reversed(entries), number))
    found.reverse()
    return found
