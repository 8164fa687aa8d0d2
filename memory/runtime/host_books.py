"""The books of host memory: what a component's weight stores take of it by tier, and what the ledger has of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ..transfer.pinned_memory import count_slabs
from .blocks.weight_store import FileStore
from .common_slabs import is_paid_elsewhere
from .devices.device_share import DeviceShare
from .devices.ledger import Kind, Ledger

__all__ = ["HostBooks", "count_host_bytes"]


class HostBooks:
    """Notes what is packed, and enters it in the ledger when all of it is there, or at once."""

    def __init__(self, owner: str, ledger: Ledger) -> None:
        self.owner = owner
        self.ledger = ledger
        self.taken = Counter[str]()
        """The bytes of host memory that the weights take, by tier."""
        self.charged = Counter[str]()
        """What of that is in the ledger."""

    @property
    def are_open(self) -> bool:
        """Whether the ledger has something of them."""
        return bool(self.charged)

    def note(self, tier: str, num_bytes: int) -> None:
        """Note bytes that `charge_all` enters."""
        self.taken[tier] += num_bytes

    def charge_all(self) -> None:
        """Enter what was noted and is not in the ledger."""
        self.settle(dict(self.taken))

    def take(self, tier: str, num_bytes: int) -> None:
        """Note bytes and enter them at once; less than none gives them back."""
        self.taken[tier] += num_bytes
        self.charge(tier, num_bytes)

    def take_pageable(self, num_bytes: int) -> None:
        if num_bytes:
            self.take("host", num_bytes)

    def settle(self, taken: Mapping[str, int]) -> None:
        """Make these the bytes that are taken, in the ledger, too."""
        for tier, num_bytes in taken.items():
            self.taken[tier] = num_bytes
            self.charge(tier, num_bytes - self.charged[tier])

    def charge(self, tier: str, num_bytes: int) -> None:
        self.charged[tier] += num_bytes
        self.ledger.change(tier, self.owner, Kind.WEIGHTS, num_bytes)

    def close(self) -> None:
        """Take all of it out of the ledger; interrupted, it can be called again."""
        while self.charged:
            tier, num_bytes = self.charged.popitem()
            self.ledger.credit(tier, self.owner, Kind.WEIGHTS, num_bytes)


def count_host_bytes(shares: Sequence[DeviceShare]) -> dict[str, int]:
    """Return the bytes of host memory that the weight stores of shares have now, by tier, counted in the stores.

    What computes in place in the memory that it came in has no slab: it counts as one.
    """
    groups = [group for share in shares for group in share.groups]
    own = [group for group in groups if not is_paid_elsewhere(group)]
    slabs = [group.host_slab for group in own if group.host_slab is not None]
    stores = [group.at_rest.store for group in groups]
    kept_bytes = sum(store.kept_bytes for store in stores if isinstance(store, FileStore))
    in_place = [group for share in shares if share.copies is None for group in share.groups]
    in_place_bytes = sum(group.slab_bytes for group in in_place if not group.encoded)
    taken = count_slabs(slabs)
    return {**taken, "host": taken["host"] + kept_bytes + in_place_bytes}
