"""A module under management: its shares on their devices, and the hooks through which computing reaches them.

[Note: entries] A component is entered through its own forward or, where programs call parts of it (a VAE's
decoder), through a direct child. The outermost entry takes the lease and its exit gives it back. Only native hooks
are used. torch skips even always-called hooks when a `BaseException` passes, which is what an interrupt is in recent
hosts; so a pass may stay open that nobody runs any more. It is healed by the next entry that cannot be nested in it,
and by whoever meets it and finds its module on no stack of its thread (`is_abandoned`). One pass runs at a time: a
second thread waits for the first.
"""

from __future__ import annotations

import enum
import sys
import threading
from collections import Counter
from collections.abc import Callable
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
from .errors import InvalidInput, UnsafeState
from .footprint import bounce_buffer_bytes, fixed_tensors
from .ledger import Kind, Ledger
from .masters import FileMaster
from .moved import Witness
from .pinning import PAGE_BYTES
from .plan import ComponentPlan
from .residency import Unit
from .share import Share
from .source import WeightsSource
from .split import Hops
from .state import StateGuard
from .transfer import allocate_slabs

__all__ = ["Attachment", "Ending", "refuse_managed"]

# The kinds of components whose blocks run one after the other on one stream of hidden states.
CHAINS = ("diffusion", "text", "vision")

attached: WeakSet[Attachment] = WeakSet()
"""All that have hooks in place, of every manager."""


class Ending(enum.Enum):
    """What the module holds when its attachment ends."""

    RESTORED = "restored"
    """Weights in plain memory, read from the file where they rest there; what came without and rests there goes so."""
    HANDED_OVER = "handed over"
    """What rests in its file stays there, for the attachment that comes next; all else is in plain memory."""
    TAKEN_BACK = "taken back"
    """What it held before it was attached."""
    DISCARDED = "discarded"
    """Shapes without memory; nothing is copied or read."""


