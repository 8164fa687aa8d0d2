"""Components that their host, or another pack, moves: the manager reads their bytes, and asks for some back.

[Note: steered] ComfyUI's dynamic VRAM brings weights to a device page by page, as layers ask for them, and takes pages
away under pressure; other packs move their models as a whole. Such a component has no blocks of ours and no lease. It
has no entry in the ledger either, which records what we allocate: its bytes are read from the host whenever they are
needed. While it is idle they are room for others, as the bytes of our own idle components are, and it leaves in the
same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol
from weakref import ref

from ..options.precision import Precision
from .claims.kept import EVERYTHING_KEPT, KeepLimit
from .event_log import EventLog
from .forecast import Forecast
from .members import Members
from .policies.candidate import Candidate
from .reload_times import ReloadTimes
from .report import ComponentReport
from .returns import KnownReturns, Returns

__all__ = ["Steered", "SteeredComponent", "SteeringHost"]


class SteeredComponent(ABC):
    """One component that its host moves.

    Args:
        node_id: the node that asked for a budget; None where none did.
    """

    engine = "dynamic"
    """What moves it, for the report."""
    takes_budgets = True
    """Whether a profile can limit its bytes."""
    names_file = True
    """Whether its name is that of its file; else of its class."""
    result: str = ""
    """The result of a node in which the host showed it first (`KnownComponent.result`)."""

    def __init__(self, name: str, kind: str, *, node_id: str | None = None, workflow_id: str | None = None) -> None:
        self.name = name
        self.kind = kind
        self.node_id = node_id
        self.workflow_id = workflow_id
        self.id = ""
        """Its name in the books; the manager gives it when it sees the component first."""
        self.last_use = 0
        self.last_use_s: float | None = None
        self.evict_last = False
        """It leaves a device only when nothing else is left to evict, up to its limit."""
        self.keep_limit = EVERYTHING_KEPT
        self.returns = Returns()
        self.settled_use = 0
        """The last use of which the end was noted."""

    # -- what the host says

    @property
    @abstractmethod
    def is_computing(self) -> bool:
        """Whether it computes now, or is about to: then none of its bytes can leave."""

    @property
    def is_in_use(self) -> bool:
        """Whether it computes now; what only may be about to compute is not in use."""
        return self.is_computing

    def asked_by(self) -> tuple[str | None, str | None]:
        """Return the node whose budget holds now, and its workflow."""
        return self.node_id, self.workflow_id

    @abstractmethod
    def device_bytes(self) -> Mapping[str, int]:
        """Return the bytes of weights on each device now."""

    def wanted_bytes(self) -> Mapping[str, int]:
        """Return the bytes of weights that it would have on each device if there were room, within its budget.

        Nothing where the host does not tell.
        """
        return {}

    @abstractmethod
    def paged_bytes(self, device: str) -> int:
        """Return the bytes of a device that it has beside torch's allocator."""

    def passing_bytes(self) -> Mapping[str, int]:
        """Return the bytes in `device_bytes` through which weights only pass."""
        return {}

    def host_bytes(self) -> Mapping[str, int]:
        """Return the bytes of RAM that it has by tier (``pinned``, ``host``), as far as the host tells."""
        return {}

    def choices(self) -> dict[str, str]:
        """Return what was chosen for it, by name: where it needs more than before, this says since which change."""
        return {"engine": self.engine}

    def content(self) -> Hashable | None:
        """Return what its weights were read from, equal for all objects of the same files; None: unknown."""
        return None

    @property
    @abstractmethod
    def is_in_effect(self) -> bool:
        """Whether it holds no more than its budget."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Return what was asked of it and why it is steered, JSON-able, in the place of a plan."""

    # -- what the host does

    @abstractmethod
    def free_memory(self, device: str, num_bytes: int) -> int:
        """Take at least so many bytes off a device, or all that can leave now; returns the bytes that left."""

    def take_off(self, device: str) -> int:
        """Take all of it off a device, as its host does that by itself; returns the bytes that left."""
        return self.free_memory(device, self.device_bytes().get(device, 0))

    @abstractmethod
    def leave_first(self, device: str) -> None:
        """Make it the first to leave a device when the host itself is short of memory."""

    # -- what the manager notes

    def join(self, component_id: str, known: KnownReturns) -> None:
        """Note its name in the books, the first one stays; it goes on with what others of its content went through."""
        if not self.id:
            here = ref(self)
            self.returns = known.take(self.content(), lambda: here() is not None)
            self.id = component_id

    def note_use(self, number: int, now_s: float) -> None:
        """Note that it is used now; ``number`` grows with every use of any component."""
        self.last_use, self.last_use_s = number, now_s

    def take_use(self) -> bool:
        """Return whether it was used since this was asked last."""
        was_used = self.last_use > self.settled_use
        self.settled_use = self.last_use
        return was_used

    def note_seen(self, now_s: float) -> None:
        """Note that it has bytes of a device; the first time counts as a use where no use was noted."""
        if self.last_use_s is None:
            self.last_use_s = now_s

    def keep(self, kept: bool, limit: KeepLimit = EVERYTHING_KEPT) -> None:
        """Evict it last (True) up to a limit, or in the usual order (False)."""
        self.evict_last, self.keep_limit = kept, limit


