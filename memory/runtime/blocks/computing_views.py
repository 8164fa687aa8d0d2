"""What a group's module holds while it computes: views into the slab on the device, decoded weights in the scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import nn

from ...weights.side_factors import SideFactors, add_product
from ...weights.storage_form import EncodedForm
from ..tensors.computing_parameter import ComputingWeight, note_data
from ..tensors.parameter_slots import ParameterSlot, as_held
from .weight_layout import WeightLayout

__all__ = ["ComputingViews", "FactorLayer"]

FORM = attrgetter("form")

Decoding: TypeAlias = tuple[type[EncodedForm], list[ParameterSlot], list[torch.Tensor], list[list[torch.Tensor]]]
"""Weights of one dtype that rest in one encoded form: each one's place in the scratch, and its leaves."""


class FactorLayer(nn.Module):
    """The side factors of one weight, in the dtype in which it computes; in no module tree."""

    def __init__(self, factors: SideFactors, dtype: torch.dtype) -> None:
        super().__init__()
        with torch.inference_mode(False), torch.no_grad():
            self.up = nn.Parameter(factors.up.to("cpu", dtype, copy=True), requires_grad=False)
            self.down = nn.Parameter(factors.down.to("cpu", dtype, copy=True), requires_grad=False)

    def add_to(self, wide: torch.Tensor) -> None:
        """Add their product to the decoded weight, on the device where they are now."""
        held = self._parameters
        up, down = held["up"], held["down"]
        assert up is not None and down is not None
        add_product(wide, up, down)


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
        self.factors: Mapping[int, FactorLayer] = {}
        """What is added to weights when they are decoded, by their index; the caller puts it on the device first."""
        self.additions: dict[tuple[int, ...], list[tuple[FactorLayer, torch.Tensor]]] = {}
        """By the same ids, what is added, and to which place in the scratch."""
        self.looked: list[ComputingWeight] = []
        """Weights whose ``.data`` was accessed while they computed."""

    def note_data(self, notes: bool) -> None:
        """Switch the recording of accesses to ``.data`` in forwards on or off."""
        self.notes_data = notes

    def forget(self) -> None:
        """Drop the views: they would keep freed slabs alive."""
        self.cache.clear()
        self.decodings.clear()
        self.additions.clear()

    def add_in_decoding(self, factors: Mapping[int, FactorLayer]) -> None:
        """Add these to weights of these indices whenever they are decoded."""
        self.factors = factors
        self.forget()

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
            wide = dict(zip(self.encoded, self.layout.wide.views(scratch), strict=True))
            self.additions[key] = [(layer, wide[index]) for index, layer in self.factors.items()]
        if not is_wide:
            for kind, slots, targets, leaves in self.decodings[key]:
                kind.decode_all(list(map(FORM, slots)), targets, leaves)
            for layer, target in self.additions[key]:
                layer.add_to(target)
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
