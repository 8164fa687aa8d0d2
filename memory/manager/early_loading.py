"""Copies blocks of a component that is used next to free device memory, while another component computes.

[Note: early loading] It takes only what would stay free anyway, and delays no copy that computing waits for. So a block
is copied to a device early where all of this holds:

1. A component under management computes there in the step that runs, it is loaded, and none of its blocks stream.
2. The host moves no component there by itself: what such a component needs is not known here.
3. Above the high watermark, and beside what forwards of this step are known to need, so many bytes are free.

Nothing is evicted for it. It ends within a block when the forecast changes, and what came for a component that is not
expected any more is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping

import torch

from ..errors import InvalidInput
from ..runtime.devices.device_share import DeviceShare
from ..runtime.devices.early_copies import EarlyCopy
from ..runtime.forwards.deferring_lock import DeferringLock
from ..runtime.forwards.recording_pauses import host_recordings
from .live_capacity import LiveCapacity
from .member import Member

__all__ = ["EarlyLoading"]

# How often it looks whether a copy has come, and whether what it waits for is over.
COPYING_S = 0.002
WAITING_S = 0.1


class EarlyLoading:
    """Loads blocks of idle components early, one after the other, in the thread that calls it.

    Args:
        leased: the members that compute now, by their ids.
    """

    def __init__(self, lock: DeferringLock, capacity: LiveCapacity, leased: Mapping[str, Member]) -> None:
        self.lock = lock
        self.capacity = capacity
        self.leased = leased
        self.begun: set[str] = set()
        """The components of which something may be on a device early."""

    def load(self, component: str, is_wanted: Callable[[], bool]) -> None:
        """Copy what of a component's plan finds room; returns when that is done, or it is not wanted any more."""
        while is_wanted():
            with self.lock.exclusive(), host_recordings.paused():
                if not is_wanted():
                    return
                begun, is_over = self.begin(component)
            if begun is None:
                if is_over:
                    return
                time.sleep(WAITING_S)
                continue
            share, early = begun
            try:
                share.early.fill(early)
            except (InvalidInput, KeyError, RuntimeError):  # its loading says what is wrong
                with self.lock.exclusive():
                    share.early.drop_unfilled()
                return
            while is_wanted() and not early.is_there:
                time.sleep(COPYING_S)

    def begin(self, component: str) -> tuple[tuple[DeviceShare, EarlyCopy] | None, bool]:
        """Make room for one block; the caller holds the lock.

        Returns:
            The block's share and its copy, to be filled without the lock; and whether nothing is left to do.
        """
        member = self.capacity.members.get(component)
        if member is None or member.leases or member.is_hosted:
            return None, True
        managed, waits = member.managed, False
        if not all(bundle.is_as_placed() for share in managed.shares for bundle in share.bundles):
            return None, False  # other code put something in place of a weight: its next use takes that over
        for share, plan in zip(managed.shares, managed.plan.shares, strict=True):
            if share.device.is_cpu:
                continue
            room_bytes = self.find_room(share.device.name)
            if room_bytes is None:
                waits = True
                continue
            if managed.source is not None:
                managed.source.keep_pages(self.capacity.has_room_for_pages(managed.plan.file_bytes))
            try:
                early = share.begin_early(plan, room_bytes)
            except torch.OutOfMemoryError:
                return None, True
            if early is not None:
                self.begun.add(component)
                return (share, early), False
            waits = waits or share.lacks_early(plan)
        return None, not waits

    def find_room(self, device_name: str) -> int | None:
        """Return how many bytes may be taken of a device early; None while what computes there does not allow any."""
        capacity, device = self.capacity, self.capacity.devices[device_name]
        running = [capacity.members.get(component) for component in next(iter(capacity.forecast.steps), ())]
        computing = dict.fromkeys([member for member in running if member is not None] + [*self.leased.values()])
        here = [member for member in computing if device_name in member.managed.device_names]
        if not here or any(member.is_hosted or not member.managed.is_loaded for member in here):
            return None
        if capacity.steered.candidates(device_name, capacity.reloads):
            return None
        kept_bytes = 0
        for member in here:
            needed = capacity.needed(member, device_name)
            if any(share.streamed for share in member.managed.plan.shares):
                return None
            kept_bytes = max(kept_bytes, needed.num_bytes if needed is not None else 0)
            if needed is None or not needed.is_known:
                kept_bytes = max(kept_bytes, capacity.unlearned(device_name, is_hosted=False))
        return capacity.free_bytes(device) - capacity.mark_of(device_name).high_bytes - kept_bytes

    def drop_others(self, wanted: Container[str]) -> None:
        """Drop what came early for components that are not expected any more; the caller holds the lock."""
        for component in [component for component in self.begun if component not in wanted]:
            self.begun.discard(component)
            member = self.capacity.members.get(component)
            if member is not None and not member.leases:
                for share in member.managed.shares:
                    share.early.drop_others()
