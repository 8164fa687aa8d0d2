"""Storage on another device: which blocks stream from its memory, and how fast they come.

[Note: store] A placement such as ``gpu:0:gpu:1`` lets a component compute on one device and stream from the memory of
another. What is stored there are copies. The origin of each block is where it would rest otherwise: its file where
that has it as it is, else pageable RAM. So the store takes free memory only, nothing leaves the other device for it,
and it leaves whenever that memory is needed: nothing is lost, and what the store does not hold streams from its origin.
Blocks that stay on the computing device while it computes are not stored, nor are non-block weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..options.profile import OffloadProfile
from ..units import format_bytes
from .capacity import EVERYTHING, Machine, PeerLink
from .device_plan import DevicePlan, confirm_share, plan_share
from .plan import ComponentPlan
from .sizes import Sizes

__all__ = ["StoreRoom", "beside_stored", "confirm_stored", "plan_stored", "rate_from", "reached_at", "store_room"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreRoom:
    """How many bytes may be stored on a device for one that computes, and how they come."""

    device: str
    num_bytes: int
    link: PeerLink | None = None
    """None where nothing is known of the way from one to the other."""
    why_little: str = ""
    """Why it is less than what is free, in words."""

    @property
    def bytes_per_s(self) -> float | None:
        """How fast copies to the device that computes are; None where that was not measured."""
        return self.link.bytes_per_s if self.link is not None else None

    @property
    def way(self) -> str:
        """How the copies go and how fast, in words."""
        speed = self.bytes_per_s
        told = f"{speed / 1e9:.3g} GB/s" if speed else "speed not measured yet"
        if self.link is None:
            return f"copies to it, {told}"
        if self.link.is_direct:
            return f"peer copies at {told}" if speed else f"peer copies, {told}"
        return f"through page-locked RAM, {told}" + (" measured" if speed else "")


def store_room(sizes: Sizes | None, machine: Machine, device: str, store: str) -> StoreRoom:
    """Return how many bytes a device may store for one that computes: what is free of it beside its watermark.

    What idle components hold is not counted, nor what activations there may need.

    Args:
        sizes: of the component, for what is known of it; None: nothing is.
    """
    capacity = machine.device(store)
    num_bytes = max(0, capacity.available_bytes - capacity.idle_bytes - capacity.unlearned_bytes)
    known = machine.needs(sizes.component, store) if machine.needs is not None and sizes is not None else None
    why = known.why if known is not None and known.num_bytes == EVERYTHING else ""
    return StoreRoom(
        device=store, num_bytes=0 if why else num_bytes, link=machine.device(device).peer(store), why_little=why
    )


def plan_stored(
    sizes: Sizes,
    plan: ComponentPlan,
    machine: Machine,
    profile: OffloadProfile,
    *,
    in_file: frozenset[str],
    pinned: frozenset[str],
    block_seconds: Mapping[int, float] | None,
) -> tuple[DevicePlan, ...]:
    """Return the share of a component whose blocks stream from another device, as `plan_share`, and what is stored.

    If the other device has too little room, as many blocks are stored as it has room for, spread over the order.
    """
    (share,) = plan.shares
    room = store_room(sizes, machine, share.device, plan.store)
    plan_with = partial(
        plan_share, sizes, share.device, share.blocks,
        profile=profile, first=True, block_seconds=block_seconds, current=share,
    )  # fmt: skip
    blocks = {number: sizes.blocks[number] for number in share.blocks}
    stored = frozenset(blocks)
    found = plan_with(machine=reached_at(machine, share.device, room), pinned=pinned | names_of(sizes, stored))
    if found.streamed_bytes > room.num_bytes:
        is_in_place = holds(share, blocks, room)
        stored = assumed_of(share) if is_in_place else spread(blocks, room.num_bytes / found.streamed_bytes)
        found = plan_with(machine=reached_at(machine, share.device, room), pinned=pinned | names_of(sizes, stored))
    streamed = {number: blocks[number] for number in found.streamed}
    taken = first_within(streamed, [*sorted(share.stored), *sorted(stored), *streamed], room.num_bytes)
    return (describe(found, sizes, room, taken, in_file),)


def confirm_stored(
    sizes: Sizes,
    plan: ComponentPlan,
    machine: Machine,
    profile: OffloadProfile,
    *,
    in_file: frozenset[str],
    pinned: frozenset[str],
    block_seconds: Mapping[int, float] | None,
) -> DevicePlan | None:
    """Return what `plan_stored` would return if that moves nothing, as `confirm_share`; None if it may."""
    (share,) = plan.shares
    room = store_room(sizes, machine, share.device, plan.store)
    if not holds(share, sizes.blocks, room):
        return None
    found = confirm_share(
        sizes, replace(share, read_bytes=0), reached_at(machine, share.device, room), profile,
        first=True, in_file=frozenset(), pinned=pinned | names_of(sizes, assumed_of(share)),
        block_seconds=block_seconds, keeps_free=True,
    )  # fmt: skip
    return None if found is None else describe(found, sizes, room, share.stored, in_file)


def holds(share: DevicePlan, sizes: Mapping[int, int] | Sequence[int], room: StoreRoom) -> bool:
    """Whether there is room for what is stored, and for no other block that streams."""
    left = room.num_bytes - share.stored_bytes
    return left >= 0 and all(sizes[number] > left for number in share.streamed if number not in share.stored)


def assumed_of(share: DevicePlan) -> frozenset[int]:
    """Return the blocks whose copies were taken not to be synchronous when a share was planned."""
    return frozenset(share.blocks) - share.blocking


def rate_from(store: str | None, device: str, machine: Machine) -> float | None:
    """Return how fast what streams reaches a device, in bytes per second; None where it is not known.

    Args:
        store: the other device that has it; none: RAM.
    """
    return store_room(None, machine, device, store).bytes_per_s if store else machine.device(device).link_bytes_per_s


def beside_stored(machine: Machine, plans: Sequence[ComponentPlan]) -> Machine:
    """Return the machine without what these components store on other devices than they compute on."""
    stored = {plan.store: 0 for plan in plans if plan.store}
    if not stored:
        return machine
    for plan in plans:
        if plan.store:
            stored[plan.store] += plan.stored_bytes
    devices = [
        replace(device, available_bytes=max(0, device.available_bytes - stored.get(device.name, 0)))
        for device in machine.devices
    ]
    return replace(machine, devices=tuple(devices))


def reached_at(machine: Machine, device: str, room: StoreRoom) -> Machine:
    """Return the machine as a component sees it whose blocks come from the store: at the speed of that way."""
    speed = room.bytes_per_s
    devices = [
        replace(each, link_bytes_per_s=speed, pageable_bytes_per_s=each.pageable_bytes_per_s if speed else None)
        if each.name == device
        else each
        for each in machine.devices
    ]
    return replace(machine, devices=tuple(devices))


def names_of(sizes: Sizes, numbers: Iterable[int]) -> frozenset[str]:
    """Return the names of blocks: copies of stored ones can be prefetched, as from page-locked memory."""
    return frozenset(sizes.component.blocks[number].name for number in numbers)


def spread(blocks: Mapping[int, int], part: float) -> frozenset[int]:
    """Return about this part of the blocks' bytes, spread over their order."""
    chosen, passed, taken = set(), 0, 0
    for number, num_bytes in blocks.items():
        passed += num_bytes
        if taken + num_bytes <= part * passed:
            chosen.add(number)
            taken += num_bytes
    return frozenset(chosen)


