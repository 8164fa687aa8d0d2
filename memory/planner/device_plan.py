"""One device's part of a plan: what of its blocks stays there, and through which memory the others stream.

[Note: budgets] A device holds, for one component: the *fixed* tensors (the non-block weights, and the buffers of
the blocks there), the *resident* blocks, the *staging* memory through which the other blocks stream, and the *scratch*
into which encoded weights are decoded. The four sum to `DevicePlan.device_bytes`, and the engine allocates exactly
that. Residents are spread through the execution order, so that every copy has compute to hide behind: at 25%
streamed and copies twice as slow as compute that runs like all-resident, a leading prefix 1.21x slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..options.profile import OffloadProfile
from ..units import GIB, MIB, SLAB_ALIGNMENT, format_bytes, format_seconds
from .capacity import DeviceCapacity, Machine
from .device_limit import find_kept, find_limit, held_later, refuse_small_limit, steady_limit
from .prefetch_schedule import (
    Schedule,
    choose_prefetch,
    choose_schedule,
    place_streamed,
)
from .sizes import Sizes
from .staging_layout import Offsets, pass_seconds
from .workload import Workload, find_blocking, find_in_file, find_speeds, find_workload, in_order

__all__ = ["Allowed", "DevicePlan", "confirm_share", "find_allowed", "plan_share", "same_to_the_reason"]

# How the reason begins that tells what stays free for forwards.
KEEPS = "keeps"
# A new schedule has to be this much faster to move blocks that are in place.
WORTH_MOVING = 0.02
# By so much more has to be free than when forwards ran out of memory.
WORTH_RETRYING = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """One device's part of a component; block numbers are positions in `Component.blocks`."""

    device: str
    blocks: tuple[int, ...]
    resident: frozenset[int]
    fixed_bytes: int
    resident_bytes: int
    staging_bytes: int = 0
    offsets: Offsets = ()
    """Where in the staging memory each streamed block comes to lie ([Note: offsets] in `staging_layout.py`)."""
    streamed_block_bytes: int = 0
    """The bytes of the largest block that streams."""
    streamed_bytes: int = 0
    """The bytes of all blocks that stream."""
    read_bytes: int = 0
    """What of these a pass reads from their file."""
    stored: frozenset[int] = frozenset()
    """The blocks that stream from the memory of another device ([Note: store] in `device_store.py`)."""
    stored_bytes: int = 0
    """The bytes that these take there."""
    scratch_bytes: int = 0
    decodes: int = 1
    """How many micro-batches have scratch of their own."""
    pass_s: float | None = None
    """What a pass is predicted to take; None where the speeds are not known."""
    limit_bytes: int | None = field(default=None, compare=False)
    """The most bytes that the weights might take, where that made blocks stream."""
    limited_by: str = field(default="", compare=False)
    """What sets that limit, in words: a budget, or what is available of the device."""
    keeps_bytes: int = field(default=0, compare=False)
    """What stays free for the forwards."""
    blocking: frozenset[int] = field(default=frozenset(), compare=False)
    """The blocks of which the schedule takes into account that their copies are synchronous."""
    reasons: tuple[str, ...] = field(default=(), compare=False)

    @property
    def streamed(self) -> tuple[int, ...]:
        return tuple(block for block in self.blocks if block not in self.resident)

    @property
    def prefetch_blocks(self) -> int:
        """For how many whole blocks there is staging memory, beside the one that computes."""
        if not self.staging_bytes:
            return 0
        return min(len(self.streamed), self.staging_bytes // self.streamed_block_bytes) - 1

    @property
    def why_kept(self) -> str:
        """Why bytes stay free for the forwards, in words."""
        return next(
            (reason for reason in self.reasons if reason.startswith(KEEPS)), "needs more memory for activations"
        )

    @property
    def total_bytes(self) -> int:
        """The bytes of all of its weights and buffers, wherever they are."""
        return self.fixed_bytes + self.resident_bytes + self.streamed_bytes

    @property
    def device_bytes(self) -> int:
        return self.fixed_bytes + self.resident_bytes + self.staging_bytes + self.scratch_bytes

    def schedule_in(self, order: Iterable[int]) -> tuple[frozenset[int], Offsets]:
        """Return which blocks stay, and where the others lie in the staging memory, by their positions in an order."""
        positions = {number: position for position, number in enumerate(order)}
        resident = frozenset(position for number, position in positions.items() if number in self.resident)
        return resident, tuple({positions[number]: begin for number, begin in here.items()} for here in self.offsets)

    def text(self) -> str:
        """Return the device's bytes in one line for people."""
        parts = [f"{format_bytes(self.fixed_bytes)} of non-block weights"]
        if self.blocks:
            parts.append(
                f"{len(self.resident)} of {len(self.blocks)} blocks resident ({format_bytes(self.resident_bytes)})"
            )
        if self.staging_bytes:
            parts.append(f"{len(self.streamed)} streamed through {format_bytes(self.staging_bytes)} of staging memory")
        if self.scratch_bytes:
            each = f", for each of {self.decodes} micro-batches" if self.decodes > 1 else ""
            parts.append(f"{format_bytes(self.scratch_bytes)} to decode weights{each}")
        return f"{self.device}: {format_bytes(self.device_bytes)} = {', '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "blocks": len(self.blocks),
            "resident_blocks": len(self.resident),
            "streamed_blocks": len(self.streamed),
            "prefetch_blocks": self.prefetch_blocks,
            "fixed_bytes": self.fixed_bytes,
            "resident_bytes": self.resident_bytes,
            "streamed_bytes": self.streamed_bytes,
            "read_bytes": self.read_bytes,
            "stored_blocks": len(self.stored),
            "stored_bytes": self.stored_bytes,
            "staging_bytes": self.staging_bytes,
            "scratch_bytes": self.scratch_bytes,
            "device_bytes": self.device_bytes,
            "pass_s": self.pass_s,
            "limit_bytes": self.limit_bytes,
            "limited_by": self.limited_by,
            "keeps_bytes": self.keeps_bytes,
        }


