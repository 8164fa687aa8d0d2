"""Copies blocks of components that are used next to free device memory, while another component computes.

[Note: early loading] It takes only what would stay free anyway, and delays no copy that computing waits for. So a block
is copied to a device early where all of this holds:

1. A component under management computes there in the step that runs, it is loaded, and none of its blocks stream.
2. What its forward needs beside the weights is known, for the size that it computes now.
3. The host moves no component there by itself: what such a component needs is not known here.
4. Above the high watermark, beside that need and what profiles leave free, so many bytes are free.
5. No budget for the whole device and no limit of idle models counts: what came early would be beyond it.

Nothing is evicted for it. A forward of a size whose need is not known begins without it. It ends within a piece
of a file when the forecast changes, and what came for a component that is not expected any more is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence

from ..options.idle_limits import IdleLimits
from ..runtime.devices.device_share import DeviceShare
from ..runtime.devices.early_copies import EarlyCopy
from ..runtime.forwards.deferring_lock import DeferringLock
from ..runtime.forwards.input_size import Size
from ..runtime.forwards.recording_pauses import host_recordings
from .idle_unloading import IdleUnloading
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

    def __init__(
        self, lock: DeferringLock, capacity: LiveCapacity, leased: Mapping[str, Member], idle: IdleUnloading
    ) -> None:
        self.lock = lock
        self.capacity = capacity
        self.leased = leased
        self.idle = idle
        self.begun: set[str] = set()
        """The components of which something may be on a device early."""

    # -- the thread

    def load(self, components: Sequence[str], is_wanted: Callable[[], bool]) -> None:
        """Copy what of the components' plans finds room, in their order, until all is there or they are not wanted."""
        left = list(components)
        while left and is_wanted():
            has_copied = False
            for component in list(left):
                is_there = self.load_block(component, is_wanted)
                if is_there:
                    left.remove(component)
                elif is_there is None:
                    continue
                has_copied = True
                break
            if not has_copied:
                time.sleep(WAITING_S)
        with self.lock.exclusive():
            for component in components:
                self.close(component)

    def load_block(self, component: str, is_wanted: Callable[[], bool]) -> bool | None:
        """Copy one block of a component, and wait until it is there.

        Returns:
            True where nothing is left to do for the component, None where it has to wait.
        """
        try:
            with self.lock.exclusive(), host_recordings.paused():
                if not is_wanted():
                    return True
                begun, is_over = self.begin(component)
            if begun is None:
                return True if is_over else None
            share, early = begun
            if share.early.fill(early):
                while is_wanted() and share.early.is_coming(early):
                    time.sleep(COPYING_S)
            return False
        except Exception:  # whatever it is, the component's own loading runs into it and says so
            with self.lock.exclusive():
                self.drop([component], all_of_it=False)
            return True

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
            room_bytes = 0 if share.device.is_cpu else self.find_room(share.device.name, member)
            group = None if share.device.is_cpu else share.find_early(plan)
            if group is None or group.slab_bytes > room_bytes:
                waits |= group is not None
                continue
            if managed.source is not None:
                managed.source.keep_pages(self.capacity.has_room_for_pages(managed.plan.file_bytes))
            self.capacity.measures.look(share.device.name)  # what computes needed so far, without it
            self.begun.add(component)
            try:
                early = share.begin_early(group)
            finally:
                self.capacity.measures.look(share.device.name)
            for other in self.leased.values():
                other.note_beside(share.device.name, group.slab_bytes)
            return (share, early), False
        return None, not waits

    # -- how much

    def find_room(self, device_name: str, newcomer: Member) -> int:
        """Return how many bytes of a device may be taken early now."""
        capacity, device = self.capacity, self.capacity.devices[device_name]
        running = [capacity.members.get(component) for component in next(iter(capacity.forecast.steps), ())]
        computing = dict.fromkeys([member for member in running if member is not None] + [*self.leased.values()])
        here = [member for member in computing if device_name in member.managed.device_names]
        if not here or not all(self.allows(member, device_name) for member in here) or self.idle.limits != IdleLimits():
            return 0
        if capacity.steered.candidates(device_name, capacity.reloads) or has_budget(newcomer, device_name):
            return 0
        kept_bytes = max(self.needed(member, device_name) for member in here)
        left_free = max(left_free_by(member, device_name, device.total_bytes()) for member in [newcomer, *here])
        left_free = max(left_free, capacity.mark_of(device_name).high_bytes)
        return max(0, capacity.free_bytes(device) - left_free - kept_bytes)

    def allows(self, member: Member, device_name: str) -> bool:
        """Whether a member that computes on a device leaves the link free, and what it needs there is known."""
        managed = member.managed
        streams = any(share.streamed for share in managed.plan.shares)
        if member.is_hosted or not managed.is_loaded or streams or has_budget(member, device_name):
            return False
        return self.is_known(member, device_name, None if managed.passes.open is None else managed.passes.open.size)

    def is_known(self, member: Member, device_name: str, size: Size | None) -> bool:
        """Whether it is known what forwards of a size need, or what the last one needed."""
        needed = self.capacity.needed(member, device_name, size)
        return needed is not None and needed.is_known

    def needed(self, member: Member, device_name: str) -> int:
        needed = self.capacity.needed(member, device_name)
        return needed.num_bytes if needed is not None else 0

    # -- dropped

    def make_way(self, member: Member, size: Size) -> None:
        """Drop what came early where a forward of a size is about to begin whose need is not known."""
        if self.begun and not all(
            self.is_known(member, name, size) for name in member.managed.device_names if name != "cpu"
        ):
            self.drop(self.begun - {member.id})

    def drop_others(self, wanted: Container[str]) -> None:
        """Drop what came early for components that are not expected any more; the caller holds the lock."""
        unexpected = [component for component in self.begun if component not in wanted]
        if unexpected:
            self.drop(unexpected)

    def drop(self, components: Container[str], *, all_of_it: bool = True) -> None:
        """Drop what came early for some components, or only what failed to come; the caller holds the lock."""
        for component in [component for component in self.begun if component in components]:
            member = self.capacity.members.get(component)
            if member is not None and member.leases:
                continue  # it computes, and has taken what came
            for share in member.managed.shares if member is not None else ():
                if all_of_it:
                    share.early.drop_others()
                else:
                    share.early.drop_unfilled()
                if not share.device.is_cpu:
                    self.capacity.measures.look(share.device.name)
            self.close(component)
            if all_of_it:
                self.begun.discard(component)

    def close(self, component: str) -> None:
        """Free the buffers through which its file was read; the caller holds the lock."""
        member = self.capacity.members.get(component)
        if member is not None and not member.leases:
            for share, plan in zip(member.managed.shares, member.managed.plan.shares, strict=True):
                share.close_early(plan)


def has_budget(member: Member, device_name: str) -> bool:
    """Whether a budget for a whole device counts for a member: what came early may be beyond it."""
    component = member.managed.component
    budgets = member.profile.budgets_for(device_name, component.name, component.kind)
    return any(budget.target == device_name for budget in budgets)


def left_free_by(member: Member, device_name: str, total_bytes: int) -> int:
    component = member.managed.component
    return member.profile.left_free(device_name, component.name, component.kind, total_bytes)
