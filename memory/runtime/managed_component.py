"""A module under management: packed, hooked, and loaded to its devices."""

from __future__ import annotations

import enum
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from weakref import WeakSet, ref

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.utils.hooks import RemovableHandle

from ..errors import InvalidInput, UnsafeState
from ..planner.plan import ComponentPlan
from ..planner.sizes import fixed_tensors
from ..transfer.devices import Device
from ..weights.component import Component, TensorSpec
from ..weights.module_component import SAFETENSORS_NAMES
from ..weights.source import WeightsSource
from .added_layers import Structure, Tree, bring_home, walk
from .bundle import Bundle
from .compiled_blocks import CompiledBlocks
from .deep_copies import OwnHook
from .device_answers import DeviceAnswers
from .device_share import DeviceShare
from .encoded_weight import EncodedWeight
from .forward_blocks import Forwards
from .forward_hooks import ForwardHooks, remove_hooks_of
from .forward_pass import Leases, NoLeases, Passes
from .hooked_modules import HookedModules
from .kept_blocks import Home, find_kept
from .ledger import Kind, Ledger
from .module_caches import ModuleCaches, at_home
from .move_guard import MoveGuard
from .other_offloaders import find_rival
from .packing import Ending, Packing
from .parameter_slots import ParameterSlot, find_slots
from .recomputing import in_backward
from .state_dict_guard import StateGuard
from .steady_look import SteadyLook
from .watched_data import AbsentWeight, Asked
from .weight_group import ReadOnUse, WeightGroup
from .weight_store import FileStore

__all__ = ["ManagedComponent", "Phase", "refuse_managed"]

attached: WeakSet[ManagedComponent] = WeakSet()
"""All that have hooks in place, of every manager."""


class Phase(enum.Enum):
    """How far an managed component has come."""

    DETACHED = "detached"
    """Not yet attached, or no more: nothing of the module is its."""
    ATTACHED = "attached"
    ENDING = "ending"
    """Being detached, or interrupted in that: `ManagedComponent.detach` goes through with it."""


