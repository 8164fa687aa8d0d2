"""Measures of nodes and runs: the peaks of devices, what forwards need beside the weights, bytes moved, seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ..runtime.devices.ledger import Ledger
from ..transfer.devices import Device
from .event_log import EventLog
from .observed import Observed
from .report import NodeReport
from .steered import Steered, SteeredComponent

__all__ = ["Measures", "OpenNode"]


@dataclass(slots=True, eq=False)
class OpenNode:
    """A node that is executing; its numbers grow with each forward in it."""

    node_id: str
    title: str
    run_id: str
    workflow_id: str | None
    begin_s: float
    moved_before: int
    """The bytes that had been copied to devices when it began."""
    waited_before_s: float
    """The seconds for which computing had waited for copies until then."""
    waited_s: float = 0.0
    """The seconds for which it waited while the node ran; known at its end."""
    peaks: Counter[str] = field(default_factory=Counter)
    weights: Counter[str] = field(default_factory=Counter)
    staging: Counter[str] = field(default_factory=Counter)
    components: dict[str, None] = field(default_factory=dict)
    """The components that it used, in the order of their first use."""

    def note_waited(self, seconds: float) -> None:
        """Note for how long computing has waited for copies since the start."""
        self.waited_s = max(0.0, seconds - self.waited_before_s)

    def note_component(self, component: str) -> None:
        """Note a component that it uses."""
        self.components[component] = None

    def note_peak(self, device: str, num_bytes: int) -> None:
        """Note what was allocated on a device; the most counts, as in the two below."""
        self.peaks[device] = max(self.peaks[device], num_bytes)

    def note_staging(self, device: str, num_bytes: int) -> None:
        """Note through how many bytes of a device the components that it uses stream."""
        self.staging[device] = max(self.staging[device], num_bytes)

    def note_weights(self, device: str, num_bytes: int) -> None:
        """Note what a component that the node uses has on a device."""
        self.weights[device] = max(self.weights[device], num_bytes)


@dataclass(slots=True)
class Interval:
    """What was allocated beside all weights at its begin, and the most since then, by device."""

    begin: dict[str, int]
    most: Counter[str] = field(default_factory=Counter)

    def note(self, device: str, num_bytes: int) -> None:
        """Note what was allocated on a device beside the weights, if the interval measures that device."""
        if device in self.begin:
            self.most[device] = max(self.most[device], num_bytes)

    def needed(self) -> dict[str, int]:
        """Return by device the most that was allocated beyond the begin."""
        return {name: max(0, self.most[name] - begin) for name, begin in self.begin.items()}


class Measures:
    """Measures the open run, the open node and any number of intervals, and enters the results in the event log.

    Peaks come from the allocator, which keeps one per device: every look at a device reads and resets it. So a look
    counts for the open node and for every open interval. A pass looks at the devices on which it computes, runs and
    nodes look at all.

    Args:
        bytes_moved: returns the bytes of weights copied to devices since the start.
        seconds_waited: returns the seconds for which computing waited for such copies.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        ledger: Ledger,
        steered: Steered,
        observed: Observed,
        event_log: EventLog,
        bytes_moved: Callable[[], int],
        seconds_waited: Callable[[], float] = float,
    ) -> None:
        self.devices = {device.name: device for device in devices if not device.is_cpu}
        self.ledger = ledger
        self.steered = steered
        self.observed = observed
        self.event_log = event_log
        self.timeline = event_log.timeline
        self.bytes_moved = bytes_moved
        self.seconds_waited = seconds_waited
        self.node: OpenNode | None = None
        self.intervals: dict[object, Interval] = {}
        self.weights_before: dict[str, int] = {}
        """The weights that torch's allocator had on each device at the last look, as far as they are known here."""
        self.peaks: Counter[str] = Counter()
        """The most that was allocated on each device since the start."""
        self.moved_before_run = 0
        self.used_in_run: dict[str, int | None] = {}
        """The components that computed in the open run, and what those that a host moves needed beside their weights.

        None: not known; so for members, which know it themselves.
        """
        self.uses: dict[str, object] = {}
        """The intervals of components that a host moves and that are used now, by their ids."""

    @property
    def step(self) -> object:
        """What tells the open node of a run from all others; None outside of nodes."""
        return (self.node.run_id, self.node.node_id, self.node.workflow_id) if self.node is not None else None

    # -- looks at devices

    def sample(self, devices: Iterable[str] | None = None, *, always: bool = False) -> None:
        """Look at devices, by default at all, and enter a point of the timeline for each (`Timeline.add`)."""
        for name in self.devices if devices is None else devices:
            if name in self.devices:
                self.look(name, always=always)

    def look(self, name: str, *, always: bool = False) -> int:
        """Add a device's peak to every open measurement, then reset the peak; returns the bytes allocated there now.

        Reads the allocator's numbers once.
        """
        device = self.devices[name]
        _, allocated, peak = device.allocator_bytes()
        device.reset_peak()
        held, weights = self.ledger.by_component(name), self.ledger.used(name)
        paged = 0
        if self.steered.hosts:
            held = {**held, **self.steered.look(name)}
            paged = self.steered.paged_bytes(name)  # pages lie beside the allocator: it counts none of them
            weights = max(weights, sum(held.values()) - paged)
        if self.observed.readers:
            weights += self.observed.held_bytes(name)
        in_all = peak + paged
        self.peaks[name] = max(self.peaks[name], in_all)
        if self.node is not None:
            self.node.note_peak(name, in_all)
        # What was loaded or evicted since the last look is no activation.
        beside = peak - max(weights, self.weights_before.get(name, 0))
        self.weights_before[name] = weights
        for interval in self.intervals.values():
            interval.note(name, beside)
        self.timeline.add(round(self.event_log.now_s, 6), name, held, allocated + paged, in_all, always=always)
        return allocated

    def beside_weights(self, name: str, allocated_bytes: int) -> int:
        """Return what torch has allocated on a device beside all weights, of so many bytes in all; resets no peak."""
        paged = self.steered.paged_bytes(name) if self.steered.hosts else 0
        steered = sum(self.steered.by_component(name).values()) - paged if self.steered.hosts else 0
        weights = self.ledger.used(name) + max(0, steered) + self.observed.held_bytes(name)
        return max(0, allocated_bytes - weights)

    # -- intervals

    def begin_interval(self, key: object, devices: Iterable[str]) -> dict[str, int]:
        """Measure what is needed on devices beside the weights from now on; returns what is allocated there now.

        Other measurements go on.
        """
        allocated = {name: self.look(name) for name in devices if name in self.devices}
        self.intervals[key] = self.make_interval(allocated)
        return allocated

    def make_interval(self, allocated: dict[str, int]) -> Interval:
        """Return an interval that begins with what the last look found allocated."""
        return Interval({name: had - self.weights_before[name] for name, had in allocated.items()})

    def end_interval(self, key: object) -> dict[str, int]:
        """Return the most bytes by device that were needed beside the weights and what was there at the beginning."""
        interval = self.intervals.get(key)
        if interval is None:
            return {}
        self.sample(interval.begin)
        self.intervals.pop(key, None)
        return interval.needed()

    def begin_use(self, component: SteeredComponent) -> None:
        """Measure what a component that its host moves needs beside its weights, until its use ends."""
        if self.event_log.is_running and component.id not in self.uses:
            key = self.uses[component.id] = object()
            self.begin_interval(key, component.device_bytes())

    def end_uses(self) -> dict[str, int]:
        """End all uses; returns the most bytes of a device that each needed beside all weights, by id."""
        found = {component: max(self.end_interval(key).values(), default=0) for component, key in self.uses.items()}
        self.uses.clear()
        return found

    # -- runs

    def begin_run(self, run_id: str, name: str) -> None:
        self.end_run()
        for device in self.devices:
            self.steered.look(device)  # what left since the last run did not leave in this one
        self.used_in_run.clear()
        self.moved_before_run = self.bytes_moved()
        self.event_log.note_run(run_id, name)
        self.sample(always=True)

    def end_run(self) -> None:
        """Close the open run, and the node that an error left open. Idempotent."""
        if not self.event_log.is_running:
            return
        if self.node is not None:
            self.end_node(self.node, {})
        self.sample()
        self.event_log.note_run_end(self.bytes_moved() - self.moved_before_run)

    # -- nodes

    def begin_node(self, node_id: str, title: str, workflow_id: str | None) -> None:
        allocated = {name: self.look(name) for name in self.devices}  # what was until now is not of this node
        self.observed.note_loads(None)
        self.event_log.enter_node(node_id)
        self.node = OpenNode(
            node_id=node_id,
            title=title,
            run_id=self.event_log.run_id,
            workflow_id=workflow_id,
            begin_s=self.event_log.now_s,
            moved_before=self.bytes_moved(),
            waited_before_s=self.seconds_waited(),
        )
        self.intervals[self.node] = self.make_interval(allocated)

    def used_by_node(self, component: str) -> None:
        """Count a component's bytes on devices for the open node, which uses it."""
        self.note_used(component)
        node = self.node
        if node is not None:
            node.note_component(component)
            for name in self.devices:
                node.note_weights(name, self.ledger.held(component, name))
                node.note_staging(name, sum(self.ledger.passing(used, name) for used in node.components))

    def note_used(self, component: str, activation_bytes: int | None = None) -> None:
        """Count a component for the open run, which uses it, and what it needed; once unknown stays unknown."""
        if self.event_log.is_running:
            before = self.used_in_run.get(component, activation_bytes)
            is_known = before is not None and activation_bytes is not None
            self.used_in_run[component] = max(before or 0, activation_bytes or 0) if is_known else None

    def steered_by_node(self) -> None:
        """Count for the open node the components that it used and the host moves."""
        node = self.node
        if node is None:
            return
        for component in self.steered.components():
            if component.last_use_s is not None and component.last_use_s >= node.begin_s:
                node.note_component(component.id)
                for device, num_bytes in component.device_bytes().items():
                    node.note_weights(device, num_bytes)

    def end_node(self, node: OpenNode, tiers: dict[str, int]) -> NodeReport:
        """Close the open node and enter its report, which is returned."""
        self.sample()
        self.observed.note_loads(self.event_log.now_s)
        node.note_waited(self.seconds_waited())
        self.node = None
        self.event_log.enter_node(None)
        report = self.report_of(node, tiers)
        self.intervals.pop(node, None)
        self.event_log.note_node(report)
        return report

    def report_of(self, node: OpenNode, tiers: dict[str, int]) -> NodeReport:
        """Return the report of a node as of the last look at each device."""
        interval = self.intervals.get(node)
        return NodeReport(
            node_id=node.node_id,
            title=node.title,
            run_id=node.run_id,
            workflow_id=node.workflow_id,
            begin_s=round(node.begin_s, 6),
            seconds=round(self.event_log.now_s - node.begin_s, 6),
            peak_bytes=dict(node.peaks),
            weights_bytes={name: held for name, held in node.weights.items() if held},
            activation_bytes=interval.needed() if interval is not None else {},
            staging_bytes={name: most for name, most in node.staging.items() if most},
            bytes_moved=self.bytes_moved() - node.moved_before,
            waited_s=round(node.waited_s, 6),
            uncounted=[name for name, device in self.devices.items() if device.is_uncounted],
            tiers=tiers,
            components=list(node.components),
        )
