"""The event log: events, the timeline, and what nodes and runs took."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..runtime.ledger import Ledger
from ..transfer.devices import Device
from ..units import format_bytes
from .report import Event, NodeReport, RunReport
from .timeline import Timeline

__all__ = ["EventLog"]

# Enough for hours of work; older entries leave first.
MAX_ENTRIES = 10_000


@dataclass(slots=True)
class OpenNode:
    """A node that is executing; its counters grow with each lease."""

    node_id: str
    title: str
    run_id: str
    workflow_id: str | None
    begin_s: float
    moved_before: int
    peaks: Counter[str] = field(default_factory=Counter)
    activations: Counter[str] = field(default_factory=Counter)
    weights: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Interval:
    """What was allocated beside all managed weights at its begin, and the most since then, by device."""

    begin: dict[str, int]
    most: Counter[str] = field(default_factory=Counter)


class EventLog:
    """Keeps the event log and the timeline, and measures peaks between their points.

    Peaks come from the allocator, which keeps one per device: every look at a device reads and resets it. So a look
    counts for the open node and for every open interval. A pass looks at the devices on which it computes, runs and
    nodes look at all.
    """

    def __init__(self, devices: Sequence[Device], ledger: Ledger, bytes_moved: Callable[[], int]) -> None:
        self.devices = {device.name: device for device in devices if not device.is_cpu}
        self.ledger = ledger
        self.bytes_moved = bytes_moved
        self.begin = time.monotonic()
        self.events: deque[Event] = deque(maxlen=MAX_ENTRIES)
        self.timeline = Timeline(MAX_ENTRIES)
        self.nodes: deque[NodeReport] = deque(maxlen=MAX_ENTRIES)
        self.runs: deque[RunReport] = deque(maxlen=MAX_ENTRIES)
        self.node: OpenNode | None = None
        self.intervals: dict[object, Interval] = {}
        self.weights_before: dict[str, int] = {}
        """The managed weights on each device at the last point."""
        self.peaks: Counter[str] = Counter()
        """The most that was allocated on each device since the start."""
        self.run_moved_before = 0
        self.listeners: list[Callable[[dict[str, Any]], None]] = []

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.begin

    @property
    def is_running(self) -> bool:
        """Whether a run is open."""
        return bool(self.runs) and self.runs[-1].end_s is None

    def note(self, kind: str, component: str, num_bytes: int, device: str, reason: str) -> Event:
        """Enter an event; evictions and errors reach the listeners at once."""
        event = Event(
            t_s=round(self.now_s, 6), kind=kind, component=component, bytes=num_bytes, device=device, reason=reason
        )
        self.events.append(event)
        if kind == "evict" and self.is_running:
            self.runs[-1] = replace(self.runs[-1], num_evictions=self.runs[-1].num_evictions + 1)
        if kind in ("evict", "error"):
            self.tell({"type": "event", **asdict(event)})
        return event

    def note_eviction(self, component: str, device: str, freed_bytes: int, left_bytes: int, reason: str) -> Event:
        """Enter an eviction, the reason for it, and what of the component stays on the device."""
        left = f"{format_bytes(left_bytes)} stay loaded" if left_bytes else "fully evicted"
        return self.note("evict", component, freed_bytes, device, f"{reason}; {left}")

    def tell(self, message: dict[str, Any]) -> None:
        for listener in list(self.listeners):
            listener(message)

    def sample(self, devices: Iterable[str] | None = None, *, always: bool = False) -> None:
        """Look at devices, by default at all, and enter a point of the timeline for each (`Timeline.add`)."""
        for name in self.devices if devices is None else devices:
            if name in self.devices:
                self.look(name, always=always)

    def look(self, name: str, *, always: bool = False) -> int:
        """Take a device's peak for all that is measured, and reset it; returns what is allocated there now.

        Reads the allocator's numbers once.
        """
        device = self.devices[name]
        _, allocated, peak = device.allocator_bytes()
        device.reset_peak()
        held, weights = self.ledger.by_component(name), self.ledger.used(name)
        self.peaks[name] = max(self.peaks[name], peak)
        if self.node is not None:
            self.node.peaks[name] = max(self.node.peaks[name], peak)
        # What was loaded or evicted since the last point is no activation.
        beside = peak - max(weights, self.weights_before.get(name, 0))
        self.weights_before[name] = weights
        for interval in self.intervals.values():
            if name in interval.begin:
                interval.most[name] = max(interval.most[name], beside)
        self.timeline.add(round(self.now_s, 6), name, held, allocated, peak, always=always)
        return allocated

    def begin_interval(self, key: object, devices: Iterable[str]) -> dict[str, int]:
        """Measure what is needed on devices beside the weights from now on; returns what is allocated there now.

        Other measurements go on.
        """
        allocated = {name: self.look(name) for name in devices if name in self.devices}
        self.intervals[key] = Interval({name: had - self.weights_before[name] for name, had in allocated.items()})
        return allocated

    def end_interval(self, key: object) -> dict[str, int]:
        """Return the most bytes by device that were needed beside the weights and what was there at the beginning."""
        interval = self.intervals.get(key)
        if interval is None:
            return {}
        self.sample(interval.begin)
        self.intervals.pop(key, None)
        return {name: max(0, interval.most[name] - begin) for name, begin in interval.begin.items()}

    def used_by_node(self, component: str) -> None:
        """Count a component's bytes on devices for the open node, which uses it."""
        if self.node is not None:
            for name in self.devices:
                self.node.weights[name] = max(self.node.weights[name], self.ledger.held(component, name))

    def needed_by_node(self, device: str, activation_bytes: int) -> None:
        """Count for the open node what a forward needed of a device beside what was there."""
        if self.node is not None:
            self.node.activations[device] = max(self.node.activations[device], activation_bytes)

    # -- runs and nodes

    def begin_run(self, run_id: str, name: str) -> None:
        self.end_run()
        self.run_moved_before = self.bytes_moved()
        begin_s = round(self.now_s, 6)
        self.runs.append(
            RunReport(run_id=run_id, name=name, begin_s=begin_s, end_s=None, bytes_moved=0, num_evictions=0)
        )
        self.sample(always=True)

    def end_run(self) -> None:
        """Close the open run, and the node that an error left open. Idempotent."""
        if not self.is_running:
            return
        if self.node is not None:
            self.end_node(self.node, {})
        self.sample()
        moved = self.bytes_moved() - self.run_moved_before
        self.runs[-1] = replace(self.runs[-1], end_s=round(self.now_s, 6), bytes_moved=moved)

    def begin_node(self, node_id: str, title: str, workflow_id: str | None) -> None:
        self.sample()
        run_id = self.runs[-1].run_id if self.is_running else ""
        self.node = OpenNode(
            node_id=node_id,
            title=title,
            run_id=run_id,
            workflow_id=workflow_id,
            begin_s=self.now_s,
            moved_before=self.bytes_moved(),
        )

    def end_node(self, node: OpenNode, tiers: dict[str, int]) -> NodeReport:
        """Close the open node and return its report."""
        self.sample()
        self.node = None
        report = NodeReport(
            node_id=node.node_id,
            title=node.title,
            run_id=node.run_id,
            workflow_id=node.workflow_id,
            seconds=round(self.now_s - node.begin_s, 6),
            peak_bytes=dict(node.peaks),
            weights_bytes={name: held for name, held in node.weights.items() if held},
            activation_bytes={name: node.activations[name] for name in self.devices},
            bytes_moved=self.bytes_moved() - node.moved_before,
            tiers=tiers,
        )
        self.nodes.append(report)
        return report
