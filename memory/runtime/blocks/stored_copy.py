"""The copy of a group's weights in the memory of another device, from which its block streams.

[Note: store copies] The weight store of the group stays what it is: its file, or a slab of RAM. What is written to
weights is written there. So the copy is compared with it whenever the block is about to stream, and what differs is
copied again first: of a file only what RAM has of it, since nothing writes to files.
"""

from __future__ import annotations

import torch

from ...transfer.bounce_buffers import BounceBuffers
from ...transfer.peer_copies import PeerCopies
from .weight_store import FileStore, HostStore
from .weights_at_rest import WeightsAtRest

__all__ = ["StoredCopy"]


class StoredCopy:
    """A slab on another device than the one that computes, and which weights at rest it has.

    Args:
        slab: of as many bytes as the group's weights take at rest.
    """

    def __init__(self, at_rest: WeightsAtRest, slab: torch.Tensor, peers: PeerCopies) -> None:
        self.at_rest = at_rest
        self.slab = slab
        self.peers = peers
        self.store: HostStore | FileStore | None = None
        """What it is a copy of; None before it is filled."""
        self.version: int | None = None
        """The version of the weights at rest that it has; None where they may have been written to past it."""

    @property
    def is_filled(self) -> bool:
        """Whether all of it was queued once."""
        return self.store is not None

    def fill(self, bounce: BounceBuffers) -> None:
        """Queue the copy of the weights at rest; a file is read through these buffers.

        Raises:
            InvalidInput: the file is not what it was. It stays unfilled.
        """
        store, version = self.at_rest.store, self.at_rest.version
        assert store is not None
        if isinstance(store, FileStore):
            before = store.bounce
            store.go_through(bounce)
            try:
                store.copy_to(self.slab, 0, self.peers.source)
            finally:
                store.go_through(before)
        else:
            store.copy_to(self.slab, 0, self.peers.source)
        self.store, self.version = store, version

    def forget(self) -> None:
        """The weights at rest may have been written to past their version: compare no more, copy again."""
        self.version = None

    def refresh(self) -> None:
        """Queue copies of what was written to the weights at rest since it was filled. Reads no file."""
        store, version = self.at_rest.store, self.at_rest.version
        if store is self.store and version == self.version:
            return
        if isinstance(store, FileStore):
            assert store is self.store, "a weight store in RAM never becomes a file again"
            for place, leaf in store.kept.items():
                begin, end = store.layout.offsets[place], store.layout.end_of(place)
                self.copy_again(store.layout.forms[place].bytes_of(leaf.detach()), begin, end)
        else:
            assert store is not None
            store.copy_to(self.slab, 0, self.peers.source)
        self.store, self.version = store, version

    def copy_again(self, leaf: torch.Tensor, begin: int, end: int) -> None:
        if begin < end:
            self.peers.source.copy(self.slab[begin:end], leaf)

    def copy_to(self, target: torch.Tensor, begin: int) -> None:
        """Queue the copy of a part of the slab to as many bytes on the device that computes."""
        self.refresh()
        self.peers.copy(target, self.slab[begin : begin + target.numel()])

    @property
    def blocks_host(self) -> bool:
        """Whether a copy to the device that computes holds the host until it is done."""
        return self.peers.blocks_host
