"""Weights of the same file in several components: found as a component is packed, and had once in RAM.

[Note: common weights] Two loaders of one file give two models, or two pipelines with a model each. Where both have a
block in RAM with the same values in the same layout, the second is packed into the slab of the first: nothing is
copied, and its own memory is free again. That they come from the same tensors of the same file says where to look; then
all bytes are compared, which takes as long as copying them would. The slab belongs to the kept weights from then on
([Note: kept weights]) and is in the books once, under their name. Whoever writes to such a block takes a slab of its
own first, by whatever way it writes: through the engine (a patch, a write on the device that is saved), or through the
tensors that its module holds and their views, which are watched ([Note: data] in `watched_data.py`). The others go on
with what the file has. When the last of them leaves, the weights are kept like any others.

Blocks are shared that have weights of the file only: no buffers, which forwards change, no encoded or quantized
weights, whose tensors are not watched. Each device has its own copies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..runtime.blocks.pristine_slab import find_origins, slab_of
from ..runtime.blocks.weight_group import WeightGroup
from ..runtime.blocks.weight_store import HostStore
from ..runtime.tensors.reported_device import plainly
from ..transfer.pinned_memory import HostSlab
from ..weights.file_origin import Origin
from .kept_weights import KeptWeights
from .member import Member
from .members import Members

__all__ = ["CommonWeights"]


class CommonWeights:
    """Finds what a newcomer has in common with members. The caller holds the manager's lock."""

    def __init__(self, members: Members, kept: KeptWeights) -> None:
        self.members = members
        self.kept = kept

    def find(self, newcomer: Member) -> dict[WeightGroup, HostSlab]:
        """Return the slabs of members into which groups of a newcomer are to be packed; those are shared from now on.

        Reads the newcomer's weights and theirs.
        """
        packing = newcomer.managed.packing
        wanted: dict[tuple[Origin | None, ...], WeightGroup] = {}
        for share in packing.shares:
            for group in share.groups if share.copies is not None else ():
                is_new = group.at_rest.store is None and group.name not in packing.plan.in_file
                origins = find_origins(group, newcomer.origins) if is_new else ()
                if origins and all(origins) and is_plain(group):
                    wanted[origins] = group
        found: dict[WeightGroup, HostSlab] = {}
        for member in [*self.members.values()] if wanted else ():
            lent: list[WeightGroup] = []
            for group in self.lendable(member):
                taker = wanted.get(group.at_rest.origins)
                store = group.at_rest.store
                if taker is None or taker in found or not isinstance(store, HostStore):
                    continue
                locks = taker.name in packing.plan.pinned
                if (store.memory.lock is not None or not locks) and has_same_bytes(taker, group):
                    found[taker] = store.memory
                    lent.append(group)
            self.lend(member, [group for group in lent if not group.at_rest.is_shared])
        return found

    def lendable(self, member: Member) -> Iterator[WeightGroup]:
        """Yield the groups of a member whose slabs have what files have, and that other code has no hold of."""
        packing = member.managed.packing
        if not member.shares_files:
            return
        for group in [group for group in packing.groups if group.name not in packing.plan.in_file]:
            at_rest = group.at_rest
            is_known = bool(at_rest.origins) and all(at_rest.origins) and not packing.written.may_be_written(group)
            if is_known and is_plain(group) and not at_rest.aliases and not at_rest.has_given_back:
                yield group

    def lend(self, member: Member, groups: list[WeightGroup]) -> None:
        """Make slabs of a member kept weights, which it shares."""
        if not groups:
            return
        slabs = [slab for slab in map(slab_of, groups) if slab is not None]
        packing = member.managed.packing
        packing.common.lend(packing.shares, groups)
        self.kept.share(member, slabs)
        packing.settle_books()


def is_plain(group: WeightGroup) -> bool:
    """Whether a group has weights only that are tensors of torch's own class, as they came."""
    return not group.encoded and not any(slot.is_buffer or slot.is_quantized for slot in group.slots)


def has_same_bytes(newcomer: WeightGroup, other: WeightGroup) -> bool:
    """Whether the weights of a group that is not packed yet are those of another group's slab, bit by bit."""
    assert other.host_slab is not None
    if newcomer.layout.at_rest != other.layout.at_rest:
        return False
    views = newcomer.layout.leaf_views(other.host_slab)
    with plainly(), torch.no_grad():
        return all(
            slot.held.device.type == "cpu" and torch.equal(bits_of(slot.held), bits_of(view))
            for slot, (view,) in zip(newcomer.slots, views, strict=True)
        )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
