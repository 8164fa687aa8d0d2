"""What the hooks do during a forward: open passes, take leases, load and unload blocks, copy between devices.

[Note: quiet passes] If all weights are resident on one device in the form in which they compute, a block's call needs
no work: its parameters are there, and no memory is reused. Such a quiet pass works only at its entry and exit; the
hooks on blocks and their parts return at once. The first pass is never quiet: it learns the order of the blocks for
later plans, and which parts of blocks other code calls.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ...errors import UnsafeState
from ...tracing.call_shapes import shapes_of
from ...transfer.timing import CallTimes
from ...weights.component import Component
from ..devices.device_share import DeviceShare
from ..tensors.recomputing import in_backward
from .backward import SavedWeights, SavingCalls
from .compiled_blocks import untraced
from .device_calls import DeviceCalls
from .device_hops import DeviceHops
from .device_mismatch import explain_mismatch, find_failed, likely_remedy
from .execution_order import remember_order
from .forward_pass import ComponentManager, Guest, NoManager, Pass, Passes
from .hooked_modules import HookedModules
from .input_size import Size
from .micro_batches import MicroBatches, note_pass_beside, open_steps, why_one_by_one
from .thread_stacks import is_waiting

__all__ = ["Forwards"]

# How long the manager sleeps before it looks again whether a call that began without hooks has returned.
WAIT_FOR_UNSEEN_S = 0.001


class Forwards:
    """The functions that the hooks of a module call while one managed component has the module.

    Args:
        manager: what the component asks of its manager.
        compiles: whether the blocks are compiled.
        places_inputs: move the inputs of an entry to the home device. False for hosts: these place inputs themselves,
            and pass buffers to be filled and containers to be emptied.
    """

    def __init__(
        self,
        owner: str,
        module: nn.Module,
        component: Component,
        shares: Sequence[DeviceShare],
        *,
        manager: ComponentManager,
        compiles: bool = False,
        places_inputs: bool = True,
    ) -> None:
        self.owner = owner
        self.guests: list[tuple[Forwards, Pass]] = []
        """The passes of lenders, which stay open as long as the pass of this component."""
        self.borrower: Forwards | None = None
        """The borrower for which a pass of this component is open."""
        self.component = component
        self.shares = shares
        self.compiles = compiles
        self.manager = manager
        self.passes = Passes(module, self.finish_pass, manager.lock)
        self.places_inputs = places_inputs
        self.hops = DeviceHops()
        self.calls = DeviceCalls(self.hops)
        self.saving = SavingCalls()
        self.step: MicroBatches | None = None
        """The micro-batches of the step that a thread computes now."""
        self.ran: dict[int, None] = {}
        """The blocks that ran in this pass, in the order of their first runs; only for a split."""
        self.last_block: int | None = None
        self.failed_block: int | None = None
        self.is_loaded = False
        """Whether the component is loaded as planned; if not, the module computes with the weights that it holds."""
        self.is_timed = False
        """Whether a plan uses the times of passes."""
        self.home = shares[0].device.torch_device
        """The home device: that of the non-block weights. Inputs are moved there and outputs returned there."""
        self.away = {share.device.torch_device for share in shares} - {self.home}
        self.clock = CallTimes(shares[0].device)
        """Times whole calls of what has all its weights on one device."""
        self.share_of = {number: share for share in shares for number in share.blocks}
        self.entries: Collection[nn.Module] = frozenset()
        self.inner: Collection[nn.Module] = frozenset()
        self.blocks: Mapping[nn.Module, int] = {}
        self.parts: dict[nn.Module, int] = {}
        self.in_parts: set[int] = set()
        """The blocks that were loaded because other code called a part of them."""
        self.seen_in_parts: set[int] = set()
        self.is_learned = False
        """Whether a pass has shown in which order blocks run, and which of their parts other code calls."""
        self.check_files: Callable[[], None] | None = None
        """Raises if files changed where they are from whose mappings it computes; called before and after each pass."""
        self.watch_inside: Callable[[], None] = nothing
        self.find_unseen: Callable[[], Collection[int]] = tuple
        self.unhook: Callable[[Iterable[nn.Module]], None] = nothing
        self.quiet_thread = 0
        """The thread that runs a quiet pass, 0 if none does ([Note: quiet passes])."""

    def take_modules(self, modules: HookedModules) -> None:
        """Work with these modules of the tree from now on: it has changed, or hooks are about to be put on it."""
        self.entries, self.inner, self.blocks = modules.entries, modules.inner, modules.blocks
        self.parts = dict(modules.parts)

    def check_with(self, check_files: Callable[[], None] | None) -> None:
        """Set what is called before and after each pass to see whether files are what they were."""
        self.check_files = check_files

    def describe(self, component: Component) -> None:
        """Take other numbers for the same component: layers were added to its module."""
        self.component = component

    def note_loaded(self, *, is_timed: bool) -> None:
        """The devices are as the plan says from now on; ``is_timed``: something is planned by the times of passes."""
        self.is_loaded, self.is_timed = True, is_timed

    def note_unloaded(self) -> None:
        """The devices are not as the plan says, or will not be in a moment.

        Waits for calls of blocks that began without hooks, as long as their threads do not wait themselves.
        """
        self.watch_inside()
        while any(thread_id != get_ident() and not is_waiting(thread_id) for thread_id in self.find_unseen()):
            time.sleep(WAIT_FOR_UNSEEN_S)
        self.is_loaded = False

    def is_called_unseen(self) -> bool:
        """Whether a call of a block is under way that began without hooks; later calls have hooks again."""
        self.watch_inside()
        return bool(self.find_unseen())

    def enter(self, module: nn.Module, inputs: Any) -> bool:
        """Enter through a module, and open a pass if none is open; False if another component has the module now."""
        current = self.passes.here
        if current is not None and any(share.streamer is not None for share in self.shares):
            self.refuse_recursion(module, current)
        self.passes.recover_for(module)
        if self.passes.outermost is not None:
            self.passes.enter(module)
            return True
        guests: list[tuple[Forwards, Pass]] = []
        try:
            for lender in self.manager.lenders():
                lender.forwards.open_for(module, guests)
            if not self.passes.begin(module, partial(self.acquire_with, guests), inputs):
                end_guests(guests, completed=False)
                return False
        except BaseException:
            end_guests(guests, completed=False)
            raise
        if open_steps:
            note_pass_beside(self.hops)
        for other, _ in guests:
            other.begin_guest(self)
        if self.step_here is not None:
            self.step_here.take(inputs)
        if self.is_quiet and module is self.passes.root and not guests:
            self.shares[0].begin_quiet_pass()
            self.quiet_thread = get_ident()
        else:
            self.begin_pass(is_timed=self.is_timed)
        if self.is_loaded and self.passes.open is not None:
            self.passes.open.begin_forward()
            if len(self.shares) == 1 and not guests:
                self.time_call(self.passes.open.size, inputs)
        return True

    def time_call(self, size: Size, inputs: Any) -> None:
        """Time the call that begins, if it is one of those: as a whole, or by blocks where these stream.

        Not where no shape of its inputs tells how much it computes: all such calls would be one.
        """
        share = self.shares[0]
        if size[0] < 0:  # a block that is called by itself
            return
        if share.streamer is None:
            if self.clock.is_due(size) and (shapes := shapes_of(inputs)):
                self.clock.start((size[0], shapes))
        elif share.times.is_timing and share.times.call is None and (shapes := shapes_of(inputs)):
            share.times.note_call((size[0], shapes))

    def refuse_recursion(self, module: nn.Module, current: Pass) -> None:
        """Raise `UnsafeState` if a block that computes calls the whole module: both need the staging memory."""
        is_guest = isinstance(current, Guest)  # this component lends to one that computes
        if module is self.passes.root and not is_guest and current.is_called_in(module):
            raise UnsafeState(
                f"{self.owner} is called inside its own forward, and its blocks are streamed: choose a budget with "
                "which all blocks stay on the device, or release it"
            )

    @property
    def is_quiet(self) -> bool:
        """Whether the next pass can be quiet ([Note: quiet passes])."""
        return self.is_loaded and self.is_learned and len(self.shares) == 1 and self.shares[0].is_wholly_resident

    @property
    def hooked(self) -> set[nn.Module]:
        """The modules that have hooks in passes that are not quiet."""
        return {*self.entries, *self.inner, *self.blocks, *self.parts}

    def take_hooks(
        self,
        watch_inside: Callable[[], None],
        find_unseen: Callable[[], Collection[int]],
        unhook: Callable[[Iterable[nn.Module]], None],
    ) -> None:
        """Set the functions of the module's hooks.

        Args:
            watch_inside: adds the hooks without which quiet passes do.
            find_unseen: returns the threads with calls that began without these.
            unhook: removes all hooks from modules that no longer need any ([Note: changes of hooks]).
        """
        self.watch_inside, self.find_unseen, self.unhook = watch_inside, find_unseen, unhook

    def begin_pass(self, *, is_timed: bool) -> None:
        """Reset the state of the last pass and prepare the devices for this one. The weights are loaded already."""
        self.watch_inside()
        self.last_block = self.failed_block = None
        self.ran.clear()
        if len(self.shares) > 1:
            home = self.shares[0]
            away = [block for block, number in self.blocks.items() if self.share_of[number] is not home]
            self.calls.find_states(self.blocks, away)
        if self.is_loaded:
            step = self.step_here
            beside = step is not None and step.begin_pass(can_be_beside=not why_one_by_one(self.shares))
            for share in self.shares:
                micro_batch = None if step is None else step.streams.number
                share.begin_pass(is_timed=is_timed and step is None, beside=beside, micro_batch=micro_batch)

    # -- micro-batches

    @property
    def step_here(self) -> MicroBatches | None:
        """The step of micro-batches that this thread computes; None if there is none."""
        return self.step if self.step is not None and self.step.thread_id == get_ident() else None

    def begin_step(self) -> MicroBatches | None:
        """Begin a step of micro-batches in this thread; None if one has begun, in any thread."""
        if self.step is not None:
            return None
        self.step = MicroBatches(self.shares, self.hops)
        return self.step

    def end_step(self, results: Any) -> None:
        """Go on behind all micro-batches, on the caller's streams; ``results`` is what they returned."""
        step, self.step = self.step, None
        if step is not None:
            step.end(results)
        if self.passes.here is None and self.hops.twins:
            self.calls.recover(is_here=True)

    # -- one pass

    def acquire_with(self, guests: list[tuple[Forwards, Pass]], current: Pass) -> bool:
        self.guests = guests  # `finish_pass` ends them, even if this raises
        with torch.no_grad() if in_backward() else nullcontext():  # nothing here is recomputed
            return self.manager.acquire(current)

    def open_for(self, module: nn.Module, guests: list[tuple[Forwards, Pass]]) -> None:
        """Open a guest pass for a borrower's entry, unless this thread runs a pass of this component already."""

        def note(current: Pass) -> bool:
            guests.append((self, current))
            return True

        current = self.passes.here
        if current is not None and not current.is_on_stack():
            self.passes.abandon(current)
        if self.passes.here is None:
            self.passes.begin(self.passes.root, note, guest_of=module)

    def guests_in(self, lender: Forwards) -> list[Pass]:
        """Return the passes of a lender that stay open for the pass of this component."""
        return [current for forwards, current in self.guests if forwards is lender]

    def begin_guest(self, borrower: Forwards) -> None:
        """Prepare the weights for a borrower's pass. The manager has loaded them already."""
        self.borrower = borrower
        self.begin_pass(is_timed=False)

    def is_entered(self) -> bool:
        """Whether this thread runs the open pass."""
        current = self.passes.open
        return current is not None and current.thread_id == get_ident()

    def before_entry(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.passes.depth > 1 or not self.is_loaded or not self.places_inputs:
            return None
        return self.calls.enter(module, (args, kwargs), self.home, source=None, target=None)

    def after_entry(self, module: nn.Module, output: Any, current: Pass) -> Any:
        if not self.passes.leave(module):
            return None
        failed = has_failed(output, current)
        try:
            if failed:
                self.explain_failure()
            elif self.check_files is not None:
                self.check_files()
            if self.away and self.is_loaded and not failed:
                output = self.hops.return_to(output, self.home, self.away)
            return self.calls.leave(module, output, failed=failed)
        except BaseException:
            failed = True
            raise
        finally:
            self.passes.end(completed=not failed)

    def finish_pass(self, current: Pass, completed: bool) -> None:
        current.end_forward()
        if self.clock.open is not None:
            self.clock.stop(completed=completed)
        was_quiet, self.quiet_thread = self.quiet_thread, 0
        try:
            for share in self.shares if not was_quiet else ():
                share.end_pass(completed=completed)
                if completed:
                    self.forget_parts(share.entered)
                    self.is_learned = self.is_learned or share.has_run_whole
            self.in_parts.clear()
            if completed and self.ran.keys() == self.share_of.keys():
                remember_order(self.passes.root, [self.component.blocks[number].name for number in self.ran])
        finally:
            if self.saving.open:
                self.saving.end()
            self.borrower = None
            self.calls.recover(is_here=current.is_here(), keeps_copies=completed and self.step_here is not None)
            try:
                self.manager.give_back(current)
            finally:
                guests, self.guests = self.guests, []
                end_guests(guests, completed=completed)

    def stop_try(self) -> None:
        """A try of this thread's pass has failed, and may be repeated: all blocks rest, the pass stays open."""
        self.clock.stop(completed=False)
        was_quiet, self.quiet_thread = self.quiet_thread, 0
        for share in self.shares if not was_quiet else ():
            share.end_pass(completed=False)
        self.in_parts.clear()
        if self.saving.open:
            self.saving.end()
        self.calls.recover(is_here=True)

    def begin_try(self) -> None:
        """Prepare the devices for another try of this thread's pass. The weights are loaded already."""
        self.begin_pass(is_timed=False)

    def forget_parts(self, numbers: Collection[int]) -> None:
        """Remove the hooks from the parts of blocks that have computed, unless other code calls the parts."""
        if self.parts:
            done = [
                part for part, number in self.parts.items() if number in numbers and number not in self.seen_in_parts
            ]
            self.unhook(done)
            for part in done:
                del self.parts[part]

    @property
    def here(self) -> torch.device:
        """The device on which the innermost open call computes."""
        if self.calls.open:
            return self.calls.open[-1].visit.device
        return self.home if self.borrower is None else self.borrower.here

    def flows_on(self) -> torch.device | None:
        """Return the device of the activations in this thread's running forward; None outside of forwards."""
        current = self.passes.here
        return self.here if current is not None and current.is_under_way and current.is_on_stack() else None

    def explain_failure(self) -> None:
        """Add component, block and remedy to an error about tensors on two devices, in place; torch raises it again."""
        error = sys.exc_info()[1]
        if error is None or not self.is_loaded:
            return
        where, at = "before its first block", self.shares[0]
        if self.quiet_thread:
            where, self.last_block, self.failed_block = "outside its blocks", None, find_failed(error, self.blocks)
        number = self.last_block if self.failed_block is None else self.failed_block
        if number is not None:
            where = f"{'after' if self.failed_block is None else 'in'} block {self.component.blocks[number].name}"
            at = self.share_of[number] if self.failed_block is not None else at
        likely = None
        if self.failed_block is not None:
            modules = [module for module, number in self.blocks.items() if number == self.failed_block]
            likely = likely_remedy(modules, self.share_of[self.failed_block].blocks[self.failed_block].groups)
        text = explain_mismatch(
            error,
            self.owner,
            where,
            at.device.name,
            {str(share.device.torch_device): share.device.name for share in self.shares},
            streams=any(share.streamer is not None for share in self.shares),
            likely=likely,
        )
        if text is not None:
            error.args = (text,)

    # -- blocks

    def before_block(self, number: int, module: nn.Module, args: Any, kwargs: Any, current: Pass) -> Any:
        if not self.is_loaded:
            return None  # a hosted component that is not loaded computes with the weights that its host left
        share = self.share_of[number]
        self.in_parts.discard(number)
        if self.compiles:  # a block that is compiled now must have no hooks inside
            self.forget_parts([number])
        if self.step is not None and (step := self.step_here) is not None:
            step.streams.enter_block(number, share.device.torch_device)
        share.enter(number)
        self.last_block = number
        if len(self.shares) > 1:
            self.ran.setdefault(number)
        if torch.is_grad_enabled():
            self.watch_saving(number, module)
        is_entry = self.places_inputs and current.outermost is module
        device, here = share.device.torch_device, self.here
        if device == here and not is_entry:
            return None
        source, target = None if is_entry else here, here if here != device else None
        return self.calls.enter(module, (args, kwargs), device, source=source, target=target)

    def after_block(self, number: int, module: nn.Module, output: Any, current: Pass) -> Any:
        failed = has_failed(output, current)
        if self.saving.open:
            self.saving.end(module)
        self.share_of[number].leave(number, prefetches=not failed)
        if failed:
            self.failed_block = number
        elif self.step is not None and (step := self.step_here) is not None:
            step.streams.leave_block(number, self.share_of[number].device.torch_device)
        if self.calls.open:
            output = self.calls.leave(module, output, failed=failed)
        return self.after_entry(module, output, current) if current.outermost is module else output

    # -- weights that a backward pass will read

    def watch_saving(self, number: int, module: nn.Module) -> None:
        """Watch what autograd saves in a block's call, if other blocks reuse the memory of its weights."""
        share = self.share_of[number]
        if share.changes_hands(number):
            bundle = share.blocks[number]
            watch = SavedWeights(f"{self.owner}: block {bundle.name}", bundle.groups, share.device.torch_device)
            self.saving.begin(module, watch)

    # -- blocks that run without a call of their forward
    #
    # A parent may call parts of its blocks itself: a modulation for all blocks beforehand, or the layers of a
    # Sequential one by one. The first call of a part loads the block, which is unloaded when the next block is loaded.

    def before_part(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        share = self.share_of[number]
        if not self.is_loaded or (number in share.computing and number not in self.in_parts):
            return None  # called inside the block's own forward
        if number not in share.computing:
            self.in_parts.add(number)
            self.seen_in_parts.add(number)
            if self.step is not None and (step := self.step_here) is not None:
                step.streams.enter_block(number, share.device.torch_device)
            share.enter(number)
            self.last_block = number
        if torch.is_grad_enabled():
            self.watch_saving(number, module)
        device = share.device.torch_device
        if self.here == device:
            return None
        return self.calls.enter(module, (args, kwargs), device, source=self.here, target=self.here)

    def after_part(self, number: int, module: nn.Module, output: Any, current: Pass) -> Any:
        if number not in self.in_parts:
            return None
        if self.saving.open:
            self.saving.end(module)
        return self.calls.leave(module, output, failed=has_failed(output, current))

    # -- non-block modules, which blocks on other devices may call

    @untraced
    def before_non_block(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if not self.is_loaded or self.here == self.home:
            return None
        moved = self.calls.enter(module, (args, kwargs or {}), self.home, source=self.here, target=self.here)
        # kwargs is None if torch copied the hook to a module that it made in place of ours (quantization).
        return moved[0] if moved is not None and kwargs is None else moved

    @untraced
    def after_non_block(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.calls.leave(module, output, failed=has_failed(output, self.passes.here))

    def dismiss(self) -> None:
        """Refuse new passes: the module is another managed component's now, or is no longer managed."""
        # Both refer to objects that refer to us: without this the module would live until the next garbage collection.
        self.manager = NoManager(self.manager.lock)
        self.take_hooks(nothing, tuple, nothing)

    def end(self) -> None:
        """Stop finishing passes: the groups are no longer managed."""
        self.passes.stop_finishing()


def has_failed(output: Any, current: Pass | None) -> bool:
    """Whether an always-called hook is called because of an exception; there is no output then."""
    return output is None and current is not None and sys.exc_info()[1] is not current.handled


def nothing(*_: Any) -> None:
    """Do nothing. Stands for functions of the hooks while no module has hooks that lead here."""


def end_guests(guests: Sequence[tuple[Forwards, Pass]], *, completed: bool) -> None:
    for lender, current in reversed(guests):
        lender.passes.end_guest(current, completed=completed)