class SteeringHost(Protocol):
    """A host that moves components itself and lets them be steered."""

    def components(self) -> Iterable[SteeredComponent]:
        """Return the components that it moves now, the last used first; the same object for the same component."""

    def keep_free(self, num_bytes: int | None) -> None:
        """Keep so many bytes of every device free; None: as many as without a VRAM watermark."""

    def pinned_bytes(self) -> int:
        """Return the bytes that it has page-locked."""


class Steered:
    """The components that hosts move, as the manager sees them. It takes no lock, and may be read in any thread."""

    def __init__(self, members: Members, event_log: EventLog) -> None:
        self.members = members
        self.event_log = event_log
        self.forecast = Forecast()
        self.returns = KnownReturns()
        self.hosts: list[SteeringHost] = []

    def take_host(self, host: SteeringHost) -> None:
        """Add a host, which stays until the process ends."""
        self.hosts.append(host)

    def components(self) -> list[SteeredComponent]:
        """Return the components that the hosts move now."""
        return [component for host in self.hosts for component in self.of_host(host)]

    def of_host(self, host: SteeringHost) -> list[SteeredComponent]:
        """Return the components that one host moves, the last used first; names those that have no name yet."""
        found = list(host.components())
        for component in found:
            if not component.id:
                component.join(self.members.name_other(component.name, component), self.returns)
        return found

    def get(self, component_id: str) -> SteeredComponent | None:
        return next((found for found in self.components() if found.id == component_id), None)

    def last_uses(self) -> dict[str, int]:
        """Return the number of each component's last use; where no use was noted, that of the next older one.

        A host tells the order of all that it moves, but notes the uses of those only for which nodes ask.
        """
        found: dict[str, int] = {}
        for host in self.hosts:
            older = 0
            for component in reversed(self.of_host(host)):
                older = found[component.id] = max(older, component.last_use)
        return found

    def held(self, device: str) -> Iterator[tuple[SteeredComponent, int]]:
        """Yield each component with bytes on a device, and these."""
        for component in self.components():
            num_bytes = component.device_bytes().get(device, 0)
            if num_bytes:
                component.note_seen(self.event_log.now_s)
                yield component, num_bytes

    def candidates(self, device: str, reloads: ReloadTimes) -> list[Candidate]:
        """Return those with bytes on a device that do not compute now."""
        last_uses, now_s = self.last_uses(), self.event_log.now_s
        return [
            Candidate(
                component=component.id,
                device_bytes=num_bytes,
                last_use=last_uses.get(component.id, component.last_use),
                idle_s=now_s - component.last_use_s if component.last_use_s is not None else None,
                evict_last=component.evict_last,
                next_use=self.forecast.next_use(component.id),
                reload_s_per_byte=reloads.of_tiers(device, component.host_bytes()),
            )
            for component, num_bytes in self.held(device)
            if not component.is_computing
        ]

    def by_component(self, device: str) -> dict[str, int]:
        """Return the bytes on a device by component."""
        return {component.id: num_bytes for component, num_bytes in self.held(device)}

    def look(self, device: str) -> dict[str, int]:
        """As `by_component`; notes what each has now, for `Returns`. The caller holds the manager's lock."""
        held = self.by_component(device)
        is_running = self.event_log.is_running
        for component in self.components():
            num_bytes = held.get(component.id, 0)
            if is_running:
                component.returns.look(device, num_bytes)
            else:  # between runs a user, a time limit or another program asks for it
                component.returns.excuse(device, num_bytes)
        return held

    def paged_bytes(self, device: str) -> int:
        """Return the bytes of a device that components have beside torch's allocator."""
        return sum(component.paged_bytes(device) for component in self.components())

    def pinned_bytes(self) -> int:
        """Return the bytes that the hosts have page-locked."""
        return sum(host.pinned_bytes() for host in self.hosts)

    def keep_free(self, num_bytes: int | None) -> None:
        """Make the hosts keep so many bytes of every device free; None: as many as they do by themselves."""
        for host in self.hosts:
            host.keep_free(num_bytes)

    def reports(self) -> list[ComponentReport]:
        """Return what the report says of each."""
        return [steered_report(component, self.forecast.next_use(component.id)) for component in self.components()]


def steered_report(component: SteeredComponent, next_use: int | None) -> ComponentReport:
    held = component.device_bytes()
    node_id, workflow_id = component.asked_by()
    plan = dict(component.describe())
    return ComponentReport(
        id=component.id,
        name=component.name,
        kind=component.kind,
        node_id=node_id,
        workflow_id=workflow_id,
        tiers={place: n for place, n in {**held, **component.host_bytes()}.items() if n},
        precision=Precision.AS_STORED.name,
        in_effect=component.is_in_effect,
        leased=any(held.values()) and component.is_computing,
        last_use_s=component.last_use_s,
        bytes_moved=None,
        plan=plan,
        engine=component.engine,
        total_bytes=plan.get("weight_bytes"),
        staging_bytes={place: n for place, n in component.passing_bytes().items() if n},
        next_use=next_use,
        kept=component.evict_last,
    )
