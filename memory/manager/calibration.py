"""Calibration: what passes tell the plans to come of block times, copy speeds and memory beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ..errors import NO_PLAN, DoesNotFit, InvalidInput
from ..planner.plan import ComponentPlan, DevicePlan
from ..planner.sizes import least_bytes
from ..runtime.forwards.forward_pass import FailedTry, Pass
from ..runtime.forwards.input_size import Size
from ..transfer.devices import Device
from ..units import format_bytes
from .live_capacity import LiveCapacity
from .member import Member
from .oom_message import Shortage, add_line, read_shortage, tell_holders

__all__ = ["learn_failed_load", "learn_failed_try", "learn_needs", "learn_times"]

# The part of a device, a 256th, that others have to take during a pass to count as the cause of its failure.
NOTICEABLE = 256


def learn_times(member: Member, capacity: LiveCapacity) -> None:
    """Store the times that a component's passes measured. With the times of all its blocks it is planned again."""
    clock = member.managed.forwards.clock
    for call, call_s in clock.take() if clock.ended else ():
        capacity.note_call(member, call, call_s, of_blocks=False)
    for share in member.managed.shares:
        seconds = share.times.take()
        if seconds is not None:
            member.note_times(share.device.name, seconds)
            if share.times.call is not None:
                capacity.note_call(member, share.times.call, sum(seconds.values()), of_blocks=True)
        for is_pinned, speed in share.take_speeds().items():
            if capacity.note_link(share.device, speed, is_pinned=is_pinned):
                member.outdate_plan()
        way = share.stored.peers.take_speed() if share.stored is not None else None
        if way is not None and share.stored is not None and capacity.note_peer(share.device, share.stored.device, way):
            member.outdate_plan()


def learn_needs(member: Member, capacity: LiveCapacity, current: Pass, needed: Mapping[str, int]) -> None:
    """Store what a pass needed beside the weights, or that it ran out of memory; later plans use it.

    Args:
        needed: its peaks by device.
    """
    if current.error is not None:
        failed = current.failed_try
        if failed is None or failed.error is not current.error:
            failed = learn_failed_try(member, capacity, current, needed, current.error)
        if failed is not None:
            tell_failure(member, capacity, current.size, failed)
    elif current.is_completed:
        learn_success(member, capacity, current.size, needed)


def learn_success(member: Member, capacity: LiveCapacity, size: Size, needed: Mapping[str, int]) -> None:
    was_short = False
    for share in member.managed.shares:
        if share.device.is_cpu:
            continue
        key = capacity.key_of(member.managed.component, share.device.name, member)
        need = capacity.needs.get(key, size)
        was_short |= need.is_open
        if need.succeed(needed.get(share.device.name, 0), partial(free_at_entry, member, capacity, share.device)):
            capacity.needs.change(key, size)
    if not capacity.event_log.is_running:
        if member.count_pass():
            capacity.end_run(member)
        if was_short:  # within a run, with the next one: this one may yet need more
            member.outdate_plan()


def learn_failed_try(
    member: Member, capacity: LiveCapacity, current: Pass, needed: Mapping[str, int], error: BaseException
) -> FailedTry | None:
    """Store what a failed allocation shows, and plan the next pass again; None where a device was not short.

    Notes the failure on the pass, so that it is learned once.
    """
    shortage = read_shortage(error)
    share = find_short(member.managed.plan, capacity, shortage) if shortage is not None else None
    if shortage is None or share is None:
        return None
    size, name = current.size, share.device
    device = capacity.devices[name]
    taken = taken_by_others(member, capacity, device, shortage)
    member.note_shortage()
    what = what_happened(member, capacity, device, shortage)
    is_excused = bool(taken) and member.excuse(size)
    if is_excused:
        line = f"{what}; another program took {format_bytes(taken)} meanwhile"
    else:
        key = capacity.key_of(member.managed.component, name, member)
        free_bytes = free_at_entry(member, capacity, device)
        if taken:  # again: a library takes it past torch, and will the next time
            free_bytes = max(free_bytes, needed.get(name, 0) + (shortage.asked_bytes or 0)) + taken
        need = capacity.needs.get(key, size)
        need.fail(free_bytes, is_least=is_least(member, share) and free_bytes >= most_free(member, capacity, share))
        capacity.needs.change(key, size)
        for sibling in capacity.members.siblings(member):
            sibling.beware()
        line = f"{what}; beside its weights {format_bytes(free_bytes)} had been free"
    failed = FailedTry(
        error=error,
        shown=shortage.error,
        device=name,
        asked_bytes=shortage.asked_bytes or 0,
        line=line,
        is_excused=is_excused,
    )
    current.note_failed_try(failed)
    return failed


def tell_failure(member: Member, capacity: LiveCapacity, size: Size, failed: FailedTry) -> None:
    """Enter the failure of a pass in the event log, and add to the error what the next run does."""
    next_run = (
        "the next run plans with what is left" if failed.is_excused else promise(member, capacity, failed.device, size)
    )
    line = f"{failed.line}; {next_run}"
    capacity.event_log.note("error", member.id, failed.asked_bytes, failed.device, line)
    add_line(failed.shown, f"Highwater: {line}")


def what_happened(member: Member, capacity: LiveCapacity, device: Device, shortage: Shortage) -> str:
    """Say that a component ran out of memory: how much was asked for, and what holds the device's memory."""
    asked = f"{format_bytes(shortage.asked_bytes)} more were asked for" if shortage.asked_bytes else "no more was free"
    memory, steered = device.memory(), capacity.steered.by_component(device.name)
    components = {**capacity.ledger.by_component(device.name), **steered}
    beside_allocator = capacity.steered.paged_bytes(device.name)
    tensors = memory.allocated - (sum(components.values()) - beside_allocator)
    holders = tell_holders(memory.total, memory.free, components, tensors)
    return f"{member.id} ran out of memory on {device.name}: {asked}; {holders}"


