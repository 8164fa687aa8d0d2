"""Layers that other code adds to a managed module or removes from it: they join their blocks and leave them.

[Note: added layers] in `added_layers.py` tells how they are seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..errors import InvalidInput, UnsafeState
from ..planner.plan import ComponentPlan
from ..weights.component import Component, TensorSpec
from ..weights.module_component import SAFETENSORS_NAMES
from .blocks.added_layers import Structure, Tree, return_to_host, walk
from .blocks.bundle import Bundle
from .changes.move_guard import GONE, MoveGuard
from .devices.device_share import DeviceShare
from .forwards.module_caches import at_home
from .holders import find_holders
from .packing import Packing
from .tensors.absent_weight import AbsentWeight
from .tensors.parameter_slots import ParameterSlot
from .weight_places import WeightPlaces

__all__ = ["Joined", "JoinedLayers", "describe_joined", "without_staging"]


@dataclass(frozen=True, slots=True)
class Joined:
    """A component after layers have joined it."""

    component: Component
    plan: ComponentPlan
    structure: Structure
    changes_blocks: bool
    """Whether any block moves other weights than before."""


class JoinedLayers:
    """The layers of one component's module that came after the component, by their blocks.

    The caller holds the manager's lock.
    """

    def __init__(
        self, owner: str, module: nn.Module, shares: Sequence[DeviceShare], packing: Packing, places: WeightPlaces
    ) -> None:
        self.owner = owner
        self.module = module
        self.shares = shares
        self.packing = packing
        self.places = places
        self.structure = Structure(module)
        """The module tree at the last look."""
        self.came_with = frozenset(self.structure.modules) - self.find_modules()
        """The modules of the tree that came under management with it."""

    # -- what has changed

    def have_changed(self) -> bool:
        """Whether layers were added to the module, or removed from it, since the last look."""
        return self.structure.has_changed()

    def have_other_forms(self) -> bool:
        """Whether a weight of an added layer has a new shape or dtype, as after hot-swapping a LoRA."""
        return any(map(has_other_form, self.slots))

    def take(self, structure: Structure) -> None:
        """Accept the module tree of the last `join` as current: all its consequences are in place."""
        self.structure = structure

    @property
    def bundles(self) -> list[Bundle]:
        return [bundle for share in self.shares for bundle in share.bundles]

    @property
    def own(self) -> list[ParameterSlot]:
        """The weights that came under management with the module."""
        return [slot for bundle in self.bundles for slot in bundle.own.slots]

    @property
    def slots(self) -> list[ParameterSlot]:
        """The weights of added layers."""
        return [slot for bundle in self.bundles if bundle.added is not None for slot in bundle.added.slots]

    def find_modules(self) -> set[nn.Module]:
        """Return the modules that have weights of added layers, and none of ours."""
        own = {module for slot in self.own for module, _ in slot.owners}
        return {module for slot in self.slots for module, _ in slot.owners} - own

    # -- joining

    def join(
        self, component: Component, plan: ComponentPlan, moves: MoveGuard, blocks: Mapping[nn.Module, int]
    ) -> Joined:
        """Take layers that were added to the module along with their blocks, and leave those that are gone alone.

        Where that changes a block it is to be loaded anew before the next pass. No pass is open but one that begins.

        Args:
            blocks: the modules of the blocks, with their numbers.

        Raises:
            UnsafeState: a weight of our own is not in the module any more, or in another block of it.
            InvalidInput: a layer was added without memory. Nothing of either has changed.
        """
        structure = Structure(self.module)
        self.refuse_exchanged(component, blocks)
        for share in self.shares:
            share.recover()
        own = {id(bundle.own) for bundle in self.bundles}
        gone = self.places.forget_removed(frozenset(structure.modules), own)
        given = self.take_other_forms()
        moves.put_back()
        for (module, name), weight in given.items():
            module._parameters[name] = weight
        tree = Tree(self.module, self.own, blocks, self.came_with, lent=self.places.lent_places())
        if gone:
            raise UnsafeState(f"{self.owner}: {gone[0]!r} is gone from its module: {GONE}")
        self.refuse_added([slot for _, slot in tree.added])
        has_changed = False
        for share in self.shares:
            changed = [bundle for bundle in share.bundles if self.join_bundle(share, bundle, tree)]
            if changed:
                has_changed = True
                share.free_staging()
                share.forget_views()
        component, plan = describe_joined(component, self.rename(plan, tree), self.shares)
        if has_changed:
            plan = without_staging(plan)
        return Joined(component, plan, structure, has_changed)

    def refuse_exchanged(self, component: Component, at: Mapping[nn.Module, int]) -> None:
        """Refuse layers that were moved to another block: they would be loaded and evicted with the wrong one.

        Raises:
            UnsafeState: a layer was moved.
        """
        numbered = [(number, bundle.own) for share in self.shares for number, bundle in share.blocks.items()]
        homes = {module: number for number, group in numbered for slot in group.slots for module, _ in slot.owners}
        blocks = component.blocks
        for path, module, home in walk(self.module, at):
            was = homes.get(module, home)
            if was is not None and was != home:
                place = (path or "the module itself") if home is None else blocks[home].name
                raise UnsafeState(f"{self.owner}: {place} holds layers of {blocks[was].name} now: call reprofile()")

    def refuse_added(self, slots: Sequence[ParameterSlot]) -> None:
        """Refuse added layers without memory, and those whose weights another component manages: both would move them.

        Raises:
            InvalidInput, UnsafeState: there is one.
        """
        names = {id(slot.held): slot.spec.name for slot in slots}
        for slot in slots:
            if slot.held.is_meta:
                what = f"{self.owner}: {slot.spec.name!r} was added without memory"
                raise InvalidInput(f"{what}; load its weights, or remove the layer")
        for other in find_holders(names.keys()) if names else ():
            name = next((names[id(weight)] for weight in other.known_weights() if id(weight) in names), None)
            if name is not None and other is not self.places:
                raise UnsafeState(
                    f"{self.owner}: {name!r} was added, and {other.owner!r} manages it: release {other.owner!r}"
                )

    def take_other_forms(self) -> dict[tuple[nn.Module, str], nn.Parameter]:
        """Return weights of added layers that have a new shape or dtype, by place; our slots give those places up."""
        given = {}
        for slot in filter(has_other_form, self.slots):
            weight = nn.Parameter(slot.held.detach(), requires_grad=False)
            given.update(dict.fromkeys(slot.owners, weight))
            slot.set_owners(())
        return given

    def join_bundle(self, share: DeviceShare, bundle: Bundle, tree: Tree) -> bool:
        """Give a bundle the added weights that belong to it; returns whether they differ from those it had."""
        is_first = share is self.shares[0]
        wanted = []
        for home, slot in tree.added:
            if home is None or slot.is_buffer:
                is_here = bundle is share.fixed and (is_first if home is None else home in share.blocks)
            else:
                is_here = share.blocks.get(home) is bundle
            if is_here:
                wanted.append(slot)
        wanted.sort(key=lambda slot: slot.is_plain_buffer)
        had = bundle.added.slots if bundle.added is not None else []
        if [slot.owners for slot in had] == [slot.owners for slot in wanted]:
            for slot, found in zip(had, wanted, strict=True):
                slot.describe(found.spec)
            return False
        self.packing.add(share, bundle, wanted)
        return True

    # -- names and numbers

    def rename(self, plan: ComponentPlan, tree: Tree) -> ComponentPlan:
        """Rename our own weights to the names that the module gives them now; returns the plan by these names.

        What is gone leaves its own to others.
        """
        names = {}
        for slot in self.own:
            if tree.names.get(id(slot)) and tree.names[id(slot)][0] != slot.spec.name:
                names[slot.spec.name] = tree.names[id(slot)][0]
        taken = {slot.spec.name for slot in self.own} | set(names.values())
        for slot in self.own:
            name = slot.spec.name
            if not tree.names.get(id(slot)) and name in names.values():
                names[name] = next(new for n in itertools.count(1) if (new := f"{name} (removed {n})") not in taken)
                taken.add(names[name])
        if not names:
            return plan
        self.packing.rename(names)
        return replace(plan, forms={names.get(name, name): numbers for name, numbers in plan.forms.items()})

    def describe_anew(self, component: Component, plan: ComponentPlan) -> tuple[Component, ComponentPlan]:
        """Return the component and the plan by the names that the module gives weights now, before another plan.

        Weights that others hold in place of ours are not what a file has, and get memory.
        """
        tree = Tree(self.module, self.own, {}, self.came_with, lent=self.places.lent_places())
        plan = self.rename(plan, tree)
        for _, slot in tree.added:
            if isinstance(slot.held, AbsentWeight):  # made of one of ours
                slot.hold(at_home(slot.held))
        self.packing.written.note_replaced(slot.spec for _, slot in tree.added)
        return describe_joined(component, plan, self.shares)

    def return_to_host(self) -> None:
        """Move weights of layers that were added, and have not joined yet, to host memory."""
        if self.have_changed():
            tree = Tree(self.module, [*self.own, *self.slots], {}, self.came_with, lent=self.places.lent_places())
            return_to_host(slot for _, slot in tree.added)


def has_other_form(slot: ParameterSlot) -> bool:
    """Whether a plain parameter has another shape or dtype than it had when it was described."""
    if slot.is_buffer or slot.is_quantized or not slot.owners:
        return False
    held, spec = slot.held, slot.spec
    return held.shape != spec.shape or SAFETENSORS_NAMES[str(held.dtype)] != spec.dtype


def describe_joined(
    component: Component, plan: ComponentPlan, shares: Sequence[DeviceShare]
) -> tuple[Component, ComponentPlan]:
    """Return the component and the plan with what the groups hold now, all added weights among them."""

    def spec_of(slot: ParameterSlot, *, is_own: bool) -> TensorSpec:
        # By a name of its own where a weight of ours, removed since, is encoded.
        is_taken = not is_own and slot.spec.name in plan.forms
        return replace(slot.spec, name=f"{slot.spec.name} (added)") if is_taken else slot.spec

    specs = {
        bundle.name: tuple(
            spec_of(slot, is_own=group is bundle.own)
            for group in bundle.groups
            for slot in group.slots
            if not slot.is_buffer
        )
        for share in shares
        for bundle in share.bundles
        if bundle.name
    }
    rest = [slot for share in shares for group in share.fixed.groups for slot in group.slots]
    before = component.weight_bytes
    component = replace(
        component,
        blocks=tuple(replace(block, tensors=specs[block.name]) for block in component.blocks),
        non_block=replace(component.non_block, tensors=tuple(slot.spec for slot in rest if not slot.is_buffer)),
        buffers=tuple(slot.spec for slot in rest if slot.is_buffer),
    )
    added_bytes = component.weight_bytes - before
    plan = replace(plan, weight_bytes=plan.weight_bytes + added_bytes)
    if plan.tier != "disk":
        pinned_bytes = added_bytes if plan.pinned_bytes else 0
        plan = replace(
            plan,
            host_bytes=plan.host_bytes + added_bytes,
            pinned_bytes=plan.pinned_bytes + pinned_bytes,
        )
    return component, plan


def without_staging(plan: ComponentPlan) -> ComponentPlan:
    """Return a plan whose staging memory is gone: it was laid out for blocks of other sizes."""
    return replace(plan, shares=tuple(replace(share, staging_bytes=0, offsets=()) for share in plan.shares))
