"""The report: its versioned schema, for the command line, the web page and the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidInput, allowed_values
from ..options.precision import Precision
from ..runtime.devices.ledger import Ledger
from ..transfer.devices import Device, DeviceMemory
from .claims.neighbours import ProcessUse
from .member import Member
from .watermark import Watermark, WatermarkReport

__all__ = [
    "EVENT_KINDS",
    "REPORT_VERSION",
    "ComponentReport",
    "ComponentState",
    "DeviceReport",
    "Event",
    "NodeReport",
    "Report",
    "RunReport",
    "Sample",
    "component_report",
    "device_report",
    "empty_report",
    "fields_of",
    "node_fields",
    "parts_of",
]

REPORT_VERSION = 2

EVENT_KINDS = (
    "plan",
    "load",
    "evict",
    "release",
    "keep",
    "share",
    "reuse",
    "drop",
    "watermark",
    "lend",
    "limits",
    "recover",
    "growth",
    "thrashing",
    "error",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happened, ``t_s`` after the start; its kind is one of `EVENT_KINDS`."""

    t_s: float
    kind: str
    component: str
    bytes: int
    device: str
    reason: str
    component_kind: str = ""
    """What the component is: diffusion, text, vae and so on."""
    to: str = ""
    """Where evicted weights rest: the tier."""
    run_id: str = ""
    """The run in which it happened; empty outside of runs."""
    node_id: str | None = None
    """The node that ran then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One point of the timeline: each component's bytes on a device, and the peak since the last point.

    There is a point whenever components' bytes change, and whenever more was allocated than the last point says.
    """

    t_s: float
    device: str
    component_bytes: dict[str, int]
    """Neighbouring points without a change share one dict."""
    allocated_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceReport:
    """A device now. ``managed_bytes`` is the sum of all components, whichever engine moves them; ``other_bytes`` is
    what the driver counts beyond it.

    ``peak_bytes`` is the most that torch had allocated since the manager was made, which resets the device's own peak,
    with the pages of the host's components that were there when it was read. ``own_watermark``: its marks without those
    of other processes on it, and what they come from; for the CPU those of the RAM.
    """

    name: str
    total_bytes: int
    free_bytes: int
    watermark: dict[str, int]
    own_watermark: WatermarkReport
    managed_bytes: int
    other_bytes: int
    peak_bytes: int = 0
    lent: dict[str, Any] | None = None
    """What of it is lent to another program: ``num_bytes``, ``missing_bytes`` not taken yet, ``left_s``."""
    neighbours: list[dict[str, Any]] = field(default_factory=list)
    """What the other processes with this pack that share it say of it (`ProcessUse`)."""
    unshared: str | None = None
    """Why other processes on it are not seen, where they should be."""
    activation_bytes: int | None = None
    """What torch has allocated now beside all weights: activations, and what nodes keep there. None: not counted."""
    pinned: dict[str, int] | None = None
    """What of the RAM is page-locked (``num_bytes``), and how much of it may be (``limit_bytes``); of the CPU alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentReport:
    """A component now; ``node_id`` is the node that loaded it.

    ``in_effect``: its devices hold what its plan says. ``num_compiles``: into how many graphs its blocks were compiled;
    ``uncompiled_blocks``: how many blocks run uncompiled nevertheless, by the reason; None where it is not compiled.
    """

    id: str
    name: str
    kind: str
    node_id: str | None
    workflow_id: str | None
    tiers: dict[str, int]
    precision: str
    in_effect: bool
    leased: bool
    last_use_s: float | None
    bytes_moved: int | None
    """None where the host moves it and does not tell."""
    plan: dict[str, Any]
    total_bytes: int | None = None
    """What its weights take in the precision in which they rest; None where its host does not tell."""
    encoded_bytes: int | None = None
    """What all of it would take of one device in precision ``fp8 scaled``, scratch memory to decode it included; None
    where it rests in another form already, no weight can, or another engine moves it."""
    staging_bytes: dict[str, int] = field(default_factory=dict)
    """The bytes by device in ``tiers`` through which weights only pass: staging memory, and scratch to decode them."""
    engine: str = "blocks"
    """What moves its weights: ``blocks``, this manager; ``dynamic``, its host's memory manager, which is steered
    ([Note: steered] in `steered.py`); ``core``, its host or another pack, and its bytes are only counted; ``kept``,
    nothing: a component that left had them ([Note: kept weights] in `kept_weights.py`)."""
    num_compiles: int | None = None
    uncompiled_blocks: dict[str, int] | None = None
    waited_s: float | None = None
    """For how long its blocks waited for their copies since it joined; None where another engine moves it."""
    next_use: int | None = None
    """The steps until it is used, as far as the host tells; 0: in the one that runs. None: not known."""
    kept: bool = False
    """It leaves a device only when nothing else is left to evict."""
    moved: bool = False
    """It was given another placement on request: what loads it has its own."""
    ahead_bytes: int | None = None
    """What look-ahead read into RAM, and copied to devices, before it was loaded, since it joined: the sum of what its
    "load" events say; a block that was both read and copied counts twice. None where another engine moves it."""
    hidden_s: float | None = None
    """How long that took while another component computed: its loading waited so much less. None as above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """One execution of a node.

    ``weights_bytes`` is the most that a component which it used had on a device, ``staging_bytes`` the most through
    which the weights of those only passed, ``activation_bytes`` the most that was allocated while it ran, beside all
    weights and what was there at its begin, and ``peak_bytes`` the most that was allocated in all.
    ``tiers`` says where the components that this node loaded are now. ``components`` are those it computed with, in the
    order of their first use.
    """

    node_id: str
    title: str
    run_id: str
    workflow_id: str | None
    seconds: float
    peak_bytes: dict[str, int]
    weights_bytes: dict[str, int]
    activation_bytes: dict[str, int]
    bytes_moved: int
    tiers: dict[str, int]
    components: list[str] = field(default_factory=list)
    staging_bytes: dict[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    """For how long computing waited for copies of weights, as far as some passes tell (`WaitTimes`)."""
    begin_s: float = 0.0
    """When it began, in seconds after the start; it ended ``seconds`` later."""
    uncounted: list[str] = field(default_factory=list)
    """The devices of which torch does not count what is allocated: activations there are not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """One prompt execution; ``bytes_moved`` counts weights copied to devices."""

    run_id: str
    name: str
    begin_s: float
    end_s: float | None
    bytes_moved: int
    num_evictions: int
    reloaded_bytes: dict[str, int] = field(default_factory=dict)
    """Of each component what was loaded again in it after it had been evicted for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything, JSON-able through `to_json`."""

    devices: list[DeviceReport]
    components: list[ComponentReport]
    nodes: list[NodeReport]
    runs: list[RunReport]
    events: list[Event]
    samples: list[Sample]
    open_nodes: list[NodeReport] = field(default_factory=list)
    """The node that runs now, with its numbers so far."""
    now_s: float = 0.0
    """The seconds from the start to this report, as the other times count."""
    version: int = field(default=REPORT_VERSION)

    def to_json(self) -> dict[str, Any]:
        """Return the report as new dicts and lists."""
        return {
            "devices": [fields_of(device) for device in self.devices],
            "components": list(map(fields_of, self.components)),
            "nodes": list(map(node_fields, self.nodes)),
            "runs": list(map(fields_of, self.runs)),
            "events": list(map(fields_of, self.events)),
            "samples": list(map(fields_of, self.samples)),
            "open_nodes": list(map(node_fields, self.open_nodes)),
            "now_s": self.now_s,
            "version": self.version,
        }


def fields_of(row: DeviceReport | ComponentReport | RunReport | Event | Sample) -> dict[str, Any]:
    """Return a row's fields without copies; `asdict` copies each value, which takes ten times as long."""
    return {name: getattr(row, name) for name in row.__slots__}


def node_fields(node: NodeReport) -> dict[str, Any]:
    """Return a node's fields; copies only its amounts."""
    fields = ((name, getattr(node, name)) for name in NodeReport.__slots__)
    return {name: dict(value) if isinstance(value, dict) else value for name, value in fields}


def empty_report() -> dict[str, Any]:
    """Return the report of a process that has no manager."""
    return Report(devices=[], components=[], nodes=[], runs=[], events=[], samples=[]).to_json()


def parts_of(report: Mapping[str, Any], only: str | None) -> dict[str, Any]:
    """Return the parts of a report that ``only`` names, with commas between, its version and time; all of it for None.

    Raises:
        InvalidInput: a name is no part of the report.
    """
    if only is None:
        return dict(report)
    wanted = only.split(",")
    for name in wanted:
        if name not in report:
            raise InvalidInput(f"only={name!r} is no part of the report; {allowed_values(name, report)}")
    return {name: part for name, part in report.items() if name in (*wanted, "now_s", "version")}


def device_report(
    device: Device,
    memory: DeviceMemory,
    mark: Watermark,
    own_mark: WatermarkReport,
    ledger: Ledger,
    peak_bytes: int,
    steered_bytes: int = 0,
    lent: dict[str, Any] | None = None,
    neighbours: Sequence[ProcessUse] = (),
    unshared: str | None = None,
    activation_bytes: int | None = None,
    pinned: dict[str, int] | None = None,
) -> DeviceReport:
    """Return the report of a device; ``steered_bytes`` are those of components that the host moves."""
    managed = ledger.used(device.name) + steered_bytes
    return DeviceReport(
        name=device.name,
        total_bytes=memory.total,
        free_bytes=memory.free,
        watermark={"low_bytes": mark.low_bytes, "high_bytes": mark.high_bytes},
        own_watermark=own_mark,
        managed_bytes=managed,
        other_bytes=max(0, memory.total - memory.free - managed),
        peak_bytes=max(peak_bytes, memory.peak),
        lent=lent,
        neighbours=[other.to_json() for other in neighbours],
        unshared=unshared,
        activation_bytes=activation_bytes,
        pinned=pinned,
    )


class ComponentState:
    """The changing state of a component, as it is now: cheap to copy while the manager is locked."""

    __slots__ = (
        "ahead_bytes",
        "bytes_moved",
        "hidden_s",
        "is_kept",
        "is_leased",
        "is_moved",
        "kind",
        "last_use_s",
        "member",
        "next_use",
        "num_compiles",
        "plan",
        "uncompiled_blocks",
        "waited_s",
    )

    def __init__(self, member: Member, next_use: int | None) -> None:
        managed = member.managed
        self.member = member
        self.next_use = next_use
        self.is_kept = member.evict_last
        self.is_moved = member.is_moved
        self.kind = managed.component.kind
        self.plan = managed.plan
        self.is_leased = bool(member.leases)
        self.last_use_s = member.last_use_s
        self.bytes_moved = managed.bytes_moved
        self.waited_s = managed.waited_s
        self.ahead_bytes = member.ahead_bytes
        self.hidden_s = member.hidden_s
        self.num_compiles = managed.compiled.num_compiles if managed.compiled is not None else None
        self.uncompiled_blocks = managed.compiled.why_uncompiled() if managed.compiled is not None else None


def component_report(state: ComponentState, ledger: Ledger) -> ComponentReport:
    member, plan, held = state.member, state.plan, ledger.bytes_by_place(state.member.id)
    return ComponentReport(
        id=member.id,
        name=member.name,
        kind=state.kind,
        node_id=member.node_id,
        workflow_id=member.workflow_id,
        tiers=held,
        precision=plan.precision.name,
        in_effect=all(
            held.get(share.device, 0) == share.device_bytes for share in plan.shares if share.device != "cpu"
        ),
        leased=state.is_leased,
        last_use_s=state.last_use_s,
        bytes_moved=state.bytes_moved,
        plan={**plan.to_json(), "reasons": [*member.reasons, *plan.reasons]},
        total_bytes=plan.total_bytes,
        encoded_bytes=member.managed.encoded_bytes if plan.precision == Precision.AS_STORED else None,
        staging_bytes={place: passing for place in held if (passing := ledger.passing(member.id, place))},
        num_compiles=state.num_compiles,
        uncompiled_blocks=state.uncompiled_blocks,
        waited_s=round(state.waited_s, 6),
        next_use=state.next_use,
        kept=state.is_kept,
        moved=state.is_moved,
        ahead_bytes=state.ahead_bytes,
        hidden_s=round(state.hidden_s, 6),
    )
