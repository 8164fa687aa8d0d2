"""A module under management: packed, hooked, and loaded to its devices."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import InvalidInput, UnsafeState
from ..planner.calls_at_once import WHY_STREAMS
from ..planner.form_choice import encoded_bytes
from ..planner.plan import ComponentPlan
from ..transfer.devices import Device
from ..weights.component import Component
from ..weights.form_numbers import rests_of
from ..weights.side_factors import SideFactors
from ..weights.source import WeightsSource
from .blocks.group_reading import read_into_memory
from .blocks.weight_group import WeightGroup
from .blocks.weight_store import FileStore, HostStore
from .blocks.weight_swaps import Swaps
from .changes.state_dict_guard import StateGuard
from .component_shares import build_shares
from .devices.device_share import wait_for_copies
from .devices.ledger import Kind, Ledger
from .factor_layers import FactorLayers
from .forwards.compiled_blocks import CompiledBlocks
from .forwards.device_answers import DeviceAnswers
from .forwards.forward_blocks import Forwards
from .forwards.forward_hooks import ForwardHooks, remove_hooks_of
from .forwards.forward_pass import ComponentManager, NoManager, Passes
from .forwards.hooked_modules import HookedModules, block_modules, modules_holding
from .forwards.micro_batches import why_one_by_one
from .forwards.module_caches import ModuleCaches
from .holders import attached
from .host_books import count_host_bytes
from .joined_layers import describe_joined, without_staging
from .mapped_weights import MappedWeights
from .outside_changes import OutsideChanges
from .packing import Ending, Packing
from .taken_ram import take_ram
from .tensors.deep_copies import OwnHook
from .tensors.parameter_slots import ParameterSlot
from .tensors.recomputing import in_backward
from .tensors.reported_device import Asked
from .weight_places import WeightPlaces

__all__ = ["ManagedComponent", "Phase"]


class Phase(enum.Enum):
    """How far a managed component has come."""

    DETACHED = "detached"
    """Not yet attached, or no more: nothing of the module is its."""
    ATTACHED = "attached"
    ENDING = "ending"
    """Being detached, or interrupted in that: `ManagedComponent.detach` goes through with it."""


class ManagedComponent:
    """One component attached to its module: packed in host memory, hooked, and loadable by plan.

    Args:
        manager: what the component asks of its manager.
        guards_state: make ``state_dict()`` complete and refuse loading while weights rest encoded or in their
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
        manager: ComponentManager,
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
        self.manager = manager
        self.source = source
        self.compiles = compiles
        self.compiled: CompiledBlocks | None = None
        self.phase = Phase.DETACHED
        self.has_taken_over = after is not None
        self.guards_state = guards_state
        earlier = after.packing if after is not None else None
        self.shares = build_shares(
            owner,
            module,
            component,
            plan,
            devices,
            ledger,
            source=source,
            earlier=earlier,
            for_host=not guards_state,
        )
        self.accelerators = [share.device for share in self.shares if not share.device.is_cpu]
        self.hooks: ForwardHooks = after.hooks if after is not None else ForwardHooks()
        self.packing: Packing = Packing(owner, component, plan, self.shares, ledger, source, after=earlier)
        self.forwards = Forwards(
            owner,
            module,
            component,
            self.shares,
            manager=manager,
            compiles=compiles,
            places_inputs=guards_state,
        )
        self.factors = FactorLayers(owner, self.shares, self.packing)
        self.places = WeightPlaces(owner, module, self.shares, Swaps(), manager)
        blocks = [module.get_submodule(block.name) for block in component.blocks]
        self.changes = OutsideChanges(owner, module, blocks, self.shares, self.places)
        # With a class of our own for some parameters torch.compile would compile each block twice.
        for group in self.groups:
            group.views.note_data(not compiles)
        for share in self.shares if guards_state else ():
            answer = answer_of(self.forwards, share.device.torch_device)
            for group in share.groups:
                group.at_rest.answer_with(answer)
        self.module_caches: ModuleCaches | None = None
        """Set while attached, unless a host does that itself."""
        self.answers: DeviceAnswers | None = None
        """Set while attached, unless a host moves single weights itself."""

    @property
    def primary(self) -> Device:
        """Where inputs go and outputs come back: the device of the non-block weights."""
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

    def is_computing(self) -> bool:
        """Whether a forward of it runs in any thread, a call of a block without one, or a step of micro-batches."""
        return self.passes.is_busy() or self.forwards.step is not None or self.forwards.is_called_unseen()

    @property
    def groups(self) -> list[WeightGroup]:
        return [group for share in self.shares for group in share.groups]

    @property
    def buffers(self) -> list[ParameterSlot]:
        """The buffers of its own, other than quantized ones."""
        if not self.component.buffers:
            return []
        return [slot for group in self.groups for slot in group.slots if slot.is_plain_buffer]

    @cached_property
    def encoded_bytes(self) -> int | None:
        """What it would take of one device if it were encoded, as `planner.form_choice.encoded_bytes`.

        None also where one of its devices could not widen that.
        """
        return encoded_bytes(self.component) if all(share.device.has_float8 for share in self.shares) else None

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights copied to devices so far."""
        return sum(share.bytes_moved for share in self.shares)

    @property
    def waited_s(self) -> float:
        """Seconds for which its blocks waited for their copies, as far as `read_waits` or a pass has read them."""
        return sum(share.waited_s for share in self.shares)

    def read_waits(self) -> float:
        """As `waited_s`, with what is over now; in the thread that runs the passes."""
        return sum(share.read_waits() for share in self.shares)

    def count_bytes(self) -> Iterator[tuple[str, Kind, int]]:
        """Yield place, kind and bytes of all its memory that is there now, for `Ledger.check`; reads no books."""
        for share in self.shares:
            yield from share.count_bytes()
        for tier, num_bytes in count_host_bytes(self.packing.shares).items():
            yield tier, Kind.WEIGHTS, num_bytes

    def early_bytes(self, device: str) -> int:
        """Return the bytes that are on a device before the component is loaded there ([Note: early copies])."""
        return sum(share.early.num_bytes for share in self.shares if share.device.name == device)

    def settle_books(self) -> None:
        """Enter in the ledger what is on devices and on its way there: an interrupt may have come before an entry."""
        bounce: Counter[str] = Counter()
        for share in self.shares:
            share.settle()
            bounce.update(share.buffer_bytes())
        for tier in ("pinned", "host"):
            self.ledger.settle(tier, self.owner, Kind.STAGING, bounce[tier])

    # -- hooks

    def attach(self, progress: Callable[[int], None] | None = None) -> None:
        """Pack the weights (`Packing.pack`) and put the hooks in place; on failure the module is as it was."""
        self.phase = Phase.ATTACHED
        try:
            self.packing.pack(progress)
            for group in self.groups:
                group.read_with(self.read_group, partial(self.manager.note_read, is_written=True))
            self.plan = self.as_locked(self.plan)
            self.forwards.check_with(self.packing.mapped.check)
            if self.guards_state:
                self.changes.begin(self.packing)
                self.answers = DeviceAnswers(self.module, self.device_of, is_inside=self.forwards.is_entered)
            self.hook()
            if self.compiles:
                blocks = [self.module.get_submodule(block.name) for block in self.component.blocks]
                self.compiled = CompiledBlocks(blocks, self.primary.torch_device)
        except BaseException:
            self.detach(Ending.TAKEN_BACK)
            raise

    def as_locked(self, plan: ComponentPlan) -> ComponentPlan:
        """Return a plan that says what is page-locked, where the driver refused that: plans to come choose by it."""
        if not self.packing.was_refused:
            return plan
        pinned = {
            group.name: group.slab_bytes
            for group in self.groups
            if isinstance(group.at_rest.store, HostStore) and not group.at_rest.blocks_host
        }
        tier = plan.tier if plan.tier == "disk" else "pinned" if pinned else "host"
        return replace(
            plan, tier=tier, pinned=frozenset(pinned), pinned_bytes=sum(pinned.values()), locks_buffers=False
        )

    def detach(self, ending: Ending = Ending.RESTORED) -> None:
        """Leave every device, give the module what the ending says, remove every hook. Idempotent; interrupted, it can
        be called again.

        What is handed over, or taken back from one that took over, keeps its forward hooks for its next owner.

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
            group.read_with(None)
        attached.discard(self.places)
        self.passes.recover_for(None)
        if self.compiled is not None:
            self.compiled.release()
        if self.answers is not None:
            self.answers.end()
        if ending is not Ending.DISCARDED:
            self.changes.follow_renamed()
        self.unload()
        self.changes.stop(self.packing)
        slabs = [group.host_slab for group in self.groups if group.host_slab is not None]
        error: InvalidInput | None = None
        try:
            self.packing.end(ending)
        except InvalidInput as problem:
            error = problem
        if self.module_caches is not None and ending is not Ending.DISCARDED:
            groups = [group for bundle in self.packing.left for group in bundle.groups]
            packed = {place for group in groups for slot in group.slots for place in slot.owners}
            lent = packed.union(self.places.borrowed())
            self.module_caches.return_to_host(slabs, others=self.places.lent_modules(), lent=lent)
        self.forwards.end()
        self.changes.end()
        self.module_caches = self.answers = None
        goes_on = ending is Ending.HANDED_OVER or (ending is Ending.TAKEN_BACK and self.has_taken_over)
        for part in self.module.modules():
            remove_hooks_of(self.forwards, part)
        if not goes_on:  # last: calls that came before this wait for the weights
            self.hooks.remove()
            for part in self.module.modules():
                remove_hooks_of(self.hooks, part)
        self.phase = Phase.DETACHED
        self.manager = NoManager(self.manager.lock)
        self.places.end()
        if error is not None:
            raise error

    def hook(self) -> None:
        attached.add(self.places)
        if self.guards_state:
            self.module_caches = self.module_caches or ModuleCaches(self.module, self.places.lent_modules())
            self.handles += self.module_caches.hook(self.owner)
        if self.guards_state and (self.plan.forms or self.plan.in_file):
            rests = rests_of(self.plan.forms) or ("in its file" if self.plan.tier == "disk" else "in part in its file")
            self.handles += StateGuard(self.owner, self.module, self.groups, self.source, rests=rests).hook()
        if self.packing.mapped.check is not None:
            check = partial(check_files, self.packing.mapped)
            self.handles.append(self.module.register_state_dict_pre_hook(check))  # type: ignore[no-untyped-call]
        modules = self.find_hooked_modules()
        self.forwards.take_modules(modules if self.guards_state else replace(modules, inner=frozenset()))
        self.hooks.lead_to(self.forwards, owner=self.owner, root=self.module)
        if len(self.shares) > 1:
            own = set(self.module.modules()) - {self.module}
            holders = modules_holding(slot for group in self.shares[0].fixed.groups for slot in group.slots)
            for module in [module for module in holders if module in own]:  # of non-block weights
                before, after = (
                    OwnHook.on(module, function, owner=self.owner)
                    for function in (self.forwards.before_non_block, self.forwards.after_non_block)
                )
                self.handles += [
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after, always_call=True),
                ]

    def find_hooked_modules(self) -> HookedModules:
        """Return which modules of the tree are what, as it is now. Raises `UnsafeState` where a block is gone."""
        holders = modules_holding(slot for share in self.shares for group in share.fixed.groups for slot in group.slots)
        blocks = block_modules(self.owner, self.module, self.component)
        return HookedModules.find(self.module, blocks, holders, self.places.lent_modules())

    def device_of(self, path: str) -> torch.device:
        """Return the device on which the submodule at a path computes: its block's, else the non-block weights'."""
        blocks = self.component.blocks
        number = next((n for n, block in enumerate(blocks) if f"{path}.".startswith(f"{block.name}.")), None)
        share = self.shares[0] if number is None else self.forwards.share_of[number]
        return share.device.torch_device

    # -- what others do with the module

    def take_changes(self) -> bool:
        """Join layers that were added, and undo what ``Module.to`` and its like did; returns whether layers changed.

        Where weights were converted it does only that: `OutsideChanges.given_up` tells of it, and the component is to
        be packed anew. Raises as `JoinedLayers.join`.
        """
        if self.changes.take_converted():
            self.forwards.note_unloaded()
            return False
        has_joined = self.changes.have_layers_changed()
        if has_joined:
            self.join_layers()
        self.changes.undo_moves(has_joined=has_joined)
        return has_joined

    def join_layers(self) -> None:
        """Take layers along that were added to the module, or that are gone from it. Raises as `JoinedLayers.join`."""
        joined = self.changes.join(self.component, self.plan, block_modules(self.owner, self.module, self.component))
        self.component, self.plan = joined.component, joined.plan
        self.forwards.describe(self.component)
        if joined.changes_blocks:
            self.forwards.note_unloaded()
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.changes.guard_anew()
        self.hook()
        self.changes.accept(joined)

    def describe_anew(self) -> None:
        """Take the names that the module gives weights now, before another plan is made."""
        self.component, self.plan = self.changes.describe_anew(self.component, self.plan)
        self.forwards.describe(self.component)

    def describe_left(self) -> Component:
        """Return the component without the weights that its module has no place for any more."""
        lost = {slot.spec.name for group in self.groups for slot in group.slots if not slot.owners}
        blocks = [*self.component.blocks, self.component.non_block]
        *blocks, non_block = (replace(b, tensors=tuple(t for t in b.tensors if t.name not in lost)) for b in blocks)
        return replace(self.component, blocks=tuple(blocks), non_block=non_block)

    def set_factors(self, factors: Mapping[str, SideFactors]) -> None:
        """Add these to encoded weights in decoding, and nothing to others. Raises as `FactorLayers.set`.

        Where sizes changed (`FactorLayers.num_laid_out`) the component is to be loaded anew.
        """
        self.settle()
        before = self.factors.num_laid_out
        try:
            self.factors.set(factors)
        finally:
            if self.factors.num_laid_out != before:
                self.component, plan = describe_joined(self.component, self.plan, self.shares)
                self.plan = without_staging(plan)
                self.forwards.describe(self.component)
                self.forwards.note_unloaded()

    def finish_loading(self) -> None:
        """Wait until what is loaded is on its devices; not for blocks that come before they are asked for."""
        for share in self.shares:
            if share.copies is not None:
                share.copies.finish()

    def finish_copies(self) -> None:
        """Wait on the host until nothing is copied to any device."""
        wait_for_copies(self.shares)

    def settle(self) -> None:
        """End open passes, wait for copies and forget staged ones: a host may then write any weight where it is."""
        self.passes.recover_for(None)
        self.finish_copies()
        for share in self.shares:
            share.forget_staged()

    def read_group(self, group: WeightGroup) -> None:
        """Read a group that rests in its file into RAM, for other code to use. Raises as `ReadOnUse`."""
        with self.manager.lock.exclusive():
            if self.plan.placement.forbids_ram:
                raise UnsafeState(
                    f"{self.owner} rests in its file, and its placement {str(self.plan.placement)!r} keeps it out of "
                    "RAM: use its weights on its device, read them by state_dict(), or place it at disk"
                )
            if self.passes.is_busy():
                rests = f"{group.name} rests" if group.name else "non-block weights rest"
                raise UnsafeState(
                    f"{self.owner} computes now, and {rests} in its file: "
                    "use its weights before or after the forward, or choose another placement"
                )
            self.settle()
            if isinstance(group.at_rest.store, FileStore):
                read_into_memory(group)
                self.manager.note_read(group.slab_bytes)

    def read_all(self) -> None:
        """Leave every device, and read what rests in files into RAM. No pass may run. Raises as `read_into_memory`."""
        self.unload()
        for group in self.groups:
            if isinstance(group.at_rest.store, FileStore):
                read_into_memory(group)

    # -- micro-batches

    def why_one_by_one(self) -> str:
        """Return why `run_micro_batches` makes calls one after the other, as far as that is known; empty if not."""
        if self.forwards.is_loaded:
            return why_one_by_one(self.shares)
        return WHY_STREAMS if self.plan.streams else ""

    def note_micro_batches(self, said: str) -> None:
        """Have the plan tell what was found of its micro-batches in place of what it expected."""
        kept = [line for line in self.plan.choices if not line.startswith("micro-batches: ")]
        self.plan = replace(self.plan, choices=(*kept, f"micro-batches: {said}"))

    def run_micro_batches(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make independent calls of the module of which several devices compute parts at the same time.

        Returns what each returned, the same bits as if made one after the other, which they are where
        `why_one_by_one` says why. Each is launched whole before the next, in this thread: a call that waits on the host
        for its results lets nothing overlap. Needs the memory of all calls at once. Raises what a call raises; the
        later ones are not made then.
        """
        step = None
        if len(calls) > 1 and len(self.shares) > 1 and not self.why_one_by_one():
            step = self.forwards.begin_step()
        if step is None:
            return [call() for call in calls]
        results: list[Any] = []
        try:
            for call in calls:
                step.begin_call()
                results.append(call())
        finally:
            self.forwards.end_step(results)
        return results

    # -- devices

    def load(self, plan: ComponentPlan, progress: Callable[[int], None] | None = None) -> int:
        """Load what the plan has on each device; returns the bytes queued. On any failure nothing stays anywhere.

        ``progress`` is called with the bytes of each block that was queued; what it raises cancels the loading.
        """
        queued = 0
        self.changes.forget_look()
        self.forwards.note_unloaded()
        self.settle_books()
        for share in self.shares:
            share.early.begin_loading()
        try:
            if take_ram(self.packing, plan):
                plan = self.as_locked(plan)
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

    def shrink(self, device: str, num_bytes: int, lasting_bytes: int = 0) -> int:
        """Give back at least so many bytes of one device if they are there; returns them.

        With ``lasting_bytes`` only blocks are given back, and so many bytes stay.
        """
        self.changes.put_back()
        self.forwards.note_unloaded()
        views = self.places.resident_views()
        freed = sum(share.shrink(num_bytes, lasting_bytes) for share in self.shares if share.device.name == device)
        freed += sum(share.shrink_stored(device, num_bytes) for share in self.shares)
        self.places.replace_evicted(views)
        return freed

    def unload(self) -> int:
        """Leave every device; returns the bytes freed."""
        self.changes.put_back()
        self.changes.bring_layers_home()
        self.forwards.note_unloaded()
        views = self.places.resident_views()
        freed = sum(share.unload() + share.unload_stored() for share in self.shares)
        self.places.replace_evicted(views)
        return freed


def check_files(mapped: MappedWeights, *_: object) -> None:
    """Before a state dict is made: refuse files that were changed where they are."""
    mapped.refuse_overwritten()


def answer_of(forwards: Forwards, device: torch.device) -> Asked:
    """Return the function that a component's weights on a device call for it; it refers to the forwards weakly."""
    alive = ref(forwards)

    def answer() -> torch.device | None:
        asked = alive()
        if asked is None:
            return None
        return asked.flows_on() or (device if in_backward() else None)

    return answer
