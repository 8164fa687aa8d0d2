"""The event log: what happened and why, the finished nodes and runs, and the timeline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import without_folders
from ..units import format_bytes, format_seconds
from .report import Event, NodeReport, RunReport, fields_of
from .timeline import Timeline

__all__ = ["EventLog"]

# Of each kind, some 100 runs of three models that push each other out, in 1 MB; older entries leave first.
MAX_ENTRIES = 1_000
# The kinds of events that the listeners hear of: weights moved, or something that a user should know.
TOLD = frozenset({"load", "evict", "release", "reuse", "drop", "error", "thrashing", "growth"})


class EventLog:
    """Records events, points of the timeline, and the nodes and runs that `Measures` measures."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.events: deque[Event] = deque(maxlen=MAX_ENTRIES)
        self.timeline = Timeline(MAX_ENTRIES)
        self.nodes: deque[NodeReport] = deque(maxlen=MAX_ENTRIES)
        self.runs: deque[RunReport] = deque(maxlen=MAX_ENTRIES)
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.node_id: str | None = None
        self.num_runs = 0

    @property
    def now_s(self) -> float:
        """Seconds since the log began."""
        return time.monotonic() - self.begin

    @property
    def is_running(self) -> bool:
        """Whether a run is open."""
        return bool(self.runs) and self.runs[-1].end_s is None

    @property
    def run_id(self) -> str:
        """The id of the open run; empty if none is open."""
        return self.runs[-1].run_id if self.is_running else ""

    def note(
        self,
        kind: str,
        component: str,
        num_bytes: int,
        device: str,
        reason: str,
        *,
        component_kind: str = "",
        to: str = "",
    ) -> Event:
        """Enter an event with the run and node of now; moves, errors and warnings reach the listeners at once."""
        event = Event(
            t_s=round(self.now_s, 6),
            kind=kind,
            component=component,
            bytes=num_bytes,
            device=device,
            reason=without_folders(reason),
            component_kind=component_kind,
            to=to,
            run_id=self.run_id,
            node_id=self.node_id,
        )
        self.events.append(event)
        if kind == "evict" and self.is_running:
            self.runs[-1] = replace(self.runs[-1], num_evictions=self.runs[-1].num_evictions + 1)
        if kind in TOLD:
            self.tell({"type": "event", **fields_of(event)})
        return event

    def note_eviction(
        self,
        component: str,
        device: str,
        freed_bytes: int,
        left_bytes: int,
        reason: str,
        *,
        component_kind: str = "",
        to: str = "",
        reload_s: float | None = None,
    ) -> Event:
        """Enter an eviction, the reason for it, what it costs to undo, and what of the component stays on the device.

        Args:
            reload_s: how long it takes to load these bytes again; None where no such copy was measured.
        """
        left = f"{format_bytes(left_bytes)} stay loaded" if left_bytes else "fully evicted"
        reload = f", reload {format_seconds(reload_s)}" if reload_s is not None else ""
        whole = f"{reason}{reload}; {left}"
        return self.note("evict", component, freed_bytes, device, whole, component_kind=component_kind, to=to)

    def enter_node(self, node_id: str | None) -> None:
        """Note the node that runs from now on; None: none does."""
        self.node_id = node_id

    def note_run(self, run_id: str, name: str) -> None:
        """Enter a run that begins now."""
        begin_s = round(self.now_s, 6)
        self.num_runs += 1
        self.runs.append(
            RunReport(run_id=run_id, name=name, begin_s=begin_s, end_s=None, bytes_moved=0, num_evictions=0)
        )

    def note_return(self, component: str, num_bytes: int) -> None:
        """Count for the open run, if there is one, what of a component was loaded again after it had been evicted."""
        if self.is_running:
            before = self.runs[-1].reloaded_bytes
            reloaded = {**before, component: before.get(component, 0) + num_bytes}
            self.runs[-1] = replace(self.runs[-1], reloaded_bytes=reloaded)

    def note_run_end(self, bytes_moved: int) -> None:
        """Complete the entry of the open run."""
        self.runs[-1] = replace(self.runs[-1], end_s=round(self.now_s, 6), bytes_moved=bytes_moved)

    def note_node(self, report: NodeReport) -> None:
        """Enter the report of a finished node."""
        self.nodes.append(report)

    def subscribe(
        self, listener: Callable[[dict[str, Any]], None], *, unless_equal: bool = False
    ) -> Callable[[], None]:
        """Call a listener with every message from now on; returns what ends that, which may be called again.

        Args:
            unless_equal: where a listener that equals this one is subscribed, that one stays the only one.
        """
        if not (unless_equal and listener in self.listeners):
            self.listeners.append(listener)

        def end() -> None:
            if listener in self.listeners:
                self.listeners.remove(listener)

        return end

    def tell(self, message: dict[str, Any]) -> None:
        """Call the listeners with a message, and ``now_s``, when it was told."""
        timed = {**message, "now_s": round(self.now_s, 6)}
        for listener in list(self.listeners):
            listener(timed)
