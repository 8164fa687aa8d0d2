"""The forwards of one module: one at a time, ended even where nobody told.

[Note: entries] A component is entered through its own forward or, where programs call parts of it (a VAE's
decoder), through a direct child. The outermost entry takes the lease and its exit gives it back. Only native hooks
are used. torch skips even always-called hooks when a `BaseException` passes, which is what an interrupt is in recent
hosts; so a pass may stay open that nobody runs any more. It is healed by the next entry that cannot be nested in it,
and by whoever meets it and finds its module on no stack of its thread (`is_abandoned`). One pass runs at a time: a
second thread waits for the first.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from torch import nn

__all__ = ["Passes"]

# How often a waiting thread looks whether the pass that it waits for was abandoned.
LOOK_EVERY_S = 0.5


class Passes:
    """Which entries of a module are open, and in which thread.

    Args:
        finish: called with whether a pass was completed when it ends, before another one can begin.
    """

    def __init__(self, root: nn.Module, finish: Callable[[bool], None]) -> None:
        self.root = root
        self.finish = finish
        self.entered: list[nn.Module] = []
        self.running = threading.Lock()
        """Held from the outermost entry to its exit."""
        self.thread_id = 0

    @property
    def outermost(self) -> nn.Module | None:
        """The module through which this thread is in the middle of a pass, if it is."""
        is_here = self.entered and self.thread_id == threading.get_ident()
        return self.entered[0] if is_here else None

    def begin(self, acquire: Callable[[], None]) -> None:
        """Wait until no other thread computes here, then call what has to hold for the pass; what it raises ends it."""
        while not self.running.acquire(timeout=LOOK_EVERY_S):
            if self.is_abandoned():
                self.abandon()
        self.thread_id = threading.get_ident()
        try:
            acquire()
        except BaseException:
            self.running.release()
            raise

    def enter(self, module: nn.Module) -> None:
        """Go one entry deeper; the outermost one has begun the pass."""
        self.entered.append(module)

    def leave(self, module: nn.Module) -> bool:
        """Leave an entry, and all inside it; returns whether that was the outermost one. Unknown ones are left alone.

        The pass goes on until `end`.
        """
        if module not in self.entered:  # the entry itself failed, or was healed
            return False
        del self.entered[self.entered.index(module) :]
        return not self.entered

    def end(self, *, completed: bool) -> None:
        """End the pass whose outermost entry was left."""
        try:
            self.finish(completed)
        finally:
            self.running.release()

    def abandon(self) -> None:
        """End a pass that nobody runs any more."""
        self.entered.clear()
        self.end(completed=False)

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

    def heal_for(self, module: nn.Module | None) -> None:
        """End a pass that an interrupt left open, if an entry into the module cannot be nested in it.

        Legal nesting is the root, then one of its children; None means that nothing can be running.
        """
        outermost = self.outermost
        if outermost is None:
            return
        if module is self.root or module is None or outermost is not self.root:
            self.abandon()
        else:
            del self.entered[1:]
