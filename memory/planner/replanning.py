"""A component's plan made anew for the memory there is now: what is resident, and what has to be in RAM for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import DoesNotFit
from ..options.precision import Precision
from ..options.profile import OffloadProfile, covers
from ..units import LOCK_LIMIT_BYTES, format_bytes
from ..weights.component import Component
from .capacity import Machine
from .device_plan import DevicePlan, confirm_share, plan_share, same_to_the_reason
from .device_store import confirm_stored, plan_stored
from .form_choice import encoded_bytes
from .plan import ComponentPlan
from .sizes import Sizes

__all__ = [
    "confirm_plan",
    "fresh_plan_holds",
    "refuse_streaming_at_tier_device",
    "replan",
    "replan_shares",
    "rest_to_stream",
]


def replan(
    component: Component,
    plan: ComponentPlan,
    machine: Machine,
    profile: OffloadProfile,
    block_seconds: Mapping[int, float] | None = None,
) -> ComponentPlan:
    """Decide anew which blocks are resident, by the memory there is now; devices, split and precision stay.

    Current residents stay where that is about as fast. Blocks that stayed in their file because they did not stream
    ([Note: no needless copy] in `mixed_tiers.py`), and now do, get a copy in RAM, as far as there is room. Raises as
    `plan_components`.
    """
    found = replan_shares(component, plan, machine, profile, block_seconds)
    if not plan.takes_ram_to_stream:
        return found
    taken = take_ram(component, found, machine, profile)
    # What found no room in RAM is slower than was assumed.
    return found if taken is found else replan_shares(component, taken, machine, profile, block_seconds)


def replan_shares(
    component: Component,
    plan: ComponentPlan,
    machine: Machine,
    profile: OffloadProfile,
    block_seconds: Mapping[int, float] | None,
    *,
    ram: Machine | None = None,
) -> ComponentPlan:
    """Return a plan with other shares: its blocks rest where they do, or where they would if they streamed.

    Args:
        ram: the machine with the RAM that is left; by default that is all of the machine's.
    """
    sizes = sizes_as_planned(component, plan)
    in_file, pinned = rest_to_stream(plan, ram or machine, profile)
    if plan.store:
        rests = {"in_file": in_file, "pinned": pinned}
        return replace(plan, shares=plan_stored(sizes, plan, machine, profile, block_seconds=block_seconds, **rests))
    shares = tuple(
        plan_share(
            sizes, share.device, share.blocks, machine, profile,
            first=index == 0, in_file=in_file, block_seconds=block_seconds, current=share,
            pinned=pinned, keeps_free=plan.tier != "device",
        )
        for index, share in enumerate(plan.shares)
    )  # fmt: skip
    if sizes.decodes > 1 and any(share.streamed for share in shares):  # no micro-batches then: one scratch does
        once = replace(plan, shares=tuple(replace(share, decodes=1) for share in plan.shares))
        return replan_shares(component, once, machine, profile, block_seconds, ram=ram)
    refuse_streaming_at_tier_device(sizes, plan.tier, shares)
    return replace(plan, shares=shares)


def sizes_as_planned(component: Component, plan: ComponentPlan) -> Sizes:
    """Return the sizes of a component in the forms of a plan, with scratch for as many micro-batches."""
    return Sizes(component, plan.forms, decodes=max((share.decodes for share in plan.shares), default=1))


def rest_to_stream(
    plan: ComponentPlan, machine: Machine, profile: OffloadProfile
) -> tuple[frozenset[str], frozenset[str]]:
    """Return what rests in its file and what is page-locked, by name, of the blocks of a plan once they stream."""
    if plan.maps_file:
        return frozenset() if plan.file_bytes <= machine.host_bytes else plan.in_file, plan.pinned
    if not plan.takes_ram_to_stream or plan.file_bytes > machine.host_bytes:
        return plan.in_file, plan.pinned
    locks = may_lock(plan, profile) and plan.file_bytes <= machine.lockable_bytes
    return frozenset(), plan.pinned | plan.in_file if locks else plan.pinned


def take_ram(component: Component, plan: ComponentPlan, machine: Machine, profile: OffloadProfile) -> ComponentPlan:
    """Return a plan in which blocks that stream from their file rest in RAM, as many as it has room for.

    The same plan where none does, or none has room. Page-locked is what the machine and the profile allow.
    """
    sizes = Sizes(component, plan.forms).blocks
    streamed = sorted(number for share in plan.shares for number in share.streamed)
    blocks = {n: component.blocks[n] for n in streamed if component.blocks[n].name in plan.in_file}
    # What no file has is in RAM already.
    wanting = {block.name: sizes[n] - component.lacking_bytes(block) for n, block in blocks.items()}
    buffers = plan.buffer_bytes
    if plan.in_file <= wanting.keys() and sum(wanting.values()) <= machine.host_bytes:
        taken, freed = wanting, buffers
    else:
        taken, freed = first_within(wanting, machine.host_bytes - buffers), 0
    if not taken:
        return plan
    in_file, freed_lock = plan.in_file - taken.keys(), freed if plan.locks_buffers else 0
    whole = {block.name: sizes[n] for n, block in blocks.items() if block.name in taken}
    lockable = {name: size for name, size in whole.items() if may_lock(plan, profile) and size < LOCK_LIMIT_BYTES}
    locked = first_within(lockable, machine.lockable_bytes + freed_lock)
    tier = "pinned" if locked or plan.tier == "pinned" else "host"
    return replace(
        plan,
        in_file=in_file,
        file_bytes=plan.file_bytes - sum(taken.values()),
        host_bytes=plan.host_bytes + sum(taken.values()) - freed,
        buffer_bytes=buffers - freed,
        pinned=plan.pinned | locked.keys(),
        pinned_bytes=plan.pinned_bytes + sum(locked.values()) - freed_lock,
        locks_buffers=plan.locks_buffers and bool(in_file),
        tier=tier,
    )


def first_within(sizes: Mapping[str, int], left: int) -> dict[str, int]:
    """Return the first of these, in their order, that fit into what is left."""
    taken = {}
    for name, num_bytes in sizes.items():
        if num_bytes <= left:
            taken[name] = num_bytes
            left -= num_bytes
    return taken


def may_lock(plan: ComponentPlan, profile: OffloadProfile) -> bool:
    """Whether the profile page-locks what a component has in RAM."""
    return covers(profile.pinned, plan.component, plan.kind)


def confirm_plan(
    component: Component,
    plan: ComponentPlan,
    machine: Machine,
    profile: OffloadProfile,
    block_seconds: Mapping[int, float] | None = None,
) -> ComponentPlan | None:
    """Return what `replan` would return if that moves nothing, with the reasons of now; None if it may move a block.

    Runs no search. The same object where nothing has changed at all.
    """
    if plan.takes_ram_to_stream and take_ram(component, plan, machine, profile) is not plan:
        return None
    sizes = sizes_as_planned(component, plan)
    in_file, pinned = rest_to_stream(plan, machine, profile)
    shares = []
    rests = {"in_file": in_file, "pinned": pinned}
    for index, share in enumerate(plan.shares):
        confirmed = (
            confirm_stored(sizes, plan, machine, profile, block_seconds=block_seconds, **rests)
            if plan.store
            else confirm_share(
                sizes, share, machine, profile,
                first=index == 0, block_seconds=block_seconds, keeps_free=plan.tier != "device", **rests,
            )
        )  # fmt: skip
        if confirmed is None:
            return None
        shares.append(confirmed)
    is_same = all(map(same_to_the_reason, shares, plan.shares))
    return plan if is_same else replace(plan, shares=tuple(shares))


def fresh_plan_holds(component: Component, plan: ComponentPlan, machine: Machine, profile: OffloadProfile) -> bool:
    """Whether `plan_components` would return this plan again: on one named device, page-locked as far as possible.

    False where several devices share the blocks, or where some blocks had to stay pageable or in their file.
    """
    is_locked = (
        plan.tier == "pinned" and not plan.in_file and plan.pinned_bytes + plan.oversize_bytes == plan.host_bytes
    )
    has_room = is_locked and plan.pinned_bytes <= machine.lockable_bytes
    return len(plan.shares) == 1 and has_room and confirm_plan(component, plan, machine, profile) is plan


def refuse_streaming_at_tier_device(sizes: Sizes, tier: str | None, shares: Sequence[DevicePlan]) -> None:
    if tier == "device" and any(share.streamed for share in shares):
        encoded = encoded_bytes(sizes.alone)
        room = sum(share.limit_bytes or share.device_bytes for share in shares)
        form = f", or precision {Precision.ENCODED.name!r}" if encoded is not None and encoded <= room else ""
        raise DoesNotFit(
            f"{sizes.component.name} at tier 'device' needs {format_bytes(sizes.all_resident_bytes)}, "
            f"which its budget does not hold; choose tier 'pinned' or 'host'{form}"
        )
