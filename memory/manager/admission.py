"""The room on the devices: how much anyone may plan with, and who has to leave for whom.

[Note: admission] A component is admitted when it is entered, never before. It may plan with what is free now,
with its own bytes, and with those of idle components, less what the watermark keeps free. If loading it would
leave less than ``low`` free, idle components leave, least recently used first and block by block, until ``high``
is free. What the forwards of the newcomer are known to need, or its kind may need, raises both marks, as far as it
can compute beside that ([Note: needs] in `needs.py`). Between the marks nothing moves. A component that computes holds
a lease and is never a victim. What the profile of the newcomer leaves free raises both marks; and where it has a budget
for the device, idle siblings, those managed by the same call, leave until all of them together are within it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial

from ..errors import DoesNotFit, InvalidInput, UnsafeState, allowed_values, require
from ..options.placement import canonical_device
from ..planner.capacity import EVERYTHING, DeviceCapacity, KeptFree, Machine
from ..planner.plan import ComponentPlan, plan_holds, replan
from ..planner.sizes import least_bytes
from ..runtime.input_size import Size
from ..runtime.ledger import Ledger
from ..transfer.devices import Device, HostMemory
from ..transfer.link_speed import known_link
from ..transfer.pinned_memory import pin_limit_bytes
from ..units import format_bytes
from ..weights.component import Component
from .event_log import EventLog
from .eviction import Candidate, EvictionPolicy, Victim
from .member import Member
from .needs import Key, Needs, digest_component, digest_device
from .watermark import Watermark, default_watermark, unlearned_bytes

__all__ = ["Admission", "computable"]


class Admission:
    """Live memory as plans see it, and the eviction that makes more of it. The caller holds the manager's lock.

    Args:
        members: those under management, by id; the registry adds and removes them.
    """

    def __init__(
        self,
        devices: dict[str, Device],
        members: dict[str, Member],
        policy: EvictionPolicy,
        ledger: Ledger,
        event_log: EventLog,
    ) -> None:
        self.devices = devices
        self.members = members
        self.policy = policy
        self.ledger = ledger
        self.event_log = event_log
        self.watermarks: dict[str, Watermark] = {}
        self.needs = Needs()
        self.device_digests: dict[str, str] = {}
        self.links = {
            name: speed
            for name, device in devices.items()
            if not device.is_cpu and (speed := known_link(device)) is not None
        }
        """Bytes per second from page-locked memory, as far as they were ever measured."""
        self.pageable_links: dict[str, float] = {}
        """Those from other host memory, as far as they were measured in this process."""
        self.epoch = 0
        """Counts changes of what there is to share; a plan of an older epoch is looked at again."""

    # -- what there is

    def set_watermark(self, device: str, low_bytes: int, high_bytes: int) -> None:
        """Set the VRAM watermark (keep free) of one accelerator, or of all with ``*``; takes effect at once.

        Raises:
            InvalidInput: an unknown device, or marks that are not 0 <= low <= high <= total.
        """
        require(device, str, what="watermark device", allowed="a text, such as gpu:0 or *")
        accelerators = [name for name, found in self.devices.items() if not found.is_cpu]
        name = canonical_device(device)
        if name != "*" and name not in accelerators:
            raise InvalidInput(f"watermark device {device!r} is not here; {allowed_values(name, ['*', *accelerators])}")
        mark = Watermark(low_bytes=low_bytes, high_bytes=high_bytes)
        targets = accelerators if name == "*" else [name]
        for target in targets:
            total = self.devices[target].total_bytes()
            if high_bytes > total:
                raise InvalidInput(
                    f"watermark high={format_bytes(high_bytes)} exceeds {target}, "
                    f"allowed is up to {format_bytes(total)}"
                )
        for target in targets:
            if self.watermarks.get(target) == mark:
                continue
            self.watermarks[target] = mark
            reason = f"keep free: low {format_bytes(low_bytes)}, high {format_bytes(high_bytes)}"
            self.event_log.note("watermark", "", low_bytes, target, reason)
            self.make_room(self.devices[target], 0, None)
            self.epoch += 1

    def watermark(self, device: str) -> Watermark:
        """Return the marks of a device: those set, else the default for its size."""
        if device not in self.watermarks:
            return default_watermark(self.devices[device].total_bytes())
        return self.watermarks[device]

    def key_of(self, component: Component, device: str, member: Member | None = None) -> Key:
        """Return what the needs of a component on a device are known by."""
        digest = member.digest if member is not None else None
        if digest is None:
            digest = digest_component(component)
            if member is not None:
                member.digest = digest
        if device not in self.device_digests:
            self.device_digests[device] = digest_device(self.devices[device])
        return digest, self.device_digests[device]

    def kept_for_sharing(self, member: Member | None, device: str) -> int:
        """Return the bytes that a member leaves free: the least that its lenders need, and the needs of its borrowers.

        A borrower is loaded before its lenders ([Note: sharing] in `weights/sharing.py`).
        """
        if member is None or self.devices[device].is_cpu:
            return 0
        num_bytes = sum(computable(lender, {device: 0})[device] for lender in member.lenders if not lender.leases)
        for other in self.borrowers(member):
            if other.leases:
                shares = other.managed.plan.shares
                num_bytes += sum(max(0, share.keeps_bytes) for share in shares if share.device == device)
        return num_bytes

    def needed(self, member: Member, device: str, size: Size | None = None) -> KeptFree | None:
        """Return what is known of the needs of a member's forwards, of one size or of those that it had last."""
        if device in member.short_on:
            return KeptFree(num_bytes=EVERYTHING, why="loading it ran out of memory")
        component = member.managed.component
        # A host that catches the failure of a VAE goes on in tiles: until they come, that tells nothing.
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
        """Return what is kept free for forwards of which nothing is known: 0 where a user or a host says what is."""
        found = self.devices[device]
        if found.is_cpu or is_hosted or device in self.watermarks:
            return 0
        return unlearned_bytes(found.total_bytes())

    def leaves_enough(self, member: Member, size: Size) -> bool:
        """Whether so much is free now as forwards of a size are known to need, or may need. Asks the driver."""
        for share in member.managed.plan.shares:
            device = self.devices[share.device]
            if device.is_cpu:
                continue
            kept = self.needed(member, share.device, size)
            num_bytes = kept.num_bytes if kept is not None else 0
            if kept is None or not kept.is_known:
                num_bytes = max(num_bytes, self.unlearned(share.device, is_hosted=member.is_hosted))
            if num_bytes > device.free_bytes():
                return False
        return True

    def lasting_bytes(self, device: str, idle: Candidate) -> int:
        """Return what an idle component keeps of a device to be able to compute, where its host believes it loaded."""
        member = self.members[idle.component]
        if not (member.is_hosted and member.managed.is_loaded):
            return 0
        return min(idle.device_bytes, computable(member, {device: 0})[device])

    def foreign_bytes(self, device: Device) -> int:
        """Return what others than torch's allocator have of a device: other programs, the driver, other libraries."""
        memory = device.memory()
        return memory.total - memory.free - memory.allocated

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
    ) -> Machine:
        """Return what a member (or a newcomer) may plan with, in live numbers.

        Args:
            size: that of the input that the plan is for, where it is known.
            freed_bytes: the host memory that a newcomer's weights take now, and give back as they are packed.
            is_hosted: whether a newcomer's host says how much it may take.
            evicts: whether the bytes of idle components count.
            in_pass: a pass of the member ends, whose tensors may still be there: as if they were not.
        """
        is_hosted = member.is_hosted if member is not None else is_hosted
        capacities = []
        computing = [other.id for other in self.siblings(member) if other.leases] if member else []
        memory = {name: device.memory() for name, device in self.devices.items()}
        for device in self.devices.values():
            total_bytes, free_bytes, _, allocated_bytes, _ = memory[device.name]
            low = 0 if device.is_cpu else self.watermark(device.name).low_bytes
            idle = self.candidates(device, member) if evicts else []
            others = sum(candidate.device_bytes for candidate in idle)
            own = self.ledger.held(member.id, device.name) if member else 0
            if in_pass and member is not None and device.name in member.allocated_at_entry:
                own += max(0, allocated_bytes - member.allocated_at_entry[device.name])
            available = free_bytes + own + others - low - self.kept_for_sharing(member, device.name)
            capacities.append(
                DeviceCapacity(
                    name=device.name,
                    total_bytes=total_bytes,
                    available_bytes=max(0, available),
                    kept_free_bytes=low,
                    link_bytes_per_s=self.links.get(device.name),
                    ceiling_bytes=(ceilings or {}).get(device.name),
                    sibling_bytes=sum(self.ledger.held(other, device.name) for other in computing),
                    pageable_bytes_per_s=self.pageable_links.get(device.name),
                    lasting_bytes=sum(map(partial(self.lasting_bytes, device.name), idle)) if is_hosted else 0,
                    unlearned_bytes=self.unlearned(device.name, is_hosted=is_hosted),
                )
            )

        def needs(component: Component, device: str) -> KeptFree | None:
            if member is not None:
                return self.needed(member, device, size)
            return self.needs.kept(self.key_of(component, device)) if self.needs.known else None

        # What a member keeps in host memory is decided when it is added.
        pinned = 0
        if member is None and len(self.devices) > 1:
            host = HostMemory(total_bytes=memory["cpu"].total, free_bytes=memory["cpu"].free)
            pinned = pin_limit_bytes(host, freed_bytes=freed_bytes)
        return Machine(devices=tuple(capacities), pinned_bytes=pinned, needs=needs)

    def replan(
        self,
        member: Member,
        ceilings: Mapping[str, int] | None = None,
        *,
        size: Size | None = None,
        evicts: bool = True,
        in_pass: bool = False,
    ) -> ComponentPlan:
        """Return what a member would be brought to now, by all that is known of it; moves nothing.

        Raises:
            InvalidInput, DoesNotFit: as `plan_components`.
        """
        managed = member.managed
        machine = self.machine(member, ceilings, size=size, evicts=evicts, in_pass=in_pass)
        if member.block_seconds is None and plan_holds(managed.component, managed.plan, machine, member.profile):
            return managed.plan
        # A second plan: memory, its host's ceiling or what forwards are known to need has changed since the first.
        return replan(managed.component, managed.plan, machine, member.profile, member.block_seconds)

    def turn(self, member: Member) -> None:
        """A run of a member is over: what an older, larger one needed is no reason any more to keep that."""
        if member.activation_bytes:
            member.activation_before, member.activation_bytes = member.activation_bytes, Counter()
            member.short_on.clear()
            member.is_wary = False
            shares = member.managed.plan.shares
            self.needs.decay(self.key_of(member.managed.component, share.device, member) for share in shares)

    # -- who leaves

    def siblings(self, member: Member) -> list[Member]:
        """Return the others that came under management by the same call."""
        return [other for other in member.call if other is not member and self.members.get(other.id) is other]

    def borrowers(self, member: Member) -> list[Member]:
        """Return the components that borrow weights of this one."""
        return [other for other in member.borrowers if self.members.get(other.id) is other]

    def candidates(self, device: Device, member: Member | None) -> list[Candidate]:
        """Return the idle components with bytes on a device, other than the member."""
        held_here = ((self.members.get(owner), held) for owner, held in self.ledger.by_component(device.name).items())
        now_s = self.event_log.now_s
        return [
            Candidate(
                component=other.id,
                device_bytes=held,
                last_use=other.last_use,
                idle_s=now_s - other.last_use_s if other.last_use_s is not None else None,
                evict_last=other.evict_last,
            )
            for other, held in held_here
            if other is not None and other is not member and not other.leases
        ]

    def victims(self, device: Device, member: Member | None) -> list[Victim]:
        """Return the same in the order in which the policy wants them to leave."""
        return self.policy.order(self.candidates(device, member))

    def make_room(self, device: Device, need_bytes: int, member: Member | None, *, keeps_bytes: int = 0) -> None:
        """Evict idle components if the need would leave less than the low mark free, until the high mark is.

        Args:
            keeps_bytes: what stays free for the member's forwards. A host's other components can compute beside it.
        """
        mark, asked = self.watermark(device.name), self.left_free(device, member)
        self.clear(device, need_bytes, member, max(mark.low_bytes, asked), max(mark.high_bytes, asked))
        if keeps_bytes > 0 and member is not None:
            self.clear(device, need_bytes, member, keeps_bytes, keeps_bytes, allow_unrunnable=not member.is_hosted)

    def clear(
        self,
        device: Device,
        need_bytes: int,
        member: Member | None,
        low: int,
        high: int,
        *,
        allow_unrunnable: bool = True,
    ) -> None:
        """Evict idle components if the need would leave less than the one free, until the other is; as `evict`."""
        left = device.free_bytes() - need_bytes
        if left >= low:
            return
        need = f"{member.id} needs {format_bytes(max(0, need_bytes))}" if member else "the watermark was raised"
        for victim in self.victims(device, member):
            if left >= high:
                return
            free = f"{format_bytes(device.free_bytes())} free, {format_bytes(low)} reserved"
            reason = f"{need}; {free}; {victim.reason}"
            other = self.members[victim.component]
            left += self.evict(other, device, high - left, reason, allow_unrunnable=allow_unrunnable)

    def left_free(self, device: Device, member: Member | None) -> int:
        """Return the bytes of a device that the member's profile leaves free."""
        if member is None:
            return 0
        component = member.managed.component
        return member.profile.left_free(device.name, component.name, component.kind, device.total_bytes())

    def clear_left_free(self, member: Member) -> bool:
        """Evict what idle components took of the bytes that a loaded member's profile leaves free.

        Returns whether it leaves any free.
        """
        if not (member.profile.budgets or member.profile.reserve) or len(self.members) == 1:
            return False
        devices = [device for device in member.managed.accelerators if self.left_free(device, member)]
        for device in devices:
            self.make_room(device, 0, member)
        return bool(devices)

    def give_headroom(self, member: Member, size: Size) -> None:
        """Keep free what forwards of a size are known to need, of a component that its host has loaded.

        Others give up what they can compute without, then it streams more itself; its host is told of both.
        """
        if not member.managed.is_loaded:
            return
        try:
            wanted = self.replan(member, size=size)
        except (DoesNotFit, InvalidInput):
            return
        for share in wanted.shares:
            missing = share.keeps_bytes - self.devices[share.device].free_bytes()
            if missing > 0 and share.device != "cpu":
                reason = f"{member.id} needs more beside its weights, {format_bytes(share.keeps_bytes)}"
                self.free_memory(share.device, missing, reason, exclude=[member], allow_unrunnable=False)
        held = {share.device: self.ledger.held(member.id, share.device) for share in member.managed.plan.shares}
        try:
            plan = self.replan(member, computable(member, held), size=size, evicts=False)
        except (DoesNotFit, InvalidInput):
            return
        member.managed.load(plan)
        for share in plan.shares:
            freed = held[share.device] - self.ledger.held(member.id, share.device)
            if freed > 0:
                reason = next((reason for reason in share.reasons if reason.startswith("keeps ")), "needs more room")
                self.event_log.note("evict", member.id, freed, share.device, reason)
        self.event_log.sample()

    def keep_budget(self, device: Device, device_bytes: int, member: Member) -> None:
        """Evict idle siblings if with so many bytes of the member they held more than its budget for the device."""
        component = member.managed.component
        for budget in member.profile.budgets_for(device.name, component.name, component.kind):
            most = budget.most(device.total_bytes())
            if budget.target != device.name or most is None:
                continue
            siblings = {other.id for other in self.siblings(member)}
            held = sum(self.ledger.held(sibling, device.name) for sibling in siblings)
            for victim in self.victims(device, member):
                excess = held + device_bytes - most
                if excess > 0 and victim.component in siblings:
                    reason = (
                        f"{member.id} needs {format_bytes(device_bytes)}, others {format_bytes(held)}; "
                        f"budget {budget} is for all of them together; {victim.reason}"
                    )
                    held -= self.evict(self.members[victim.component], device, excess, reason)

    def free_memory(
        self,
        device_name: str,
        num_bytes: int,
        cause: str,
        *,
        exclude: Collection[Member] = (),
        allow_unrunnable: bool = True,
    ) -> int:
        """Evict idle components until so many bytes of a device are free again; returns what really was freed.

        Args:
            cause: who needs the bytes, for the event log; the policy says why it is this component that gives them.
            exclude: components that their host is about to load. The room is for them, however long they were idle.
            allow_unrunnable: whether hosted components may lose the form in which they can compute.
        """
        freed = 0
        device = self.devices[device_name]
        for victim in self.victims(device, None):
            if freed >= num_bytes:
                break
            member, reason = self.members[victim.component], f"{cause}; {victim.reason}"
            if member not in exclude:
                freed += self.evict(member, device, num_bytes - freed, reason, allow_unrunnable=allow_unrunnable)
        return freed

    def evict(
        self, member: Member, device: Device, num_bytes: int, reason: str, *, allow_unrunnable: bool = True
    ) -> int:
        """Drop at least so many bytes of an idle component if it has them; returns the bytes freed.

        Args:
            allow_unrunnable: whether it may lose the form in which it can compute.
        """
        if member.leases:
            raise UnsafeState(f"{member.id} computes and cannot be evicted")
        held = self.ledger.held(member.id, device.name)
        if not (
            member.is_hosted and self.stream_more(member, device, held - num_bytes, allow_unrunnable=allow_unrunnable)
        ):
            member.managed.shrink(device.name, num_bytes)
        left = self.ledger.held(member.id, device.name)
        freed = held - left
        rest = f"{format_bytes(left)} of it stay" if left else "nothing of it stays"
        self.event_log.note("evict", member.id, freed, device.name, f"{reason}; {rest}")
        self.event_log.sample()
        self.epoch += 1
        return freed

    def stream_more(self, member: Member, device: Device, ceiling: int, *, allow_unrunnable: bool) -> bool:
        """Bring a component down to so many bytes in a form that can compute; False if it has none so small.

        Its host believes it loaded and may enter it without loading it again. Not ``allow_unrunnable``: its least form
        will do.
        """
        ceilings = {device.name: ceiling}
        try:
            plan = self.replan(member, ceilings if allow_unrunnable else computable(member, ceilings))
        except (DoesNotFit, InvalidInput):
            return not allow_unrunnable
        member.managed.load(plan)
        return True


def computable(member: Member, ceilings: Mapping[str, int]) -> dict[str, int]:
    """Return a host's ceilings, none of them under what the component needs to compute at all."""
    component, plan = member.managed.component, member.managed.plan
    least = {
        share.device: least_bytes(component, share.blocks, plan.forms, first=index == 0)
        for index, share in enumerate(plan.shares)
    }
    return {device: max(ceiling, least.get(device, 0)) for device, ceiling in ceilings.items()}
