"""One device's part of a plan: what of its blocks stays there, and through which slots the others stream.

[Note: budgets] A device holds, for one component: the *fixed* tensors (the rest, and the buffers of the blocks
there), the *resident* blocks, the *staging* slots through which the other blocks stream, and the *scratch* into
which eight-bit weights are widened. The four sum to `SharePlan.device_bytes`, and the engine allocates exactly
that. Residents are spread through the execution order, so that every copy has compute to hide behind: at 25%
streamed and copies twice as slow as compute that runs like all-resident, a leading prefix 1.21x slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from .component import Component
from .errors import DoesNotFit, InvalidInput
from .footprint import block_bytes, fixed_tensors, resting_bytes, wide_bytes
from .machine import DeviceCapacity, Machine
from .profile import OffloadProfile
from .schedule import DEPTHS, USUAL_DEPTHS, BlockSeconds, Schedule, balanced_seconds, choose_schedule, pass_seconds
from .units import GIB, MIB, format_bytes

__all__ = ["SharePlan", "plan_share"]

# A new schedule has to be this much faster to move blocks that are in place.
WORTH_MOVING = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class SharePlan:
    """One device's part of a component; block numbers are positions in `Component.blocks`."""

    device: str
    blocks: tuple[int, ...]
    resident: frozenset[int]
    fixed_bytes: int
    resident_bytes: int
    num_slots: int = 0
    slot_bytes: int = 0
    scratch_bytes: int = 0
    pass_s: float | None = None
    """What a pass is predicted to take; None where the speeds are not known."""
    limit_bytes: int | None = field(default=None, compare=False)
    """What the weights were allowed to take, where that made blocks stream."""
    reasons: tuple[str, ...] = field(default=(), compare=False)

    @property
    def streamed(self) -> tuple[int, ...]:
        return tuple(block for block in self.blocks if block not in self.resident)

    @property
    def staging_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def device_bytes(self) -> int:
        return self.fixed_bytes + self.resident_bytes + self.staging_bytes + self.scratch_bytes

    def text(self) -> str:
        """Return the device's bytes in one line for people."""
        parts = [f"{format_bytes(self.fixed_bytes)} fixed"]
        if self.blocks:
            parts.append(
                f"{len(self.resident)} of {len(self.blocks)} blocks resident {format_bytes(self.resident_bytes)}"
            )
        if self.num_slots:
            slots = f"{self.num_slots} slot{'s' if self.num_slots > 1 else ''} of {format_bytes(self.slot_bytes)}"
            parts.append(f"{len(self.streamed)} streamed through {slots}")
        if self.scratch_bytes:
            parts.append(f"{format_bytes(self.scratch_bytes)} scratch")
        return f"{self.device}: {format_bytes(self.device_bytes)} = {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "blocks": len(self.blocks),
            "resident_blocks": len(self.resident),
            "streamed_blocks": len(self.streamed),
            "num_slots": self.num_slots,
            "fixed_bytes": self.fixed_bytes,
            "resident_bytes": self.resident_bytes,
            "staging_bytes": self.staging_bytes,
            "scratch_bytes": self.scratch_bytes,
            "device_bytes": self.device_bytes,
            "pass_s": self.pass_s,
        }


