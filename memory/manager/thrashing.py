"""Thrashing: a component that is evicted and loaded again and again, and what would stop that."""

from __future__ import annotations

from ..options.precision import Precision
from ..units import format_bytes
from .live_capacity import LiveCapacity
from .member import Member
from .steered import SteeredComponent

__all__ = ["note_return", "note_uses_of_steered"]

# So many reloads within so many runs are thrashing.
NUM_RETURNS = 3
NUM_RUNS = 5


def note_return(member: Member, capacity: LiveCapacity, device: str) -> None:
    """Note for the run that a component was loaded after bytes of it had been evicted; an event when that is thrashing.

    The event comes once, and again only after as many further reloads.
    """
    lost_bytes = member.returns.take_lost()
    if lost_bytes and capacity.event_log.is_running and not capacity.devices[device].is_cpu:
        count_return(member, capacity, device, lost_bytes)


def note_uses_of_steered(capacity: LiveCapacity) -> None:
    """Note the end of the uses of components that their host moves, and what of them came back for these.

    Enters events as `note_return`. To be called where a node or a run ends, before it is closed.
    """
    is_running, measures = capacity.event_log.is_running, capacity.measures
    needed = measures.end_uses()
    for component in capacity.steered.components():
        if component.take_use():
            held = component.device_bytes()
            # What computes while its weights come is no measure: patches are applied to them then.
            is_steady = not component.returns.has_grown(held)
            measures.note_used(component.id, needed.get(component.id) if is_steady else None)
            back = component.returns.end_use(held)
            for device, num_bytes in back.items() if is_running else ():
                if device in capacity.devices and not capacity.devices[device].is_cpu:
                    count_return(component, capacity, device, num_bytes)


def count_return(component: Member | SteeredComponent, capacity: LiveCapacity, device: str, num_bytes: int) -> None:
    log = capacity.event_log
    log.note_return(component.id, num_bytes)
    runs = component.returns.note_return(log.num_runs, since=log.num_runs - NUM_RUNS + 1)
    if len(runs) >= NUM_RETURNS:
        runs.clear()
        reason = (
            f"evicted and loaded again {NUM_RETURNS} times within {NUM_RUNS} runs, {format_bytes(num_bytes)} the last "
            f"time; {remedy(component, capacity, device, num_bytes)}"
        )
        kind = component.managed.component.kind if isinstance(component, Member) else component.kind
        log.note("thrashing", component.id, num_bytes, device, reason, component_kind=kind)


def remedy(component: Member | SteeredComponent, capacity: LiveCapacity, device: str, lost_bytes: int) -> str:
    """Return what would make room for the bytes that a component loses, in numbers of now."""
    mark = capacity.watermarks.of(device)
    # A host that moves components keeps free what was asked for, and knows of no default.
    is_kept = isinstance(component, Member) or device in capacity.watermarks.all_set()
    if is_kept and mark.high_bytes >= lost_bytes:
        low, high = (format_bytes(max(0, num_bytes - lost_bytes)) for num_bytes in (mark.low_bytes, mark.high_bytes))
        return f"a watermark of {device} of low {low}, high {high} would stop that"
    needed = needed_bytes(component, device)
    for name, other in capacity.devices.items():
        if name != device and not other.is_cpu and needed:
            left = other.free_bytes() - capacity.watermarks.of(name).high_bytes
            if left >= needed:
                free, has = format_bytes(left), format_bytes(needed)
                return f"placement {name} would stop that: {free} are free there, it has {has}"
    held = {owner: num_bytes for owner, num_bytes in limitable(capacity, device).items() if owner != component.id}
    largest = max(held, key=lambda owner: held[owner], default=None)
    if largest is not None and held[largest] > lost_bytes:
        budget = format_bytes(held[largest] - lost_bytes)
        return (
            f"a profile with budget {budget} for {largest} would stop that: it then streams {format_bytes(lost_bytes)}"
        )
    lack = f"{device} lacks {format_bytes(lost_bytes)} for all that is used in turns"
    helps = encoding_saves(capacity, device) >= lost_bytes
    return f"{lack}: precision {Precision.ENCODED.name!r} takes half" if helps else lack


def encoding_saves(capacity: LiveCapacity, device: str) -> int:
    """Return by how much less the components on a device would take of it encoded; half of what its host moves."""
    saved = sum(component.wanted_bytes().get(device, 0) // 2 for component in capacity.steered.components())
    for member in list(capacity.members.values()):
        managed = member.managed
        encoded = managed.encoded_bytes if managed.plan.precision.is_as_stored else None
        if encoded is not None and managed.plan.shares[0].device == device:
            saved += max(0, managed.plan.total_bytes - encoded)
    return saved


def needed_bytes(component: Member | SteeredComponent, device: str) -> int:
    """Return the bytes that all of a component takes of a device; 0 where its host does not tell."""
    if isinstance(component, Member):
        return component.managed.component.weight_bytes
    return component.wanted_bytes().get(device, 0)


def limitable(capacity: LiveCapacity, device: str) -> dict[str, int]:
    """Return the bytes that components on a device have which a budget can limit."""
    steered = {component.id: n for component, n in capacity.steered.held(device) if component.takes_budgets}
    return {**capacity.ledger.by_component(device), **steered}
