"""Live capacity: what each component may plan with now, by free memory, watermarks and what forwards need.

[Note: capacity] A component may plan with what is free, with its own bytes, and with those of idle components, less
what the watermark keeps free. Everything here is arithmetic on what devices and books say; nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ..errors import DoesNotFit, InvalidInput
from ..options.marks import HOST
from ..planner.capacity import EVERYTHING, DeviceCapacity, KeptFree, Machine, PeerLink
from ..planner.plan import ComponentPlan, DevicePlan
from ..planner.replanning import confirm_plan, replan
from ..planner.sizes import least_bytes
from ..runtime.forwards.input_size import Size
from ..tracing.call_shapes import Shapes
from ..transfer.devices import Device, HostMemory, peers_of
from ..transfer.link_speed import known_link, link_bytes_per_s
from ..transfer.pinned_memory import pin_limit_bytes
from ..weights.component import Component
from .claims.kept import KeepLimit
from .claims.loans import Loans
from .claims.neighbours import Neighbours
from .forecast import Forecast
from .kept_weights import KeptWeights
from .measures import Measures
from .member import Member
from .members import Members
from .needs import Key, Needs, digest_component, digest_device
from .policies.candidate import Candidate, EvictionPolicy
from .policies.newcomer import Newcomer
from .reload_times import ReloadTimes
from .speeds import CallKey, Speeds, digest_speed, main_dtype
from .steered import Steered
from .watermark import Watermark, WatermarkReport, Watermarks, unlearned_bytes

__all__ = ["LiveCapacity", "computable"]

# A plan's room for one piece exceeds what is expected of it by no more than this part.
ROOM_MARGIN = 0.2


class LiveCapacity:
    """The numbers that plans are made from, as they are now. The caller holds the manager's lock.

    Args:
        members: the components under management; the registry adds and removes them.
    """

    def __init__(
        self, devices: dict[str, Device], members: Members, steered: Steered, measures: Measures, policy: EvictionPolicy
    ) -> None:
        self.devices = devices
        self.members = members
        self.steered = steered
        self.forecast: Forecast = steered.forecast
        self.measures = measures
        self.ledger = measures.ledger
        self.event_log = measures.event_log
        self.watermarks = Watermarks({name: device for name, device in devices.items() if not device.is_cpu})
        self.loans = Loans(self.foreign_on, lambda: self.event_log.now_s)
        self.neighbours = Neighbours()
        self.kept = KeptWeights(members, self.ledger, self.event_log, self.forecast, policy)
        self.needs = Needs()
        self.device_digests: dict[str, str] = {}
        self.speeds = Speeds()
        self.speed_digests: dict[str, str] = {}
        self.links = {
            name: speed
            for name, device in devices.items()
            if not device.is_cpu and (speed := known_link(device)) is not None
        }
        """Bytes per second from page-locked memory, as far as they were ever measured."""
        self.pageable_links: dict[str, float] = {}
        """Bytes per second from other host memory, as far as they were measured in this process."""
        self.peers: dict[str, tuple[PeerLink, ...]] = {}
        """By device, the ways from all others, once a plan was asked for."""
        self.reloads = ReloadTimes(self.links, self.pageable_links)
        self.epoch = 0
        """Counts changes of the memory that plans share; a plan of an older epoch is checked again."""

    def outdate_plans(self) -> None:
        """Note that free memory has changed: every component checks its plan when it is used next."""
        self.epoch += 1

    def mark_of(self, device: str) -> Watermark:
        """Return how much of an accelerator is kept free now: its marks, and what is lent of it."""
        mark, lent = self.joined_mark(device), self.lent_bytes(device)
        if not lent:
            return mark
        return Watermark(low_bytes=mark.low_bytes + lent, high_bytes=mark.high_bytes + lent)

    def mark_of_host(self) -> Watermark:
        """Return how much of the RAM is kept free now."""
        return self.watermarks.of_host(HostMemory.now().total_bytes)

    def band_of(self, device: Device) -> int:
        """Return the distance of an accelerator's marks: so much may come and go, and nothing moves."""
        if device.is_cpu:
            return 0
        mark = self.mark_of(device.name)
        return mark.high_bytes - mark.low_bytes

    def watermark_reports(self) -> dict[str, WatermarkReport]:
        """Return the marks of each accelerator and of the RAM, and what they come from."""
        marks = self.watermarks
        found = {name: marks.of(name) for name in marks.devices} | {HOST: self.mark_of_host()}
        return {name: marks.report(name, mark) for name, mark in found.items()}

    def free_bytes(self, device: Device) -> int:
        """Return the bytes of a device that an allocation may take now: free, and not lent."""
        return device.free_bytes() - self.lent_bytes(device.name)

    def joined_mark(self, device: str) -> Watermark:
        """Return the marks of an accelerator, the larger ones where other processes on it keep more free."""
        own, (low, high) = self.watermarks.of(device), self.neighbours.marks(device)
        return Watermark(low_bytes=max(own.low_bytes, low), high_bytes=max(own.high_bytes, high))

    def lent_bytes(self, device: str) -> int:
        """Return what this process and others lend of an accelerator, and is not taken yet."""
        return self.loans.missing_bytes(device) + self.neighbours.lent_bytes(device)

    def trim_kept(self) -> None:
        """Drop kept weights until the RAM's high mark is free, if less than its low mark is."""
        if self.kept.parts:
            self.kept.drop_unwanted()
            memory = HostMemory.now()
            self.kept.trim(memory.free_bytes, self.watermarks.of_host(memory.total_bytes))

    def make_lockable(self, num_bytes: int, freed_bytes: int) -> None:
        """Drop kept weights until so many bytes may be page-locked, and the RAM's low mark stays free beside them.

        Those that a newcomer lies in count for it.

        Args:
            freed_bytes: the host memory that packing gives back.
        """
        if self.kept.parts:
            host = HostMemory.now()
            room = host.free_bytes + freed_bytes - self.watermarks.of_host(host.total_bytes).low_bytes
            self.kept.make_lockable(num_bytes - min(pin_limit_bytes(host, freed_bytes=freed_bytes), room))

    def has_room_for_pages(self, num_bytes: int) -> bool:
        """Whether the system can keep so many bytes of files in its cache, beside the RAM's low mark."""
        host = self.devices["cpu"].memory()
        return host.free - self.watermarks.of_host(host.total).low_bytes >= num_bytes

    def key_of(self, component: Component, device: str, member: Member | None = None) -> Key:
        """Return the key of a component's needs on a device."""
        digest = member.digest if member is not None else None
        if digest is None:
            digest = digest_component(component)
            if member is not None:
                member.note_digest(digest)
        if device not in self.device_digests:
            self.device_digests[device] = digest_device(self.devices[device])
        return digest, self.device_digests[device]

    def speed_digest(self, device: str) -> str:
        """Return what measured calls name a device by."""
        if device not in self.speed_digests:
            self.speed_digests[device] = digest_speed(self.devices[device])
        return self.speed_digests[device]

    def note_call(self, member: Member, call: tuple[int, Shapes], seconds: float, *, of_blocks: bool) -> None:
        """Store how long a member's device computed for a call, given by its entry and the shapes of its inputs."""
        managed = member.managed
        component, device = managed.component, managed.primary.name
        precision = managed.plan.precision
        self.speeds.note(
            CallKey(
                component=self.key_of(component, device, member)[0],
                device=self.speed_digest(device),
                dtype=main_dtype(component, "" if precision.is_as_stored else precision.name),
                entry=call[0],
                shapes=call[1],
            ),
            seconds,
            of_blocks=of_blocks,
        )

    def expect(self, member: Member, num_bytes: int) -> bool:
        """Note what forwards to come are predicted to take on a member's first device; returns whether it is news.

        Where its plan keeps room for tiles, or for one piece, that much.
        """
        # Room for a decode in one piece is a little more than that takes: what tiles are chosen by.
        if member.tile_bytes <= num_bytes * (1 + ROOM_MARGIN):
            num_bytes = member.tile_bytes or num_bytes
        return self.needs.expect(self.key_of(member.managed.component, member.managed.primary.name, member), num_bytes)

    def kept_for_sharing(self, member: Member | None, device: str) -> int:
        """Return the bytes that a member leaves free for its lenders' least form and for its borrowers' forwards.

        A borrower is loaded before its lenders ([Note: sharing] in `weights/sharing.py`).
        """
        if member is None or self.devices[device].is_cpu:
            return 0
        num_bytes = sum(computable(lender, {device: 0})[device] for lender in member.lenders if not lender.leases)
        for other in self.members.borrowers(member):
            if other.leases:
                shares = other.managed.plan.shares
                num_bytes += sum(max(0, share.keeps_bytes) for share in shares if share.device == device)
        return num_bytes

    def needed(self, member: Member, device: str, size: Size | None = None) -> KeptFree | None:
        """Return what a member's forwards are known to need, for one input size or for the last one."""
        if device in member.short_on:
            return KeptFree(num_bytes=EVERYTHING, why="it ran out of memory there")
        component = member.managed.component
        # A host catches the failure of a VAE and goes on in tiles: before those ran, the failure tells nothing.
        fears = size is not None or not member.is_hosted or component.kind != "vae"
        kept = self.needs.kept(self.key_of(component, device, member), size, fears=fears)
        seen = max(member.activation_bytes[device], member.activation_before[device])
        if seen and (kept is None or seen > kept.num_bytes):
            is_known = size is None or (kept is not None and kept.is_known)
            kept = KeptFree(num_bytes=seen, why="an earlier pass needed it", is_known=is_known)
        if member.is_wary and size is not None and (kept is None or not kept.is_known):
            why = "another part ran out of memory, and what this one needs is not known yet"
            return KeptFree(num_bytes=EVERYTHING, why=why, is_known=False)
        return kept

    def unlearned(self, device: str, *, is_hosted: bool) -> int:
        """Return what is kept free for forwards of unknown needs; 0 where the user or a host says what stays free."""
        found = self.devices[device]
        if found.is_cpu or is_hosted or self.watermarks.is_set(device):
            return 0
        return unlearned_bytes(found.total_bytes())

    def leaves_enough(self, member: Member, size: Size) -> bool:
        """Whether enough is free now for what forwards of a size need, or may need. Asks the driver."""
        for share in member.managed.plan.shares:
            device = self.devices[share.device]
            if device.is_cpu:
                continue
            kept = self.needed(member, share.device, size)
            num_bytes = kept.num_bytes if kept is not None else 0
            if kept is None or not kept.is_known:
                num_bytes = max(num_bytes, self.unlearned(share.device, is_hosted=member.is_hosted))
            if num_bytes > self.free_bytes(device):
                return False
        return True

    def lasting_bytes(self, device: str, idle: str) -> int:
        """Return the bytes of an idle component that stay while its host counts it as loaded: the least to compute."""
        member = self.members.get(idle)
        if member is None or not self.counts_as_loaded(member):
            return 0
        return min(self.ledger.held(idle, device), computable(member, {device: 0})[device])

    def counts_as_loaded(self, member: Member) -> bool:
        """Whether a host loaded a component: it may enter it without loading it again, also where blocks left since."""
        return member.is_hosted and (member.managed.is_loaded or member.was_evicted)

    def foreign_bytes(self, device: Device) -> int:
        """Return the bytes of a device that are in use by anything but torch's allocator in this process."""
        memory = device.memory()
        return memory.total - memory.free - memory.allocated - self.steered.paged_bytes(device.name)

    def foreign_on(self, device: str) -> int:
        """As `foreign_bytes`, by the device's name, and without what other processes with this pack say they use."""
        return self.foreign_bytes(self.devices[device]) - self.neighbours.used_bytes(device)

    def candidates(self, device: Device, member: Member | None) -> list[Candidate]:
        """Return the idle components with bytes on a device, other than the member, also those that the host moves.

        A kept component that holds more than its limit is two: what exceeds the limit leaves in the usual order.
        """
        found = [*self.own_candidates(device, member), *self.steered.candidates(device.name, self.reloads)]
        if not any(candidate.evict_last for candidate in found):
            return found
        return [part for candidate in found for part in self.parted(candidate, device)]

    def parted(self, candidate: Candidate, device: Device) -> list[Candidate]:
        limit = self.limit_of(candidate.component) if candidate.evict_last else None
        most = limit.most(device.total_bytes()) if limit is not None else None
        if most is None or candidate.device_bytes <= most:
            return [candidate]
        beyond = replace(candidate, device_bytes=candidate.device_bytes - most, evict_last=False)
        return [beyond, replace(candidate, device_bytes=most)] if most else [beyond]

    def spared(self, idle: Iterable[Candidate], member: Member, device: str) -> list[Candidate]:
        """Return the idle components on a device that a member streams past ([Note: streaming past])."""
        newcomer = Newcomer(
            num_passes=member.passes_left(self.measures.step),
            next_use=self.forecast.use_after(member.id),
            reload_s_per_byte=self.reloads.of(member, device),
        )
        return [candidate for candidate in idle if newcomer.streams_past(candidate)]

    def spared_by(self, member: Member) -> Iterator[Candidate]:
        """Yield the idle components on the devices of a member that it streams past."""
        for device in member.managed.accelerators:
            yield from self.spared(self.candidates(device, member), member, device.name)

    def limit_of(self, component: str) -> KeepLimit | None:
        """Return up to how many bytes a component is kept."""
        found = self.members.get(component) or self.steered.get(component)
        return found.keep_limit if found is not None else None

    def own_candidates(self, device: Device, member: Member | None) -> list[Candidate]:
        """Return the idle components under management with bytes on a device, other than the member."""
        held_here = ((self.members.get(owner), held) for owner, held in self.ledger.by_component(device.name).items())
        now_s = self.event_log.now_s
        return [
            Candidate(
                component=other.id,
                device_bytes=held,
                last_use=other.last_use,
                idle_s=now_s - other.last_use_s if other.last_use_s is not None else None,
                evict_last=other.evict_last,
                next_use=self.forecast.next_use(other.id),
                reload_s_per_byte=self.reloads.of(other, device.name),
            )
            for other, held in held_here
            if other is not None and other is not member and not other.leases
            if not other.managed.forwards.is_called_unseen()
        ]

    def moved_by_hosts(self) -> list[str]:
        """Return the components that a host loads or moves: they move only where it expects that."""
        hosted = [member.id for member in list(self.members.values()) if member.is_hosted]
        return [*hosted, *(component.id for component in self.steered.components())]

    def computing(self, device: str, member: Member | None) -> tuple[tuple[str, int], ...]:
        """Return the components other than the member that compute and hold bytes of a device, the largest first."""
        found = [
            (owner, held)
            for owner, held in self.ledger.by_component(device).items()
            if (other := self.members.get(owner)) is not None and other is not member and other.leases and held
        ]
        return tuple(sorted(found, key=lambda entry: -entry[1]))

    def machine(
        self,
        member: Member | None,
        ceilings: Mapping[str, int] | None = None,
        *,
        size: Size | None = None,
        freed_bytes: int = 0,
        is_hosted: bool = False,
        evicts: bool = True,
        in_pass: bool = False,
        spares: bool = True,
        given: Mapping[str, int] | None = None,
    ) -> Machine:
        """Return what a member (or a newcomer) may plan with, in live numbers.

        Args:
            size: that of the input that the plan is for, where it is known.
            freed_bytes: the host memory of a newcomer's weights, which packing them gives back.
            is_hosted: whether a newcomer's host says how much it may take.
            evicts: whether the bytes of idle components count as available.
            spares: but not those that the member streams past ([Note: streaming past] in `policies/newcomer.py`).
            in_pass: a pass of the member ends: what its tensors still take counts as available.
            given: what other processes or the newcomers themselves might give of devices counts as available, too.
        """
        is_hosted = member.is_hosted if member is not None else is_hosted
        capacities = []
        computing = [other.id for other in self.members.siblings(member) if other.leases] if member else []
        memory = {name: device.memory() for name, device in self.devices.items()}
        kept = self.kept.held()
        for device in self.devices.values():
            total_bytes, free_bytes, _, allocated_bytes, _ = memory[device.name]
            low = 0 if device.is_cpu else self.mark_of(device.name).low_bytes
            idle = self.candidates(device, member) if evicts else []
            if spares and member is not None and idle:
                spared = self.spared(idle, member, device.name)
                idle = [candidate for candidate in idle if candidate not in spared]
            others = sum(candidate.device_bytes for candidate in idle)
            names = {candidate.component for candidate in idle}
            own = held = self.ledger.held(member.id, device.name) if member else 0
            own += sum(kept.values()) if device.is_cpu else 0  # they leave for it
            if in_pass and member is not None and device.name in member.allocated_at_entry:
                own += max(0, allocated_bytes - member.allocated_at_entry[device.name])
            own += (given or {}).get(device.name, 0)
            steadies = (
                member is not None and member.managed.is_loaded and not (is_hosted or others or ceilings or given)
            )
            available = free_bytes + own + others - low - self.kept_for_sharing(member, device.name)
            capacities.append(
                DeviceCapacity(
                    name=device.name,
                    total_bytes=total_bytes,
                    available_bytes=max(0, available),
                    kept_free_bytes=low,
                    lent_bytes=0 if device.is_cpu else min(low, self.lent_bytes(device.name)),
                    link_bytes_per_s=self.links.get(device.name),
                    ceiling_bytes=(ceilings or {}).get(device.name),
                    held_bytes=held,
                    band_bytes=self.band_of(device) if steadies else 0,
                    computing=self.computing(device.name, member),
                    sibling_bytes=sum(self.ledger.held(other, device.name) for other in computing),
                    pageable_bytes_per_s=self.pageable_links.get(device.name),
                    lasting_bytes=sum(self.lasting_bytes(device.name, name) for name in names) if is_hosted else 0,
                    unlearned_bytes=self.unlearned(device.name, is_hosted=is_hosted),
                    has_float8=device.has_float8,
                    is_integrated=device.is_integrated,
                    speed=device.speed(),
                    idle_bytes=others,
                    peers=self.peers_of(device),
                )
            )

        def needs(component: Component, device: str) -> KeptFree | None:
            if member is not None:
                return self.needed(member, device, size)
            return self.needs.kept(self.key_of(component, device)) if self.needs.known else None

        # How much host memory a member takes is decided when it is added, unless it takes more when it streams.
        pinned = 0
        takes_ram = member is None or member.managed.plan.takes_ram_to_stream
        if takes_ram and len(self.devices) > 1:
            host = HostMemory(total_bytes=memory["cpu"].total, free_bytes=memory["cpu"].free)
            # What the host has page-locked counts towards the same limit.
            pinned = pin_limit_bytes(host, freed_bytes=freed_bytes + kept["pinned"]) + kept["pinned"]
            pinned = max(0, pinned - self.steered.pinned_bytes())
        return Machine(
            devices=tuple(capacities),
            pinned_bytes=pinned,
            host_kept_bytes=self.watermarks.of_host(memory["cpu"].total).low_bytes,
            freed_bytes=max(0, freed_bytes - (given or {}).get("cpu", 0)),  # these are available already
            needs=needs,
        )

    def replan(
        self,
        member: Member,
        ceilings: Mapping[str, int] | None = None,
        *,
        size: Size | None = None,
        evicts: bool = True,
        in_pass: bool = False,
        given: Mapping[str, int] | None = None,
    ) -> ComponentPlan:
        """Return the plan for a member with the memory, needs and times that are known now; moves nothing.

        The member's own plan is returned, and none is made, where it would move nothing.

        Raises:
            InvalidInput, DoesNotFit: as `plan_components`.
        """
        managed = member.managed

        def plan(*, spares: bool) -> ComponentPlan:
            machine = self.machine(
                member, ceilings, size=size, evicts=evicts, in_pass=in_pass, spares=spares, given=given
            )
            chosen = managed.component, managed.plan, machine, member.profile, member.block_seconds
            # Planned again where memory, its host's ceiling, or the known needs and times of forwards have changed.
            return confirm_plan(*chosen) or replan(*chosen)

        try:
            found = plan(spares=True)
        except (DoesNotFit, InvalidInput):
            if not any(self.spared_by(member)):
                raise
            return plan(spares=False)
        # Beside those that it streams past there may be too little room for its forwards.
        is_short = any(self.keeps_too_little(member, share, size) for share in found.shares)
        return plan(spares=False) if is_short and any(self.spared_by(member)) else found

    def keeps_too_little(self, member: Member, share: DevicePlan, size: Size | None) -> bool:
        """Whether a share keeps less free than forwards are known to need."""
        if share.device == "cpu":
            return False
        kept = self.needed(member, share.device, size)
        if kept is None or kept.num_bytes == EVERYTHING:
            return False
        return kept.num_bytes > max(share.keeps_bytes, self.mark_of(share.device).low_bytes)

    def end_run(self, member: Member) -> None:
        """End a run of a member: what only an earlier, larger run needed is no longer kept free."""
        if member.end_run():
            shares = member.managed.plan.shares
            self.needs.decay(self.key_of(member.managed.component, share.device, member) for share in shares)

    def peers_of(self, device: Device) -> tuple[PeerLink, ...]:
        """Return how weights come to a device from every other, as far as that is known; asks the driver once."""
        if device.is_cpu:
            return ()
        if device.name not in self.peers:
            direct = peers_of(device)
            self.peers[device.name] = tuple(
                PeerLink(device=name, is_direct=name in direct, bytes_per_s=known_link(device, other))
                for name, other in self.devices.items()
                if not other.is_cpu and other != device
            )
        return self.peers[device.name]

    def note_peer(self, device: Device, store: Device, speed: float) -> bool:
        """Store the first measured speed of copies from another device; returns whether it was unknown before."""
        links = self.peers_of(device)
        if any(link.device == store.name and link.bytes_per_s for link in links):
            return False
        known = link_bytes_per_s(device, partial(float, speed), store=store)
        self.peers[device.name] = tuple(
            replace(link, bytes_per_s=known) if link.device == store.name else link for link in links
        )
        return True

    def note_link(self, device: Device, speed: float, *, is_pinned: bool) -> bool:
        """Store the first measured speed of copies to a device; returns whether it was unknown before.

        Only the link's own speed, from page-locked memory, is remembered beyond this process: the other depends on what
        else the host does.
        """
        known = self.links if is_pinned else self.pageable_links
        if device.name in known:
            return False
        known[device.name] = link_bytes_per_s(device, partial(float, speed)) if is_pinned else speed
        return True


def computable(member: Member, ceilings: Mapping[str, int]) -> dict[str, int]:
    """Return a host's ceilings, raised to the least with which the component can compute."""
    component, plan = member.managed.component, member.managed.plan
    least = {
        share.device: least_bytes(component, share.blocks, plan.forms, first=index == 0)
        for index, share in enumerate(plan.shares)
    }
    return {device: max(ceiling, least.get(device, 0)) for device, ceiling in ceilings.items()}
