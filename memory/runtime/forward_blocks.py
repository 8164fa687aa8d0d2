"""What a forward does to a managed module: leases and passes, blocks that come and go, hops between devices.

[Note: quiet passes] Where all weights stay on one device as they compute, a block's call needs nothing: its parameters
are there, and no memory changes hands. Such a pass does what it has to at its entry and its exit, and the hooks on
blocks and what is inside them return at once. The first pass is a whole one all the same: it learns the order of the
blocks, for plans to come, and which parts of blocks other code calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ..weights.component import Component
from .backward import SavedWeights
from .compiled_blocks import untraced
from .device_hops import DeviceHops, Visit
from .device_mismatch import explain_mismatch
from .device_share import DeviceShare
from .execution_order import remember_order
from .forward_pass import CALL_OF_A_MODULE, Leases, NoLeases, Pass, Passes
from .recomputing import in_backward
from .shared_states import Stores, find_shared_states

__all__ = ["Forwards"]


class Call:
    """A call that computes on another device than its caller: of an entry, a block, or something inside or outside it.

    ``previous`` is the index of the accelerator that was current before, None where the call changes nothing of that.
    """

    def __init__(self, module: nn.Module, visit: Visit, previous: int | None) -> None:
        self.module = module
        self.visit = visit
        self.previous = previous


class Forwards:
    """What the hooks of a component's module call, while one managed component has it.

    Args:
        leases: what a pass asks of the manager.
        compiles: whether the blocks are compiled.
        places_inputs: move what an entry is given to the device of the rest; a host does that itself, and has buffers
            to be filled, or containers to be emptied, where it wants them.
    """

    def __init__(
        self,
        owner: str,
        module: nn.Module,
        component: Component,
        shares: Sequence[DeviceShare],
        *,
        leases: Leases,
        compiles: bool = False,
        places_inputs: bool = True,
    ) -> None:
        self.owner = owner
        self.guests: list[tuple[Forwards, Pass]] = []
        """The passes of lenders that stay open as long as the pass of this component."""
        self.host: Forwards | None = None
        """The component for which a pass of this one is open."""
        self.component = component
        self.shares = shares
        self.compiles = compiles
        self.leases = leases
        self.passes = Passes(module, self.finish_pass, leases.lock)
        self.places_inputs = places_inputs
        self.hops = DeviceHops()
        self.calls: list[Call] = []
        """Those under way in which tensors have other devices than outside, the outermost first."""
        self.saving: list[tuple[nn.Module, SavedWeights]] = []
        """The watches of what autograd saves in open calls whose weights leave their memory, the outermost first."""
        self.shared_states: Mapping[nn.Module, list[Any]] = {}
        """By block, the objects of other libraries' hooks and of attention processors that other blocks use, too."""
        self.stores: Stores | None = None
        self.ran: dict[int, None] = {}
        """The blocks of this pass in the order in which they ran first; kept where they are split."""
        self.last_block: int | None = None
        self.failed_block: int | None = None
        self.is_loaded = False
        """Whether the devices are as the plan says; else the module computes with what it holds."""
        self.is_timed = False
        """Whether something is planned by the times of passes."""
        self.home = shares[0].device.torch_device
        """Where inputs go and outputs come back: the device of the rest."""
        self.away = {share.device.torch_device for share in shares} - {self.home}
        self.share_of = {number: share for share in shares for number in share.blocks}
        self.entries: frozenset[nn.Module] = frozenset()
        self.inner: frozenset[nn.Module] = frozenset()
        self.blocks: dict[nn.Module, int] = {}
        self.parts: dict[nn.Module, int] = {}
        self.in_parts: set[int] = set()
        """The blocks that came because something inside them was called from outside."""
        self.seen_in_parts: set[int] = set()
        self.done_parts: list[nn.Module] = []
        """Those of the parts that need no hooks any more."""
        self.is_learned = False
        """Whether a whole pass has told in which order blocks run, and which of their parts others call."""
        self.watch_exits: Callable[[], None] = nothing
        self.quiet_thread = 0
        """The thread that is in a pass in which blocks and their parts need nothing done ([Note: quiet passes])."""

    def enter(self, module: nn.Module, inputs: Any) -> bool:
        """Enter through a module, into a pass of its own if none is open; False if the component is another's now."""
        self.passes.recover_for(module)
        if self.passes.outermost is not None:
            self.passes.enter(module)
            return True
        guests: list[tuple[Forwards, Pass]] = []
        try:
            for lender in self.leases.lenders():
                lender.forwards.open_for(module, guests)
            if not self.passes.begin(module, partial(self.acquire_with, guests), inputs):
                end_guests(guests, completed=False)
                return False
        except BaseException:
            end_guests(guests, completed=False)
            raise
        for lender, _ in guests:
            lender.begin_guest(self)
        if self.is_quiet and module is self.passes.root and not guests:
            self.shares[0].begin_quiet_pass()
            self.quiet_thread = get_ident()
        else:
            self.begin_pass(is_timed=self.is_timed)
        if self.is_loaded and self.passes.open is not None:
            self.passes.open.is_under_way = True
        return True

    @property
    def is_quiet(self) -> bool:
        """Whether the next pass can be a quiet one."""
        return self.is_loaded and self.is_learned and len(self.shares) == 1 and self.shares[0].is_wholly_resident

    def take_done_parts(self) -> list[nn.Module]:
        """Return the modules that need no hooks any more, once."""
        done, self.done_parts = self.done_parts, []
        return done

    def before_whole_pass(self, watch_exits: Callable[[], None]) -> None:
        """Call this before each pass that is not a quiet one, also one for another component: blocks tell their end."""
        self.watch_exits = watch_exits

    def begin_pass(self, *, is_timed: bool) -> None:
        """Forget the last pass and prepare the devices for this one; its weights are loaded."""
        self.watch_exits()
        self.last_block = self.failed_block = None
        self.ran.clear()
        if len(self.shares) > 1:
            self.find_shared_states()
        if self.is_loaded:
            for share in self.shares:
                share.begin_pass(is_timed=is_timed)

    def find_shared_states(self) -> None:
        """Find the objects that blocks share with one another, and with the caller of the module."""
        if self.stores is None:
            home = self.shares[0]
            self.stores = Stores(block for block, number in self.blocks.items() if self.share_of[number] is not home)
        states = find_shared_states(self.blocks)
        for block, processor in self.stores.find():
            states[block].append(processor)
        self.shared_states = states

    def acquire_with(self, guests: list[tuple[Forwards, Pass]], current: Pass) -> bool:
        self.guests = guests  # ended with the pass, however that ends
        with torch.no_grad() if in_backward() else nullcontext():  # nothing here is computed again
            return self.leases.acquire(current)

    def open_for(self, module: nn.Module, guests: list[tuple[Forwards, Pass]]) -> None:
        """Open a pass for another component's entry, which uses weights of this one, unless this thread has one."""

        def note(current: Pass) -> bool:
            guests.append((self, current))
            return True

        current = self.passes.here
        if current is not None and not current.is_on_stack():
            self.passes.abandon(current)
        if self.passes.here is None:
            self.passes.begin(self.passes.root, note, guest_of=module)

    def begin_guest(self, host: Forwards) -> None:
        """Prepare the weights for another component's pass; the manager has loaded them."""
        self.host = host
        self.begin_pass(is_timed=False)

    def is_entered(self) -> bool:
        """Whether this thread is in the middle of a pass."""
        current = self.passes.open
        return current is not None and current.thread_id == get_ident()

    def is_outermost(self, module: nn.Module) -> bool:
        """Whether this thread has entered through this module."""
        return self.passes.outermost is module

    def before_entry(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.passes.depth > 1 or not self.is_loaded or not self.places_inputs:
            return None
        return self.go(module, (args, kwargs), self.home, source=None, target=None)

    def after_entry(self, module: nn.Module, output: Any) -> Any:
        if not self.passes.leave(module):
            return None
        failed = self.has_failed(output)
        try:
            if failed:
                self.explain_failure()
            elif self.away and self.is_loaded:
                output = self.hops.bring_home(output, self.home, self.away)
            return self.come_back(module, output, failed=failed)
        except BaseException:
            failed = True
            raise
        finally:
            self.passes.end(completed=not failed)

    def has_failed(self, output: Any) -> bool:
        """Whether an always-called hook is called because of an exception: then there is no output."""
        current = self.passes.here
        return output is None and current is not None and sys.exc_info()[1] is not current.handled

    def finish_pass(self, current: Pass, completed: bool) -> None:
        current.is_under_way = False
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
            self.stop_saving()
            self.host = None
            self.leave_devices(current)
            self.hops.forget()
            try:
                self.leases.give_back(current)
            finally:
                guests, self.guests = self.guests, []
                end_guests(guests, completed=completed)

    def forget_parts(self, numbers: Collection[int]) -> None:
        """Remove the hooks from what is inside blocks that have computed, unless other code calls it from outside."""
        if self.parts:
            done = [
                part for part, number in self.parts.items() if number in numbers and number not in self.seen_in_parts
            ]
            self.done_parts += done
            for part in done:
                self.parts.pop(part, None)

    # -- from device to device

    def go(
        self,
        module: nn.Module,
        given: tuple[Any, Any],
        device: torch.device,
        *,
        source: torch.device | None,
        target: torch.device | None,
    ) -> Any:
        """Enter a call that computes on another device; returns its arguments there, None if they are as they were.

        Args:
            source, target: as in `DeviceHops.visit`.
        """
        shared = self.shared_states.get(module, ()) if target is not None else ()
        visit = self.hops.visit(given, device, source=source, target=target, shared=shared)
        if visit is None:
            return None
        call = Call(module, visit, None if target is None else torch.accelerator.current_device_index())
        self.calls.append(call)
        if call.previous is not None:  # kernels of others are launched on the current device
            torch.accelerator.set_device_index(device.index)
        return visit.lent.value

    def come_back(self, module: nn.Module, output: Any, *, failed: bool) -> Any:
        """Leave a call; returns its output as the caller is to have it."""
        if not self.calls or self.calls[-1].module is not module:
            return output
        call = self.calls.pop()
        if call.previous is not None:
            torch.accelerator.set_device_index(call.previous)
        if not failed:
            return call.visit.end(output)
        call.visit.give_back_states()
        return None

    def leave_devices(self, current: Pass) -> None:
        """Forget the calls that an interrupt left open."""
        before = [call.previous for call in self.calls if call.previous is not None]
        for call in self.calls:
            call.visit.give_back_states()
        self.calls.clear()
        if before and current.is_here():
            torch.accelerator.set_device_index(before[0])

    @property
    def here(self) -> torch.device:
        """The device of the tensors that the innermost call has."""
        if self.calls:
            return self.calls[-1].visit.device
        return self.home if self.host is None else self.host.here

    def flows_on(self) -> torch.device | None:
        """Return the device of the activations in this thread's running forward; None outside of a forward."""
        current = self.passes.here
        return self.here if current is not None and current.is_under_way and current.is_on_stack() else None

    def explain_failure(self) -> None:
        """Add component, block and remedy to an error about tensors on two devices, which torch raises again."""
        error = sys.exc_info()[1]
        if error is None or not self.is_loaded:
            return
        where, at = "before its first block", self.shares[0]
        if self.quiet_thread:
            where, self.last_block, self.failed_block = "outside of its blocks", None, self.find_failed(error)
        number = self.last_block if self.failed_block is None else self.failed_block
        if number is not None:
            where = f"{'after' if self.failed_block is None else 'in'} block {self.component.blocks[number].name}"
            at = self.share_of[number] if self.failed_block is not None else at
        text = explain_mismatch(
            error,
            self.owner,
            where,
            at.device.name,
            {str(share.device.torch_device): share.device.name for share in self.shares},
            streams=any(share.streamer is not None for share in self.shares),
        )
        if text is not None:
            error.args = (text,)

    def find_failed(self, error: BaseException) -> int | None:
        """Return the block in whose call an exception was raised, by its traceback; None outside of blocks."""
        trace, number = error.__traceback__, None
        while trace is not None:
            if trace.tb_frame.f_code is CALL_OF_A_MODULE:
                number = self.blocks.get(trace.tb_frame.f_locals["self"], number)
            trace = trace.tb_next
        return number

    # -- blocks

    def before_block(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.is_loaded:
            return None  # a hosted component off its devices computes as its host left it
        share = self.share_of[number]
        self.in_parts.discard(number)
        if self.compiles:  # what is compiled now is not to be called back from inside
            self.forget_parts([number])
        share.enter(number)
        self.last_block = number
        if len(self.shares) > 1:
            self.ran.setdefault(number)
        if torch.is_grad_enabled():
            self.watch_saving(number, module)
        is_entry = self.places_inputs and self.passes.outermost is module
        device, here = share.device.torch_device, self.here
        if device == here and not is_entry:
            return None
        source, target = None if is_entry else here, here if here != device else None
        return self.go(module, (args, kwargs), device, source=source, target=target)

    def after_block(self, number: int, module: nn.Module, output: Any) -> Any:
        failed = self.has_failed(output)
        if self.saving:
            self.stop_saving(module)
        self.share_of[number].leave(number, prefetches=not failed)
        if failed:
            self.failed_block = number
        output = self.come_back(module, output, failed=failed)
        if self.passes.outermost is module:
            return self.after_entry(module, output)
        return output

    # -- what a backward pass will read

    def watch_saving(self, number: int, module: nn.Module) -> None:
        """Watch what autograd saves in a call if other blocks reuse the memory of its weights."""
        share = self.share_of[number]
        if share.changes_hands(number):
            bundle = share.blocks[number]
            watch = SavedWeights(f"{self.owner}: block {bundle.name}", bundle.groups, share.device.torch_device)
            self.saving.append((module, watch))  # first: an interrupt may come between the two
            watch.begin()

    def stop_saving(self, module: nn.Module | None = None) -> None:
        """End the watches of a call and of those inside it; without a module, all of them."""
        if module is None or any(module is watched for watched, _ in self.saving):
            while self.saving:
                watched, watch = self.saving.pop()
                watch.end()
                if watched is module:
                    break

    # -- blocks whose forward is not what runs them
    #
    # A parent may call what is inside its blocks itself: a modulation for all blocks beforehand, or the layers of a
    # Sequential one by one. The first of them that comes brings its block, which goes when the next block comes.

    def before_part(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        share = self.share_of[number]
        if not self.is_loaded or (number in share.computing and number not in self.in_parts):
            return None  # inside the block's own forward
        if number not in share.computing:
            self.in_parts.add(number)
            self.seen_in_parts.add(number)
            share.enter(number)
            self.last_block = number
        if torch.is_grad_enabled():
            self.watch_saving(number, module)
        device = share.device.torch_device
        if self.here == device:
            return None
        return self.go(module, (args, kwargs), device, source=self.here, target=self.here)

    def after_part(self, number: int, module: nn.Module, output: Any) -> Any:
        if number not in self.in_parts:
            return None
        if self.saving:
            self.stop_saving(module)
        return self.come_back(module, output, failed=self.has_failed(output))

    # -- the rest, which parts of blocks elsewhere may call

    @untraced
    def before_rest(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        if not self.is_loaded or self.here == self.home:
            return None
        moved = self.go(module, (args, kwargs or {}), self.home, source=self.here, target=self.here)
        # Without keyword arguments: torch copied the hook to a module that it made in place of ours (quantization).
        return moved[0] if moved is not None and kwargs is None else moved

    @untraced
    def after_rest(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self.come_back(module, output, failed=self.has_failed(output))

    def dismiss(self) -> None:
        """Refuse new passes: the module is another managed component's now, or is no longer managed."""
        # They refer to the manager's member and to us: the module would live until the next garbage collection.
        self.leases, self.watch_exits = NoLeases(self.leases.lock), nothing

    def end(self) -> None:
        """Finish no pass any more: the groups are no longer managed."""
        self.passes.finish = lambda current, completed: None


def nothing() -> None:
    """Watch no exits: no module leads here."""


def end_guests(guests: Sequence[tuple[Forwards, Pass]], *, completed: bool) -> None:
    for lender, current in reversed(guests):
        lender.passes.end_guest(current, completed=completed)
