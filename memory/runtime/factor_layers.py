"""Side factors of a component's encoded weights: they rest and move with their blocks, and are added in decoding.

A host sets them. Their layers are in no module tree, so that the host's model is what it was, and lie in the slab of
added weights of their block ([Note: added layers] in `added_layers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ..errors import InvalidInput
from ..weights.side_factors import SideFactors
from .blocks.added_layers import describe_tensor
from .blocks.bundle import Bundle
from .blocks.computing_views import FactorLayer
from .blocks.weight_group import WeightGroup
from .devices.device_share import DeviceShare
from .packing import Packing
from .tensors.parameter_slots import ParameterSlot

__all__ = ["FactorLayers"]

PARTS = ("up", "down")


class FactorLayers:
    """The side factors of one component. The caller holds the manager's lock, and no pass is open."""

    def __init__(self, owner: str, shares: Sequence[DeviceShare], packing: Packing) -> None:
        self.owner = owner
        self.shares = shares
        self.packing = packing
        self.given: dict[str, SideFactors] = {}
        """What is added to each weight now, by the names of these."""
        self.num_laid_out = 0
        """How often blocks got a new slab for their factors."""

    def set(self, factors: Mapping[str, SideFactors]) -> None:
        """Add these to the weights of these names from now on, and nothing to others.

        Factors of the same ranks are overwritten where they are, those that are set already left alone.

        Raises:
            InvalidInput: a weight is not encoded, or of another shape. Nothing has changed.
            MemoryError, torch.OutOfMemoryError: some blocks have theirs; the same again, or none, can be set.
        """
        self.refuse_unsuitable(factors)
        for share, bundle in self.bundles():
            names = [slot.spec.name for slot in bundle.own.slots]
            had, wanted = ({name: each[name] for name in names if name in each} for each in (self.given, factors))
            if ranks_of(had) == ranks_of(wanted):
                self.overwrite(bundle, wanted)
            else:
                self.lay_out(share, bundle, wanted)

    def bundles(self) -> Iterator[tuple[DeviceShare, Bundle]]:
        return ((share, bundle) for share in self.shares for bundle in share.bundles)

    def refuse_unsuitable(self, factors: Mapping[str, SideFactors]) -> None:
        groups = {slot.spec.name: bundle.own for _, bundle in self.bundles() for slot in bundle.own.slots}
        for name, each in factors.items():
            group = groups.get(name)
            if group is None or not group.decodes_plainly(name):
                remedy = "merge factors into it, or name another weight"
                raise InvalidInput(f"{self.owner}: {name!r} is not encoded, or not contiguous: {remedy}")
            shape = group.slots[group.index_of(name)].spec.shape
            if not each.suit(shape):
                raise InvalidInput(
                    f"{self.owner}: {name!r} has the shape {told(shape)}, and factors of the shapes "
                    f"{told(each.up.shape)} and {told(each.down.shape)} do not make that"
                )

    def lay_out(self, share: DeviceShare, bundle: Bundle, wanted: Mapping[str, SideFactors]) -> None:
        """Give a block a new slab for factors of other sizes than it had; after an error it has none."""
        self.num_laid_out += 1
        share.free_staging()
        share.forget_views()
        own = bundle.own
        own.views.add_in_decoding({})
        for slot in own.slots:
            self.given.pop(slot.spec.name, None)
        self.packing.remove_added(share, bundle)
        layers, slots = {}, []
        for index in own.encoded:
            name = own.slots[index].spec.name
            if name in wanted:
                layers[index] = FactorLayer(wanted[name], own.wide_dtypes[name])
                slots += [slot_of(layers[index], part, f"{name} ({part})") for part in PARTS]
        self.packing.add(share, bundle, slots)
        own.views.add_in_decoding(layers)
        self.given |= wanted

    def overwrite(self, bundle: Bundle, wanted: Mapping[str, SideFactors]) -> None:
        """Overwrite factors of the same sizes where they rest, or on their device."""
        for name, each in wanted.items():
            had = self.given.pop(name)  # until all is written
            for part in PARTS:
                if getattr(each, part) is not getattr(had, part):
                    assert bundle.added is not None
                    write(bundle.added, f"{name} ({part})", getattr(each, part))
            self.given[name] = each


def write(group: WeightGroup, name: str, values: torch.Tensor) -> None:
    dtype = group.slots[group.index_of(name)].held.dtype
    with torch.inference_mode(False):
        if group.host_slab is None:  # it computes in place
            group.slots[group.index_of(name)].held.data.copy_(values)
        else:
            group.overwrite(name, values.to(dtype))


def slot_of(layer: FactorLayer, part: str, name: str) -> ParameterSlot:
    spec = replace(describe_tensor(layer.get_parameter(part)), name=name)
    return ParameterSlot(spec, ((layer, part),), is_buffer=False)


def ranks_of(factors: Mapping[str, SideFactors]) -> dict[str, int]:
    return {name: each.down.shape[0] for name, each in factors.items()}


def told(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