class ManagedComponent:
    """One component attached to its module: packed in host memory, hooked, and loadable by plan.

    Args:
        leases: what the component asks of its manager.
        guards_state: make ``state_dict()`` complete and refuse loading while weights rest in eight bits or in their
            file, and undo ``Module.to``; a host that reads and writes single weights does without.
        source: the files that the weights may rest in.
        compiles: whether the repeated blocks are compiled.
        after: the managed component whose place this one takes.
    """

    def __init__(
        self,
        owner: str,
        module: nn.Module,
        component: Component,
        plan: ComponentPlan,
        devices: dict[str, Device],
        ledger: Ledger,
        *,
        leases: Leases,
        guards_state: bool = True,
        source: WeightsSource | None = None,
        compiles: bool = False,
        after: ManagedComponent | None = None,
    ) -> None:
        self.owner = owner
        self.module = module
        self.component = component
        self.plan = plan
        self.ledger = ledger
        self.handles: list[RemovableHandle] = []
        self.leases = leases
        self.source = source
        self.compiles = compiles
        self.compiled: CompiledBlocks | None = None
        self.phase = Phase.DETACHED
        self.has_taken_over = after is not None
        self.guards_state = guards_state
        self.shares = self.build_shares(devices, after, host_replaces=not guards_state)
        self.accelerators = [share.device for share in self.shares if not share.device.is_cpu]
        self.hooks: ForwardHooks = after.hooks if after is not None else ForwardHooks()
        earlier = after.packing if after is not None else None
        self.packing: Packing = Packing(owner, component, plan, self.shares, ledger, source, after=earlier)
        self.forwards = Forwards(
            owner,
            module,
            component,
            self.shares,
            leases=leases,
            compiles=compiles,
            places_inputs=guards_state,
        )
        # With a class of our own for some parameters torch.compile would compile each block twice.
        for group in self.groups:
            group.note_data(not compiles)
        for share in self.shares if guards_state else ():
            answer = answer_of(self.forwards, share.device.torch_device)
            for group in share.groups:
                group.answer_with(answer)
        first = module.get_submodule(component.blocks[0].name) if component.blocks else module
        blocks = [module.get_submodule(block.name) for block in component.blocks]
        self.marked_by_others = list(dict.fromkeys([module, *blocks, *first.modules()]))
        """A library that moves the weights, too, has its hooks on at least one of these modules."""
        self.module_caches: ModuleCaches | None = None
        """Set while attached, unless a host does that itself."""
        self.moves: MoveGuard | None = None
        """Set while attached, unless a host moves single weights itself."""
        self.look: SteadyLook | None = None
        """What the module held when a close look found nothing; None until then."""
        self.structure: Structure | None = None
        """The module tree as it was when last checked; set as long as ``moves``."""
        self.tree: Structure | None = None
        """The module tree as it was when `has_any` looked last."""
        self.answers: DeviceAnswers | None = None
        """Set as long as ``moves``."""
        self.came_with: frozenset[nn.Module] = frozenset()
        """The modules of the tree when it was attached."""

    @property
    def primary(self) -> Device:
        """Where inputs go and outputs come back: the device of the rest."""
        return self.shares[0].device

    @property
    def device_names(self) -> list[str]:
        """The devices that it computes on, the primary first."""
        return [share.device.name for share in self.shares]

    @property
    def passes(self) -> Passes:
        return self.forwards.passes

    @property
    def is_hooked(self) -> bool:
        """Whether its module's calls come here: not while another computes with it, or after its release."""
        return self.hooks.target is self.forwards and self.hooks.gate is None

    @property
    def is_loaded(self) -> bool:
        """Whether its devices are as its plan says."""
        return self.forwards.is_loaded

    @property
    def groups(self) -> list[WeightGroup]:
        return [group for share in self.shares for group in share.groups]

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights copied to devices so far."""
        return sum(share.bytes_moved for share in self.shares)

    def count_bytes(self) -> Iterator[tuple[str, Kind, int]]:
        """Yield place, kind and bytes of all its memory that is there now, for `Ledger.check`; reads no books."""
        for share in self.shares:
            yield from share.count_bytes()
        for tier, num_bytes in self.packing.count_bytes().items():
            yield tier, Kind.WEIGHTS, num_bytes

    def settle_books(self) -> None:
        """Enter in the ledger what is on devices and on its way there: an interrupt may have come before an entry."""
        bounce: Counter[str] = Counter()
        for share in self.shares:
            share.settle()
            bounce.update(share.bounce.host_bytes if share.bounce is not None else {})
        for tier in ("pinned", "host"):
            self.ledger.settle(tier, self.owner, Kind.STAGING, bounce[tier])

    def build_shares(
        self, devices: dict[str, Device], after: ManagedComponent | None, *, host_replaces: bool
    ) -> list[DeviceShare]:
        kept: dict[Home, Bundle] = {}
        if after is not None:
            kept = after.find_kept(self.component, self.plan, devices, source=self.source)
            after.packing.unpack_left(list(kept.values()), reads=not self.component.has_file)
        specs = [tensor for block in [*self.component.blocks, self.component.non_block] for tensor in block.tensors]
        slots = find_slots(self.module, [*specs, *self.component.buffers])
        for slot in [slot for bundle in kept.values() for group in bundle.groups for slot in group.slots]:
            slot.become_as(slots[slot.spec.name])
        shares = []
        for index, part in enumerate(self.plan.shares):
            fixed = fixed_tensors(self.component, part.blocks, first=index == 0)
            bundles = {
                number: kept.get((index, number))
                or Bundle(
                    WeightGroup(
                        self.component.blocks[number].name,
                        [slots[tensor.name] for tensor in self.component.blocks[number].tensors],
                        forms=self.plan.forms,
                        shows_wide=self.guards_state,
                    )
                )
                for number in part.blocks
            }
            beside = kept.get((index, None)) or Bundle(WeightGroup("", [slots[tensor.name] for tensor in fixed]))
            shares.append(
                DeviceShare(self.owner, devices[part.device], beside, bundles, self.ledger, host_replaces=host_replaces)
            )
        return shares

    def find_kept(
        self, component: Component, plan: ComponentPlan, devices: Mapping[str, Device], *, source: WeightsSource | None
    ) -> dict[Home, Bundle]:
        """Return what another plan of the component, which handed over, goes on with as it is packed."""
        return find_kept(
            self.packing.left,
            self.module,
            component,
            plan,
            source=source,
            written=self.packing.written,
            cpus=[name for name, device in devices.items() if device.is_cpu],
        )

    # -- hooks

    def attach(self, progress: Callable[[int], None] | None = None) -> None:
        """Pack the weight stores (`Packing.pack`) and put the hooks in place; on failure the module is as it was."""
        self.phase = Phase.ATTACHED
        try:
            self.packing.pack(progress)
            for group in self.groups:
                group.let_read(self.bring)
            if self.packing.was_refused:  # plans to come choose what streams by what is locked
                pinned = {
                    group.name: group.slab_bytes
                    for group in self.groups
                    if group.store is not None and not group.blocks_host
                }
                tier = "pinned" if pinned else "host"
                self.plan = replace(self.plan, tier=tier, pinned=frozenset(pinned), pinned_bytes=sum(pinned.values()))
            if self.guards_state:
                self.moves = self.guard_moves()
                self.structure = Structure(self.module)
                self.came_with = frozenset(self.structure.modules) - self.find_added_modules()
                self.answers = DeviceAnswers(self.module, self.device_of, is_inside=self.forwards.is_entered)
            self.hook()
            if self.compiles:
                blocks = [self.module.get_submodule(block.name) for block in self.component.blocks]
                self.compiled = CompiledBlocks(blocks, self.primary.torch_device)
        except BaseException:
            self.detach(Ending.TAKEN_BACK)
            raise

    def detach(self, ending: Ending = Ending.RESTORED) -> None:
        """Leave every device, give the module what the ending says, remove every hook. Idempotent; interrupted, it can
        be called again.

        What is handed over, or taken back from one that took over, keeps its forward hooks for who comes next.

        Raises:
            InvalidInput: as `Packing.end`, when all else is done.
        """
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if self.phase is Phase.DETACHED:
            return
        self.phase = Phase.ENDING
        for group in self.groups:
            group.let_read(None)
        attached.discard(self)
        self.passes.recover_for(None)
        if self.compiled is not None:
            self.compiled.release()
        if self.answers is not None:
            self.answers.end()
        if ending is not Ending.DISCARDED:
            self.follow_renamed()
        self.unload()
        if self.moves is not None:
            self.packing.note_written(self.moves.swaps.names)
        slabs = [group.host_slab for group in self.groups if group.host_slab is not None]
        self.structure, self.tree, self.look, self.came_with = None, None, None, frozenset()
        error: InvalidInput | None = None
        try:
            self.packing.end(ending)
        except InvalidInput as problem:
            error = problem
        if self.module_caches is not None and ending is not Ending.DISCARDED:
            groups = [group for bundle in self.packing.left for group in bundle.groups]
            packed = {place for group in groups for slot in group.slots for place in slot.owners}
            self.module_caches.bring_home(slabs, others=self.find_lent_modules(), lent=packed.union(self.find_lent()))
        self.forwards.end()
        self.moves = self.module_caches = self.answers = None
        goes_on = ending is Ending.HANDED_OVER or (ending is Ending.TAKEN_BACK and self.has_taken_over)
        for part in self.module.modules():
            remove_hooks_of(self.forwards, part)
        if not goes_on:  # last: calls that came before this wait for the weights
            self.hooks.remove()
            for part in self.module.modules():
                remove_hooks_of(self.hooks, part)
        self.phase = Phase.DETACHED
        self.leases = NoLeases(self.leases.lock)
        if error is not None:
            raise error

    def hook(self) -> None:
        attached.add(self)
        if self.guards_state:
            self.module_caches = self.module_caches or ModuleCaches(self.module, self.find_lent_modules())
            self.handles += self.module_caches.hook(self.owner)
        if self.guards_state and (self.plan.forms or self.plan.tier == "disk"):
            rests = next((numbers.rests for numbers in self.plan.forms.values()), "in its file")
            self.handles += StateGuard(self.owner, self.module, self.groups, self.source, rests=rests).hook()
        modules = self.find_hooked_modules()
        self.forwards.take_modules(modules if self.guards_state else replace(modules, inner=frozenset()))
        self.hooks.lead_to(self.forwards, owner=self.owner, root=self.module)
        if len(self.shares) > 1:
            for module in self.find_rest_modules():
                before, after = (
                    OwnHook.on(module, function, owner=self.owner)
                    for function in (self.forwards.before_rest, self.forwards.after_rest)
                )
                self.handles += [
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after, always_call=True),
                ]

    def find_hooked_modules(self) -> HookedModules:
        """Return which modules of the tree are what, as it is now. Raises `UnsafeState` where a block is gone."""
        slots = [slot for share in self.shares for group in share.fixed.groups for slot in group.slots]
        holders = {module for slot in slots for module, _ in slot.owners}
        return HookedModules.find(self.module, self.find_blocks(), holders, self.find_lent_modules())

    def find_rest_modules(self) -> list[nn.Module]:
        """Return the modules that hold weights of the rest themselves, except the root."""
        groups = self.shares[0].fixed.groups
        holders = {module: None for group in groups for slot in group.slots for module, _ in slot.owners}
        own = set(self.module.modules())
        return [module for module in holders if module is not self.module and module in own]

    def device_of(self, path: str) -> torch.device:
        """Return the device on which the submodule at a path computes: its block's, else that of the rest."""
        blocks = self.component.blocks
        number = next((n for n, block in enumerate(blocks) if f"{path}.".startswith(f"{block.name}.")), None)
        share = self.shares[0] if number is None else self.forwards.share_of[number]
        return share.device.torch_device

    # -- what others do with the module

    def refuse_rivals(self) -> None:
        """Refuse to compute while others move the weights, too. Looks where any of them would leave its mark.

        Raises:
            UnsafeState: they do.
        """
        rival = find_rival(self.marked_by_others)
        if rival is not None:
            raise UnsafeState(f"{self.owner} is managed, and has {rival}, or release it")

    def take_changes(self) -> bool:
        """Join layers that were added, and undo what ``Module.to`` and its like did; returns whether layers changed.

        Raises as `join_layers`.
        """
        if self.moves is None:
            return False
        self.look = None
        joins = self.has_other_layers() or (
            bool(self.added_slots()) and self.moves.is_moved() and self.has_other_forms()
        )
        if joins:
            self.join_layers()
        if not self.moves.put_back() and not joins:
            self.look = self.look_quickly()
        return joins

    def tell_undone(self) -> None:
        """Tell what was done to the weights and taken back (`MoveGuard.tell_undone`). Raises `UnsafeState`."""
        if self.moves is not None:
            self.moves.tell_undone()

    def is_steady(self) -> bool:
        """Whether one quick look finds the module as the last close one (`take_changes`) left it.

        A host looks after its modules itself.
        """
        if self.moves is None:
            return True
        return self.look is not None and self.look.is_steady() and self.moves.is_settled

    def look_quickly(self) -> SteadyLook | None:
        """Return what quick looks compare with from now on; None where a quick look does not tell enough."""
        assert self.structure is not None and self.moves is not None
        groups = self.groups
        if any(slot.is_quantized for group in groups for slot in group.slots) or peek_interpreter_stack() is not None:
            return None  # torch.func's tensors have no place of their own
        return SteadyLook(
            self.structure.modules, self.marked_by_others, self.moves.plain_weights(), self.moves.samples()
        )

    def begin_loans(self) -> None:
        """A pass begins: what others lent to the module computes on the device of its block."""
        if self.moves is not None and self.moves.swaps.loans:
            self.moves.swaps.begin()

    def end_loans(self) -> None:
        """The pass is over: the module holds the others' own tensors again."""
        if self.moves is not None and self.moves.swaps.loans:
            self.moves.swaps.end()

    def put_back(self) -> None:
        """Undo what ``Module.to`` and its like did to the weights; the caller holds the manager's lock."""
        self.look = None
        if self.moves is not None:
            self.moves.put_back()
            if self.moves.gone is not None:
                self.follow_renamed()

    def has_other_layers(self) -> bool:
        """Whether layers were added to the module, or taken out of it, since it was looked at last."""
        return self.structure is not None and self.structure.has_changed()

    def join_layers(self) -> None:
        """Take layers that were added to the module along with their blocks, and leave those that are gone alone.

        ([Note: added layers] in `added_layers.py`.) Where that changes a block it is loaded anew before the next pass.
        The caller holds the manager's lock, and no pass is open but one that begins.

        Raises:
            UnsafeState: a block or a weight of our own is not in the module any more, or in another block of it.
            InvalidInput: a layer was added without memory. Nothing of either has changed.
        """
        assert self.structure is not None and self.moves is not None
        now = Structure(self.module)
        self.refuse_exchanged_layers()
        for share in self.shares:
            share.recover()
        gone = self.forget_removed_places(frozenset(now.modules))
        given = self.take_other_forms()
        self.moves.put_back()
        for (module, name), weight in given.items():
            module._parameters[name] = weight
        own = [slot for share in self.shares for bundle in share.bundles for slot in bundle.own.slots]
        tree = Tree(self.module, own, self.find_blocks(), self.came_with, lent=self.lent_places())
        if gone:
            raise UnsafeState(f"{self.owner}: {gone[0]!r} is gone from its module: release it before you change that")
        for _, slot in tree.added:
            if slot.held.is_meta:
                what = f"{self.owner}: {slot.spec.name!r} was added without memory"
                raise InvalidInput(f"{what}; load its weights, or remove the layer")
        self.refuse_layers_of_others([slot for _, slot in tree.added])
        has_changed = False
        for share in self.shares:
            changed = [bundle for bundle in share.bundles if self.join(share, bundle, tree)]
            if changed:
                has_changed = True
                share.free_staging()
                share.forget_views()
        self.rename(own, tree)
        self.describe_added()
        if has_changed:  # what is in place was planned for other sizes
            self.forwards.note_unloaded()
            shares = tuple(replace(share, staging_bytes=0, places=()) for share in self.plan.shares)
            self.plan = replace(self.plan, shares=shares)
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.moves = self.guard_moves(after=self.moves)
        self.hook()
        self.structure = now

    def refuse_exchanged_layers(self) -> None:
        """Refuse layers that were moved to another block: they would be loaded and evicted with the wrong one.

        Raises:
            UnsafeState: a layer was moved.
        """
        numbered = [(number, bundle.own) for share in self.shares for number, bundle in share.blocks.items()]
        homes = {module: number for number, group in numbered for slot in group.slots for module, _ in slot.owners}
        blocks = self.component.blocks
        for path, module, home in walk(self.module, self.find_blocks()):
            was = homes.get(module, home)
            if was is not None and was != home:
                place = path if home is None else blocks[home].name
                raise UnsafeState(f"{self.owner}: {place} holds layers of {blocks[was].name} now: call reprofile()")

    def refuse_layers_of_others(self, slots: Iterable[ParameterSlot]) -> None:
        """Refuse added layers whose weights another component manages: both would move them.

        Raises:
            UnsafeState: there is one.
        """
        names = {id(slot.held): slot.spec.name for slot in slots}
        for other in find_holders(names.keys()) if names else ():
            name = next((names[id(weight)] for weight in other.known_weights() if id(weight) in names), None)
            if name is not None and other is not self:
                raise UnsafeState(f"{self.owner}: {name!r} was added, and {other.owner!r} manages it: release that")

    def guard_moves(self, after: MoveGuard | None = None) -> MoveGuard:
        groups = [(group, share.device.torch_device) for share in self.shares for group in share.groups]
        return MoveGuard(self.owner, groups, wait=self.finish_copies, after=after)

    def lent_places(self) -> dict[tuple[nn.Module, str], ParameterSlot]:
        """Return the places in the module that hold other components' weights, or temporary replacements of ours."""
        loans = self.moves.swaps.loans if self.moves is not None else []
        return self.find_lent() | {loan.owner: loan.slot for loan in loans}

    def has_any(self, ids: AbstractSet[int]) -> bool:
        """Whether any of these objects is in its module now: modules in the tree, and weights there or at rest."""
        tree = self.tree
        if tree is None or tree.has_changed():
            self.tree = tree = Structure(self.module)
        return not (
            ids.isdisjoint(map(id, tree.tensors()))
            and ids.isdisjoint(map(id, tree.modules))
            and all(
                ids.isdisjoint(map(id, tensors)) for group in self.groups for tensors in (group.resting, group.placed)
            )
        )

    def known_weights(self) -> Iterator[torch.Tensor]:
        """Yield all tensors that its module holds, or may hold, at rest."""
        for group in self.groups:
            yield from (tensor for _, tensor in group.known_tensors())

    # -- what several components have in common ([Note: sharing] in `weights/sharing.py`)

    def find_lent_modules(self) -> set[nn.Module]:
        """Return the parts of the module that other components own: the owners' hooks see their calls."""
        return {part for lender in self.leases.lenders() for part in lender.module.modules()}

    def find_lent(self) -> dict[tuple[nn.Module, str], ParameterSlot]:
        """Return the places of weights that other components own."""
        lenders = self.leases.lenders()
        return {place: e for lender in lenders for group in lender.groups for e in group.slots for place in e.owners}

    def lend_to(self, module: nn.Module) -> None:
        """Update our weights, from now on, in another component's module, too, where it holds them. Idempotent."""
        own = set(self.module.modules())
        self.own_places([part for part in module.modules() if part not in own])

    def own_places(self, parts: Iterable[nn.Module]) -> None:
        """Update our weights, from now on, at all places of these modules that hold one of them, and nowhere else."""
        known: dict[int, tuple[WeightGroup, int]] = {}
        for group in self.groups:
            known.update((id(tensor), (group, index)) for index, tensor in group.own_tensors())
        for group in self.groups:  # objects that came another way, where they are no other weight's
            for index, slot in enumerate(group.slots):
                if slot.owners:
                    known.setdefault(id(slot.held), (group, index))
        homes = {
            owner: (group, index)
            for group in self.groups
            for index, slot in enumerate(group.slots)
            for owner in slot.owners
        }
        lent = {loan.owner for loan in self.moves.swaps.loans} if self.moves is not None else ()
        slots = {id(slot): (group, index) for group in self.groups for index, slot in enumerate(group.slots)}
        for part in parts:
            for is_buffer, places in ((False, part._parameters), (True, part._buffers)):
                for name, tensor in list(places.items()):
                    group, index = known.get(id(tensor), (None, 0))
                    if isinstance(tensor, EncodedWeight):
                        group, index = slots.get(id(tensor.encoded.slot), (None, 0))
                    elif isinstance(tensor, AbsentWeight) and isinstance(tensor.bring, ReadOnUse) and group is None:
                        group, index = (None, 0) if tensor.is_data else slots.get(id(tensor.bring.slot), (None, 0))
                    if group is None or group.slots[index].is_buffer != is_buffer:
                        continue
                    home = homes.get((part, name))
                    if home != (group, index) and (part, name) not in lent:
                        if home is not None:  # other code put one of our weights in place of another
                            home[0].disown(home[1], (part, name))
                        group.own(index, (part, name))
                        if group.placed:
                            places[name] = group.placed[index]  # type: ignore[assignment]

    def follow_renamed(self) -> None:
        """Update weights at the places to which other code moved them within the module, and not at the old ones.

        ``prune`` and ``spectral_norm`` of `torch.nn.utils` give a weight another name. Forwards are refused until the
        component is released, or planned anew with what such code has put into the module beside that.
        """
        if self.moves is None:
            return
        for group in self.groups:
            for index, slot in enumerate(group.slots):
                for module, name in list(slot.owners):
                    if slot.tensors_of(module).get(name) is None:
                        group.disown(index, (module, name))
                        if not slot.is_buffer:
                            self.moves.note_gone(slot.spec.name)
        lent = self.find_lent_modules()
        self.own_places([part for part in self.module.modules() if part not in lent])

    def describe_left(self) -> Component:
        """Return the component without the weights that its module has no place for any more."""
        lost = {slot.spec.name for group in self.groups for slot in group.slots if not slot.owners}
        blocks = [*self.component.blocks, self.component.non_block]
        *blocks, rest = (replace(b, tensors=tuple(t for t in b.tensors if t.name not in lost)) for b in blocks)
        return replace(self.component, blocks=tuple(blocks), non_block=rest)

    def describe_anew(self) -> None:
        """Call weights what the module calls them now, and note which others hold in their stead, before a new plan."""
        if self.moves is None:
            return
        self.follow_renamed()
        own = [slot for share in self.shares for bundle in share.bundles for slot in bundle.own.slots]
        tree = Tree(self.module, own, {}, self.came_with, lent=self.lent_places())
        self.rename(own, tree)
        self.describe_added()
        for _, slot in tree.added:
            if isinstance(slot.held, AbsentWeight):  # made of one of ours
                slot.hold(at_home(slot.held))
        if self.source is not None:
            others = [slot.spec for _, slot in tree.added]
            self.packing.note_written(spec.name for spec in others if self.source.holds(spec))

    def take_back_from(self, module: nn.Module) -> None:
        """Stop updating another component's module: it keeps our weight stores, as the same objects. Idempotent."""
        own, others = set(self.module.modules()), set(module.modules())
        for group in self.groups:
            for index, slot in enumerate(group.slots):
                for part, name in [place for place in slot.owners if place[0] in others and place[0] not in own]:
                    group.disown(index, (part, name))
                    if group.resting:
                        slot.tensors_of(part)[name] = group.resting[index]

    def forget_removed_places(self, modules: Collection[nn.Module]) -> list[str]:
        """Forget the places from which weights were removed; returns the weights that the module still needs.

        It needs no weights of modules that were removed, nor what was removed from a dict of parameters. Those that
        came under management with the module stay in its block's memory until the next `reprofile()`.

        Args:
            modules: those that are in the tree now.
        """
        own = {id(bundle.own) for share in self.shares for bundle in share.bundles}
        gone = []
        for group in self.groups:
            for slot in group.slots:
                if not slot.is_buffer and any(module._parameters.get(name) is None for module, name in slot.owners):
                    lost = [place[0] for place in slot.owners if place[0]._parameters.get(place[1]) is None]
                    is_missed = any(part in modules and not isinstance(part, nn.ParameterDict) for part in lost)
                    if id(group) in own and is_missed:
                        gone.append(slot.spec.name)
                        continue
                    slot.set_owners(place for place in slot.owners if place[0] not in lost)
        return gone

    def has_other_forms(self) -> bool:
        """Whether a weight of an added layer has a new shape or dtype, as after hot-swapping a LoRA."""
        return any(map(has_other_form, self.added_slots()))

    def find_added_modules(self) -> set[nn.Module]:
        """Return the modules that have weights of added layers, and none of ours."""
        bundles = [bundle for share in self.shares for bundle in share.bundles]
        own = {module for bundle in bundles for slot in bundle.own.slots for module, _ in slot.owners}
        return {module for slot in self.added_slots() for module, _ in slot.owners} - own

    def added_slots(self) -> list[ParameterSlot]:
        added = [bundle.added for share in self.shares for bundle in share.bundles if bundle.added is not None]
        return [slot for group in added for slot in group.slots]

    def take_other_forms(self) -> dict[tuple[nn.Module, str], nn.Parameter]:
        """Return weights of added layers that have a new shape or dtype, by place; our entries give those places up."""
        given = {}
        for slot in filter(has_other_form, self.added_slots()):
            weight = nn.Parameter(slot.held.detach(), requires_grad=False)
            given.update(dict.fromkeys(slot.owners, weight))
            slot.set_owners(())
        return given

    def find_blocks(self) -> dict[nn.Module, int]:
        """Return the modules of the blocks, with their numbers."""
        blocks: dict[nn.Module, int] = {}
        for number, block in enumerate(self.component.blocks):
            try:
                blocks[self.module.get_submodule(block.name)] = number
            except AttributeError:
                what = f"{self.owner}: {block.name!r} is gone from its module"
                raise UnsafeState(f"{what}: release it before you change that") from None
        return blocks

    def join(self, share: DeviceShare, bundle: Bundle, tree: Tree) -> bool:
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

    def rename(self, own: Sequence[ParameterSlot], tree: Tree) -> None:
        """Rename our own weights to the names that the module gives them now; what is gone leaves its own to others."""
        names = {}
        for slot in own:
            if tree.names.get(id(slot)) and tree.names[id(slot)][0] != slot.spec.name:
                names[slot.spec.name] = tree.names[id(slot)][0]
        taken = {slot.spec.name for slot in own} | set(names.values())
        for slot in own:
            name = slot.spec.name
            if not tree.names.get(id(slot)) and name in names.values():
                names[name] = next(new for n in itertools.count(1) if (new := f"{name} (removed {n})") not in taken)
                taken.add(names[name])
        if names:
            self.packing.rename(names)
            self.plan = replace(
                self.plan, forms={names.get(name, name): numbers for name, numbers in self.plan.forms.items()}
            )

    def spec_of_added(self, slot: ParameterSlot) -> TensorSpec:
        """Return an added weight in numbers; by a name of its own where a weight of ours, removed since, is encoded."""
        is_taken = slot.spec.name in self.plan.forms
        return replace(slot.spec, name=f"{slot.spec.name} (added)") if is_taken else slot.spec

    def describe_added(self) -> None:
        """Update the component and the plan to what the groups hold now, with all added weights."""
        bundles = [bundle for share in self.shares for bundle in share.bundles]
        specs = {
            bundle.name: tuple(
                slot.spec if group is bundle.own else self.spec_of_added(slot)
                for group in bundle.groups
                for slot in group.slots
                if not slot.is_buffer
            )
            for bundle in bundles
            if bundle.name
        }
        rest = [group for share in self.shares for group in share.fixed.groups]
        before = self.component.weight_bytes
        self.component = replace(
            self.component,
            blocks=tuple(replace(block, tensors=specs[block.name]) for block in self.component.blocks),
            non_block=replace(
                self.component.non_block,
                tensors=tuple(e.spec for group in rest for e in group.slots if not e.is_buffer),
            ),
            buffers=tuple(slot.spec for group in rest for slot in group.slots if slot.is_buffer),
        )
        self.forwards.describe(self.component)
        added_bytes = self.component.weight_bytes - before
        self.plan = replace(self.plan, weight_bytes=self.plan.weight_bytes + added_bytes)
        if self.plan.tier != "disk":
            pinned_bytes = added_bytes if self.plan.pinned_bytes else 0
            self.plan = replace(
                self.plan,
                host_bytes=self.plan.host_bytes + added_bytes,
                pinned_bytes=self.plan.pinned_bytes + pinned_bytes,
            )

    def move_added_to_host(self) -> None:
        """Move weights of layers that were added, and have not joined yet, to host memory."""
        if self.has_other_layers():
            known = [slot for group in self.groups for slot in group.slots]
            tree = Tree(self.module, known, {}, self.came_with, lent=self.lent_places())
            bring_home(slot for _, slot in tree.added)

    def finish_copies(self) -> None:
        """Wait on the host until nothing is copied to any device."""
        for share in self.shares:
            if share.copies is not None:
                share.copies.finish()

    def settle(self) -> None:
        """End open passes, wait for copies and forget staged ones: a host may then write any weight where it is."""
        self.passes.recover_for(None)
        self.finish_copies()
        for share in self.shares:
            if share.streamer is not None:
                share.streamer.area.forget()

    def bring(self, group: WeightGroup) -> None:
        """Read a group that rests in its file into RAM, for other code to use. Raises as `ReadOnUse`."""
        with self.leases.lock.exclusive():
            if self.passes.is_busy():
                raise UnsafeState(
                    f"{self.owner} computes now, and {group.name or 'the part beside its blocks'} rests in its file: "
                    "use its weights before or after the forward, or choose another placement"
                )
            self.settle()
            if isinstance(group.store, FileStore):
                group.read_into_memory()
                self.leases.note_read(group.slab_bytes)

    # -- devices

    def load(self, plan: ComponentPlan, progress: Callable[[int], None] | None = None) -> int:
        """Bring every device to the plan; returns the bytes queued. On any failure nothing stays anywhere.

        ``progress`` is called with the bytes of each block that was queued; what it raises cancels the loading.
        """
        queued = 0
        self.look = None
        self.forwards.note_unloaded()
        self.settle_books()
        try:
            for share, part in zip(self.shares, plan.shares, strict=True):
                queued += share.load(part, progress)
        except BaseException:
            self.unload()
            raise
        if self.module_caches is not None:
            self.module_caches.send_back(self.primary.torch_device)
        if queued:  # another form: its passes take other times
            for share in self.shares:
                share.times.start_over()
        self.plan = plan
        self.forwards.note_loaded(is_timed=plan.streams)
        return queued

    def shrink(self, device: str, num_bytes: int) -> int:
        """Give back at least so many bytes of one device if they are there; returns them."""
        self.put_back()
        self.forwards.note_unloaded()
        freed = sum(share.shrink(num_bytes) for share in self.shares if share.device.name == device)
        return freed

    def unload(self) -> int:
        """Leave every device; returns the bytes freed."""
        self.put_back()
        self.move_added_to_host()
        self.forwards.note_unloaded()
        return sum(share.unload() for share in self.shares)


