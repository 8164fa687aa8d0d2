"""Side factors: the low-rank sum that is added to a weight when it is decoded, such as a LoRA's.

A small change would be lost if the sum were encoded again: where it is less than half a step of the form, the weight
stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["SideFactors", "add_product"]


@dataclass(frozen=True, slots=True, eq=False)
class SideFactors:
    """What is added to a weight: ``up @ down``; each strength and scale is in them already.

    Two with other ``up`` or ``down`` are different, whatever their values: setting the same one again costs nothing.
    """

    up: torch.Tensor
    """(rows, rank); a row of the weight is its first dimension."""
    down: torch.Tensor
    """(rank, elements of a row)."""

    @staticmethod
    def joined(parts: Sequence[SideFactors]) -> SideFactors:
        """Return the sum of several, whose rank is the sum of theirs."""
        if len(parts) == 1:
            return parts[0]
        return SideFactors(up=torch.cat([part.up for part in parts], 1), down=torch.cat([part.down for part in parts]))

    def suit(self, shape: Sequence[int]) -> bool:
        """Whether they can be added to a weight of this shape."""
        rows, columns = shape[0], torch.Size(shape[1:]).numel()
        return self.up.dim() == self.down.dim() == 2 and (
            (self.up.shape[0], self.up.shape[1], self.down.shape[1]) == (rows, self.down.shape[0], columns)
        )


@torch.no_grad()
def add_product(wide: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
    """Add ``up @ down`` to a contiguous weight of their dtype, on their device: summed in one product, rounded once."""
    wide.view(up.shape[0], -1).addmm_(up, down)
