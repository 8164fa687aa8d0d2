"""The weights that move together: those of a block when management began, and those of layers added to it since."""

from __future__ import annotations

import torch

from ...transfer.copy_stream import CopyStream
from .block_state import BlockState
from .weight_group import WeightGroup

__all__ = ["Bundle"]


class Bundle:
    """The groups of a block, or of the non-block weights: its own, and one for layers that were added.

    On a device each resident group has a slab of its own. In staging memory they lie one behind the other, so that the
    block comes as one.
    """

    def __init__(self, own: WeightGroup) -> None:
        self.own = own
        self.all = [own]
        self.added: WeightGroup | None = None
        """The weights of layers that other code added to the block, such as a LoRA's."""
        self.pieces: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """Slabs of staging memory and each group's part of them, by the slab's id."""

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def groups(self) -> list[WeightGroup]:
        return self.all

    def add(self, added: WeightGroup | None) -> None:
        """Include the weights of layers that other code added to the block, or exclude them again."""
        self.added = added
        self.all = [self.own] if added is None else [self.own, added]

    def is_as_placed(self) -> bool:
        """Whether the module holds what it was given, at every place."""
        return self.own.placed.is_as_placed() and (self.added is None or self.added.placed.is_as_placed())

    @property
    def slab_bytes(self) -> int:
        return sum(group.slab_bytes for group in self.groups)

    @property
    def is_resident(self) -> bool:
        return self.own.copy is not None

    @property
    def is_encoded(self) -> bool:
        return bool(self.own.encoded)

    @property
    def state(self) -> BlockState:
        """The state of the group that computes, else of the block's own group."""
        own = self.own.placed.state
        if self.added is None or own is BlockState.COMPUTING:
            return own
        added = self.added.placed.state
        return added if added is BlockState.COMPUTING else own

    @property
    def version(self) -> int:
        """The version of the weights at rest; it grows with each write to them."""
        own = self.own.at_rest.version
        return own if self.added is None else own + self.added.at_rest.version

    @property
    def blocks_host(self) -> bool:
        """Whether a copy to a device holds the host until it is done."""
        return self.own.blocks_host or (self.added is not None and self.added.blocks_host)

    def copy_to(self, target: torch.Tensor, begin: int, copies: CopyStream) -> None:
        """Queue copies of a part of the weights at rest, group after group, into a target on the device."""
        if self.added is None:
            self.own.copy_to(target, begin, copies)
            return
        offset = 0
        for group in self.groups:
            first, last = max(begin, offset), min(begin + target.numel(), offset + group.slab_bytes)
            if first < last:
                group.copy_to(target[first - begin : last - begin], first - offset, copies)
            offset += group.slab_bytes

    def compute_from(self, slab: torch.Tensor | None, scratch: torch.Tensor | None, *, is_wide: bool = False) -> None:
        """Give the module its weights in staging memory, or the resident copies; decodes what is encoded.

        Args:
            is_wide: whether that was decoded into the scratch in this pass, and is there still.
        """
        if self.added is None:
            own = self.own
            if slab is None:
                assert own.copy is not None
                slab = own.copy.slab
            own.compute_from(slab, scratch, is_wide=is_wide)
            return
        parts = (
            self.parts(slab)
            if slab is not None
            else [group.copy.slab for group in self.groups if group.copy is not None]
        )
        for group, part in zip(reversed(self.groups), reversed(parts), strict=True):  # decoding needs what was added
            group.compute_from(part, scratch, is_wide=is_wide)

    def compute_in_place(self, scratch: torch.Tensor | None, *, is_wide: bool = False) -> None:
        """Give the module the weights at rest, in host memory, to compute from; ``is_wide`` as above."""
        for group in self.groups:
            if group.host_slab is not None:
                group.compute_from(group.host_slab, scratch, is_wide=is_wide)

    def parts(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return each group's part of a slab, the same objects every time."""
        if self.added is None:
            return [slab]
        if id(slab) not in self.pieces:
            self.pieces[id(slab)] = slab, list(torch.split(slab, [group.slab_bytes for group in self.groups]))
        return self.pieces[id(slab)][1]

    def forget_views(self) -> None:
        """Drop all views into staging memory and scratch: they would keep freed slabs alive."""
        self.pieces.clear()
        for group in self.groups:
            group.forget_views()