def plan_share(
    component_sizes: Sizes,
    device: str,
    blocks: tuple[int, ...],
    machine: Machine,
    profile: OffloadProfile,
    *,
    first: bool,
    in_file: frozenset[str] = frozenset(),
    pinned: frozenset[str] | None = None,
    block_seconds: Mapping[int, float] | None = None,
    current: DevicePlan | None = None,
    keeps_free: bool = True,
) -> DevicePlan:
    """Decide what of these blocks is resident on one device and what streams; arithmetic, moves nothing.

    Args:
        first: the device also holds the weights that are in no block.
        in_file: the blocks that rest in their file, by name.
        pinned: the blocks that rest in page-locked memory, by name; None: all of them.
        block_seconds: what each block of the component was measured to compute, in the order in which they ran.
        current: the share that is in place; it stays if it fits, is as fast, and leaves no block's bytes unused.
        keeps_free: whether what forwards need comes before residents.

    Raises:
        InvalidInput: the user's budget is too small for the least form.
        DoesNotFit: the device is too small for it.
    """
    allowed = find_allowed(
        component_sizes, device, blocks, machine, profile, first=first, keeps_free=keeps_free, current=current
    )
    component, whole, limit = component_sizes.component, allowed.whole, allowed.limit_bytes
    if allowed.holds_all:
        return whole
    if allowed.least_bytes > limit or not blocks:
        refuse_small_limit(component_sizes, blocks, machine, device, profile, limit, first=first)
    sizes = {number: allowed.sizes[number] for number in in_order(blocks, block_seconds)}
    left_bytes = allowed.left_bytes
    room_bytes = left_bytes // SLAB_ALIGNMENT * SLAB_ALIGNMENT
    blocking = find_blocking(component, blocks, pinned)
    files = find_in_file(component, blocks, in_file)
    speeds = find_speeds(machine.device(device), sizes, blocking, files)
    work = find_workload(sizes, speeds, left_bytes, blocking, files, block_seconds)
    are_known = block_seconds is not None and speeds is not None
    prefetch_blocks = choose_prefetch(profile.prefetch_blocks, times_are_known=are_known)
    in_place: Schedule | None = None
    if current is not None and current.staging_bytes and current.blocks == blocks:
        in_place = keep_in_place(current, sizes, work, left_bytes, profile)
    if in_place is not None and current is not None and is_settled(current, in_place, are_known):
        schedule = in_place
    else:
        schedule = choose_schedule(work, room_bytes, prefetch_blocks=prefetch_blocks)
        if in_place is not None and in_place.pass_s <= schedule.pass_s * (1 + WORTH_MOVING):
            schedule = in_place
    share = stream(whole, sizes, schedule)
    share = replace(share, read_bytes=sum(component_sizes.in_file[number] for number in files - share.resident))
    reasons = explain_streaming(component_sizes, share, allowed, speeds, profile, are_known)
    pass_s = schedule.pass_s if are_known else None
    return replace(
        share, pass_s=pass_s, limit_bytes=limit, limited_by=allowed.source, blocking=blocking, reasons=reasons
    )


