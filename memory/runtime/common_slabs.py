"""Slabs that groups of several components have: packing into them, and what that means for the books."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from ..transfer.bounce_buffers import allocate_slabs
from ..transfer.copy_stream import CopyStream
from ..transfer.pinned_memory import HostSlab
from ..units import PAGE_BYTES
from .blocks.pristine_slab import KnownOrigins, find_origins
from .blocks.slab_sharing import SlabSharing
from .blocks.weight_group import WeightGroup
from .blocks.weight_store import HostStore, SharedStore
from .devices.device_share import DeviceShare

__all__ = ["CommonSlabs", "is_paid_elsewhere"]


class CommonSlabs:
    """The slabs that a component shares with others. They are in the books as kept weights, once.

    Args:
        take: enters memory in the component's part of the books, by its tier and bytes.
    """

    def __init__(self, owner: str, take: Callable[[str, int], None]) -> None:
        self.owner = owner
        self.take = take
        self.slabs: Mapping[WeightGroup, HostSlab] = {}
        """Those of other components, by the groups that are about to be packed into them."""

    def start_from(self, slabs: Mapping[WeightGroup, HostSlab]) -> None:
        """Set the slabs of other components into which groups are to be packed."""
        self.slabs = slabs

    def pack(self, share: DeviceShare, origins: KnownOrigins, progress: Callable[[int], None] | None) -> None:
        """Pack the groups whose weights others have into the others' slabs; copies nothing."""
        for group in share.groups if self.slabs else ():
            slab = self.slabs.get(group)
            if slab is not None and group.at_rest.store is None and share.copies is not None:
                if slab.lock is not None:
                    slab.lock.join(share.copies.wait)
                group.at_rest.note_origins(find_origins(group, origins))
                group.pack(slab, None, progress, sharing=self.sharing(group, slab, share.copies))

    def lend(self, shares: Iterable[DeviceShare], groups: Collection[WeightGroup]) -> None:
        """Share the slabs of these groups with other components; the caller enters them in the books as kept."""
        for share in shares:
            for group in share.groups:
                store = group.at_rest.store
                if group in groups and isinstance(store, HostStore) and share.copies is not None:
                    group.at_rest.share(self.sharing(group, store.memory, share.copies))

    def go_on(self, group: WeightGroup, share: DeviceShare) -> None:
        """Go on with a group's part in a slab, in the place of the packing that had it before."""
        store, sharing = group.at_rest.store, group.at_rest.sharing
        if sharing is not None and isinstance(store, HostStore) and share.copies is not None:
            if store.memory.lock is not None:
                store.memory.lock.join(share.copies.wait)
            sharing.allocate_by(self.allocation(group, store.memory, share.copies))

    def leave(self, group: WeightGroup, shares: Iterable[DeviceShare]) -> None:
        """Wait for the copies from a group's slab if others have it, too: it may stay page-locked after this."""
        store = group.at_rest.store
        if isinstance(store, SharedStore) and store.memory.lock is not None:
            for share in shares:
                if share.copies is not None:
                    store.memory.lock.leave(share.copies.wait)

    def end(self) -> None:
        """Enter nothing in the books any more."""
        self.take = take_nothing

    def sharing(self, group: WeightGroup, slab: HostSlab, copies: CopyStream) -> SlabSharing:
        return SlabSharing(self.owner, self.allocation(group, slab, copies))

    def allocation(self, group: WeightGroup, slab: HostSlab, copies: CopyStream) -> Callable[[], HostSlab]:
        return partial(self.allocate, group.slab_bytes, copies, locks=slab.lock is not None)

    def allocate(self, num_bytes: int, copies: CopyStream, *, locks: bool) -> HostSlab:
        """Allocate a slab for a group that leaves a shared one."""
        slabs = allocate_slabs([num_bytes], pinned_bytes=num_bytes + PAGE_BYTES if locks else 0, streams=[copies])
        (slab,) = slabs
        if slab.lock is not None:
            self.take("pinned", slabs.locked_bytes)
        else:
            self.take("host", num_bytes)
        return slab


def take_nothing(tier: str, num_bytes: int) -> None:
    """Do nothing: the component is no longer in the books."""


def is_paid_elsewhere(group: WeightGroup) -> bool:
    """Whether a group's slab is in the books as that of kept weights, which components share."""
    store = group.at_rest.store
    if not isinstance(store, HostStore):
        return False
    return isinstance(store, SharedStore) or (store.memory.lock is not None and store.memory.lock.is_shared)
