"""What a host tells of models that it loads, moves and unloads itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..weights.side_factors import SideFactors
from .card_sharing import CardSharing
from .eviction import UNLOADED_BY_HOST
from .leases import Leases
from .member import Member
from .observed import Observed, ObservedModel
from .registered import RegisteredCaches, RegisteredComponent
from .steered import SteeredComponent, SteeringHost

__all__ = ["Hosting"]


class Hosting:
    """Takes what hosts say into the books. Takes the manager's lock."""

    def __init__(self, leases: Leases, observed: Observed, sharing: CardSharing) -> None:
        self.lock = leases.lock
        self.leases = leases
        self.observed = observed
        self.sharing = sharing
        self.admission = leases.admission
        self.capacity = leases.capacity
        self.event_log = leases.event_log
        self.measures = leases.measures
        self.ledger = leases.ledger
        self.caches = RegisteredCaches()

    # -- models that the host moves

    def steer(self, host: SteeringHost) -> None:
        """Steer the components that a host moves itself ([Note: steered] in `steered.py`). Idempotent."""
        with self.lock.exclusive():
            if host not in self.capacity.steered.hosts:
                self.capacity.steered.take_host(host)
                self.admission.keep_free_in_host()
                self.capacity.outdate_plans()

    def register(self, component: RegisteredComponent) -> None:
        """Take a cache of other code into the books ([Note: registered] in `registered.py`)."""
        with self.lock.exclusive():
            self.caches.add(component)
            self.steer(self.caches)
            self.capacity.steered.components()  # gives it its name
            self.note_use(component)
            self.capacity.outdate_plans()

    def unregister(self, component: RegisteredComponent) -> None:
        """Take a cache of other code out of the books. Idempotent."""
        with self.lock.exclusive():
            self.caches.remove(component)
            self.capacity.outdate_plans()

    def observe(self, read: Callable[[], Iterable[ObservedModel]]) -> None:
        """Count the models that a host loaded by itself; the function returns them. Nothing is asked of them."""
        with self.lock.exclusive():
            self.observed.watch(read)

    def note_use(self, component: SteeredComponent) -> None:
        """Note that the host uses a component that it moves, and tell the host the order in which others leave."""
        with self.lock.exclusive():
            self.leases.touch(component)
            self.admission.order_steered()
            self.measures.sample()
            self.measures.begin_use(component)
            self.sharing.note_use(component)

    def note_unload(self, component: SteeredComponent, freed_bytes: Mapping[str, int]) -> None:
        """Note that the host took a component that it moves off its devices."""
        with self.lock.exclusive():
            for device, num_bytes in freed_bytes.items():
                if num_bytes:
                    self.event_log.note(
                        "evict",
                        component.id,
                        num_bytes,
                        device,
                        UNLOADED_BY_HOST,
                        component_kind=component.kind,
                        to="host",
                    )
            self.capacity.outdate_plans()
            self.measures.sample()

    # -- components that the host loads and unloads as a whole

    def load(self, member: Member, ceilings: Mapping[str, int] | None = None) -> None:
        """Load a hosted component now, within the ceilings that its host gives.

        Raises as `acquire`.
        """
        with self.lock.exclusive():
            self.leases.touch(member)
            member.note_unload()  # should this fail
            self.leases.admit(member, ceilings)

    def set_factors(self, member: Member, factors: Mapping[str, SideFactors]) -> None:
        """Add these to a component's encoded weights in decoding. Raises as `FactorLayers.set`."""
        with self.lock.exclusive():
            layers = member.managed.factors
            before = layers.num_laid_out
            try:
                member.managed.set_factors(factors)
            finally:
                if layers.num_laid_out != before:
                    self.capacity.outdate_plans()
                    self.measures.sample()

    def unload(self, member: Member) -> None:
        """Take a hosted component off every device; it stays packed in host memory."""
        with self.lock.exclusive():
            held = self.ledger.bytes_by_place(member.id)
            member.note_unload()
            if member.managed.unload():
                kind, to = member.managed.component.kind, member.managed.plan.tier
                for share in member.managed.shares:
                    name = share.device.name
                    self.event_log.note(
                        "evict", member.id, held.get(name, 0), name, UNLOADED_BY_HOST, component_kind=kind, to=to
                    )
            self.capacity.outdate_plans()
            self.measures.sample()
