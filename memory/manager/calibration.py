"""What passes tell, for the plans to come: times of blocks, speeds of copies, what they need beside the weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial

from ..errors import DoesNotFit, InvalidInput
from ..planner.plan import ComponentPlan, DevicePlan
from ..planner.sizes import least_bytes
from ..runtime.forward_pass import Pass
from ..runtime.input_size import Size
from ..transfer.devices import Device
from ..transfer.link_speed import link_bytes_per_s
from ..units import format_bytes
from .admission import Admission
from .member import Member
from .oom_message import Shortage, add_line, read_shortage

__all__ = ["learn_failed_load", "learn_needs", "learn_times"]

# Outside of runs, after so many passes what an older, larger one needed counts less.
PASSES_OF_A_RUN = 64
# Of a device, what others have to take in the middle of a pass to be the cause of its failure: a 256th.
NOTICEABLE = 256


def learn_times(member: Member, admission: Admission) -> None:
    """Take what was timed of a component's passes; a streamed one is planned again when it has all."""
    shares = member.managed.shares
    for share in shares:
        seconds = share.take_times()
        if seconds is not None:
            member.taken_seconds[share.device.name] = seconds
        for is_pinned, speed in share.take_speeds().items():
            known = admission.links if is_pinned else admission.pageable_links
            if share.device.name not in known:
                # Only that of the link itself is worth remembering; the other depends on what else the host does.
                known[share.device.name] = link_bytes_per_s(share.device, partial(float, speed)) if is_pinned else speed
                member.planned_in_epoch = -1
    if member.taken_seconds and all(share.device.name in member.taken_seconds for share in shares):
        taken = [member.taken_seconds.pop(share.device.name).items() for share in shares]
        member.block_seconds = dict(itertools.chain(*taken))
        member.planned_in_epoch = -1


def learn_needs(member: Member, admission: Admission, current: Pass, needed: Mapping[str, int]) -> None:
    """Take what a pass needed beside the weights, or that it ran out of memory, for plans to come.

    Args:
        needed: its peaks by device.
    """
    if current.error is not None:
        shortage = read_shortage(current.error)
        if shortage is not None:
            learn_shortage(member, admission, current.size, needed, shortage)
    elif current.is_completed:
        learn_success(member, admission, current.size, needed)


def learn_success(member: Member, admission: Admission, size: Size, needed: Mapping[str, int]) -> None:
    was_short = False
    for share in member.managed.shares:
        if share.device.is_cpu:
            continue
        key = admission.key_of(member.managed.component, share.device.name, member)
        need = admission.needs.get(key, size)
        was_short |= need.is_open
        if need.succeed(needed.get(share.device.name, 0), partial(free_at_entry, member, admission, share.device)):
            admission.needs.change(key, size)
    if not admission.event_log.is_running:
        member.num_passes += 1
        if member.num_passes >= PASSES_OF_A_RUN:
            member.num_passes = 0
            admission.turn(member)
        if was_short:  # else with the next run: one that is under way may yet need more
            member.planned_in_epoch = -1


def learn_shortage(
    member: Member, admission: Admission, size: Size, needed: Mapping[str, int], shortage: Shortage
) -> None:
    """Take what a failed allocation tells, plan the next pass anew, and say in the error what that will keep free."""
    share = find_short(member.managed.plan, admission, shortage)
    if share is None:
        return
    name = share.device
    device = admission.devices[name]
    taken = taken_by_others(member, admission, device, shortage)
    member.planned_in_epoch = -1
    member.settled.clear()
    asked = f"{format_bytes(shortage.asked_bytes)} more were asked for" if shortage.asked_bytes else "no more was free"
    what = f"{member.id} ran out of memory on {name}: {asked}"
    if taken and size not in member.spoiled:
        member.spoiled.add(size)
        line = f"{what}, another program took {format_bytes(taken)} meanwhile; the next run plans with what is left"
    else:
        key = admission.key_of(member.managed.component, name, member)
        free_bytes = free_at_entry(member, admission, device)
        if taken:  # again: a library takes it past torch, and will the next time
            free_bytes = max(free_bytes, needed.get(name, 0) + (shortage.asked_bytes or 0)) + taken
        need = admission.needs.get(key, size)
        need.fail(free_bytes, is_least=is_least(member, share) and free_bytes >= most_free(member, admission, share))
        admission.needs.change(key, size)
        for sibling in admission.siblings(member):
            sibling.is_wary = True
        had = f"{format_bytes(free_bytes)} had been free"
        line = f"{what}, beside its weights {had}; {promise(member, admission, name, size)}"
    admission.event_log.note("error", member.id, shortage.asked_bytes or 0, name, line)
    add_line(shortage.error, f"Highwater: {line}")