def first_within(streamed: Mapping[int, int], wanted: Iterable[int], room_bytes: int) -> frozenset[int]:
    """Return the first of the wanted blocks that stream, as many as there is room for."""
    taken: set[int] = set()
    left = room_bytes
    for number in dict.fromkeys(wanted):
        if number in streamed and streamed[number] <= left:
            taken.add(number)
            left -= streamed[number]
    return frozenset(taken)


def describe(
    share: DevicePlan, sizes: Sizes, room: StoreRoom, stored: frozenset[int], in_file: frozenset[str]
) -> DevicePlan:
    """Return a share with the blocks that are stored, what a pass reads from the file beside them, and both as text."""
    component = sizes.component
    others = [number for number in share.streamed if number not in stored]
    read_bytes = sum(sizes.in_file[number] for number in others if component.blocks[number].name in in_file)
    stored_bytes = sum(sizes.blocks[number] for number in stored)
    reasons = share.reasons
    if share.streamed:
        reasons = (*reasons, explain(share, room, stored, stored_bytes, read_bytes))
    return replace(share, stored=stored, stored_bytes=stored_bytes, read_bytes=read_bytes, reasons=reasons)


def explain(share: DevicePlan, room: StoreRoom, stored: frozenset[int], stored_bytes: int, read_bytes: int) -> str:
    """Return how many blocks are stored where, how they come, and why not more of them are."""
    missing = len(share.streamed) - len(stored)
    why = room.why_little or f"{format_bytes(room.num_bytes)} free on {room.device} beside what it keeps free"
    origin = "their file" if read_bytes else "RAM"
    if not stored:
        return f"nothing is stored on {room.device}: {why}; {missing} blocks stream from {origin}"
    line = f"{format_bytes(stored_bytes)} stored on {room.device}: {room.way}"
    return f"{line}; {missing} more blocks stream from {origin}: {why}" if missing else line
