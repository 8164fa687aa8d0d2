"""Blocks that rested in their file and get a copy in RAM, because they stream from now on."""

from __future__ import annotations

from ..planner.plan import ComponentPlan
from ..transfer.bounce_buffers import allocate_slabs
from ..units import PAGE_BYTES
from .blocks.bundle import Bundle
from .blocks.group_reading import read_into_memory
from .blocks.weight_store import FileStore
from .devices.device_share import DeviceShare
from .packing import Packing

__all__ = ["take_ram"]


def take_ram(packing: Packing, plan: ComponentPlan) -> bool:
    """Read blocks into RAM that rest in their file, where a new plan of the same blocks wants them there.

    Returns whether the plan wants any.

    No pass runs. Those that the plan does not have resident leave the device first.

    Raises:
        InvalidInput: the file has changed. Those that were read before stay in RAM.
    """
    if plan.in_file == packing.plan.in_file:
        return False
    try:
        with packing.open_files():
            for share, part in zip(packing.shares, plan.shares, strict=True):
                bundles = {number: share.blocks[number] for number in share.blocks if leaves_file(share, number, plan)}
                share.drop_blocks(number for number in bundles if number not in part.resident)
                read_share(packing, share, [each for each in bundles.values() if rests_in_file(each)], plan)
    finally:
        packing.settle_books()
    packing.follow(plan)
    return True


def leaves_file(share: DeviceShare, number: int, plan: ComponentPlan) -> bool:
    bundle = share.blocks[number]
    return rests_in_file(bundle) and bundle.own.name not in plan.in_file


def rests_in_file(bundle: Bundle) -> bool:
    return isinstance(bundle.own.at_rest.store, FileStore)


def read_share(packing: Packing, share: DeviceShare, bundles: list[Bundle], plan: ComponentPlan) -> None:
    """Read blocks of one device into slabs, page-locked as far as the plan says and the driver agrees."""
    groups = sorted((bundle.own for bundle in bundles), key=lambda group: group.name not in plan.pinned)
    if not groups:
        return
    assert share.copies is not None
    locked = [group.slab_bytes for group in groups if group.name in plan.pinned]
    slabs = allocate_slabs(
        [group.slab_bytes for group in groups],
        pinned_bytes=sum(locked) + len(locked) * PAGE_BYTES,
        streams=[share.copies],
    )
    for group, slab in zip(groups, slabs, strict=True):
        read_into_memory(group, slab)
        if group.copy is not None:  # the same weights
            group.copy.take_store_version(group.at_rest.version)
        packing.written.note_packed(group)
    packing.note_refusal(slabs.was_refused)