def confirm_share(
    component_sizes: Sizes,
    share: DevicePlan,
    machine: Machine,
    profile: OffloadProfile,
    *,
    first: bool,
    in_file: frozenset[str],
    pinned: frozenset[str],
    block_seconds: Mapping[int, float] | None,
    keeps_free: bool,
) -> DevicePlan | None:
    """Return what `plan_share` would return with this share in place if that moves nothing; None if it may.

    Runs no search for a schedule. What stays free for forwards and the reasons are as they are now. A share that is
    wholly resident is confirmed while it fits beside what is kept free; one that streams, while its limit, what rests
    in page-locked memory and the known times are the same.
    """
    allowed = find_allowed(
        component_sizes, share.device, share.blocks, machine, profile,
        first=first, keeps_free=keeps_free, current=share,
    )  # fmt: skip
    if allowed.holds_all or not share.staging_bytes:
        return allowed.whole if allowed.holds_all and allowed.whole == share else None
    blocking = find_blocking(component_sizes.component, share.blocks, pinned)
    if blocking != share.blocking or allowed.limit_bytes != share.limit_bytes:
        return None
    files = find_in_file(component_sizes.component, share.blocks, in_file)
    speeds = find_speeds(machine.device(share.device), allowed.sizes, blocking, files)
    are_known = block_seconds is not None and speeds is not None
    if block_seconds is not None or share.pass_s is not None:
        sizes = {number: allowed.sizes[number] for number in in_order(share.blocks, block_seconds)}
        left_bytes = allowed.left_bytes
        work = find_workload(sizes, speeds, left_bytes, blocking, files, block_seconds)
        in_place = keep_in_place(share, sizes, work, left_bytes, profile)
        if in_place is None or not is_settled(share, in_place, are_known):
            return None
    reasons = explain_streaming(component_sizes, share, allowed, speeds, profile, are_known)
    return replace(share, keeps_bytes=allowed.whole.keeps_bytes, limited_by=allowed.source, reasons=reasons)


