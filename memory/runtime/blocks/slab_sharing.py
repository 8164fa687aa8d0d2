"""How a group leaves a slab that it shares with groups of other components."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...transfer.pinned_memory import HostSlab
from ..tensors.watched_data import point_into
from .weight_store import SharedStore

__all__ = ["SlabSharing"]


class SlabSharing:
    """A group's part in a slab that other components have, too ([Note: common weights] in `common_weights.py`).

    Args:
        owner: the component.
        allocate: returns a slab of the group's own, entered in the books; ``locked`` as the shared one is.
    """

    def __init__(self, owner: str, allocate: Callable[[], HostSlab]) -> None:
        self.owner = owner
        self.allocate = allocate
        self.left: tuple[int, int, HostSlab] | None = None
        """Where the shared slab began and ended, and the group's own, once it has one."""

    def allocate_by(self, allocate: Callable[[], HostSlab]) -> None:
        """Take a slab from elsewhere, when it comes to that."""
        self.allocate = allocate

    def take_slab(self, store: SharedStore) -> HostSlab:
        """Return a slab of the group's own, with what the shared one has."""
        slab = self.allocate()
        with torch.no_grad():
            slab.data.copy_(store.slab)
        begin = store.slab.data_ptr()
        self.left = begin, begin + store.slab.numel(), slab
        return slab

    def point(self, tensor: torch.Tensor, own: torch.Tensor) -> None:
        """Point a weight at rest to where it is in the group's own slab."""
        assert self.left is not None
        slab = self.left[2].data
        point_into(tensor, slab, own.data_ptr() - slab.data_ptr())

    def follow(self, tensor: torch.Tensor) -> None:
        """Point a view of the shared slab, which is about to be written to, to the same place in the group's own."""
        if self.left is not None:
            begin, end, slab = self.left
            at = tensor.data_ptr()
            if begin <= at < end:
                point_into(tensor, slab.data, at - begin)
