"""What loadings by other libraries were seen to give: which weights are bytes of which tensors of files.

[Note: loadings] A library that reads files itself, such as diffusers, gives a module with weights in its mapping of
them. Names and forms say which tensor each weight may be; when it is packed it is read from there, and compared bit by
bit with what the module has. What is equal has an origin, and may be kept ([Note: kept weights]). That is remembered by
loading (`Loading`), because an equal one gives the same: the library then gets files that lack the bytes of kept
weights (`StandIn`), and the weights are pointed to kept ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from ..planner.plan import ComponentPlan
from ..runtime.tensors.parameter_slots import ParameterSlot
from ..weights.component import Component
from ..weights.file_origin import Origin
from ..weights.loading import Loading
from ..weights.source import WeightsSource
from .kept_weights import KeptWeights
from .member import Member

__all__ = ["KeptOfLoading", "KnownLoadings", "Newcomer"]

# Loadings that are remembered: about a MB for a model of some thousand weights.
MAX_LOADINGS = 64
# The share of the files' bytes that a `StandIn` may have to have a copy of; else the files themselves are loaded.
LARGEST_COPIED_SHARE = 0.25

Newcomer: TypeAlias = tuple[Member, nn.Module, Component, ComponentPlan, WeightsSource | None]
KeptOfLoading: TypeAlias = dict[str, tuple[Origin, torch.Tensor]]
"""Kept weights for those of a module, by their names."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a loading gave."""

    origins: dict[str, Origin]
    """The weights that are bytes of files, by name."""
    is_plain: bool
    """Whether each other weight has a tensor of its own name: it was made of that one."""


class KnownLoadings:
    """Remembers loadings. The caller holds the manager's lock."""

    def __init__(self, kept: KeptWeights) -> None:
        self.kept = kept
        self.seen: OrderedDict[Loading, Seen] = OrderedDict()
        """The least recently used first."""

    def find(self, loading: Loading) -> KeptOfLoading:
        """Return the kept weights for a module of an equal loading, if these are most of it; else none.

        None either where it is not known of what each of its other weights was made.
        """
        seen = self.seen.get(loading)
        if seen is None or not seen.is_plain:
            return {}
        self.seen.move_to_end(loading)
        kept = {origin: view for file in loading.files for origin, view in self.kept.find(file).items()}
        found = {name: (origin, kept[origin]) for name, origin in seen.origins.items() if origin in kept}
        origins = {origin for origin, _ in found.values()}
        copied_bytes = sum(file.file_bytes for file in loading.files) - sum(
            each.tensor.weight_bytes for each in origins
        )
        if copied_bytes > LARGEST_COPIED_SHARE * sum(file.file_bytes for file in loading.files):
            return {}
        self.kept.note_reuse(origins)
        return found

    def claim(self, newcomers: Iterable[Newcomer]) -> None:
        """Note what the weights of newcomers may have been read from; those that point to kept ones surely were.

        What computes in the memory that it came in gets memory of its own in the place of kept weights.
        """
        addresses = {view.data_ptr(): origin for slab in self.kept.slabs() for origin, view in slab.weights()}
        for member, module, component, plan, source in newcomers:
            if source is None or source.loading is None:
                continue
            origins, proven = {}, set()
            for block in (*component.blocks, component.non_block):
                for spec in block.tensors:
                    origin = source.origin_of(spec)
                    if origin is None or not origin.is_form_of(weight := module.get_parameter(spec.name)):
                        continue
                    is_kept = addresses.get(weight.data_ptr()) == origin
                    if is_kept and "cpu" in plan.device_bytes:
                        weight.data = weight.data.clone()
                    elif is_kept:
                        proven.add(weight.data_ptr())
                    origins[spec.name] = ((weight.data_ptr(), origin),)
            member.came_from(origins, proven)

    def note(self, member: Member) -> None:
        """Remember which weights of a component, which was just packed, are what the files have."""
        source = member.managed.source
        if source is None or source.loading is None:
            return
        found, is_plain = {}, True
        for group in member.managed.groups:
            for index, slot in enumerate(group.slots):
                origins = group.at_rest.origins
                origin = origins[group.layout.first_leaf(index)] if origins else None
                if origin is not None:
                    found[slot.spec.name] = origin
                elif not slot.is_buffer:
                    is_plain = is_plain and is_named(slot, source)
        before = self.seen.pop(source.loading, Seen({}, is_plain))
        self.seen[source.loading] = Seen({**before.origins, **found}, is_plain and before.is_plain)
        if len(self.seen) > MAX_LOADINGS:
            self.seen.popitem(last=False)


def is_named(slot: ParameterSlot, source: WeightsSource) -> bool:
    """Whether a file has a tensor of a weight's name, in whatever form."""
    return any(name in source.files for name in (slot.spec.name, *slot.spec.other_names))
