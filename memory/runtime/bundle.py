"""What moves together: the weights of a block as they came under management, and those of layers added to it since."""

from __future__ import annotations

import torch

from ..transfer.copy_stream import CopyStream
from .weight_group import BlockState, WeightGroup

__all__ = ["Bundle"]


class Bundle:
    """The units of a block, or of what stays beside the blocks: its own, and one for layers that were added.

    On a device each resident unit has a slab of its own. In staging memory they lie one behind the other, so that the
    block comes as one.
    """

    def __init__(self, own: WeightGroup) -> None:
        self.own = own
        self.added: WeightGroup | None = None
        """The weights of layers that others added to the block, such as a LoRA's."""
        self.pieces: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """Slabs of staging memory and each unit's part of them, by the slab's id."""

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def units(self) -> list[WeightGroup]:
        return [self.own] if self.added is None else [self.own, self.added]

    @property
    def slab_bytes(self) -> int:
        return sum(unit.slab_bytes for unit in self.units)

    @property
    def is_resident(self) -> bool:
        return self.own.copy is not None

    @property
    def is_cast(self) -> bool:
        return bool(self.own.cast_names)

    @property
    def state(self) -> BlockState:
        """That of any unit which computes, else of its own."""
        return next((unit.state for unit in self.units if unit.state is BlockState.COMPUTING), self.own.state)

    @property
    def version(self) -> int:
        """That of the masters; grows when any is written to."""
        return sum(unit.version for unit in self.units)

    @property
    def blocks_host(self) -> bool:
        """Whether a copy to a device holds the host until it is done."""
        return any(unit.blocks_host for unit in self.units)

    def copy_to(self, target: torch.Tensor, begin: int, copies: CopyStream) -> None:
        """Queue the copy of a part of the masters, one behind the other, to as many bytes on a device."""
        offset = 0
        for unit in self.units:
            first, last = max(begin, offset), min(begin + target.numel(), offset + unit.slab_bytes)
            if first < last:
                assert unit.master is not None
                unit.master.copy_to(target[first - begin : last - begin], first - offset, copies)
            offset += unit.slab_bytes

    def compute_from(self, slab: torch.Tensor | None, scratch: torch.Tensor | None) -> None:
        """Give the module its weights in staging memory, or the resident copies; widens what is cast."""
        parts = (
            self.parts(slab) if slab is not None else [unit.copy.slab for unit in self.units if unit.copy is not None]
        )
        for unit, part in zip(self.units, parts, strict=True):
            unit.compute_from(part, scratch)

    def compute_in_place(self, scratch: torch.Tensor | None) -> None:
        """Give the module the masters to compute from, which are in host memory."""
        for unit in self.units:
            if unit.host_slab is not None:
                unit.compute_from(unit.host_slab, scratch)

    def parts(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return each unit's part of a slab, the same objects every time."""
        if self.added is None:
            return [slab]
        if id(slab) not in self.pieces:
            self.pieces[id(slab)] = slab, list(torch.split(slab, [unit.slab_bytes for unit in self.units]))
        return self.pieces[id(slab)][1]

    def rest(self) -> None:
        """Give the module what it holds between computes."""
        for unit in self.units:
            unit.rest()

    def forget_views(self) -> None:
        """Drop what is known of staging memory and scratch: it would keep freed slabs alive."""
        self.pieces.clear()
        for unit in self.units:
            unit.forget_views()
