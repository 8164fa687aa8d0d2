"""Packed blocks that a component keeps when it gets another profile or placement.

[Note: kept blocks] A managed component that hands over leaves its blocks packed. The next one goes on with those that
its plan wants as they are: the same weights, at the same places of the module, in the same precision, at the same tier.
Weights that other code put elsewhere, replaced or resized do not match, and what does not match is unpacked and packed
anew. So a block is kept only if packing it anew would give the same bytes in memory of the same kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..planner.plan import ComponentPlan
from ..planner.sizes import fixed_tensors
from ..transfer.pinned_memory import ArenaLock
from ..weights.component import Component, TensorSpec
from ..weights.known_forms import encoded_form
from ..weights.source import WeightsSource
from .blocks.bundle import Bundle
from .blocks.weight_group import WeightGroup
from .blocks.weight_store import FileStore, HostStore
from .tensors.parameter_slots import ParameterSlot, find_slots

__all__ = ["Home", "find_kept"]

# Of an arena's slabs, the share that has to stay for the others' part of it to remain locked and unused.
LEAST_KEPT_SHARE = 15 / 16

Home = tuple[int, int | None]
"""The number of a device's part in the plan, and of a block; None for the non-block weights."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A component as a plan packs it."""

    module: nn.Module
    component: Component
    plan: ComponentPlan
    source: WeightsSource | None
    written: Collection[str]
    """The weights that differ from their file."""
    slots: Mapping[str, ParameterSlot]
    """The weights that the module holds now, by name."""
    parts: Collection[nn.Module]
    """The modules of the component."""

    def takes(self, bundle: Bundle, specs: Sequence[TensorSpec], *, on_cpu: bool) -> bool:
        """Whether a block is packed as the plan packs these weights."""
        by_name = {spec.name: spec for spec in specs}
        slots = [slot for group in bundle.groups for slot in group.slots]
        return (
            len(slots) == len(specs)
            and all(slot.spec.name in by_name for slot in slots)
            and all(has_form(slot.spec, by_name[slot.spec.name]) for slot in slots)
            and all(self.has_tier(group, on_cpu=on_cpu) and self.has_weights(group) for group in bundle.groups)
        )

    def has_tier(self, group: WeightGroup, *, on_cpu: bool) -> bool:
        names = [slot.spec.name for slot in group.slots]
        wanted = {at: encoded_form(self.plan.forms[name]) for at, name in enumerate(names) if name in self.plan.forms}
        if group.encoded != wanted:
            return False
        if isinstance(group.at_rest.store, FileStore):
            is_wanted = group.name in self.plan.in_file and group.at_rest.store.source is self.source
            return is_wanted and self.rests_in_file(group)
        if group.name in self.plan.in_file or (on_cpu and not group.encoded):
            return False
        if not isinstance(group.at_rest.store, HostStore):  # an interrupt came after it was unpacked
            return False
        return group.at_rest.store.blocks_host == (group.name not in self.plan.pinned)

    def rests_in_file(self, group: WeightGroup) -> bool:
        """Whether the file is to have what it has now of a group that rests there."""
        assert self.source is not None
        in_file = {
            slot.spec.name
            for slot in group.slots
            if not slot.is_buffer and slot.spec.name not in self.written and self.source.holds(slot.spec)
        }
        return group.at_rest.names_in_file == in_file

    def has_weights(self, group: WeightGroup) -> bool:
        """Whether the module holds the group's tensors at the same places, and nowhere else."""
        for slot, resting in zip(group.slots, group.at_rest.tensors, strict=True):
            own = [place for place in slot.owners if place[0] in self.parts]
            if not own or set(own) != set(self.slots[slot.spec.name].owners):
                return False
            if any(slot.tensors_of(module).get(name) is not resting for module, name in slot.owners):
                return False
        return True


def find_kept(
    left: Sequence[Bundle],
    module: nn.Module,
    component: Component,
    plan: ComponentPlan,
    *,
    source: WeightsSource | None,
    written: Collection[str],
    cpus: Collection[str],
) -> dict[Home, Bundle]:
    """Return the blocks of an earlier managed component that a plan keeps unchanged, by their home.

    Args:
        cpus: the devices that compute in host memory.
    """
    homes: dict[Home, tuple[str, Sequence[TensorSpec]]] = {}
    for index, part in enumerate(plan.shares):
        homes[index, None] = "", fixed_tensors(component, part.blocks, first=index == 0)
        for number in part.blocks:
            homes[index, number] = component.blocks[number].name, component.blocks[number].tensors
    all_specs = [spec for _, specs in homes.values() for spec in specs]
    wanted = Wanted(
        module=module,
        component=component,
        plan=plan,
        source=source,
        written=written,
        slots=find_slots(module, all_specs),
        parts=set(module.modules()),
    )
    by_weights = {(bundle.name, names_of(bundle)): bundle for bundle in left}
    kept: dict[Home, Bundle] = {}
    for home, (name, specs) in homes.items():
        bundle = by_weights.get((name, frozenset(spec.name for spec in specs)))
        if bundle is not None and specs and wanted.takes(bundle, specs, on_cpu=plan.shares[home[0]].device in cpus):
            kept[home] = bundle
    locks = {id(lock): lock for bundle in kept.values() for lock in locks_of(bundle)}
    kept_bytes = Counter[int]()
    for bundle in kept.values():
        for group in bundle.groups:
            if isinstance(group.at_rest.store, HostStore) and group.at_rest.store.memory.lock is not None:
                kept_bytes[id(group.at_rest.store.memory.lock)] += group.slab_bytes
    thin = {number for number, lock in locks.items() if kept_bytes[number] < LEAST_KEPT_SHARE * lock.slab_bytes}
    return {home: bundle for home, bundle in kept.items() if not any(id(lock) in thin for lock in locks_of(bundle))}


def locks_of(bundle: Bundle) -> list[ArenaLock]:
    stores = [group.at_rest.store for group in bundle.groups]
    return [store.memory.lock for store in stores if isinstance(store, HostStore) and store.memory.lock is not None]


def names_of(bundle: Bundle) -> frozenset[str]:
    return frozenset(slot.spec.name for group in bundle.groups for slot in group.slots)


def has_form(spec: TensorSpec, other: TensorSpec) -> bool:
    return (spec.dtype, spec.shape, spec.leaves) == (other.dtype, other.shape, other.leaves)