def learn_failed_load(member: Member, admission: Admission, plan: ComponentPlan, error: BaseException) -> None:
    """Load as little as can compute the next time: the device had less memory in one piece than it said."""
    shortage = read_shortage(error)
    share = find_short(plan, admission, shortage) if shortage is not None else None
    if share is None:
        return
    member.planned_in_epoch = -1
    if not is_least(member, share):
        member.short_on.add(share.device)
        line = f"{member.id} ran out of memory while it was loaded; the next run loads as little of it as can compute"
        add_line(error, f"Highwater: {line}")


def find_short(plan: ComponentPlan, admission: Admission, shortage: Shortage) -> DevicePlan | None:
    """Return the share whose device ran out of memory; None if that is none of the component's."""
    shares = [share for share in plan.shares if not admission.devices[share.device].is_cpu]
    if shortage.device_index is None:
        return min(shares, key=lambda share: admission.devices[share.device].free_bytes(), default=None)
    found = (share for share in shares if admission.devices[share.device].torch_device.index == shortage.device_index)
    return next(found, None)


def taken_by_others(member: Member, admission: Admission, device: Device, shortage: Shortage) -> int:
    """Return what others took of a device since it was planned, if the allocation would have fitted without that."""
    foreign = admission.foreign_bytes(device)
    free_bytes = device.free_bytes()
    if shortage.free_bytes is not None and shortage.held_bytes is not None:
        foreign = max(foreign, device.total_bytes() - shortage.free_bytes - shortage.held_bytes)
        free_bytes = shortage.free_bytes
    taken = foreign - member.foreign_at_plan.get(device.name, foreign)
    missing = (shortage.asked_bytes or 0) - free_bytes
    return taken if taken >= max(missing, device.total_bytes() // NOTICEABLE) else 0


def free_at_entry(member: Member, admission: Admission, device: Device) -> int:
    """Return what was free beside all weights when the component was entered."""
    foreign = admission.foreign_bytes(device)
    foreign = max(foreign, member.foreign_at_plan.get(device.name, foreign))
    return max(0, device.total_bytes() - foreign - member.allocated_at_entry.get(device.name, 0))


def is_least(member: Member, share: DevicePlan) -> bool:
    """Whether a share holds no more than it takes to compute at all."""
    managed = member.managed
    is_first = share.device == managed.plan.shares[0].device
    return share.device_bytes <= least_bytes(managed.component, share.blocks, managed.plan.forms, first=is_first)


def most_free(member: Member, admission: Admission, share: DevicePlan) -> int:
    """Return what would be free of a share's device beside what it holds, if all left that may."""
    capacity = admission.machine(member, in_pass=True).device(share.device)
    return capacity.available_bytes + capacity.kept_free_bytes - capacity.lasting_bytes - share.device_bytes


def promise(member: Member, admission: Admission, device: str, size: Size) -> str:
    """Return what the next run does about a failure."""
    try:
        plan = admission.replan(member, size=size, in_pass=True)
    except (DoesNotFit, InvalidInput) as error:
        return str(error)
    share = next(share for share in plan.shares if share.device == device)
    if share.keeps_bytes:
        return f"the next run keeps {format_bytes(share.keeps_bytes)} free for {member.id}"
    return "no plan leaves more: choose a smaller size, tiles or fewer frames, 'fp8 scaled', or another device"