def keep_in_place(
    current: DevicePlan, sizes: Mapping[int, int], work: Workload, left_bytes: int, profile: OffloadProfile
) -> Schedule | None:
    """Return the schedule that leaves a share's residents where they are, if they still make sense there."""
    room_bytes = left_bytes // SLAB_ALIGNMENT * SLAB_ALIGNMENT
    asked = min(profile.prefetch_blocks or 0, room_bytes // max(sizes.values()) - 1)
    return keep_residents(current, sizes, work, room_bytes, asked)


def same_to_the_reason(one: DevicePlan, other: DevicePlan) -> bool:
    """Whether two shares are equal, also in the fields that ``==`` leaves out."""
    return one == other and all(
        getattr(one, name) == getattr(other, name) for name in ("limit_bytes", "keeps_bytes", "blocking", "reasons")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """The bytes that some blocks may take of a device, and what they would take if all of them were resident."""

    whole: DevicePlan
    """The plan with all blocks resident, and what it keeps free."""
    sizes: Mapping[int, int]
    largest_bytes: int
    least_bytes: int
    """The bytes of the smallest form that can compute."""
    limit_bytes: int
    source: str
    """What sets the limit: a budget or the device, in words."""

    @property
    def left_bytes(self) -> int:
        """What blocks may take, beside non-block weights, buffers and what weights are decoded into."""
        return self.limit_bytes - self.whole.fixed_bytes - self.whole.scratch_bytes

    @property
    def holds_all(self) -> bool:
        return self.whole.device == "cpu" or self.whole.device_bytes <= self.limit_bytes


def find_allowed(
    component_sizes: Sizes,
    device: str,
    blocks: tuple[int, ...],
    machine: Machine,
    profile: OffloadProfile,
    *,
    first: bool,
    keeps_free: bool,
    current: DevicePlan | None,
) -> Allowed:
    """Return what blocks may take of a device now; arguments as of `plan_share`."""
    component, capacity = component_sizes.component, machine.device(device)
    if machine.held is not None and (held := machine.held(component, device)):
        capacity = replace(capacity, available_bytes=max(0, capacity.available_bytes - held))
    sizes = {number: component_sizes.blocks[number] for number in blocks}
    whole = DevicePlan(
        device=device,
        blocks=blocks,
        resident=frozenset(blocks),
        fixed_bytes=component_sizes.fixed_bytes(blocks, first=first),
        resident_bytes=sum(sizes.values()),
        scratch_bytes=component_sizes.scratch_bytes(blocks),
        decodes=component_sizes.decodes,
    )
    largest = max(sizes.values(), default=0)
    least = whole.fixed_bytes + whole.scratch_bytes + largest
    if device == "cpu":
        return Allowed(whole=whole, sizes=sizes, largest_bytes=largest, least_bytes=least, limit_bytes=0, source="")
    if capacity.ceiling_bytes is not None:
        # A host says it of the device that it loads a component on, and may say less than anything computes with.
        capacity = replace(capacity, ceiling_bytes=max(capacity.ceiling_bytes, least) if first else None)
    limit, source, reasons = find_limit(component, capacity, profile, least + largest, whole.device_bytes)
    more = 0
    if keeps_free and limit >= least:
        kept = find_kept(component, capacity, machine, profile)
        more = held_later(kept, capacity)
        most = capacity.available_bytes + capacity.kept_free_bytes - capacity.lasting_bytes  # beside no weights
        is_futile = most - least <= kept.futile_bytes * (1 + WORTH_RETRYING)
        if kept.num_bytes > capacity.kept_free_bytes and not is_futile:
            keeps_bytes = max(0, min(kept.num_bytes, most - least))
            whole = replace(whole, keeps_bytes=keeps_bytes)
            if most - keeps_bytes < limit:
                limit, source = most - keeps_bytes, f"{format_bytes(most - keeps_bytes)} available on {capacity.name}"
            if kept.is_known or whole.device_bytes > limit:
                reasons.append(f"{KEEPS} {format_bytes(keeps_bytes)} free for activations: {kept.why}")
    full_limit = limit
    if whole.device_bytes > limit > least:
        limit = min(limit, max(least, capacity.available_bytes - more))
    if limit >= GIB and whole.device_bytes > limit >= least:
        limit = max(least, limit // MIB * MIB)  # whole MiB: people read the text that gives the same plan again
    if current is not None and may_be_wobble(capacity, current, whole) and current.limit_bytes is not None:
        steady = steady_limit(full_limit, limit, capacity, current.device_bytes, current.limit_bytes, largest)
        limit = max(min(limit, least), steady)
    return Allowed(
        whole=replace(whole, reasons=tuple(reasons)),
        sizes=sizes,
        largest_bytes=largest,
        least_bytes=least,
        limit_bytes=limit,
        source=source,
    )


def may_be_wobble(capacity: DeviceCapacity, current: DevicePlan, whole: DevicePlan) -> bool:
    """Whether only free memory may have changed: the blocks, and what stays free for the forwards, are the same."""
    is_same = current.blocks == whole.blocks and current.keeps_bytes == whole.keeps_bytes
    return bool(capacity.band_bytes and capacity.held_bytes) and is_same


def stream(whole: DevicePlan, sizes: Mapping[int, int], schedule: Schedule) -> DevicePlan:
    """Return the share with the residents and the staging memory of a schedule; its positions count the sizes."""
    numbers = list(sizes)
    resident = frozenset(numbers[position] for position in schedule.resident)
    return replace(
        whole,
        resident=resident,
        resident_bytes=sum(sizes[number] for number in resident),
        staging_bytes=schedule.staging_bytes,
        offsets=tuple({numbers[position]: begin for position, begin in here.items()} for here in schedule.offsets),
        streamed_bytes=whole.resident_bytes - sum(sizes[number] for number in resident),
        streamed_block_bytes=max(sizes[number] for number in numbers if number not in resident),
    )


def keep_residents(
    current: DevicePlan, sizes: Mapping[int, int], work: Workload, room_bytes: int, prefetch_blocks: int
) -> Schedule | None:
    """Return the schedule with the residents that are in place; None if they leave a block's bytes unused, or too few.

    The staging memory stays as it is, too, where it fits.
    """
    resident, offsets = current.schedule_in(sizes)
    smallest = min(sizes[number] for number in current.streamed)
    unused_bytes = room_bytes - current.resident_bytes - current.staging_bytes
    if unused_bytes >= smallest:
        return None
    if unused_bytes < 0 or prefetch_blocks > current.prefetch_blocks:
        staging_bytes = room_bytes - current.resident_bytes
        if staging_bytes < (prefetch_blocks + 1) * current.streamed_block_bytes:
            return None
        found = place_streamed(work, resident, staging_bytes)
        # The staging memory may come out smaller than it may be: what is left then would hold a block next time.
        return found if room_bytes - current.resident_bytes - found.staging_bytes < smallest else None
    pass_s = pass_seconds(work, resident, current.staging_bytes, offsets)
    return Schedule(resident, current.staging_bytes, offsets, pass_s)


def is_settled(current: DevicePlan, in_place: Schedule, are_known: bool) -> bool:
    """Whether what is in place was chosen with the same times, so that a search would find nothing better."""
    is_moved = in_place.staging_bytes != current.staging_bytes
    return not is_moved and current.pass_s == (in_place.pass_s if are_known else None)


def explain_streaming(
    component_sizes: Sizes,
    share: DevicePlan,
    allowed: Allowed,
    speeds: Mapping[int, float] | None,
    profile: OffloadProfile,
    are_known: bool,
) -> tuple[str, ...]:
    """Return why blocks of a share stream, and what that costs."""
    streamed_bytes = sum(allowed.sizes[number] for number in share.streamed)
    read = ""
    if share.read_bytes:
        num_bytes = format_bytes(share.read_bytes)
        is_converted = component_sizes.in_file != component_sizes.blocks
        read = (
            f", for which {num_bytes} are read from its file"
            if is_converted
            else f", {num_bytes} of it read from its file"
        )
    speed = ""
    if speeds is not None:
        copies_s = sum(allowed.sizes[number] / speeds[number] for number in share.streamed)
        speed = f", at least {format_seconds(copies_s)} at {streamed_bytes / copies_s / 1e9:.3g} GB/s"
    reason = (
        f"{allowed.source}: {len(share.streamed)} of {len(share.blocks)} blocks stream, "
        f"{format_bytes(streamed_bytes)} per pass{speed}{read}"
    )
    return (*allowed.whole.reasons, reason, *explain_staging(share, profile, are_known))


def explain_staging(share: DevicePlan, profile: OffloadProfile, are_known: bool) -> list[str]:
    ahead = share.prefetch_blocks
    if profile.prefetch_blocks is not None:
        if ahead < min(profile.prefetch_blocks, len(share.streamed) - 1):
            return [f"prefetch {profile.prefetch_blocks} requested; staging memory is enough for prefetch {ahead}"]
        return []
    if ahead == 0 and len(share.streamed) > 1:
        if are_known:
            part = share.staging_bytes / share.streamed_block_bytes
            return [
                f"staging memory for {part:.2f} blocks: as measured, more resident blocks save more time than "
                "staging memory for a second block"
            ]
        return ["staging memory for less than two blocks: copies wait for computing; with a larger budget they overlap"]
    if ahead > 1:
        return [f"prefetches {ahead} blocks: copy and compute times differ between blocks"]
    return []
