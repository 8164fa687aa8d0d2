"""What passes tell of their times and of the speeds of copies, for the plans to come."""

from __future__ import annotations

import itertools
from functools import partial

from .link import link_bytes_per_s
from .membership import Member
from .room import Room

__all__ = ["learn_times"]


def learn_times(member: Member, room: Room) -> None:
    """Take what was timed of a component's passes; a streamed one is planned again when it has all."""
    shares = member.attachment.shares
    for share in shares:
        seconds = share.take_times()
        if seconds is not None:
            member.taken_seconds[share.device.name] = seconds
        for is_pinned, speed in share.take_speeds().items():
            known = room.links if is_pinned else room.pageable_links
            if share.device.name not in known:
                # Only that of the link itself is worth remembering; the other depends on what else the host does.
                known[share.device.name] = link_bytes_per_s(share.device, partial(float, speed)) if is_pinned else speed
                member.planned_in_epoch = -1
    if member.taken_seconds and all(share.device.name in member.taken_seconds for share in shares):
        taken = [member.taken_seconds.pop(share.device.name).items() for share in shares]
        member.block_seconds = dict(itertools.chain(*taken))
        member.planned_in_epoch = -1