class Attachment:
    """One component attached to its module: packed in host memory, hooked, and loadable by plan.

    Args:
        acquire: called on the outermost entry; loads the component or raises, and holds the lease.
        give_back: called when the outermost entry is left, also by an exception.
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
        acquire: Callable[[], None],
        give_back: Callable[[], None],
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
        self.guards_state = guards_state
        self.hops = Hops()
        self.entered: list[nn.Module] = []
        self.running = threading.Lock()
        """Held from the outermost entry to its exit."""
        self.thread_id = 0
        self.handles: list[RemovableHandle] = []
        self.source = source
        self.compiles = compiles
        self.compiled: CompiledBlocks | None = None
        self.host_bytes = Counter[str]()
        """What the masters take of host memory, by tier."""
        self.was_refused = False
        """Whether the driver would not page-lock all the masters that the plan wanted to be."""
        self.told_refusal = False
        self.witnesses: list[Witness] = []
        self.changed_dtype: torch.dtype | None = None
        """What somebody changed the weights to, and was not told yet that it was taken back."""
        self.is_attached = False
        self.is_loaded = False
        self.shares = self.build_shares(devices)
        self.came_bare = frozenset(
            entry.spec.name for unit in self.units for entry in unit.entries if entry.held.is_meta
        )
        """The weights that came under management without memory."""
        self.written = frozenset[str]()
        """The weights that are not what their file has any more."""
        if after is not None:
            self.came_bare, self.written = after.came_bare, after.written
        self.share_of = {number: share for share in self.shares for number in share.blocks}

    @property
    def primary(self) -> Device:
        """Where inputs go and outputs come back: the device of the rest."""
        return self.shares[0].device

    @property
    def units(self) -> list[Unit]:
        return [unit for share in self.shares for unit in share.units]

    def tell_refusal(self) -> bool:
        """Whether the driver would not page-lock all that the plan wanted; true once."""
        refused = self.was_refused or any(
            share.bounce is not None and share.bounce.was_refused for share in self.shares
        )
        tells, self.told_refusal = refused and not self.told_refusal, self.told_refusal or refused
        return tells

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

    # -- host memory and hooks

    def measure(self) -> None:
        """Find how weights will be cast; changes nothing. Raises `InvalidInput` for weights that cannot be."""
        for unit in self.units:
            unit.measure()

    def to_read(self) -> int:
        """Return the bytes that `attach` would read from files into RAM; those of buffers do not count at tier disk."""
        if self.plan.tier == "disk":
            return 0
        return sum(entry.spec.weight_bytes for unit in self.units for entry in unit.entries if entry.held.is_meta)

    def attach(self, progress: Callable[[int], None] | None = None) -> None:
        """Pack the masters and put the hooks in place; on failure the module is as it was.

        Holds, beside the masters, one arena of slabs at a time. The caller measured all that it attaches, before any
        weight loses a bit.

        Args:
            progress: called with the bytes that were read of the files since it was called last; what it raises is
                raised here.
        """
        packed: list[Unit] = []
        try:
            for share in self.shares:
                if self.plan.tier == "disk":
                    self.leave_in_file(share, packed)
                else:
                    self.pack(share, packed, progress)
        except BaseException:
            for unit in packed:
                unit.unpack(unit.bare)
            raise
        self.is_attached = True
        self.witnesses = [Witness(unit) for unit in self.units] if self.guards_state else []
        for tier, num_bytes in self.host_bytes.items():
            self.ledger.charge(tier, self.owner, Kind.WEIGHTS, num_bytes)
        for unit in packed:
            unit.charge_host = self.charge_host
        try:
            self.hook()
            if self.compiles:
                blocks = [self.module.get_submodule(block.name) for block in self.component.blocks]
                self.compiled = CompiledBlocks(blocks, self.primary.torch_device)
        except BaseException:
            self.detach(Ending.TAKEN_BACK)
            raise

    def pack(self, share: Share, packed: list[Unit], progress: Callable[[int], None] | None) -> None:
        """Move a share's masters into host slabs, page-locked as the plan says and the driver agrees."""
        if share.copies is None:  # others compute in place, in the memory they came in
            units = [unit for unit in share.units if unit.cast_names]
            for unit in share.units:
                if unit not in units:
                    packed.append(unit)
                    unit.fill(self.source, progress)
        else:
            units = sorted(share.units, key=lambda unit: unit.name not in self.plan.pinned)
        self.host_bytes["host"] += sum(unit.slab_bytes for unit in share.units if unit not in units)
        locked = [unit.slab_bytes for unit in units if unit.name in self.plan.pinned]
        streams = [share.copies] if share.copies is not None else []
        # What an arena rounds up is less than its last page.
        slabs = allocate_slabs(
            [unit.slab_bytes for unit in units],
            pinned_bytes=sum(locked) + len(locked) * PAGE_BYTES,
            streams=streams,
        )
        for unit, slab in zip(units, slabs, strict=True):
            packed.append(unit)
            unit.pack(slab, self.source, progress)
            if not slab.is_pinned():
                self.host_bytes["host"] += unit.slab_bytes
        self.host_bytes["pinned"] += slabs.locked_bytes
        self.was_refused = self.was_refused or slabs.was_refused

    def leave_in_file(self, share: Share, packed: list[Unit]) -> None:
        """Let a share's masters rest in their file; on their way to the device they pass through buffers."""
        assert self.source is not None and share.bounce is not None
        for unit in share.units:
            packed.append(unit)
            unit.rest_in_file(self.source, share.bounce, written=self.written)
            assert isinstance(unit.master, FileMaster)
            self.host_bytes["host"] += unit.master.kept_bytes
        share.bounce_bytes = bounce_buffer_bytes(self.component, list(share.blocks), first=share is self.shares[0])
        share.locks_bounce = bool(self.plan.pinned_bytes)

    def charge_host(self, num_bytes: int) -> None:
        if num_bytes:
            self.host_bytes["host"] += num_bytes
            self.ledger.charge("host", self.owner, Kind.WEIGHTS, num_bytes)

    def detach(self, ending: Ending = Ending.RESTORED) -> None:
        """Leave every device, remove every hook, give the module what the ending says. Idempotent.

        Raises:
            InvalidInput: weights rest in a file that is not what it was; they stay without memory.
        """
        for handle in self.handles:
            handle.remove()
        if not self.is_attached:
            return
        self.handles, self.is_attached = [], False
        attached.discard(self)
        self.heal_for(None)
        if self.compiled is not None:
            self.compiled.release()
        self.unload()
        if self.plan.tier == "disk":
            left = [unit for unit in self.units if unit.host_slab is not None]
            self.written |= {entry.spec.name for unit in left for entry in unit.entries if not entry.is_buffer}
        error: InvalidInput | None = None
        for unit in self.units:
            unit.charge_host = lambda num_bytes: None
            try:
                self.end_unit(unit, ending)
            except InvalidInput as problem:
                error = error or problem
        for tier, num_bytes in self.host_bytes.items():
            self.ledger.credit(tier, self.owner, Kind.WEIGHTS, num_bytes)
        self.acquire = self.give_back = refuse_released  # they refer to the manager's member, and it to us
        if error is not None:
            raise error

    def end_unit(self, unit: Unit, ending: Ending) -> None:
        if ending is Ending.DISCARDED:
            unit.discard()
        elif ending is Ending.TAKEN_BACK:
            unit.unpack(unit.bare)
        elif ending is Ending.HANDED_OVER:
            unit.unpack(unit.names_in_file)
        else:  # half of a model's weights without memory would be of use to nobody
            unit.unpack(unit.names_in_file & self.came_bare if not self.written else ())

    def hook(self) -> None:
        attached.add(self)

        def on(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> None:
            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            self.handles.append(module.register_forward_hook(after, always_call=True))

        if self.guards_state and (self.plan.cast or self.plan.tier == "disk"):
            rests = "in its file" if self.plan.tier == "disk" else "in eight bits"
            self.handles += StateGuard(self.owner, self.module, self.units, self.source, rests=rests).hook()
        blocks = {self.module.get_submodule(block.name): n for n, block in enumerate(self.component.blocks)}
        for entry in self.find_entry_modules():
            if entry not in blocks:
                on(entry, self.before_entry, self.after_entry)
        for block, number in blocks.items():
            on(block, self.before_block(number), self.after_block(number))
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

    def before_entry(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.heal_for(module)
        outermost = not (self.entered and self.thread_id == threading.get_ident())
        if outermost:
            self.begin_alone()
            try:
                self.acquire()
            except BaseException:
                self.running.release()
                raise
        self.entered.append(module)
        if not (outermost and self.is_loaded):
            return None
        for share in self.shares:
            share.begin_pass()
        return self.hops.move((args, kwargs), self.primary.torch_device)

    def after_entry(self, module: nn.Module, args: Any, output: Any) -> Any:
        if module not in self.entered:  # the entry itself failed, or was healed
            return None
        del self.entered[self.entered.index(module) :]
        if self.entered:
            return None
        completed = output is not None  # an always-called hook has none after an exception
        output = self.hops.move(output, self.primary.torch_device) if len(self.shares) > 1 else None
        self.finish_pass(completed=completed)
        return output

    def finish_pass(self, *, completed: bool) -> None:
        try:
            for share in self.shares:
                share.end_pass(completed=completed)
        finally:
            self.hops.forget()
            self.give_back()
            self.running.release()

    def begin_alone(self) -> None:
        """Wait until no other thread computes here; ends a pass that its thread has left without a hook."""
        while not self.running.acquire(timeout=0.5):
            if self.is_abandoned():
                self.end_open_pass()
        self.thread_id = threading.get_ident()

    def is_abandoned(self) -> bool:
        """Whether a pass is open whose entry module no frame of its thread is running. Walks that thread's stack."""
        if not self.entered:
            return False
        frame = sys._current_frames().get(self.thread_id)
        while frame is not None:
            if frame.f_locals.get("self") is self.entered[0]:
                return False
            frame = frame.f_back
        return True

    def is_busy_elsewhere(self) -> bool:
        """Whether another thread is in the middle of a pass."""
        return bool(self.entered) and self.thread_id != threading.get_ident() and not self.is_abandoned()

    def end_open_pass(self) -> None:
        self.entered.clear()
        self.finish_pass(completed=False)

    def heal_for(self, module: nn.Module | None) -> None:
        """End a pass that an interrupt left open, if an entry into the module cannot be nested in it.

        Legal nesting is the root, then one of its children; None means that nothing can be running.
        """
        if not self.entered or self.thread_id != threading.get_ident():
            return
        if module is self.module or module is None or self.entered[0] is not self.module:
            self.end_open_pass()
        else:
            del self.entered[1:]

    # -- blocks

    def before_block(self, number: int) -> Callable[..., Any]:
        share = self.share_of[number]

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self.entered or self.thread_id != threading.get_ident():  # called from outside, as its own entry
                self.before_entry(module, (), {})
            if not self.is_loaded:
                return None  # a hosted component off its devices computes as its host left it
            share.enter(number)
            alone = len(self.shares) == 1 and self.entered[0] is not module
            return None if alone else self.hops.move((args, kwargs), share.device.torch_device)

        return before

    def after_block(self, number: int) -> Callable[..., Any]:
        share = self.share_of[number]
        module_name = self.component.blocks[number].name
        # What the root does with an output expects the device of the rest; in a chain it only hands it on.
        is_chain = self.component.kind in CHAINS and not has_skips(module_name)
        returns = share is not self.shares[0] and (number == max(share.blocks) or not is_chain)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            changes_hands = share.leave(number, prefetches=output is not None)
            if changes_hands and torch.is_grad_enabled():
                refuse_backward(output, f"{self.owner}: block {module_name}")
            if returns and output is not None:
                output = self.hops.move(output, self.primary.torch_device)
            if self.entered and self.entered[0] is module:
                self.after_entry(module, args, output)
            return output

        return after

    def before_rest(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.hops.move((args, kwargs), self.primary.torch_device)

    # -- what others do with the module

    def put_back(self) -> None:
        """Undo what ``Module.to`` and its like did to the weights. Takes a microsecond or two per block to see nothing.

        The caller holds the manager's lock.
        """
        if any(witness.is_moved() for witness in self.witnesses):
            for witness in self.witnesses:  # a block's buffers are in another unit than its weights
                self.changed_dtype = witness.put_back() or self.changed_dtype

    def refuse_changed_dtype(self) -> None:
        """Tell, once, whoever changed the dtype of the weights. Raises `UnsafeState`."""
        if self.changed_dtype is not None:
            dtype, self.changed_dtype = self.changed_dtype, None
            raise UnsafeState(
                f"{self.owner}: its weights were changed to {dtype}, which has been undone: "
                "release it before changing its dtype"
            )

    def settle(self) -> None:
        """End open passes, wait for copies and forget staged ones: a host may then write any weight where it is."""
        self.heal_for(None)
        for share in self.shares:
            if share.copies is not None:
                share.copies.finish()
            if share.streamer is not None:
                share.streamer.forget()

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


def refuse_released() -> None:
    raise AssertionError("a released component was entered: its hooks are gone")