def learn_failed_load(member: Member, capacity: LiveCapacity, plan: ComponentPlan, error: BaseException) -> None:
    """Note that loading failed although the plan fitted: the next load takes the least that can compute."""
    shortage = read_shortage(error)
    if shortage is not None and plan.store and capacity.devices[plan.store].torch_device.index == shortage.device_index:
        member.outdate_plan()
        member.note_failed_load(plan.store)
        what = what_happened(member, capacity, capacity.devices[plan.store], shortage)
        add_line(error, f"Highwater: {what}; that was while it was stored there; the next run stores nothing there")
        return
    share = find_short(plan, capacity, shortage) if shortage is not None else None
    if shortage is None or share is None:
        return
    member.outdate_plan()
    if not is_least(member, share):
        member.note_failed_load(share.device)
        what = what_happened(member, capacity, capacity.devices[share.device], shortage)
        line = f"{what}; that was while it was loaded; the next run loads as little of it as can compute"
        add_line(error, f"Highwater: {line}")


def find_short(plan: ComponentPlan, capacity: LiveCapacity, shortage: Shortage) -> DevicePlan | None:
    """Return the share whose device ran out of memory; None if the component does not use that device."""
    shares = [share for share in plan.shares if not capacity.devices[share.device].is_cpu]
    if shortage.device_index is None:
        return min(shares, key=lambda share: capacity.devices[share.device].free_bytes(), default=None)
    found = (share for share in shares if capacity.devices[share.device].torch_device.index == shortage.device_index)
    return next(found, None)


def taken_by_others(member: Member, capacity: LiveCapacity, device: Device, shortage: Shortage) -> int:
    """Return what others took of a device since the plan was made, if the allocation would have fitted before."""
    foreign = capacity.foreign_bytes(device)
    free_bytes = device.free_bytes()
    if shortage.free_bytes is not None and shortage.held_bytes is not None:
        foreign = max(foreign, device.total_bytes() - shortage.free_bytes - shortage.held_bytes)
        free_bytes = shortage.free_bytes
    taken = foreign - member.foreign_at_plan.get(device.name, foreign)
    missing = (shortage.asked_bytes or 0) - free_bytes
    return taken if taken >= max(missing, device.total_bytes() // NOTICEABLE) else 0


def free_at_entry(member: Member, capacity: LiveCapacity, device: Device) -> int:
    """Return what was free beside all weights when the component was entered."""
    foreign = capacity.foreign_bytes(device)
    foreign = max(foreign, member.foreign_at_plan.get(device.name, foreign))
    return max(0, device.total_bytes() - foreign - member.allocated_at_entry.get(device.name, 0))


def is_least(member: Member, share: DevicePlan) -> bool:
    """Whether a share has only the least bytes that it needs to compute."""
    managed = member.managed
    is_first = share.device == managed.plan.shares[0].device
    return share.device_bytes <= least_bytes(managed.component, share.blocks, managed.plan.forms, first=is_first)


def most_free(member: Member, capacity: LiveCapacity, share: DevicePlan) -> int:
    """Return what would be free of a share's device beside what it holds, if every idle component left."""
    device = capacity.machine(member, in_pass=True).device(share.device)
    return device.available_bytes + device.kept_free_bytes - device.lasting_bytes - share.device_bytes


def promise(member: Member, capacity: LiveCapacity, device: str, size: Size) -> str:
    """Return what the next run does about a failure, and what helps where it can do nothing."""
    try:
        plan = capacity.replan(member, size=size, in_pass=True)
    except (DoesNotFit, InvalidInput) as error:
        return str(error)
    share = next(share for share in plan.shares if share.device == device)
    if share.keeps_bytes:
        return f"the next run keeps {format_bytes(share.keeps_bytes)} free for {member.id}"
    kept = capacity.needed(member, device, size)
    tried = kept.futile_bytes if kept is not None else 0
    free_before = free_at_entry(member, capacity, capacity.devices[device])
    elsewhere = find_remedies(member, capacity, share, max(tried, free_before))
    remedies = ["a smaller size", "tiles", "fewer frames", *elsewhere]
    then = "it as usual"
    if plan.tier == "device":
        remedies.append("tier 'pinned'")
        then = "all of it again, as tier 'device' asks for"
    before = f"with {format_bytes(tried)} free it failed, too, and " if tried > free_before else ""
    choose = f"{', '.join(remedies[:-1])}, or {remedies[-1]}"
    return f"{before}{NO_PLAN}choose {choose}; the next run loads {then}"


def find_remedies(member: Member, capacity: LiveCapacity, share: DevicePlan, tried_bytes: int) -> list[str]:
    """Return on which device more would stay free beside a share's least form than what was too little.

    No precision leaves more: encoded, a block takes scratch to be widened in, more than it saves.
    """
    managed = member.managed
    is_first = share.device == managed.plan.shares[0].device
    least = least_bytes(managed.component, share.blocks, managed.plan.forms, first=is_first)
    taken = {part.device for part in managed.plan.shares}
    room = {
        other.name: other.available_bytes + other.kept_free_bytes - least
        for other in capacity.machine(member, in_pass=True).accelerators
        if other.name not in taken
    }
    roomiest = max(room, key=lambda name: room[name], default=None)
    return [f"placement {roomiest}"] if roomiest is not None and room[roomiest] > tried_bytes else []
