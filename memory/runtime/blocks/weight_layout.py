"""Where each weight of a group lies in memory: at rest in a slab, and decoded in the scratch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...transfer.slabs import Form, SlabLayout
from ...weights.quantized_leaves import leaves_of
from ...weights.storage_form import EncodedForm
from ..tensors.parameter_slots import ParameterSlot

__all__ = ["WeightLayout"]


class WeightLayout:
    """The leaves of a group's weights in one slab, and its encoded weights in the scratch.

    Args:
        encoded: by the index of each weight that rests in an encoded form, which.
    """

    def __init__(self, slots: Sequence[ParameterSlot], encoded: Mapping[int, type[EncodedForm]]) -> None:
        self.slots = slots
        self.encoded = encoded
        self.num_leaves = [len(self.leaf_forms(index)) for index in range(len(slots))]
        self.renew()

    def lay_out(self) -> SlabLayout:
        """Return the layout of a slab for what the module holds now."""
        return SlabLayout.of([form for index in range(len(self.slots)) for form in self.leaf_forms(index)])

    def renew(self) -> None:
        """Lay the slab and the scratch out for what the module holds now; nothing may lie in one."""
        self.at_rest = self.lay_out()
        self.wide = SlabLayout.of([Form.of(self.slots[index].held) for index in self.encoded])

    def leaf_forms(self, index: int) -> list[Form]:
        held = self.slots[index].held
        if index in self.encoded:
            form = Form.of(held)
            weight = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
            leaves = self.encoded[index].empty_leaves(weight)
            return [Form(leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves]
        return [Form.of(leaf) for leaf in leaves_of(held)]

    def first_leaf(self, index: int) -> int:
        """Return the place of a weight's first leaf among all leaves."""
        return sum(self.num_leaves[:index])

    def leaf_form(self, index: int) -> Form:
        """Return the form of a weight's first leaf."""
        return self.at_rest.forms[self.first_leaf(index)]

    def wide_form(self, index: int) -> Form:
        """Return what an encoded weight is when it computes."""
        return self.wide.forms[list(self.encoded).index(index)]

    def leaf_views(self, slab: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return the views into a slab that make each weight."""
        views = iter(self.at_rest.views(slab))
        return [list(itertools.islice(views, count)) for count in self.num_leaves]

    def take_strides(self, index: int, strides: Sequence[int], slabs: Sequence[torch.Tensor]) -> None:
        """Lay a weight of one leaf out by other strides, where it lies in these slabs, too."""
        place = self.first_leaf(index)
        before = [self.at_rest.views(slab)[place].clone() for slab in slabs]
        forms = list(self.at_rest.forms)
        forms[place] = replace(forms[place], strides=tuple(strides))
        self.at_rest = replace(self.at_rest, forms=tuple(forms))
        for slab, values in zip(slabs, before, strict=True):
            self.at_rest.views(slab)[place].copy_(values)

    @property
    def buffers_begin(self) -> int:
        """The offset at which plain buffers begin, behind all weights."""
        num_leaves = sum(
            count for slot, count in zip(self.slots, self.num_leaves, strict=True) if not slot.is_plain_buffer
        )
        offsets = self.at_rest.offsets
        return offsets[num_leaves] if num_leaves < len(offsets) else self.at_rest.slab_bytes
