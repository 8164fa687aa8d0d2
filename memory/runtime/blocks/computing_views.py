"""What a group's module holds while it computes: views into the slab on the device, decoded weights in the scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias

import torch

from ...weights.storage_form import EncodedForm
from ..tensors.computing_parameter import ComputingWeight, note_data
from ..tensors.parameter_slots import ParameterSlot, as_held
from .weight_layout import WeightLayout

__all__ = ["ComputingViews"]

FORM = attrgetter("form")

Decoding: TypeAlias = tuple[type[EncodedForm], list[ParameterSlot], list[torch.Tensor], list[list[torch.Tensor]]]
"""Weights of one dtype that rest in one encoded form: each one's place in the scratch, and its leaves."""


class ComputingViews:
    """The views from which a group computes, the same objects for the same memory every time.

    Building a block's parameters costs microseconds per tensor, and every step it lies at the same places.
    """

    def __init__(
        self,
        slots: Sequence[ParameterSlot],
        encoded: Mapping[int, type[EncodedForm]],
        layout: WeightLayout,
        *,
        notes_data: bool,
    ) -> None:
        self.slots = slots
        self.encoded = encoded
        self.layout = layout
        self.notes_data = notes_data
        """Whether accesses to ``.data`` in a forward are recorded, which costs a little in every call."""
        self.cache: dict[tuple[int, ...], list[torch.Tensor]] = {}
        """The views by the ids of the slab and the scratch."""
        self.decodings: dict[tuple[int, ...], list[Decoding]] = {}
        """The weights to decode first, by the same ids."""
        self.looked: list[ComputingWeight] = []
        """Weights whose ``.data`` was accessed while they computed."""

    def note_data(self, notes: bool) -> None:
        """Switch the recording of accesses to ``.data`` in forwards on or off."""
        self.notes_data = notes

    def forget(self) -> None:
        """Drop the views: they would keep freed slabs alive."""
        self.cache.clear()
        self.decodings.clear()

    def of(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return what the module holds to compute from a slab without encoded weights."""
        key = (id(slab),)
        views = self.cache.get(key)
        if views is None:
            leaves = zip(self.slots, self.layout.leaf_views(slab), strict=True)
            views = self.cache[key] = self.noted([as_held(iter(own), slot) for slot, own in leaves])
        return views

    def decoded(
        self,
        slab: torch.Tensor,
        scratch: torch.Tensor,
        resident: Sequence[torch.Tensor] | None,
        *,
        is_wide: bool = False,
    ) -> list[torch.Tensor]:
        """Decode the encoded weights of a slab into the scratch; returns what the module then computes from.

        Args:
            is_wide: whether they are decoded there already.
            resident: what the module holds at rest, if the slab stays on the device.
        """
        key = id(slab), id(scratch)
        if key not in self.cache:
            self.cache[key] = self.build(slab, scratch, resident)
            self.decodings[key] = self.find_decodings(slab, scratch)
        for kind, slots, wide, leaves in () if is_wide else self.decodings[key]:
            kind.decode_all(list(map(FORM, slots)), wide, leaves)
        return self.cache[key]

    def build(
        self, slab: torch.Tensor, scratch: torch.Tensor, resident: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Return views of encoded weights in the scratch, and of the others in the slab."""
        wide = dict(zip(self.encoded, self.layout.wide.views(scratch), strict=True))
        views: list[torch.Tensor] = []
        for index, leaves in enumerate(self.layout.leaf_views(slab)):
            if resident is not None and index not in wide:
                views.append(resident[index])
            else:
                own = iter([wide[index]] if index in wide else leaves)
                views += self.noted([as_held(own, self.slots[index])])
        return views

    def find_decodings(self, slab: torch.Tensor, scratch: torch.Tensor) -> list[Decoding]:
        targets, leaves = self.layout.wide.views(scratch), self.layout.leaf_views(slab)
        # One dtype each: on CUDA some versions of torch write all targets of a foreach copy in the dtype of the first.
        decodings: dict[tuple[type[EncodedForm], torch.dtype], Decoding] = {}
        for (index, kind), target in zip(self.encoded.items(), targets, strict=True):
            _, slots, wide, stored = decodings.setdefault((kind, target.dtype), (kind, [], [], []))
            slots.append(self.slots[index])
            wide.append(target)
            stored.append(leaves[index])
        return list(decodings.values())

    def noted(self, views: list[torch.Tensor]) -> list[torch.Tensor]:
        return [note_data(view, self.looked) for view in views] if self.notes_data else views
