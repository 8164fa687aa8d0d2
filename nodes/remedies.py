"""What would give weights more room, checked against the numbers of a report before it is said."""

from __future__ import annotations

from collections.abc import Sequence

from ..memory.units import MIB, align_up, format_bytes
from .last_run import LastRun, Part, Room, Share
from .texts import Text

__all__ = [
    "NAME_LENGTH",
    "elsewhere",
    "hold_all",
    "in_mib",
    "keep_in_ram",
    "place_elsewhere",
    "say",
    "short_name",
    "stream_less",
]

NAME_LENGTH = 40
# By so many of its mean blocks a limit has to grow before fewer blocks stream: blocks differ in size.
WORTH_BLOCKS = 2


def say(key: str, /, **values: object) -> Text:
    """Return a text of advice by its key, with its values."""
    return Text(f"advice.{key}", {name: str(value) for name, value in values.items()})


def short_name(name: str) -> str:
    """Return a name, cut in the middle where it is long."""
    if len(name) <= NAME_LENGTH:
        return name
    return f"{name[: NAME_LENGTH // 2 - 1]}…{name[len(name) - NAME_LENGTH // 2 :]}"


def in_mib(num_bytes: int) -> str:
    """Return a size that a user can type, in whole MiB, no larger than these bytes."""
    return f"{num_bytes // MIB}MiB"


def stream_less(run: LastRun, part: Part, share: Share) -> Text | None:
    """Return what lets fewer blocks of a share stream, best of all none; None where nothing here does."""
    name, room = short_name(part.id), run.rooms.get(share.device)
    if share.limit_bytes <= 0 or room is None:
        return None
    available, enough = room.beside(share.keeps_bytes), align_up(share.whole_bytes, MIB)
    if share.budget and enough <= available:
        free = format_bytes(available)
        return say("raise_to_all", name=name, budget=share.budget, enough=in_mib(enough), free=free)
    if not share.budget and (marks := lower_marks(room, share.missing_bytes, share)):
        return say("lower_marks", device=room.device, name=name, **marks)
    if (other := elsewhere(run, part, share.whole_bytes)) is not None:
        return place_elsewhere(part, other, share.whole_bytes)
    alone = len(part.shares) == 1
    if alone and 0 < part.encoded_bytes <= share.limit_bytes:
        need, limit = format_bytes(part.encoded_bytes), format_bytes(share.limit_bytes)
        return say("fp8_all", name=name, need=need, limit=limit)
    second = max(
        (other for other in run.rooms.values() if other.device not in {one.device for one in part.shares}),
        key=lambda other: other.free_bytes,
        default=None,
    )
    if alone and not share.budget and second is not None:
        needed = share.missing_bytes + WORTH_BLOCKS * share.block_bytes
        if needed <= second.free_bytes:
            placement, free = f"{room.device}&{second.device}", format_bytes(second.free_bytes)
            return say("split", name=name, placement=placement, free=free, device=second.device)
    if share.budget and available >= share.limit_bytes + WORTH_BLOCKS * share.block_bytes:
        return say("raise_budget", name=name, budget=share.budget, enough=in_mib(available))
    left = part.encoded_bytes - (share.limit_bytes - share.staging_bytes)
    if alone and part.encoded_bytes and left < share.streamed_bytes - WORTH_BLOCKS * share.block_bytes // 2:
        now, then = format_bytes(share.streamed_bytes), format_bytes(max(0, left))
        return say("fp8_less", name=name, then=then, now=now)
    return None


def lower_marks(room: Room, missing_bytes: int, share: Share | None = None) -> dict[str, str]:
    """Return the watermark that gives so many bytes more, activations beside, as ``low`` and ``high``; or nothing.

    Args:
        share: what is limited now; its limit must be what the device has, not what a host allows.
    """
    low = (room.low_bytes - max(0, missing_bytes)) // MIB * MIB
    if low < room.activation_bytes or low < 0:
        return {}
    if share is not None and (share.keeps_bytes or share.limit_bytes < room.available_bytes - share.block_bytes):
        return {}
    return {"low": in_mib(low), "high": in_mib(low + room.high_bytes - room.low_bytes)}


def elsewhere(run: LastRun, part: Part, num_bytes: int) -> Room | None:
    """Return another accelerator that has room for so many bytes without evicting anything; None if none has."""
    taken = {share.device for share in part.shares} or {part.device}
    rooms = [room for room in run.rooms.values() if room.device not in taken and room.free_bytes >= num_bytes > 0]
    return max(rooms, key=lambda room: room.free_bytes, default=None)


def place_elsewhere(part: Part, room: Room, num_bytes: int) -> Text:
    need, free = format_bytes(num_bytes), format_bytes(room.free_bytes)
    return say("place_elsewhere", device=room.device, name=short_name(part.id), need=need, free=free)


def keep_in_ram(run: LastRun, part: Part) -> Text | None:
    """Return what keeps a component in RAM that is read from its file; None where the RAM is too small."""
    ram_bytes = run.ram_bytes + part.ram_bytes
    name, free = short_name(part.id), format_bytes(ram_bytes)
    if 0 < part.total_bytes <= ram_bytes:
        placement = f"{part.device}:pinned" if part.total_bytes <= run.lockable_bytes else f"{part.device}:host"
        need = format_bytes(part.total_bytes)
        return say("keep_in_ram", placement=placement, name=name, need=need, free=free)
    if 0 < part.encoded_bytes <= ram_bytes:
        return say("fp8_in_ram", name=name, need=format_bytes(part.encoded_bytes), free=free)
    return None


def hold_all(run: LastRun, parts: Sequence[Part], room: Room, lack_bytes: int) -> Text | None:
    """Return what lets components that take turns on a device be there at once; None where nothing here does.

    Args:
        lack_bytes: what the device lacks for that.
    """
    if marks := lower_marks(room, lack_bytes):
        return say("marks_for_turns", device=room.device, **marks)
    for part in sorted(parts, key=lambda part: part.needed_bytes):
        other = elsewhere(run, part, part.needed_bytes) if part.needed_bytes >= lack_bytes else None
        if other is not None and len(part.shares) <= 1:
            return place_elsewhere(part, other, part.needed_bytes)
    savings = {part.id: saving for part in parts if len(part.shares) == 1 and (saving := saving_of(part)) > 0}
    chosen: list[str] = []
    for name in sorted(savings, key=lambda name: -savings[name])[:2]:
        chosen.append(name)
        if sum(savings[one] for one in chosen) >= lack_bytes:
            saved, lack = format_bytes(sum(savings[one] for one in chosen)), format_bytes(lack_bytes)
            first, *second = map(short_name, chosen)
            if second:
                return say("fp8_for_both", name=first, other=second[0], saved=saved, lack=lack)
            return say("fp8_for_turns", name=first, saved=saved, lack=lack)
    return None


def saving_of(part: Part) -> int:
    """Return how much less of its device a component takes in fp8; 0 where that is not known."""
    return part.needed_bytes - part.encoded_bytes if part.encoded_bytes else 0
