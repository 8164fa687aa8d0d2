"""A module under management: its shares on their devices, and the hooks through which computing reaches them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .blocks import has_skips
from .compiling import CompiledBlocks
from .component import Component, is_callable
from .devices import Device
from .entries import find_entries
from .errors import UnsafeState
from .footprint import fixed_tensors
from .hooks import Hooks
from .ledger import Ledger
from .moved import MoveGuard
from .packing import Ending, Packing
from .passes import Pass, Passes
from .plan import ComponentPlan
from .residency import Unit
from .share import Share
from .source import WeightsSource
from .split import Hops
from .state import StateGuard

__all__ = ["Attachment", "refuse_managed"]

# The kinds of components whose blocks run one after the other on one stream of hidden states.
CHAINS = ("diffusion", "text", "vision")

attached: WeakSet[Attachment] = WeakSet()
"""All that have hooks in place, of every manager."""


class Attachment:
    """One component attached to its module: packed in host memory, hooked, and loadable by plan.

    Args:
        exclusive: holds the manager's lock.
        acquire: called on the outermost entry; loads the component or raises, and holds a lease for the pass. Returns
            whether the component is still this attachment's.
        give_back: called when the outermost entry is left, also by an exception; perhaps twice.
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
        self.acquire = acquire
        self.give_back = give_back
        self.hops = Hops()
        self.handles: list[RemovableHandle] = []
        self.source = source
        self.compiles = compiles
        self.compiled: CompiledBlocks | None = None
        self.is_attached = False
        self.is_loaded = False
        self.shares = self.build_shares(devices)
        self.hooks: Hooks = after.hooks if after is not None else Hooks()
        earlier = after.packing if after is not None else None
        self.packing: Packing = Packing(owner, component, plan, self.shares, ledger, source, after=earlier)
        self.passes = Passes(module, self.finish_pass, exclusive)
        self.guards_state = guards_state
        self.moves: MoveGuard | None = None
        """While it is attached, unless a host moves single weights itself."""
        self.share_of = {number: share for share in self.shares for number in share.blocks}
        self.returning = self.find_returning()

    @property
    def primary(self) -> Device:
        """Where inputs go and outputs come back: the device of the rest."""
        return self.shares[0].device

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
        self.packing.pack(progress)
        if self.packing.was_refused:  # plans to come choose what streams by what is locked
            pinned = {unit.name for unit in self.units if unit.master is not None and not unit.blocks_host}
            self.plan = replace(self.plan, pinned=frozenset(pinned))
        self.is_attached = True
        if self.guards_state:
            self.moves = MoveGuard(self.owner, self.units, wait=self.finish_copies)
        try:
            self.hook()
            if self.compiles:
                blocks = [self.module.get_submodule(block.name) for block in self.component.blocks]
                self.compiled = CompiledBlocks(blocks, self.primary.torch_device)
        except BaseException:
            self.detach(Ending.TAKEN_BACK)
            raise

    def detach(self, ending: Ending = Ending.RESTORED) -> None:
        """Leave every device, give the module what the ending says, remove every hook. Idempotent.

        What is handed over keeps its forward hooks, for the attachment that comes next.

        Raises:
            InvalidInput: as `Packing.end`, when all else is done.
        """
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if not self.is_attached:
            return
        self.is_attached = False
        attached.discard(self)
        self.passes.heal_for(None)
        if self.compiled is not None:
            self.compiled.release()
        self.unload()
        try:
            self.packing.end(ending)
        finally:
            # It refers to us: the module would live until the next garbage collection.
            self.passes.finish, self.moves = lambda current, completed: None, None
            if ending is not Ending.HANDED_OVER:  # last: who comes until now waits for the weights
                self.hooks.remove()

    def dismiss(self) -> None:
        """Let nobody in any more: another one has the module now, or none."""
        # They refer to the manager's member and to us, as `Passes.finish` does.
        self.acquire, self.give_back = refuse_entry, forget_pass

    def hook(self) -> None:
        attached.add(self)
        if self.guards_state and (self.plan.cast or self.plan.tier == "disk"):
            rests = "in its file" if self.plan.tier == "disk" else "in eight bits"
            self.handles += StateGuard(self.owner, self.module, self.units, self.source, rests=rests).hook()
        blocks = {self.module.get_submodule(block.name): n for n, block in enumerate(self.component.blocks)}
        self.hooks.lead_to(self, self.find_entry_modules(), blocks)
        if len(self.shares) > 1:
            for module in self.find_rest_modules():
                self.handles.append(module.register_forward_pre_hook(self.before_rest, with_kwargs=True))

    def find_entry_modules(self) -> list[nn.Module]:
        return [self.module, *(child for child in self.module.children() if is_callable(child))]

    def find_rest_modules(self) -> list[nn.Module]:
        """Return the modules that hold weights of the rest themselves, except the root."""
        holders = {module: None for entry in self.shares[0].fixed.entries for module, _ in entry.owners}
        return [module for module in holders if module is not self.module]

    # -- entries

    def enter(self, module: nn.Module) -> bool:
        """Enter through a module, into a pass of its own if none is open; False if the component is another's now."""
        self.passes.heal_for(module)
        if self.passes.outermost is not None:
            self.passes.enter(module)
            return True
        if not self.passes.begin(module, self.acquire):
            return False
        if self.is_loaded:
            for share in self.shares:
                share.begin_pass(is_timed=self.plan.streams)  # else nothing is planned by the times
        return True

    def is_entered(self) -> bool:
        """Whether this thread is in the middle of a pass."""
        return self.passes.outermost is not None

    def before_entry(self, args: Any, kwargs: Any) -> Any:
        is_nested = self.passes.depth > 1
        return None if is_nested or not self.is_loaded else self.hops.move((args, kwargs), self.primary.torch_device)

    def after_entry(self, module: nn.Module, output: Any) -> Any:
        if not self.passes.leave(module):
            return None
        completed = output is not None  # an always-called hook has none after an exception
        try:
            output = self.hops.move(output, self.primary.torch_device) if len(self.shares) > 1 else None
        except BaseException:
            completed = False
            raise
        finally:
            self.passes.end(completed=completed)
        return output

    def finish_pass(self, current: Pass, completed: bool) -> None:
        try:
            for share in self.shares:
                share.end_pass(completed=completed)
        finally:
            self.hops.forget()
            self.give_back(current)

    # -- blocks

    def find_returning(self) -> set[int]:
        """Return the blocks whose output goes back to the device of the rest.

        What the root does with an output expects it there; in a chain it only hands it on.
        """
        found = set()
        for share in self.shares[1:]:
            for number in share.blocks:
                is_chain = self.component.kind in CHAINS and not has_skips(self.component.blocks[number].name)
                if not is_chain or number == max(share.blocks):
                    found.add(number)
        return found

    def before_block(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.is_loaded:
            return None  # a hosted component off its devices computes as its host left it
        share = self.share_of[number]
        share.enter(number)
        alone = len(self.shares) == 1 and self.passes.outermost is not module
        return None if alone else self.hops.move((args, kwargs), share.device.torch_device)

    def after_block(self, number: int, module: nn.Module, output: Any) -> Any:
        changes_hands = self.share_of[number].leave(number, prefetches=output is not None)
        if changes_hands and torch.is_grad_enabled():
            refuse_backward(output, f"{self.owner}: block {self.component.blocks[number].name}")
        if number in self.returning and output is not None:
            output = self.hops.move(output, self.primary.torch_device)
        if self.passes.outermost is module:
            moved = self.after_entry(module, output)
            return output if moved is None else moved
        return output

    def before_rest(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.hops.move((args, kwargs), self.primary.torch_device)

    # -- what others do with the module

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

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise UnsafeState(f"{self.owner} is managed: release it before copying its module")

    def __reduce__(self) -> Any:
        raise UnsafeState(f"{self.owner} is managed: release it before pickling its module, or save its state_dict()")

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
        if queued:  # another form: its passes take other times
            for share in self.shares:
                share.passes = share.num_partial = 0
        self.plan, self.is_loaded = plan, True
        return queued

    def shrink(self, device: str, num_bytes: int) -> int:
        """Give back at least so many bytes of one device if they are there; returns them."""
        self.put_back()
        freed = sum(share.shrink(num_bytes) for share in self.shares if share.device.name == device)
        self.is_loaded = False
        return freed

    def unload(self) -> int:
        """Leave every device; returns the bytes freed."""
        self.put_back()
        self.is_loaded = False
        return sum(share.unload() for share in self.shares)


def refuse_backward(output: Any, block: str) -> None:
    """Let a backward pass that reaches these outputs fail: the memory of the weights will hold another block's."""

    def refuse(gradient: torch.Tensor) -> None:
        raise UnsafeState(f"{block} streams or is widened to compute: a backward pass would read other weights")

    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(refuse)  # type: ignore[no-untyped-call]


def refuse_managed(module: nn.Module) -> None:
    """Refuse to touch the weights of a module where they are: those of a managed one move, and may rest in eight bits.

    Raises:
        UnsafeState: any of them is managed.
    """
    weights = {id(parameter) for parameter in module.parameters()}
    for attachment in list(attached):
        if any(id(parameter) in weights for parameter in attachment.module.parameters()):
            raise UnsafeState(f"{attachment.owner} is managed: release it before loading other weights into it")


def refuse_entry(current: Pass) -> bool:
    """Let nobody in: who waited meanwhile computes with whatever the module holds now."""
    return False


def forget_pass(current: Pass) -> None:
    """Hold nothing for a pass."""