def answer_of(forwards: Forwards, device: torch.device) -> Asked:
    """Return the function that a component's weights on a device call for it; it refers to the forwards weakly."""
    alive = ref(forwards)

    def answer() -> torch.device | None:
        asked = alive()
        if asked is None:
            return None
        return asked.flows_on() or (device if in_backward() else None)

    return answer


def find_sharers(modules: Iterable[nn.Module]) -> list[ManagedComponent]:
    """Return all that have hooks in place, of every manager, and may have weights of these modules.

    What hangs in a managed module without having joined it yet is not found: `ManagedComponent.join_layers` looks.
    """
    roots = list(modules)
    trees = [Structure(root) for root in roots]
    if not has_other_holders(trees):
        return []
    ids = {id(tensor) for tree in trees for tensor in tree.tensors() if tensor is not None} | set(map(id, roots))
    return find_holders(ids)


def find_holders(ids: AbstractSet[int]) -> list[ManagedComponent]:
    """Return all that have hooks in place, of every manager, and any of these objects. Looks at each of them."""
    return [managed for managed in list(attached) if managed.has_any(ids)]


def has_other_holders(trees: Iterable[Structure]) -> bool:
    """Whether anything but these module trees refers to a weight in them, as whoever manages it does.

    Counts references, so that it takes no longer where there are many components. One that comes from elsewhere counts,
    too, such as a list of weights.
    """
    held = [tensor for tree in trees for tensor in tree.tensors() if tensor is not None]
    num_places = Counter(map(id, held))
    weights: list[object] = list(dict(zip(map(id, held), held, strict=True)).values())
    held.clear()
    weights.append(object())  # to which nothing refers but the list
    *counts, least = map(sys.getrefcount, weights)
    return any(count - least != num_places[id(weight)] for count, weight in zip(counts, weights, strict=False))


def refuse_managed(module: nn.Module) -> None:
    """Refuse to touch the weights of a module where they are: those of a managed one move, and may rest in eight bits.

    Raises:
        UnsafeState: any of them is managed.
    """
    weights = {id(parameter) for parameter in module.parameters()}
    for managed in list(attached):
        if any(id(parameter) in weights for parameter in managed.module.parameters()):
            raise UnsafeState(f"{managed.owner} is managed: release it before loading other weights into it")


def has_other_form(slot: ParameterSlot) -> bool:
    """Whether a plain parameter has another shape or dtype than it had when it was described."""
    if slot.is_buffer or slot.is_quantized or not slot.owners:
        return False
    held, spec = slot.held, slot.spec
    return held.shape != spec.shape or SAFETENSORS_NAMES[str(held.dtype)] != spec.dtype
