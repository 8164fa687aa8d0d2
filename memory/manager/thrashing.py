"""Thrashing: a component that is evicted and loaded again and again, and what would stop that."""

from __future__ import annotations

from ..units import format_bytes
from .live_capacity import LiveCapacity
from .member import Member

__all__ = ["note_return"]

# So many reloads within so many runs are thrashing.
NUM_RETURNS = 3
NUM_RUNS = 5


def note_return(member: Member, capacity: LiveCapacity, device: str) -> None:
    """Note that a component was loaded after bytes of it had been evicted; enters an event when that is thrashing.

    The event comes once, and again only after as many further reloads.
    """
    log = capacity.event_log
    lost_bytes = member.take_evicted()
    if not lost_bytes or not log.is_running or capacity.devices[device].is_cpu:
        return
    returns = member.note_return(log.num_runs, since=log.num_runs - NUM_RUNS + 1)
    if len(returns) >= NUM_RETURNS:
        returns.clear()
        reason = (
            f"evicted and loaded again {NUM_RETURNS} times within {NUM_RUNS} runs, {format_bytes(lost_bytes)} the last "
            f"time; {remedy(member, capacity, device, lost_bytes)}"
        )
        kind = member.managed.component.kind
        log.note("thrashing", member.id, lost_bytes, device, reason, component_kind=kind)


def remedy(member: Member, capacity: LiveCapacity, device: str, lost_bytes: int) -> str:
    """Return what would make room for the bytes that a component loses, in numbers of now."""
    mark = capacity.watermarks.of(device)
    if mark.high_bytes >= lost_bytes:
        low, high = (format_bytes(max(0, num_bytes - lost_bytes)) for num_bytes in (mark.low_bytes, mark.high_bytes))
        return f"a watermark of {device} of low {low}, high {high} would stop that"
    needed = member.managed.component.weight_bytes
    for name, other in capacity.devices.items():
        if name != device and not other.is_cpu:
            left = other.free_bytes() - capacity.watermarks.of(name).high_bytes
            if left >= needed:
                free, has = format_bytes(left), format_bytes(needed)
                return f"placement {name} would stop that: {free} are free there, it has {has}"
    held = {owner: num_bytes for owner, num_bytes in capacity.ledger.by_component(device).items() if owner != member.id}
    largest = max(held, key=lambda owner: held[owner], default=None)
    if largest is not None and held[largest] > lost_bytes:
        budget = format_bytes(held[largest] - lost_bytes)
        return (
            f"a profile with budget {budget} for {largest} would stop that: it then streams {format_bytes(lost_bytes)}"
        )
    return f"{device} lacks {format_bytes(lost_bytes)} for all that is used in turns: precision 'fp8 scaled' takes half"
