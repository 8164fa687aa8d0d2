"""A module under management: packed, hooked, and loaded to its devices."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from weakref import WeakSet

from torch import nn
from torch.utils.hooks import RemovableHandle

from .compiling import CompiledBlocks
from .component import Component, is_callable
from .devices import Device
from .entries import find_entries
from .errors import InvalidInput, UnsafeState
from .footprint import fixed_tensors
from .forwards import Forwards
from .hooks import Hooks
from .ledger import Ledger
from .leftovers import Leftovers
from .moved import MoveGuard
from .packing import Ending, Packing
from .passes import Pass, Passes
from .plan import ComponentPlan
from .residency import Unit
from .rivals import find_rival
from .share import Share
from .source import WeightsSource
from .state import StateGuard

__all__ = ["Attachment", "Phase", "refuse_managed"]

attached: WeakSet[Attachment] = WeakSet()
"""All that have hooks in place, of every manager."""


class Phase(enum.Enum):
    """How far an attachment has come."""

    DETACHED = "detached"
    """Not yet attached, or no more: nothing of the module is its."""
    ATTACHED = "attached"
    ENDING = "ending"
    """Being detached, or interrupted in that: `Attachment.detach` goes through with it."""


class Attachment:
    """One component attached to its module: packed in host memory, hooked, and loadable by plan.

    Args:
        exclusive, acquire, give_back: as in `Forwards`.
        guards_state: make ``state_dict()`` complete and refuse loading while weights rest in eight bits or in their
            file, and undo ``Module.to``; a host that reads and writes single weights does without.
        source: the files that the weights may rest in.
        compiles: whether the repeated blocks are compiled.
        after: the attachment whose place this one takes.
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
        exclusive: Callable[[], AbstractContextManager[None]],
        acquire: Callable[[Pass], bool],
        give_back: Callable[[Pass], None],
        guards_state: bool = True,
        source: WeightsSource | None = None,
        compiles: bool = False,
        after: Attachment | None = None,
    ) -> None:
        self.owner = owner
        self.module = module
        self.component = component
        self.plan = plan
        self.ledger = ledger
        self.handles: list[RemovableHandle] = []
        self.source = source
        self.compiles = compiles
        self.compiled: CompiledBlocks | None = None
        self.phase = Phase.DETACHED
        self.has_taken_over = after is not None
        self.shares = self.build_shares(devices)
        self.hooks: Hooks = after.hooks if after is not None else Hooks()
        earlier = after.packing if after is not None else None
        self.packing: Packing = Packing(owner, component, plan, self.shares, ledger, source, after=earlier)
        self.forwards = Forwards(
            owner,
            module,
            component,
            self.shares,
            self.hooks,
            exclusive=exclusive,
            acquire=acquire,
            give_back=give_back,
            compiles=compiles,
            places_inputs=guards_state,
        )
        self.guards_state = guards_state
        first = module.get_submodule(component.blocks[0].name) if component.blocks else module
        blocks = [module.get_submodule(block.name) for block in component.blocks]
        self.marked_by_others = list(dict.fromkeys([module, *blocks, *first.modules()]))
        """The modules of which one at least has the hooks of whoever else moves the weights."""
        self.leftovers: Leftovers | None = None
        """While it is attached, unless a host sees to that itself."""
        self.moves: MoveGuard | None = None
        """While it is attached, unless a host moves single weights itself."""

    @property
    def primary(self) -> Device:
        """Where inputs go and outputs come back: the device of the rest."""
        return self.shares[0].device

    @property
    def passes(self) -> Passes:
        return self.forwards.passes

    @property
    def is_loaded(self) -> bool:
        """Whether its devices are as its plan says."""
        return self.forwards.is_loaded

    @property
    def units(self) -> list[Unit]:
        return [unit for share in self.shares for unit in share.units]

    @property
    def bytes_moved(self) -> int:
        """Bytes of weights copied to devices so far."""
        return sum(share.bytes_moved for share in self.shares)

    def build_shares(self, devices: dict[str, Device]) -> list[Share]:
        specs = [tensor for block in [*self.component.blocks, self.component.rest] for tensor in block.tensors]
        entries = find_entries(self.module, [*specs, *self.component.buffers])
        shares = []
        for index, part in enumerate(self.plan.shares):
            fixed = fixed_tensors(self.component, part.blocks, first=index == 0)
            units = {
                number: Unit(
                    self.component.blocks[number].name,
                    [entries[tensor.name] for tensor in self.component.blocks[number].tensors],
                    cast=self.plan.cast,
                )
                for number in part.blocks
            }
            fixed_unit = Unit("", [entries[tensor.name] for tensor in fixed], cast=frozenset())
            shares.append(Share(self.owner, devices[part.device], fixed_unit, units, self.ledger))
        return shares

    # -- hooks

    def attach(self, progress: Callable[[int], None] | None = None) -> None:
        """Pack the masters (`Packing.pack`) and put the hooks in place; on failure the module is as it was."""
        self.phase = Phase.ATTACHED
        try:
            self.packing.pack(progress)
            if self.packing.was_refused:  # plans to come choose what streams by what is locked
                pinned = {
                    unit.name: unit.slab_bytes
                    for unit in self.units
                    if unit.master is not None and not unit.blocks_host
                }
                tier = "pinned" if pinned else "host"
                self.plan = replace(self.plan, tier=tier, pinned=frozenset(pinned), pinned_bytes=sum(pinned.values()))
            if self.guards_state:
                units = [(unit, share.device.torch_device) for share in self.shares for unit in share.units]
                self.moves = MoveGuard(self.owner, units, wait=self.finish_copies)
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
        attached.discard(self)
        self.passes.heal_for(None)
        if self.compiled is not None:
            self.compiled.release()
        self.unload()
        if self.moves is not None:
            self.packing.written |= self.moves.swaps.names
        slabs = [unit.host_slab for unit in self.units if unit.host_slab is not None]
        error: InvalidInput | None = None
        try:
            self.packing.end(ending)
        except InvalidInput as problem:
            error = problem
        if self.leftovers is not None and ending is not Ending.DISCARDED:
            self.leftovers.bring_home(slabs)
        self.forwards.end()
        self.moves = self.leftovers = None
        goes_on = ending is Ending.HANDED_OVER or (ending is Ending.TAKEN_BACK and self.has_taken_over)
        if not goes_on:  # last: who comes until now waits for the weights
            self.hooks.remove()
        self.phase = Phase.DETACHED
        if error is not None:
            raise error

    def hook(self) -> None:
        attached.add(self)
        if self.guards_state:
            self.leftovers = Leftovers(self.module)
            self.handles += self.leftovers.hook()
        if self.guards_state and (self.plan.cast or self.plan.tier == "disk"):
            rests = "in its file" if self.plan.tier == "disk" else "in eight bits"
            self.handles += StateGuard(self.owner, self.module, self.units, self.source, rests=rests).hook()
        blocks = {self.module.get_submodule(block.name): n for n, block in enumerate(self.component.blocks)}
        self.forwards.entries = frozenset(self.find_entry_modules())
        self.forwards.blocks, self.forwards.parts = blocks, self.find_parts(blocks)
        self.hooks.lead_to(self.forwards)
        if len(self.shares) > 1:
            for module in self.find_rest_modules():
                self.handles += [
                    module.register_forward_pre_hook(self.forwards.before_rest, with_kwargs=True),
                    module.register_forward_hook(self.forwards.after_rest, always_call=True),
                ]

    def find_entry_modules(self) -> list[nn.Module]:
        return [self.module, *(child for child in self.module.children() if is_callable(child))]

    def find_parts(self, blocks: Mapping[nn.Module, int]) -> dict[nn.Module, int]:
        """Return the modules inside one block each, with its number."""
        inside = [(part, number) for block, number in blocks.items() for part in block.modules() if part is not block]
        num_blocks = Counter(part for part, _ in inside)
        return {part: number for part, number in inside if num_blocks[part] == 1 and is_callable(part)}

    def find_rest_modules(self) -> list[nn.Module]:
        """Return the modules that hold weights of the rest themselves, except the root."""
        holders = {module: None for entry in self.shares[0].fixed.entries for module, _ in entry.owners}
        return [module for module in holders if module is not self.module]

    # -- what others do with the module

    def refuse_rivals(self) -> None:
        """Refuse to compute while others move the weights, too. Looks where any of them would leave its mark.

        Raises:
            UnsafeState: they do.
        """
        rival = find_rival(self.marked_by_others)
        if rival is not None:
            raise UnsafeState(f"{self.owner} is managed, and has {rival}, or release it")

    def put_back(self) -> None:
        """Undo what ``Module.to`` and its like did to the weights; the caller holds the manager's lock."""
        if self.moves is not None:
            self.moves.put_back()

    def finish_copies(self) -> None:
        """Wait on the host until nothing is copied to any device."""
        for share in self.shares:
            if share.copies is not None:
                share.copies.finish()

    def settle(self) -> None:
        """End open passes, wait for copies and forget staged ones: a host may then write any weight where it is."""
        self.passes.heal_for(None)
        self.finish_copies()
        for share in self.shares:
            if share.streamer is not None:
                share.streamer.area.forget()

    # -- devices

    def load(self, plan: ComponentPlan, progress: Callable[[int], None] | None = None) -> int:
        """Bring every device to the plan; returns the bytes queued. On any failure nothing stays anywhere.

        ``progress`` is called with the bytes of each block that was queued; what it raises cancels the loading.
        """
        queued = 0
        try:
            for share, part in zip(self.shares, plan.shares, strict=True):
                queued += share.load(part, progress)
        except BaseException:
            self.unload()
            raise
        if self.leftovers is not None:
            self.leftovers.send(self.primary.torch_device)
        if queued:  # another form: its passes take other times
            for share in self.shares:
                share.passes = share.num_partial = 0
        self.plan, self.forwards.is_loaded, self.forwards.is_timed = plan, True, plan.streams
        return queued

    def shrink(self, device: str, num_bytes: int) -> int:
        """Give back at least so many bytes of one device if they are there; returns them."""
        self.put_back()
        freed = sum(share.shrink(num_bytes) for share in self.shares if share.device.name == device)
        self.forwards.is_loaded = False
        return freed

    def unload(self) -> int:
        """Leave every device; returns the bytes freed."""
        self.put_back()
        self.forwards.is_loaded = False
        return sum(share.unload() for share in self.shares)


def refuse_managed(module: nn.Module) -> None:
    """Refuse to touch the weights of a module where they are: those of a managed one move, and may rest in eight bits.

    Raises:
        UnsafeState: any of them is managed.
    """
    weights = {id(parameter) for parameter in module.parameters()}
    for attachment in list(attached):
        if any(id(parameter) in weights for parameter in attachment.module.parameters()):
            raise UnsafeState(f"{attachment.owner} is managed: release it before loading other weights into it")