def plan_share(
    component: Component,
    device: str,
    blocks: tuple[int, ...],
    machine: Machine,
    profile: OffloadProfile,
    cast: frozenset[str],
    *,
    first: bool,
    from_disk: bool = False,
    block_seconds: Sequence[float] | None = None,
    current: SharePlan | None = None,
) -> SharePlan:
    """Decide what of these blocks is resident on one device and what streams; arithmetic, moves nothing.

    Args:
        first: this device has the rest of the component too.
        from_disk: the link's speed does not tell that of copies.
        block_seconds: what each block of the component was measured to compute.
        current: what is in place; it stays if it fits, leaves no block's room unused and is as fast.

    Raises:
        InvalidInput: the user's budget is below the least form.
        DoesNotFit: the device is.
    """
    capacity = machine.device(device)
    if from_disk:
        capacity = replace(capacity, link_bytes_per_s=None)
    sizes = {number: block_bytes(component.blocks[number], cast) for number in blocks}
    whole = SharePlan(
        device=device,
        blocks=blocks,
        resident=frozenset(blocks),
        fixed_bytes=resting_bytes(fixed_tensors(component, blocks, first=first)),
        resident_bytes=sum(sizes.values()),
        scratch_bytes=max((wide_bytes(component.blocks[number], cast) for number in blocks), default=0),
    )
    if device == "cpu":
        return whole
    largest = max(sizes.values(), default=0)
    least = whole.fixed_bytes + whole.scratch_bytes + largest
    limit, source, reasons = find_limit(component, capacity, profile, least + largest, whole.device_bytes)
    if whole.device_bytes <= limit:
        return replace(whole, reasons=tuple(reasons))
    if least > limit or not blocks:
        refuse(component, capacity, profile, limit, whole, largest)
    if limit >= GIB:  # whole MiB: the text that gives the same plan again is read by people
        limit = max(least, limit // MIB * MIB)
    seconds, idle_s, are_known = find_seconds(component, whole, sizes, capacity, limit, block_seconds)
    # A slot more costs a resident block: only measured times tell whether it is worth that.
    depths = (profile.prefetch_blocks,) if profile.prefetch_blocks else DEPTHS if are_known else USUAL_DEPTHS
    schedule = choose_schedule(
        tuple(sizes[number] for number in blocks),
        limit - whole.fixed_bytes - whole.scratch_bytes,
        seconds=seconds,
        depths=depths,
        idle_s=idle_s,
    )
    share = fill_slots(whole, sizes, schedule)
    if current is not None and could_stay(current, share, sizes, limit, profile):
        positions = {position for position, number in enumerate(blocks) if number in current.resident}
        in_place_s = pass_seconds(*seconds, positions, current.num_slots, idle_s=idle_s)
        if in_place_s <= schedule.pass_s * (1 + WORTH_MOVING):
            share = current
            schedule = replace(schedule, pass_s=in_place_s)
    streamed_bytes = sum(sizes[number] for number in share.streamed)
    link = capacity.link_bytes_per_s
    speed = f", at least {streamed_bytes / link:.2g} s at {link / 1e9:.3g} GB/s" if link else ""
    reasons.append(
        f"{source}: {len(share.streamed)} of {len(blocks)} blocks stream, "
        f"{format_bytes(streamed_bytes)} per pass{speed}"
    )
    reasons += explain_slots(share, profile, are_known)
    return replace(share, pass_s=schedule.pass_s if are_known else None, limit_bytes=limit, reasons=tuple(reasons))


def find_limit(
    component: Component, capacity: DeviceCapacity, profile: OffloadProfile, overlapping_bytes: int, whole_bytes: int
) -> tuple[int, str, list[str]]:
    """Return the most bytes that the weights may take of a device, what says so, and what was changed.

    Args:
        overlapping_bytes: the least with which copies and computes overlap; a profile's budget rises to it.
    """
    available = available_bytes(component, capacity, profile)
    budget = profile.budget_for(capacity.name, component.name, component.kind)
    if budget is None:
        return available, f"{capacity.name} can give {format_bytes(available)}", []
    limit = budget.limit(capacity.total_bytes, available, capacity.kept_free_bytes)
    needed = min(overlapping_bytes, whole_bytes, available)
    if not budget.from_profile or limit >= needed:
        return limit, f"budget {budget}", []
    raised = f"raised to {format_bytes(needed)}"
    reason = f"profile {profile.name}'s budget {budget} is too small for {component.name}: {raised}"
    return needed, f"budget {raised}", [reason]


def available_bytes(component: Component, capacity: DeviceCapacity, profile: OffloadProfile) -> int:
    """Return what the device can give when the profile's reserve stays free; what is kept free counts towards it."""
    reserve = profile.reserve_for(capacity.name, component.name, component.kind, capacity.total_bytes)
    return max(0, capacity.available_bytes - max(0, reserve - capacity.kept_free_bytes))


def find_seconds(
    component: Component,
    whole: SharePlan,
    sizes: dict[int, int],
    capacity: DeviceCapacity,
    limit: int,
    block_seconds: Sequence[float] | None,
) -> tuple[BlockSeconds, float, bool]:
    """Return seconds of computing and copying per block, those that other devices compute, and whether all is known."""
    link = capacity.link_bytes_per_s
    if block_seconds is None or link is None or len(block_seconds) != len(component.blocks):
        room = limit - whole.fixed_bytes - whole.scratch_bytes
        return balanced_seconds(list(sizes.values()), room), 0.0, False
    compute_s = tuple(block_seconds[number] for number in whole.blocks)
    idle_s = max(0.0, sum(block_seconds) - sum(compute_s))
    return (compute_s, tuple(size / link for size in sizes.values())), idle_s, True


def fill_slots(whole: SharePlan, sizes: dict[int, int], schedule: Schedule) -> SharePlan:
    resident = frozenset(whole.blocks[position] for position in schedule.resident)
    streamed = [sizes[number] for number in whole.blocks if number not in resident]
    return replace(
        whole,
        resident=resident,
        resident_bytes=sum(sizes[number] for number in resident),
        num_slots=min(schedule.num_slots, len(streamed)),
        slot_bytes=max(streamed),
    )


def could_stay(
    current: SharePlan, share: SharePlan, sizes: dict[int, int], limit: int, profile: OffloadProfile
) -> bool:
    """Whether what is in place fits, leaves no room for a further block, and prefetches as was asked."""
    if not current.num_slots or current.blocks != share.blocks or current.scratch_bytes != share.scratch_bytes:
        return False
    if profile.prefetch_blocks is not None and current.num_slots != share.num_slots:
        return False
    return 0 <= limit - current.device_bytes < min(sizes[number] for number in current.streamed)


def explain_slots(share: SharePlan, profile: OffloadProfile, are_known: bool) -> list[str]:
    if share.num_slots == 1:
        if are_known:
            return ["one staging slot: copies take so much longer than computes that more residents save more"]
        return ["one staging slot only: copies wait for computes; a larger budget would overlap them"]
    ahead = share.num_slots - 1
    if profile.prefetch_blocks is not None and ahead < profile.prefetch_blocks:
        return [f"prefetch {profile.prefetch_blocks} was asked for, there is room for {ahead}"]
    if profile.prefetch_blocks is None and ahead > 1:
        return [f"{ahead} blocks are copied ahead: their copies and computes differ"]
    return []


def refuse(
    component: Component,
    capacity: DeviceCapacity,
    profile: OffloadProfile,
    limit: int,
    whole: SharePlan,
    largest: int,
) -> NoReturn:
    """Raise the error of a component whose least form does not fit: the user's budget or reserve, or the device."""
    least = whole.fixed_bytes + whole.scratch_bytes + largest
    form = (
        f"at least {format_bytes(least)} ({format_bytes(whole.fixed_bytes)} fixed, "
        f"{format_bytes(largest)} for the largest block, {format_bytes(whole.scratch_bytes)} scratch)"
    )
    budget = profile.budget_for(capacity.name, component.name, component.kind)
    available = available_bytes(component, capacity, profile)
    if budget is not None and not budget.from_profile and limit < available:
        raise InvalidInput(f"budget {str(budget)!r} is too small: {component.name} needs {form} on {capacity.name}")
    if available < capacity.available_bytes:
        kept = format_bytes(capacity.kept_free_bytes + capacity.available_bytes - available)
        raise InvalidInput(
            f"a reserve of {kept} leaves {format_bytes(available)} of {capacity.name}: {component.name} needs {form}"
        )
    raise DoesNotFit(
        f"{component.name} needs {form} on {capacity.name}: {format_bytes(max(0, limit))} can be had of "
        f"{format_bytes(capacity.total_bytes)}, {format_bytes(capacity.kept_free_bytes)} kept free; "
        "lower the watermark, choose 'fp8 scaled', or place it on another device"
    )
