"""Leaves of a slab that their file has in another form: converted in the memory that they are read into.

They are cast to the dtype of their module ([Note: casts] in `weights/casting.py`), and those of weights that rest in an
encoded form are encoded, by which the device gets fewer bytes than the file has. A form has to be measured before, on
the whole weight; that is done once, the first time that it is read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...weights.casting import NUM_AT_A_TIME, can_cast, cast_into, convert_in_place, stored_begin
from ...weights.storage_form import EncodedForm
from ..tensors.parameter_slots import ParameterSlot

__all__ = ["ConvertedLeaf"]


class ConvertedLeaf:
    """One leaf of a slab that is made of what its file has of a weight.

    Args:
        stored: the dtype that the file has.
        wide: the dtype in which the weight computes.
        leaf: the dtype in which it rests in a slab.
        kind: the form in which it rests there; None if that is as it computes.
    """

    def __init__(
        self,
        slot: ParameterSlot,
        *,
        stored: torch.dtype,
        wide: torch.dtype,
        leaf: torch.dtype,
        kind: type[EncodedForm] | None,
    ) -> None:
        assert stored is wide or can_cast(stored, wide)
        self.slot = slot
        self.stored = stored
        self.wide = wide
        self.leaf = leaf
        self.kind = kind

    @property
    def is_measured(self) -> bool:
        """Whether a part of it can be converted by itself."""
        return self.kind is None or self.slot.encoding is not None

    def room_bytes(self, num_elements: int) -> int:
        """Return the bytes of memory in which so many elements are read and converted."""
        return num_elements * max(self.stored.itemsize, self.leaf.itemsize)

    def read_part(self, room: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Return the bytes of that memory which are to be read."""
        begin = stored_begin(num_elements, self.stored, self.leaf)
        return room[begin : begin + num_elements * self.stored.itemsize]

    def measure(self, pieces: Iterable[torch.Tensor]) -> None:
        """Find the form of the weight, of all that the file has of it, in pieces. Raises as `EncodedForm.measure`."""
        assert self.kind is not None
        parts = (part for piece in pieces for part in torch.split(piece.view(self.stored), NUM_AT_A_TIME))
        self.slot.rest_as(self.kind.measure_parts((self.widened(part) for part in parts), name=self.slot.spec.name))

    def measure_whole(self, wide: torch.Tensor) -> None:
        """Find the form of the weight, as it computes. Raises as `measure`."""
        assert self.kind is not None
        self.slot.rest_as(self.kind.measure(wide, name=self.slot.spec.name))

    def convert(self, room: torch.Tensor, num_elements: int) -> torch.Tensor:
        """Convert elements that were read, and return their bytes, the first of that memory. Takes some MiB."""
        convert_in_place(room, num_elements, self.stored, self.leaf, self.encode if self.kind else None)
        return room[: num_elements * self.leaf.itemsize]

    def widened(self, elements: torch.Tensor) -> torch.Tensor:
        """Return elements in the dtype in which the weight computes; the same ones where they have it."""
        if elements.dtype is self.wide:
            return elements
        wide = torch.empty(elements.shape, dtype=self.wide)
        cast_into(elements, wide)
        return wide

    def encode(self, elements: torch.Tensor, leaf: torch.Tensor) -> None:
        """Fill a part of the leaf of a measured weight with elements, read in whatever dtype; may overwrite them."""
        assert self.slot.encoding is not None
        self.slot.encoding.encode_part(self.widened(elements), leaf)
