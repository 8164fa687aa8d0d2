"""What a forward does to a managed module: leases and passes, blocks that come and go, hops between devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .blocks import has_skips
from .component import Component
from .errors import UnsafeState
from .hooks import Hooks
from .passes import Pass, Passes
from .share import Share
from .split import Hops

__all__ = ["Forwards"]

# The kinds of components whose blocks run one after the other on one stream of hidden states.
CHAINS = ("diffusion", "text", "vision")


class Forwards:
    """What the hooks of a component's module call, while one attachment has it.

    Args:
        exclusive: holds the manager's lock.
        acquire: called on the outermost entry; loads the component or raises, and holds a lease for the pass. Returns
            whether the component is still this attachment's.
        give_back: called when the outermost entry is left, also by an exception; perhaps twice.
        compiles: whether the blocks are compiled.
    """

    def __init__(
        self,
        owner: str,
        module: nn.Module,
        component: Component,
        shares: Sequence[Share],
        hooks: Hooks,
        *,
        exclusive: Callable[[], AbstractContextManager[None]],
        acquire: Callable[[Pass], bool],
        give_back: Callable[[Pass], None],
        compiles: bool = False,
    ) -> None:
        self.owner = owner
        self.component = component
        self.shares = shares
        self.hooks = hooks
        self.compiles = compiles
        self.acquire = acquire
        self.give_back = give_back
        self.passes = Passes(module, self.finish_pass, exclusive)
        self.hops = Hops()
        self.is_loaded = False
        """Whether the devices are as the plan says; else the module computes with what it holds."""
        self.is_timed = False
        """Whether something is planned by the times of passes."""
        self.home = shares[0].device.torch_device
        """Where inputs go and outputs come back: the device of the rest."""
        self.share_of = {number: share for share in shares for number in share.blocks}
        self.returning = self.find_returning()
        self.entries: frozenset[nn.Module] = frozenset()
        self.blocks: dict[nn.Module, int] = {}
        self.parts: dict[nn.Module, int] = {}
        self.in_parts: set[int] = set()
        """The blocks that came because something inside them was called from outside."""
        self.seen_in_parts: set[int] = set()

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

    def enter(self, module: nn.Module, inputs: Any) -> bool:
        """Enter through a module, into a pass of its own if none is open; False if the component is another's now."""
        self.passes.heal_for(module)
        if self.passes.outermost is not None:
            self.passes.enter(module)
            return True
        if not self.passes.begin(module, self.acquire, inputs):
            return False
        if self.is_loaded:
            for share in self.shares:
                share.begin_pass(is_timed=self.is_timed)
        return True

    def is_entered(self) -> bool:
        """Whether this thread is in the middle of a pass."""
        return self.passes.outermost is not None

    def is_outermost(self, module: nn.Module) -> bool:
        """Whether this thread has entered through this module."""
        return self.passes.outermost is module

    def before_entry(self, args: Any, kwargs: Any) -> Any:
        is_nested = self.passes.depth > 1
        return None if is_nested or not self.is_loaded else self.hops.move((args, kwargs), self.home)

    def after_entry(self, module: nn.Module, output: Any) -> Any:
        if not self.passes.leave(module):
            return None
        completed = output is not None  # an always-called hook has none after an exception
        try:
            output = self.hops.move(output, self.home) if len(self.shares) > 1 else None
        except BaseException:
            completed = False
            raise
        finally:
            self.passes.end(completed=completed)
        return output

    def finish_pass(self, current: Pass, completed: bool) -> None:
        try:
            self.in_parts.clear()
            for share in self.shares:
                share.end_pass(completed=completed)
                if completed:
                    self.forget_parts(share.entered)
        finally:
            self.hops.forget()
            self.give_back(current)

    def forget_parts(self, numbers: Collection[int]) -> None:
        """Let what is inside blocks that have computed be called without us, unless others call it."""
        if self.parts:
            done = [
                part for part, number in self.parts.items() if number in numbers and number not in self.seen_in_parts
            ]
            self.hooks.remove_from(done)
            for part in done:
                self.parts.pop(part, None)

    # -- blocks

    def before_block(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.is_loaded:
            return None  # a hosted component off its devices computes as its host left it
        share = self.share_of[number]
        self.in_parts.discard(number)
        if self.compiles:  # what is compiled now is not to be called back from inside
            self.forget_parts([number])
        share.enter(number)
        alone = len(self.shares) == 1 and self.passes.outermost is not module
        return None if alone else self.hops.move((args, kwargs), share.device.torch_device)

    def after_block(self, number: int, module: nn.Module, output: Any) -> Any:
        changes_hands = self.share_of[number].leave(number, prefetches=output is not None)
        if changes_hands and torch.is_grad_enabled():
            refuse_backward(output, f"{self.owner}: block {self.component.blocks[number].name}")
        if number in self.returning and output is not None:
            output = self.hops.move(output, self.home)
        if self.passes.outermost is module:
            moved = self.after_entry(module, output)
            return output if moved is None else moved
        return output

    # -- blocks whose forward is not what runs them
    #
    # A parent may call what is inside its blocks itself: a modulation for all blocks beforehand, or the layers of a
    # Sequential one by one. The first of them that comes brings its block, which goes when the next block comes.

    def before_part(self, number: int, args: Any, kwargs: Any) -> Any:
        share = self.share_of[number]
        if not self.is_loaded or (number in share.computing and number not in self.in_parts):
            return None  # inside the block's own forward
        if number not in share.computing:
            self.in_parts.add(number)
            self.seen_in_parts.add(number)
            share.enter(number)
        return self.hops.move((args, kwargs), share.device.torch_device) if len(self.shares) > 1 else None

    def after_part(self, number: int, output: Any) -> Any:
        share = self.share_of[number]
        if output is None or number not in self.in_parts or number not in share.computing:
            return None
        if torch.is_grad_enabled() and share.changes_hands(number):
            refuse_backward(output, f"{self.owner}: block {self.component.blocks[number].name}")
        return self.hops.move(output, self.home) if share is not self.shares[0] else None

    def before_rest(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.hops.move((args, kwargs), self.home)

    def dismiss(self) -> None:
        """Let nobody in any more: another one has the module now, or none."""
        # They refer to the manager's member and to us: the module would live until the next garbage collection.
        self.acquire, self.give_back = refuse_entry, forget_pass

    def end(self) -> None:
        """Finish no pass any more: the units are no longer managed."""
        self.passes.finish = lambda current, completed: None

    # -- who copies the module copies its hooks

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise UnsafeState(f"{self.owner} is managed: release it before copying its module")

    def __reduce__(self) -> Any:
        raise UnsafeState(f"{self.owner} is managed: release it before pickling its module, or save its state_dict()")


def refuse_backward(output: Any, block: str) -> None:
    """Let a backward pass that reaches these outputs fail: the memory of the weights will hold another block's."""

    def refuse(gradient: torch.Tensor) -> None:
        raise UnsafeState(f"{block} streams or is widened to compute: a backward pass would read other weights")

    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(refuse)  # type: ignore[no-untyped-call]


def refuse_entry(current: Pass) -> bool:
    """Let nobody in: who waited meanwhile computes with whatever the module holds now."""
    return False


def forget_pass(current: Pass) -> None:
    """Hold nothing for a pass."""
